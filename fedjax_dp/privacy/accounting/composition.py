"""Composition and sampling of (ε, δ) guarantees, by the classic theorems: of any mechanisms."""

import math
from typing import NamedTuple

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Decay, NonNegative, ProperFraction


class Guarantee(NamedTuple):
    """What holds of a composition or on a sample.

    Attributes:
      epsilon: ε, at least 0; infinite if nothing holds.
      dp_delta: δ; nothing holds if it is 1 or more.
    """

    epsilon: float
    dp_delta: float


@checked
def advanced_composition(
    epsilon: NonNegative, dp_delta: Decay, count: Count, slack: ProperFraction
) -> Guarantee:
    """Bounds the adaptive composition of releases of which each is (ε, δ)-private.

    `(kε(e^ε − 1) + ε√(2k ln(1/δ')), kδ + δ')` for k releases, under any neighbouring relation that
    all have. It is for mechanisms of which no more is known: ledgers compose events, whose curves
    give less. For large ε or few releases basic composition, kε, is smaller, and no more than that
    is returned, at the same δ.

    Args:
      epsilon: ε of one release, at least 0.
      dp_delta: δ of one release, in [0, 1).
      count: k, at least 1.
      slack: δ', in (0, 1).

    Returns:
      ε and δ of all releases together.

    Source: Dwork, Rothblum, Vadhan 2010, theorem III.3; Malekmohammadi 2025, lemma 2.
    """
    with np.errstate(over="ignore"):
        drift = float(count * epsilon * np.expm1(np.float64(epsilon)))
    advanced = drift + epsilon * math.sqrt(2 * count * math.log(1 / slack))
    return Guarantee(min(advanced, count * epsilon), count * dp_delta + slack)


@checked
def amplified_by_sampling(
    epsilon: NonNegative, dp_delta: Decay, num_drawn: Count, num_records: Count
) -> Guarantee:
    """Bounds what an (ε, δ)-private release of a random sample reveals of the whole.

    `(ln(1 + m(e^ε − 1)/n), mδ/n)` for m of n records, drawn uniformly without replacement and kept
    secret, both under replacement of one record. Ledgers amplify only mechanisms whose curves they
    have; this holds for any.

    Args:
      epsilon: ε of the release on its sample, at least 0.
      dp_delta: δ of that, in [0, 1).
      num_drawn: m, at least 1.
      num_records: n, at least m.

    Returns:
      ε and δ for one of the n records.

    Raises:
      ValueError: if more records are drawn than there are.

    Source: Balle, Barthe, Gaboardi 2018, theorem 9, with the rate m/n; Malekmohammadi 2025, lemma
    1.
    """
    checks.require(num_drawn <= num_records, "num_drawn", f"be at most {num_records}", num_drawn)
    rate = num_drawn / num_records
    # ln(1 + q(e^ε − 1)) = ε + ln(q + (1 − q)e^−ε), where e^ε is too large for a float.
    if epsilon > 700:
        amplified = epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon))
    else:
        amplified = math.log1p(rate * math.expm1(epsilon))
    return Guarantee(max(0.0, amplified), rate * dp_delta)
