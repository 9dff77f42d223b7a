"""Curves over rounds: the factors by which a number of `Hyper` changes from round to round.

A curve is a function of the rounds done, 0 before the first, to a factor of at least 0.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from fedjax_dp.core import checks, ranges
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative, Positive

# `(rounds done) -> factor`.
Curve: TypeAlias = Callable[[Any], Any]
_FACTOR = {"factor": NonNegative}


@checked
def constant() -> Curve:
    """Leaves the number as it is, for a warm-up without a decay.

    Returns:
      The curve, 1 in every round.
    """
    return lambda t: 1.0


@checked
def linear(rounds: Count, *, final: NonNegative = 0.0) -> Curve:
    """Changes along a straight line, `1 + (final - 1) t / rounds` with t rounds done.

    Args:
      rounds: rounds until the final factor, which all later rounds have, at least 1.
      final: the factor after these rounds, at least 0; above 1 for a number that grows.

    Returns:
      The curve.
    """
    return lambda t: 1 + (final - 1) * np.minimum(t, rounds) / rounds


@checked
def cosine(rounds: Count, *, final: NonNegative = 0.0) -> Curve:
    """Follows half a period of a cosine, `final + (1 - final) (1 + cos(π t / rounds)) / 2`.

    Args:
      rounds: rounds until the final factor, which all later rounds have, at least 1.
      final: the factor after these rounds, at least 0.

    Returns:
      The curve.

    Source: Loshchilov and Hutter 2017, equation 5.
    """

    def factor(t: Any) -> Any:
        share = np.minimum(t, rounds) / rounds
        return final + (1 - final) * (1 + np.cos(np.pi * share)) / 2

    return factor


@checked
def steps(
    *, after: Sequence[Count] | None = None, every: Count | None = None, factor: NonNegative = 0.1
) -> Curve:
    """Multiplies the number by a factor after some rounds.

    Args:
      after: the numbers of rounds after which it is multiplied, such as 60 and 80.
      every: or the rounds from one multiplication to the next.
      factor: the factor of each, at least 0.

    Returns:
      The curve.

    Raises:
      ValueError: with both or neither of `after` and `every`.
    """
    rule = "be given without every, and only then"
    checks.require((after is None) != (every is None), "after", rule, after)

    def curve(t: Any) -> Any:
        if after is None:
            return factor ** np.floor(t / every)
        return factor ** sum(t >= end for end in after)

    return curve


@checked
def exponential(*, decay: Positive = 0.5, every: Positive = 1.0, staircase: bool = False) -> Curve:
    """Multiplies the number by the same factor in equal times, `decay ** (t / every)`.

    Args:
      decay: the factor of `every` rounds, above 0.
      every: these rounds, above 0.
      staircase: change it after whole multiples of `every` alone.

    Returns:
      The curve.
    """

    def factor(t: Any) -> Any:
        # Powers of 2, for halvings, are exact.
        return (1 / decay) ** -(np.floor(t / every) if staircase else t / every)

    return factor


@checked
def inverse(*, every: Positive = 1.0, power: Positive = 1.0) -> Curve:
    """Divides the number by a power of time, `(1 + t / every) ** -power`.

    The power 1 has a sum without bound and a bounded sum of squares, which convergence of
    stochastic gradient steps to the exact minimum needs.

    Args:
      every: rounds after which the power 1 has halved the number, above 0.
      power: the power, above 0: 1 for 1/t, 0.5 for 1/√t.

    Returns:
      The curve.

    Source: Robbins and Monro 1951.
    """

    def factor(t: Any) -> Any:
        if power == 0.5:
            return 1 / np.sqrt(t / every + 1)
        return 1 / (t / every + 1) if power == 1 else (t / every + 1) ** -power

    return factor


@checked
def inverse_log(*, base: Literal["e", "10"] = "e") -> Curve:
    """Divides the number by a logarithm of time: `1 / ln(t + e)`, or `1 / (1 + log10(t + 1))`.

    Args:
      base: e or 10, the two meanings of 1/log t.

    Returns:
      The curve.

    Source: Malekmohammadi 2025, theorem 3.
    """
    if base == "e":
        return lambda t: 1 / np.log(t + np.e)
    return lambda t: 1 / (1 + np.log10(t + 1))


@checked
def listed(*, factors: Sequence[NonNegative]) -> Curve:
    """Takes the factors from a list.

    Args:
      factors: the factor of each round, at least 0; the last is that of all later rounds.

    Returns:
      The curve.

    Raises:
      ValueError: for an empty list.
    """
    checks.require(len(factors) > 0, "factors", "have at least one entry", factors)
    table = np.asarray(factors, np.float64)
    return lambda t: np.asarray(table)[np.minimum(t, len(table) - 1).astype(np.int32)]


@checked
def warm_up(curve: Curve, rounds: Count) -> Curve:
    """Precedes a curve by rounds in which the number grows along a straight line.

    With w rounds of warm-up the factor of round t, from 0, is `(t + 1) / (w + 1)`, times the first
    one of the curve, which begins after them.

    Args:
      curve: the curve that follows.
      rounds: w, at least 1.

    Returns:
      The curve.

    Source: Goyal and others 2017, section 2.2.
    """

    def factor(t: Any) -> Any:
        ramp = (np.minimum(t, rounds) + 1) / (rounds + 1)
        return ramp * curve(np.maximum(t - rounds, 0))

    return factor


def table_of(curve: Curve | Sequence[Any] | np.ndarray, num_rounds: int, name: str) -> np.ndarray:
    """Computes the factor of each round on the host, `[rounds]`, float32; a list is one already."""
    if not callable(curve):
        return _checked(curve, name)
    table, again = (_checked(_found(curve, num_rounds, name), name) for _ in range(2))
    rule = "have the same factors whenever it is called"
    checks.require(np.array_equal(table, again), f"the curve of {name}", rule, "others")
    return table


def _found(curve: Curve, num_rounds: int, name: str) -> list[Any]:
    try:
        return [curve(t) for t in range(num_rounds)]
    except Exception as error:
        text = f"the curve of {name} must have a factor in each round, the first of which is 0"
        raise ValueError(f"{text}; it raised {type(error).__name__}: {error}") from error


def _checked(found: Any, name: str) -> np.ndarray:
    rule = "have one factor for each round, and at least one"
    fits = np.ndim(found) == 1 and len(found) > 0
    checks.require(fits, f"the curve of {name}", rule, found)
    for t, factor in enumerate(found):
        # None would pass as a number that is left out.
        given = np.nan if factor is None else factor
        ranges.check({"factor": given}, _FACTOR, f"{name}: in round {t} the ")
    return np.asarray(found, np.float64).astype(np.float32)
