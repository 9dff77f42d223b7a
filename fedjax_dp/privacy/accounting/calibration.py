"""ε of Poisson-sampled steps, and multipliers and steps from budgets, for many clients at once."""

import functools
import math
from collections.abc import Callable

import dp_accounting as dpa
import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.privacy.accounting import rdp
from fedjax_dp.privacy.accounting.dp_accounting_adapter import require_accountant
from fedjax_dp.privacy.accounting.ledger import Bound, Ledger
from fedjax_dp.privacy.accounting.renyi import orders_of
from fedjax_dp.privacy.events import DpEvent, require_noise
from fedjax_dp.privacy.sensitivities import RELATIONS

# Multipliers outside of this range are useless: a search that gets there has failed.
_SMALLEST, _LARGEST = 2.0**-10, 2.0**24
# Largest logarithm of a ratio: costs beyond it count as infinite.
_BOUND = 50.0
_TOLERANCE = 1e-7


@checked
def calibrate_noise_multiplier(
    make_event: Callable[[float], DpEvent],
    epsilon: float,
    dp_delta: float,
    *,
    accountant: str = "rdp",
    relation: str = "add_remove",
) -> float:
    """Finds the smallest noise multiplier whose composition stays within a budget.

    Guarantee: ε of the returned multiplier is at most `epsilon`; a multiplier smaller by a relative
    1e-6 exceeds it, by that accountant.

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
      ValueError: if an argument is not valid, or no noise meets the budget.
    """
    _check_budget(epsilon, dp_delta)

    def spent(noise_multiplier: float) -> np.ndarray:
        ledger = Ledger(relation=relation)
        ledger.charge(make_event(noise_multiplier))
        return ledger.epsilon(dp_delta, accountant)

    return _smallest(spent, epsilon, dp_delta, accountant)


def rounded_up(noise_multiplier: ArrayLike) -> np.ndarray:
    """Rounds up to float32, so that the noise of a run is never below the calibrated noise."""
    # A Python number would be compared as float32, and never be larger.
    exact = np.asarray(noise_multiplier, dtype=np.float64)
    rounded = exact.astype(np.float32)
    return np.where(rounded >= exact, rounded, np.nextafter(rounded, np.float32(np.inf)))


@checked
def calibrate_poisson(
    epsilon: ArrayLike,
    dp_delta: ArrayLike,
    sampling_rate: ArrayLike,
    num_steps: ArrayLike,
    *,
    rho: ArrayLike = 0.0,
    noise_factor: ArrayLike = 1.0,
    accountant: str = "rdp",
    relation: str = "add_remove",
) -> np.ndarray:
    """Finds the noise multiplier of every client of Poisson-sampled Gaussian training.

    Clients with the same numbers share one search, all others are searched at once, and results are
    cached.

    Guarantee: ε of each returned multiplier is at most the client's budget.

    Args:
      epsilon: budgets, above 0; a scalar or `[clients]`.
      dp_delta: δ in (0, 1); a scalar or `[clients]`.
      sampling_rate: as for `epsilon_of_poisson`.
      num_steps: as for `epsilon_of_poisson`.
      rho: as for `epsilon_of_poisson`.
      noise_factor: what multiplies the noise multiplier in each phase, above 0; the shape of
        `sampling_rate` or one that broadcasts to it.
      accountant: "rdp", "pld" or "rdp-classic-64".
      relation: "add_remove" or "replace_one".

    Returns:
      `[clients]`, or a scalar array if all arguments are scalars.

    Raises:
      UnsupportedEvent: if the combination has no valid analysis.
      ValueError: if an argument is not valid, or no noise meets a budget.
    """
    _check_budget(epsilon, dp_delta)
    checks.one_of("relation", relation, RELATIONS)
    numbers = epsilon, dp_delta, rho, sampling_rate, num_steps
    rows, shape = rows_of(*numbers, accountant, noise_factor)
    unique, for_all = distinct(rows, shape)
    return for_all(_calibrated(tuple(map(tuple, unique.tolist())), accountant, relation))


@checked
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
      limit: the largest answer.

    Returns:
      int64, `[clients]`, or a scalar array if all arguments are scalars.

    Raises:
      UnsupportedEvent: if the combination has no valid analysis.
    """
    _check_budget(epsilon, dp_delta)
    checks.probability("sampling_rate", sampling_rate)
    checks.positive("noise_multiplier", noise_multiplier)
    columns = np.broadcast_arrays(epsilon, dp_delta, sampling_rate, noise_multiplier)
    rows = np.stack([np.asarray(c, float).ravel() for c in columns], axis=1)
    unique, for_all = distinct(rows, columns[0].shape)
    steps = [
        Ledger(relation=relation).max_rounds(
            step_event(rate, z), budget, delta, accountant=accountant, limit=limit
        )
        for budget, delta, rate, z in unique.tolist()
    ]
    return for_all(np.asarray(steps, np.int64))


def _check_budget(epsilon: ArrayLike, dp_delta: ArrayLike) -> None:
    checks.positive("epsilon", epsilon)
    require_delta(dp_delta)


def _smallest(
    spent: Callable[[float], np.ndarray],
    epsilon: float,
    dp_delta: float,
    accountant: str,
    start: float = 0.0,
    step: float = 1.0,
) -> float:
    """Finds the smallest multiplier that keeps a budget, from a guess at its logarithm."""

    @functools.cache
    def excess(log_multiplier: float) -> float:
        return _log_ratio(spent(math.exp(log_multiplier)), epsilon).item()

    found = _root(excess, start, step)
    if found is None:
        log_spent = excess(math.log(_LARGEST))
        raise ValueError(_unreachable(epsilon, dp_delta, accountant, log_spent))
    return math.exp(found)


def _unreachable(epsilon: float, dp_delta: float, accountant: str, log_spent: float) -> str:
    if accountant == "rdp-classic-64":
        hint = "this recipe cannot go below ln(1/dp_delta)/63; choose accountant 'rdp' or 'pld'"
    elif log_spent < _BOUND:
        hint = "events without this noise multiplier already exceed it, or one above 2^24 is needed"
    else:
        hint = (
            "no epsilon holds, however much noise is added: events without this noise multiplier "
            "release data without noise, or with a probability above dp_delta"
        )
    return f"epsilon must be reachable, got {epsilon!r} at dp_delta {dp_delta!r}: {hint}"


@functools.lru_cache(maxsize=256)
def _calibrated(rows: tuple[tuple[float, ...], ...], accountant: str, relation: str) -> np.ndarray:
    """Finds the noise multipliers of rows that begin with the budget."""
    table = np.asarray(rows)
    if accountant == "pld" or relation == "replace_one":
        return np.array([_calibrated_alone(row, accountant, relation) for row in table])
    budget = table[:, 0]

    def excess(which: np.ndarray, log_multiplier: np.ndarray) -> np.ndarray:
        asked = table[which].copy()
        asked[:, 0] = np.exp(log_multiplier)
        spent = bounds(asked, accountant, relation).value
        return _log_ratio(spent, budget[which])

    found = _roots(excess, len(rows))
    (lost,) = np.nonzero(np.isnan(found))
    if lost.size:
        log_spent = excess(lost[:1], np.array([math.log(_LARGEST)])).item()
        epsilon, dp_delta = rows[lost[0]][:2]
        raise ValueError(_unreachable(epsilon, dp_delta, accountant, log_spent))
    return np.exp(found)


def _calibrated_alone(row: np.ndarray, accountant: str, relation: str) -> float:
    """Finds the noise multiplier of one row, starting from a Gaussian of equal variance."""
    budget, dp_delta = float(row[0]), float(row[1])
    rates, steps, factors = np.split(row[3:], 3)

    def spent(noise_multiplier: float) -> np.ndarray:
        return bound_alone(row, noise_multiplier, accountant, relation).value

    start = _first_guess(budget, dp_delta, rates, steps, factors, relation)
    return _smallest(spent, budget, dp_delta, accountant, start, 0.1)


def _first_guess(
    budget: float,
    dp_delta: float,
    rates: np.ndarray,
    steps: np.ndarray,
    factors: np.ndarray,
    relation: str,
) -> float:
    """Guesses the logarithm of a multiplier by the central limit of many steps.

    Source: Bu, Dong, Long, Su 2020: μ² is the sum of q²·(e^(1/z²) − 1).
    """
    price = -2 * math.log(dp_delta)
    mu = math.sqrt(price + 2 * budget) - math.sqrt(price)

    def excess(log_multiplier: float) -> float:
        lift = np.minimum(math.exp(-2 * log_multiplier) / factors**2, 600.0)
        lifted = np.array([math.expm1(each) for each in lift])
        shifts = np.where(rates < 1, rates**2 * lifted, lift)
        total = float(steps @ shifts) * (4 if relation == "replace_one" else 1)
        return math.log(max(total, 1e-300)) - 2 * math.log(mu)

    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    if excess(low) <= 0 or excess(high) > 0:
        return 0.0
    return float(optimize.brentq(excess, low, high, xtol=1e-3))


def _log_ratio(spent: ArrayLike, budget: ArrayLike) -> np.ndarray:
    """Computes log(spent / budget) in [-50, 50], above 0 if a budget is exceeded."""
    with np.errstate(divide="ignore", over="ignore"):
        ratio = np.asarray(spent, float) / np.asarray(budget, float)
        return np.clip(np.log(ratio), -_BOUND, _BOUND)


def _root(excess: Callable[[float], float], start: float, step: float) -> float | None:
    """Finds the zero of a decreasing function from above, or None; the first probe is at `step`."""
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


def _roots(excess: Callable[[np.ndarray, np.ndarray], np.ndarray], count: int) -> np.ndarray:
    """Finds the zeros of many decreasing functions, by false position with Illinois weights.

    `excess` maps (which, logarithms of multipliers) to values, `[functions asked]`. Returns the
    upper
    end of each bracket, not above zero; NaN if one is above zero everywhere, which ends the search.
    """
    all_functions = np.arange(count)
    low, high = np.full(count, math.log(_SMALLEST)), np.full(count, math.log(_LARGEST))
    at_low, at_high = excess(all_functions, low), excess(all_functions, high)
    if np.any(at_high > 0):
        return np.where(at_high > 0, np.nan, high)
    high = np.where(at_low <= 0, low, high)
    last_side = np.zeros(count)
    for iteration in range(200):
        (open_,) = np.nonzero(high - low > _TOLERANCE)
        if not open_.size:
            break
        a, b, fa, fb = low[open_], high[open_], at_low[open_], at_high[open_]
        middle = _between(a, b, fa, fb, is_halved=iteration % 3 == 2)
        value = excess(open_, middle)
        is_below = value > 0
        side = np.where(is_below, -1.0, 1.0)
        # An end that stays twice gets half the weight.
        weight = np.where(side == last_side[open_], 0.5, 1.0)
        low[open_], at_low[open_] = (
            np.where(is_below, middle, a),
            np.where(is_below, value, weight * fa),
        )
        high[open_], at_high[open_] = (
            np.where(is_below, b, middle),
            np.where(is_below, weight * fb, value),
        )
        last_side[open_] = side
    return high


def _between(
    a: np.ndarray, b: np.ndarray, fa: np.ndarray, fb: np.ndarray, *, is_halved: bool
) -> np.ndarray:
    """Chooses the next probe in brackets from a to b: by false position, or in the middle."""
    is_slow = is_halved | (np.abs(fa) > 5) | (np.abs(fb) > 5)
    middle = np.where(is_slow, a + (b - a) / 2, (a * fb - b * fa) / (fb - fa))
    # Both ends must close in, so no step may come closer than a part of the tolerance.
    return np.clip(middle, a + _TOLERANCE / 4, b - _TOLERANCE / 4)


@checked
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
      sampling_rate: in [0, 1]; a scalar, `[clients]`, or `[clients, phases]` if the rate
        changes in the course of a run. Rate 1 is full participation.
      num_steps: steps of each phase, the shape of `sampling_rate` or one that broadcasts to it;
        integers, except for "rdp-classic-64", whose recipe counts `epochs·N/b`.
      dp_delta: δ in (0, 1); a scalar or `[clients]`.
      rho: zCDP cost of all other releases, such as private selections; a scalar or
        `[clients]`.
      accountant: "rdp", "pld" or "rdp-classic-64".
      relation: "add_remove" or "replace_one".

    Returns:
      `[clients]`, or a scalar array if all arguments are scalars.

    Raises:
      UnsupportedEvent: if the combination has no valid analysis.
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
    """Computes what `epsilon_of_poisson` does, and names the accountant."""
    checks.one_of("relation", relation, RELATIONS)
    require_noise("noise_multiplier", noise_multiplier)
    rows, shape = rows_of(noise_multiplier, dp_delta, rho, sampling_rate, num_steps, accountant)
    unique, for_all = distinct(rows, shape)
    return Bound(*map(for_all, bounds(unique, accountant, relation)))


def require_delta(dp_delta: ArrayLike) -> None:
    """Requires every δ to be in (0, 1)."""
    inside = np.all((np.asarray(dp_delta) > 0) & (np.asarray(dp_delta) < 1))
    checks.require(bool(inside), "dp_delta", "be in (0, 1)", dp_delta)


def step_event(rate: float, noise_multiplier: float) -> DpEvent:
    """Makes the event of one step; rate 1 means full participation."""
    gaussian = dpa.GaussianDpEvent(noise_multiplier)
    return gaussian if rate == 1 else dpa.PoissonSampledDpEvent(rate, gaussian)


def rows_of(
    first: ArrayLike,
    dp_delta: ArrayLike,
    rho: ArrayLike,
    sampling_rate: ArrayLike,
    num_steps: ArrayLike,
    accountant: str,
    noise_factor: ArrayLike = 1.0,
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Checks the numbers of clients and writes them as a table, one row per client.

    `first` is a client's budget or noise multiplier, checked by the caller. Returns `[clients, 3 +
    3·phases]` (first, δ, ρ, then the rates, the steps and the factors of noise of all phases) and
    the shape of an answer.
    """
    require_accountant(accountant)
    require_delta(dp_delta)
    checks.probability("sampling_rate", sampling_rate, allow_zero=True)
    try:
        is_counted = bool(np.all(np.asarray(num_steps, float) <= 2.0**53))
    except OverflowError:
        # Of an integer above all floats.
        is_counted = False
    checks.require(is_counted, "num_steps", "be at most 2^53", num_steps)
    checks.non_negative("num_steps", num_steps)
    checks.non_negative("rho", rho)
    steps = np.asarray(num_steps, float)
    if accountant != "rdp-classic-64":
        whole = bool(np.all(steps == np.floor(steps)))
        checks.require(whole, "num_steps", "hold integers", num_steps)
    checks.positive("noise_factor", noise_factor)
    factors = np.asarray(noise_factor, float)
    rates, steps, factors = np.broadcast_arrays(np.asarray(sampling_rate, float), steps, factors)
    phases = rates.shape[1:] or (1,)
    rates, steps, factors = (x.reshape(*x.shape[:1], *phases) for x in (rates, steps, factors))
    scalars = np.broadcast_arrays(first, dp_delta, rho, rates[..., 0])
    shape = scalars[0].shape
    num_clients = math.prod(shape)
    table = [np.asarray(x, float).reshape(num_clients, 1) for x in scalars[:3]]
    for x in (rates, steps, factors):
        table.append(np.broadcast_to(x, (*shape, *phases)).reshape(num_clients, -1))
    return np.concatenate(table, axis=1), shape


def distinct(
    rows: np.ndarray, shape: tuple[int, ...]
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Finds the distinct rows, and a function from their answers to those of all clients."""
    unique, inverse = np.unique(rows, axis=0, return_inverse=True)
    return unique, lambda answers: answers[inverse.reshape(-1)].reshape(shape)


def bounds(rows: np.ndarray, accountant: str, relation: str) -> Bound:
    """Computes ε of each row of a table of `rows_of` that begins with the noise multiplier."""
    if accountant == "pld" or relation == "replace_one":
        found = [bound_alone(row, float(row[0]), accountant, relation) for row in rows]
        return Bound(*(np.concatenate(column) for column in zip(*found, strict=True)))
    is_classic = accountant == "rdp-classic-64"
    orders = np.asarray(orders_of(accountant))
    rates, steps, factors = np.split(rows[:, 3:], 3, axis=1)
    curves = rows[:, 2:3] * orders
    for rate, count, factor in zip(rates.T, steps.T, factors.T, strict=True):
        runs = count > 0
        one = rdp.poisson_gaussian(rate[runs], rows[runs, 0] * factor[runs], tuple(orders))
        curves[runs] += count[runs, None] * one
    curves *= 1 + 2 * (rates.shape[1] + 2) * rdp.EPS
    spent = rdp.to_epsilon(curves, tuple(orders), rows[:, 1], is_classic=is_classic)
    return Bound(spent, np.full(len(rows), accountant))


def bound_alone(row: np.ndarray, noise_multiplier: float, accountant: str, relation: str) -> Bound:
    """Computes ε of one row of `rows_of`, whose first number is not read, by a ledger."""
    ledger = Ledger(relation=relation)
    ledger.charge(_event(row, noise_multiplier))
    return ledger.bound(float(row[1]), accountant)


def _event(row: np.ndarray, noise_multiplier: float) -> DpEvent:
    rho, phases = row[2], np.split(row[3:], 3)
    parts: list[DpEvent] = [
        dpa.SelfComposedDpEvent(step_event(rate, noise_multiplier * factor), int(count))
        for rate, count, factor in zip(*(x.tolist() for x in phases), strict=True)
    ]
    if rho:
        parts.append(dpa.ZCDpEvent(float(rho)))
    return dpa.ComposedDpEvent(parts)
