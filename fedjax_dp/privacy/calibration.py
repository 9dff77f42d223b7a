"""Noise multipliers from budgets, budgets from noise multipliers, and the steps that both allow."""

import functools
import math
from collections.abc import Callable

import dp_accounting as dpa
import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from fedjax_dp.core import checks
from fedjax_dp.privacy import rdp
from fedjax_dp.privacy.accounting import Bound, Ledger
from fedjax_dp.privacy.curves import orders_of
from fedjax_dp.privacy.events import DpEvent
from fedjax_dp.privacy.translation import accountant_name

# Multipliers outside of this range have no use, so that a search that gets there has failed.
_SMALLEST, _LARGEST = 2.0**-10, 2.0**24
_TOLERANCE = 1e-7
_BOUND = 50.0


def calibrate_noise_multiplier(
    make_event: Callable[[float], DpEvent],
    epsilon: float,
    dp_delta: float,
    *,
    accountant: str = "rdp",
    relation: str = "add_remove",
) -> float:
    """Finds the smallest noise multiplier whose composition stays within a budget.

    Guarantee: ε of the returned multiplier is at most `epsilon`; a multiplier smaller by 1e-6 of
    itself exceeds it, as that accountant counts.

    Args:
      make_event: `(noise_multiplier) → event` of the whole run; ε must fall with the multiplier.
      epsilon: the budget, above 0.
      dp_delta: δ in (0, 1).
      accountant: "rdp", "pld" or "rdp-classic-64".
      relation: "add_remove" or "replace_one"; the multiplier is the standard deviation over the
        largest contribution under either.

    Returns:
      The noise multiplier, at least 2^-10.

    Raises:
      UnsupportedEvent: if the composition has no valid analysis.
      ValueError: if an argument is not valid, or no noise reaches the budget.
    """
    _check_budget(epsilon, dp_delta)

    @functools.cache
    def excess(log_multiplier: float) -> float:
        ledger = Ledger(relation=relation)
        ledger.charge(make_event(math.exp(log_multiplier)))
        return _log_ratio(ledger.epsilon(dp_delta, accountant), epsilon).item()

    found = _root(excess, 0.0, 1.0)
    if found is None:
        log_spent = excess(math.log(_LARGEST))
        raise ValueError(_unreachable(epsilon, dp_delta, accountant, log_spent))
    return math.exp(found)


def rounded_up(noise_multiplier: ArrayLike) -> np.ndarray:
    """Gives the next float32, so that the noise that runs is never below what was calibrated.

    Args:
      noise_multiplier: a number or an array of them.

    Returns:
      The same shape, float32.
    """
    # A Python number would be compared as float32, and never be found larger.
    exact = np.asarray(noise_multiplier, dtype=np.float64)
    rounded = exact.astype(np.float32)
    return np.where(rounded >= exact, rounded, np.nextafter(rounded, np.float32(np.inf)))


def _root(excess: Callable[[float], float], start: float, step: float) -> float | None:
    """Finds where a falling function of the logarithm of a multiplier reaches zero, from above.

    Args:
      excess: the function.
      start: where to begin.
      step: how far to look first; doubled until the zero lies between two points.

    Returns:
      A point where it is not above zero; None where there is none.
    """
    smallest, largest = math.log(_SMALLEST), math.log(_LARGEST)
    low = high = start
    reach = step
    while excess(high) > 0:
        if high == largest:
            return None
        low, high, reach = high, min(high + reach, largest), 2 * reach
    reach = step
    while low == high or excess(low) <= 0:
        if low == smallest:
            return smallest
        low, high, reach = max(low - reach, smallest), low, 2 * reach
    root = float(optimize.brentq(excess, low, high, xtol=_TOLERANCE, rtol=1e-12))
    lift = _TOLERANCE
    while excess(root) > 0:
        root, lift = root + lift, 2 * lift
    return root


def _check_budget(epsilon: ArrayLike, dp_delta: ArrayLike) -> None:
    checks.positive("epsilon", epsilon)
    inside = np.all((np.asarray(dp_delta) > 0) & (np.asarray(dp_delta) < 1))
    checks.require(bool(inside), "dp_delta", "lie in (0, 1)", dp_delta)


def _log_ratio(spent: ArrayLike, budget: ArrayLike) -> np.ndarray:
    """The sign tells whether the budget is exceeded; bounded, as root finders need it."""
    with np.errstate(divide="ignore"):
        ratio = np.asarray(spent, float) / np.asarray(budget, float)
        return np.clip(np.log(ratio), -_BOUND, _BOUND)


def _unreachable(epsilon: float, dp_delta: float, accountant: str, log_spent: float) -> str:
    if accountant == "rdp-classic-64":
        hint = "this recipe cannot go below ln(1/dp_delta)/63; choose accountant 'rdp' or 'pld'"
    elif log_spent < _BOUND:
        hint = "what does not depend on the noise multiplier spends it already"
    else:
        hint = (
            "however much noise there is, no epsilon holds: what does not depend on the noise "
            "multiplier spends it already without any noise, or with a chance above dp_delta"
        )
    return f"epsilon must be reachable, got {epsilon!r} at dp_delta {dp_delta!r}: {hint}"


def epsilon_of_poisson(
    noise_multiplier: ArrayLike,
    sampling_rate: ArrayLike,
    num_steps: ArrayLike,
    dp_delta: ArrayLike,
    *,
    rho: ArrayLike = 0.0,
    accountant: str = "rdp",
    relation: str = "add_remove",
) -> np.ndarray:
    """Computes ε of Poisson-sampled Gaussian steps for many clients at once.

    Args:
      noise_multiplier: standard deviation over the largest contribution, at least 0; a scalar or
        `[clients]`.
      sampling_rate: in [0, 1]; a scalar, `[clients]`, or `[clients, phases]` where the rate
        changes in the course of a run. Rate 1 means that everybody takes part.
      num_steps: steps of each phase, the shape of `sampling_rate` or one that broadcasts to it;
        whole numbers, except for "rdp-classic-64", whose recipe counts `epochs·N/b`.
      dp_delta: δ in (0, 1); a scalar or `[clients]`.
      rho: zCDP cost of all else that was released, such as private selections; a scalar or
        `[clients]`.
      accountant: "rdp", "pld" or "rdp-classic-64".
      relation: "add_remove" or "replace_one".

    Returns:
      `[clients]`, or a scalar array where all arguments are scalars.

    Raises:
      UnsupportedEvent: if the combination has no valid analysis.
      ValueError: if an argument is not valid.
    """
    settings = (noise_multiplier, sampling_rate, num_steps, dp_delta)
    return bound_of_poisson(*settings, rho=rho, accountant=accountant, relation=relation).value


def bound_of_poisson(
    noise_multiplier: ArrayLike,
    sampling_rate: ArrayLike,
    num_steps: ArrayLike,
    dp_delta: ArrayLike,
    *,
    rho: ArrayLike = 0.0,
    accountant: str = "rdp",
    relation: str = "add_remove",
) -> Bound:
    """Computes ε of Poisson-sampled Gaussian steps, and says which accountant gave it.

    Args:
      noise_multiplier: as for `epsilon_of_poisson`.
      sampling_rate: as for `epsilon_of_poisson`.
      num_steps: as for `epsilon_of_poisson`.
      dp_delta: as for `epsilon_of_poisson`.
      rho: as for `epsilon_of_poisson`.
      accountant: as for `epsilon_of_poisson`; by "pld" the better of it and "rdp" is taken where
        a lattice cannot resolve what is asked.
      relation: as for `epsilon_of_poisson`.

    Returns:
      ε and the accountant's name, `[clients]` each, or scalar arrays.

    Raises:
      UnsupportedEvent: if the combination has no valid analysis.
      ValueError: if an argument is not valid.
    """
    checks.non_negative("noise_multiplier", noise_multiplier)
    rows, shape = _rows(noise_multiplier, dp_delta, rho, sampling_rate, num_steps, accountant)
    unique, inverse = np.unique(rows, axis=0, return_inverse=True)
    spent = _bounds(unique, accountant, relation)
    value, name = (x[inverse.reshape(-1)].reshape(shape) for x in spent)
    return Bound(value, name)


def calibrate_poisson(
    epsilon: ArrayLike,
    dp_delta: ArrayLike,
    sampling_rate: ArrayLike,
    num_steps: ArrayLike,
    *,
    rho: ArrayLike = 0.0,
    accountant: str = "rdp",
    relation: str = "add_remove",
) -> np.ndarray:
    """Finds the noise multiplier of every client of Poisson-sampled Gaussian training.

    Clients with the same numbers share the work, all others are searched side by side, and
    calls with the same numbers are remembered.

    Guarantee: ε of each returned multiplier is at most the client's budget.

    Args:
      epsilon: budgets, above 0; a scalar or `[clients]`.
      dp_delta: δ in (0, 1); a scalar or `[clients]`.
      sampling_rate: as for `epsilon_of_poisson`.
      num_steps: as for `epsilon_of_poisson`.
      rho: as for `epsilon_of_poisson`.
      accountant: "rdp", "pld" or "rdp-classic-64".
      relation: "add_remove" or "replace_one".

    Returns:
      `[clients]`, or a scalar array where all arguments are scalars.

    Raises:
      UnsupportedEvent: if the combination has no valid analysis.
      ValueError: if an argument is not valid, or no noise reaches a budget.
    """
    _check_budget(epsilon, dp_delta)
    rows, shape = _rows(epsilon, dp_delta, rho, sampling_rate, num_steps, accountant)
    unique, inverse = np.unique(rows, axis=0, return_inverse=True)
    found = _calibrated(tuple(map(tuple, unique.tolist())), accountant, relation)
    return np.asarray(found)[inverse.reshape(-1)].reshape(shape)


def max_poisson_steps(
    epsilon: ArrayLike,
    dp_delta: ArrayLike,
    sampling_rate: ArrayLike,
    noise_multiplier: ArrayLike,
    *,
    accountant: str = "rdp",
    relation: str = "add_remove",
    limit: int = 10**7,
) -> np.ndarray:
    """Counts the steps that a budget allows.

    Multiplied by `sampling_rate` and rounded down they are epochs.

    Args:
      epsilon: budgets, above 0; a scalar or `[clients]`.
      dp_delta: δ in (0, 1); a scalar or `[clients]`.
      sampling_rate: in (0, 1]; a scalar or `[clients]`.
      noise_multiplier: above 0; a scalar or `[clients]`.
      accountant: "rdp", "pld" or "rdp-classic-64".
      relation: "add_remove" or "replace_one".
      limit: the largest answer that is looked for.

    Returns:
      int64, `[clients]`, or a scalar array where all arguments are scalars.

    Raises:
      UnsupportedEvent: if the combination has no valid analysis.
      ValueError: if an argument is not valid.
    """
    _check_budget(epsilon, dp_delta)
    checks.probability("sampling_rate", sampling_rate)
    checks.positive("noise_multiplier", noise_multiplier)
    columns = np.broadcast_arrays(epsilon, dp_delta, sampling_rate, noise_multiplier)
    rows = np.stack([np.asarray(c, float).ravel() for c in columns], axis=1)
    unique, inverse = np.unique(rows, axis=0, return_inverse=True)
    steps = [
        Ledger(relation=relation).max_rounds(
            _step(rate, z), budget, delta, accountant=accountant, limit=limit
        )
        for budget, delta, rate, z in unique.tolist()
    ]
    return np.asarray(steps, np.int64)[inverse.reshape(-1)].reshape(columns[0].shape)


def _step(rate: float, noise_multiplier: float) -> DpEvent:
    gaussian = dpa.GaussianDpEvent(noise_multiplier)
    return gaussian if rate == 1 else dpa.PoissonSampledDpEvent(rate, gaussian)


def _rows(
    first: ArrayLike,
    dp_delta: ArrayLike,
    rho: ArrayLike,
    sampling_rate: ArrayLike,
    num_steps: ArrayLike,
    accountant: str,
) -> tuple[np.ndarray, tuple[int, ...]]:
    """One row a client: first, δ, ρ, then the rates and the steps of all phases."""
    accountant_name(accountant)
    _check_budget(1.0, dp_delta)
    checks.probability("sampling_rate", sampling_rate, allow_zero=True)
    checks.non_negative("num_steps", num_steps)
    checks.non_negative("rho", rho)
    steps = np.asarray(num_steps, float)
    if accountant != "rdp-classic-64":
        whole = bool(np.all(steps == np.floor(steps)))
        checks.require(whole, "num_steps", "hold whole numbers", num_steps)
    rates, steps = np.broadcast_arrays(np.asarray(sampling_rate, float), steps)
    phases = rates.shape[1:] or (1,)
    rates, steps = (x.reshape(*x.shape[:1], *phases) for x in (rates, steps))
    scalars = np.broadcast_arrays(first, dp_delta, rho, rates[..., 0])
    shape = scalars[0].shape
    num_clients = math.prod(shape)
    table = [np.asarray(x, float).reshape(num_clients, 1) for x in scalars[:3]]
    for x in (rates, steps):
        table.append(np.broadcast_to(x, (*shape, *phases)).reshape(num_clients, -1))
    return np.concatenate(table, axis=1), shape


def _event(row: np.ndarray, noise_multiplier: float) -> DpEvent:
    rho, (rates, steps) = row[2], np.split(row[3:], 2)
    parts: list[DpEvent] = [
        dpa.SelfComposedDpEvent(_step(rate, noise_multiplier), int(count))
        for rate, count in zip(rates.tolist(), steps.tolist(), strict=True)
    ]
    if rho:
        parts.append(dpa.ZCDpEvent(float(rho)))
    return dpa.ComposedDpEvent(parts)


def _bounds(rows: np.ndarray, accountant: str, relation: str) -> Bound:
    """ε of rows that begin with the noise multiplier, and by whom."""
    if accountant == "pld" or relation == "replace_one":
        found = [_bound(row, float(row[0]), accountant, relation) for row in rows]
        return Bound(*(np.concatenate(column) for column in zip(*found, strict=True)))
    is_classic = accountant == "rdp-classic-64"
    orders = np.asarray(orders_of(accountant))
    rates, steps = np.split(rows[:, 3:], 2, axis=1)
    curves = rows[:, 2:3] * orders
    for rate, count in zip(rates.T, steps.T, strict=True):
        runs = count > 0
        one = rdp.poisson_gaussian(rate[runs], rows[runs, 0], tuple(orders))
        curves[runs] += count[runs, None] * one
    curves *= 1 + 2 * (rates.shape[1] + 2) * rdp.EPS
    spent = rdp.to_epsilon(curves, tuple(orders), rows[:, 1], is_classic=is_classic)
    return Bound(spent, np.full(len(rows), accountant))


def _bound(row: np.ndarray, noise_multiplier: float, accountant: str, relation: str) -> Bound:
    ledger = Ledger(relation=relation)
    ledger.charge(_event(row, noise_multiplier))
    return ledger.bound(float(row[1]), accountant)


@functools.lru_cache(maxsize=256)
def _calibrated(rows: tuple[tuple[float, ...], ...], accountant: str, relation: str) -> np.ndarray:
    """Noise multipliers of rows that begin with the budget."""
    table = np.asarray(rows)
    if accountant == "pld" or relation == "replace_one":
        return np.array([_calibrated_alone(row, accountant, relation) for row in table])
    budget = table[:, 0]

    def excess(which: np.ndarray, log_multiplier: np.ndarray) -> np.ndarray:
        asked = table[which].copy()
        asked[:, 0] = np.exp(log_multiplier)
        return _log_ratio(_bounds(asked, accountant, relation).value, budget[which])

    return np.exp(_roots(excess, rows, accountant))


def _calibrated_alone(row: np.ndarray, accountant: str, relation: str) -> float:
    """The noise multiplier of one row, from where a Gaussian of as much variance would be."""
    budget, dp_delta = float(row[0]), float(row[1])

    @functools.cache
    def excess(log_multiplier: float) -> float:
        spent = _bound(row, math.exp(log_multiplier), accountant, relation).value
        return _log_ratio(spent, budget).item()

    rates, steps = np.split(row[3:], 2)
    found = _root(excess, _first_guess(budget, dp_delta, rates, steps, relation), 0.1)
    if found is None:
        log_spent = excess(math.log(_LARGEST))
        raise ValueError(_unreachable(budget, dp_delta, accountant, log_spent))
    return math.exp(found)


def _first_guess(
    budget: float, dp_delta: float, rates: np.ndarray, steps: np.ndarray, relation: str
) -> float:
    """Guesses the logarithm of a multiplier by the central limit of many steps.

    Source: Bu, Dong, Long, Su 2020: μ² is the sum of q²·(e^(1/z²) − 1).
    """
    price = -2 * math.log(dp_delta)
    mu = math.sqrt(price + 2 * budget) - math.sqrt(price)

    def excess(log_multiplier: float) -> float:
        lift = min(math.exp(-2 * log_multiplier), 600.0)
        shifts = np.where(rates < 1, rates**2 * math.expm1(lift), lift)
        total = float(steps @ shifts) * (4 if relation == "replace_one" else 1)
        return math.log(max(total, 1e-300)) - 2 * math.log(mu)

    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    if excess(low) <= 0 or excess(high) > 0:
        return 0.0
    return float(optimize.brentq(excess, low, high, xtol=1e-3))


def _roots(
    excess: Callable[[np.ndarray, np.ndarray], np.ndarray],
    rows: tuple[tuple[float, ...], ...],
    accountant: str,
) -> np.ndarray:
    """Zeros of many falling functions at once, by false position with Illinois weights.

    What is returned is the upper end of each bracket, where the budget is known to hold.
    """
    everyone = np.arange(len(rows))
    low, high = np.full(len(rows), math.log(_SMALLEST)), np.full(len(rows), math.log(_LARGEST))
    at_low, at_high = excess(everyone, low), excess(everyone, high)
    if np.any(at_high > 0):
        first = int(np.argmax(at_high > 0))
        row, log_spent = rows[first], float(at_high[first])
        raise ValueError(_unreachable(row[0], row[1], accountant, log_spent))
    high = np.where(at_low <= 0, low, high)
    last_side = np.zeros(len(rows))
    for iteration in range(200):
        (open_,) = np.nonzero(high - low > _TOLERANCE)
        if not open_.size:
            break
        a, b, fa, fb = low[open_], high[open_], at_low[open_], at_high[open_]
        middle = (a * fb - b * fa) / (fb - fa)
        width = b - a
        # Both ends must close in, so that no step may come closer than a part of the tolerance.
        is_slow = (iteration % 3 == 2) | (np.abs(fa) > 5) | (np.abs(fb) > 5)
        middle = np.where(is_slow, a + width / 2, middle)
        middle = np.clip(middle, a + _TOLERANCE / 4, b - _TOLERANCE / 4)
        value = excess(open_, middle)
        is_below = value > 0
        side = np.where(is_below, -1.0, 1.0)
        repeats = side == last_side[open_]
        low[open_], at_low[open_] = (
            np.where(is_below, middle, a),
            np.where(is_below, value, np.where(repeats, fa / 2, fa)),
        )
        high[open_], at_high[open_] = (
            np.where(is_below, b, middle),
            np.where(is_below, np.where(repeats, fb / 2, fb), value),
        )
        last_side[open_] = side
    return high
