"""Rényi curves of Poisson sampling, for many settings at once, and their conversions.

Functions of plain arrays, which depend on NumPy and SciPy alone.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

# The orders of the default RDP accountant of dp-accounting, so that results agree.
DEFAULT_ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in range(11, 64)),
    128.0,
    256.0,
    512.0,
    1024.0,
)
# The orders of the recipe that many published noise multipliers were made with.
CLASSIC_ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in range(12, 65)),
)

_MAX_TERMS = 1000
# Logarithms of moments below this have lost digits in a series that begins with 1.
_SMALL = 1e-6
# The unit of rounding of float64, in multiples of which bounds are lifted.
EPS = float(np.finfo(float).eps)
_CHUNK = 512
# Terms times entries that a series computes at once.
_BLOCK = 2**13


def poisson_gaussian(
    sampling_probability: ArrayLike,
    noise_multiplier: ArrayLike,
    orders: Sequence[float] = DEFAULT_ORDERS,
) -> np.ndarray:
    """Bounds the Rényi curves, `[settings, orders]`, of the Poisson-sampled Gaussian (add/remove).

    Evaluates the formulas of dp-accounting for all settings and orders at once, in float64, with
    two changes. At whole orders the moment less 1 is summed, whose terms are all positive, so that
    no digits are lost however little a step costs. At others, where the series begins with that 1
    and loses whatever is far below it, chords between whole orders are used. Infinite without
    noise.

    Guarantee: no value lies below the divergence; the largest possible rounding error is added.

    Source: Mironov, Talwar, Zhang 2019, sections 3.1 to 3.3; Wang, Balle, Kasiviswanathan 2019,
    corollary 10 (chords).
    """
    q, z = np.broadcast_arrays(
        np.atleast_1d(np.asarray(sampling_probability, float)),
        np.atleast_1d(np.asarray(noise_multiplier, float)),
    )
    alpha = np.asarray(orders, float)
    curves = np.zeros((q.size, alpha.size))
    # Noise whose square underflows counts as none.
    is_noised = z**2 > 0
    (sampled,) = np.nonzero((q > 0) & (q < 1) & is_noised)
    with np.errstate(over="ignore"):
        for start in range(0, sampled.size, _CHUNK):
            rows = sampled[start : start + _CHUNK]
            curves[rows] = _log_moments(q[rows], z[rows], alpha) / (alpha - 1)
        # Sampling never costs more than full participation.
        drawn = (q > 0) & is_noised
        full = alpha / (2 * z[drawn, None] ** 2)
    curves[drawn] = np.where(q[drawn, None] < 1, np.minimum(curves[drawn], full), full)
    curves[(q > 0) & ~is_noised] = np.inf
    return curves * (1 + 8 * EPS)


def poisson_of_any(
    sampling_probability: float, curve: np.ndarray, orders: np.ndarray
) -> np.ndarray:
    """Bounds the Rényi curve, `[orders]`, of any mechanism under Poisson sampling and add/remove.

    `curve` holds the mechanism's own divergences at orders 2, 3, ..., m + 1; between whole orders
    `(α − 1)·ρ(α)`, which is convex, is bounded by its chord.

    Source: Zhu and Wang 2019, theorem 5; Wang, Balle, Kasiviswanathan 2019, corollary 10 (chords).
    """
    q = float(sampling_probability)
    if q == 0:
        return np.zeros(len(orders))
    if q == 1:
        q = float(np.nextafter(1.0, 0.0))

    def whole(alpha: int) -> np.ndarray:
        lifts = np.arange(1, alpha) * curve[: alpha - 1]
        # What two draws cost beyond 1, e^x − 1, and what more cost, 3·e^x − 1: all positive.
        with np.errstate(over="ignore"):
            costs = np.append(_log_expm1(lifts[:1]), np.log(3) + lifts[1:])
            costs[1:] += np.log1p(-np.exp(-costs[1:]))
        size = np.max(lifts, where=np.isfinite(lifts), initial=0.0)
        return _log_moment(alpha, q, costs, size)

    return _with_chords(orders, np.zeros(()), whole) / (orders - 1)


def _with_chords(
    orders: np.ndarray, at_one: np.ndarray, whole: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Bounds a convex function of the order, `[..., orders]`, by chords between whole orders."""
    low, high = np.floor(orders), np.ceil(orders)
    ends = np.unique(np.concatenate([low, high])).astype(int).tolist()
    known = {end: whole(end) if end > 1 else at_one for end in ends}
    below, above = (np.stack([known[int(a)] for a in end], axis=-1) for end in (low, high))
    part = orders - low
    with np.errstate(invalid="ignore"):
        return np.where(part == 0, below, (1 - part) * below + part * above)


def _log_moments(q: np.ndarray, z: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Bounds the logarithms of E[ratio^α], `[settings, orders]`, for q in (0, 1) and z above 0."""
    # Infinite if even the sum of a whole order overflows; then no chord is used.
    found = _with_chords(alpha, np.zeros(q.size), lambda end: _log_moments_whole(q, z, end))
    broken = alpha != np.floor(alpha)
    if broken.any():
        series = _log_moments_fractional(q, z, alpha[broken])
        # Except for small moments the series is that of dp-accounting, so that others can recompute
        # it; orders at which it does not converge are left out there and here.
        chords = np.fmin(found[:, broken], series)
        found[:, broken] = np.where(series > _SMALL, series, chords)
    return np.where(np.isnan(found), np.inf, found)


def _log_moment(
    order: int, sampling_probability: ArrayLike, log_costs: np.ndarray, parts: ArrayLike = 0.0
) -> np.ndarray:
    """Sums `log(1 + Σ C(α,k)·q^k·(1−q)^(α−k)·cost(k))` over k from 2 to α, rounded up.

    `log_costs` is `[settings, α − 1]` or `[α − 1]`; `parts` are the largest of their summands,
    `[settings]`.
    """
    q = np.asarray(sampling_probability, float)[..., None]
    k = np.arange(2.0, order + 1)
    log_q, log_p = np.log(q), np.log1p(-q)
    exponents = _log_comb(float(order), k) + k * log_q + (order - k) * log_p + log_costs
    largest = exponents.max(axis=-1)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        total = shift + np.log(np.exp(exponents - shift[..., None]).sum(axis=-1))
    # Every logarithm was added up from numbers as large as these, each rounded.
    size = 3 * special.gammaln(order + 1) - order * (log_q + log_p)[..., 0] + np.asarray(parts)
    return np.logaddexp(0.0, total + 8 * EPS * (size + 1)) * (1 + 4 * EPS)


def _log_expm1(x: np.ndarray) -> np.ndarray:
    """Computes `log(e^x − 1)` for x of at least 0 without loss at either end; -inf at 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x > 1, x + np.log(-np.expm1(-x)), np.log(np.expm1(np.minimum(x, 1.0))))


def _log_comb(n: np.ndarray | float, k: np.ndarray | float) -> np.ndarray:
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)


def _log_moments_whole(q: np.ndarray, z: np.ndarray, alpha: int) -> np.ndarray:
    k = np.arange(2.0, alpha + 1)
    exponents = (k * k - k) / (2 * z[:, None] ** 2)
    return _log_moment(alpha, q, _log_expm1(exponents), exponents[:, -1])


def _log_moments_fractional(q: np.ndarray, z: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Bounds the series: both halves term by term, without signs; converged entries drop out.

    Above order α terms alternate and fall: all that is left is below the last one. Terms are
    computed in blocks, the longer the fewer entries are left, and added up one after another.
    """
    shape = (q.size, alpha.size)
    numbers = np.stack(
        [
            np.broadcast_to(x, shape).ravel()
            for x in (np.log(q)[:, None], np.log1p(-q)[:, None], z[:, None], alpha)
        ]
    )
    result = np.full(q.size * alpha.size, np.inf)
    active = np.arange(result.size)
    total = np.full(result.size, -np.inf)
    previous = np.full((1, 2, result.size), -np.inf)
    # The possible rounding error of every term, from the numbers that its exponent is summed from.
    rounding, largest = np.zeros(result.size), np.zeros(result.size)
    i = 0
    while i < _MAX_TERMS and active.size:
        count = min(max(_BLOCK // active.size, 1), _MAX_TERMS - i)
        halves = _halves(np.arange(i, i + count, dtype=float)[:, None], *numbers)
        terms, sizes = halves.sum(axis=2), np.abs(halves).sum(axis=2) + 4
        pairs = np.logaddexp(terms[:, 0], terms[:, 1])
        totals = _running(np.logaddexp, total, pairs)
        chances = np.exp(np.minimum(terms, 0.0))
        roundings = _running(np.add, rounding, np.sum(chances * sizes, axis=1))
        shares = np.exp(np.minimum(terms - totals[:, None], 0.0))
        most = _running(np.add, largest, np.sum(sizes * shares, axis=1))
        falls = np.all(terms < np.concatenate([previous, terms[:-1]]), axis=1)
        is_past = numbers[3] - np.arange(i, i + count)[:, None] < -1
        done = falls & (terms.max(axis=1) < totals - 30) & is_past
        (ended,) = np.nonzero(done.any(axis=0))
        at = done.argmax(axis=0)[ended], ended
        rest = np.logaddexp(totals[at], pairs[at])
        lost = np.where(rest <= 0.5, roundings[at], most[at])
        result[active[ended]] = (rest + 8 * EPS * lost) * (1 + 4 * EPS)
        left = ~done.any(axis=0)
        active, numbers, previous = active[left], numbers[:, left], terms[-1:, :, left]
        total, rounding, largest = totals[-1, left], roundings[-1, left], most[-1, left]
        i += count
    return result.reshape(shape)


def _running(add: np.ufunc, start: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """Returns the sums after each of the terms, `[terms, entries]`, added in their order."""
    return add.accumulate(np.concatenate([start[None], terms]), axis=0)[1:]


def _halves(
    i: np.ndarray, log_q: np.ndarray, log_p: np.ndarray, sigma: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Returns what the logarithms of terms of both halves are summed from, `[i, 2, 4, entries]`."""
    j, crossing = order - i, sigma**2 * (log_p - log_q) + 0.5
    coefficient = _log_comb(order, i)
    halves = []
    for k, rest, tail in ((i, j, crossing - i), (j, i, j - crossing)):
        chance, lift = k * log_q + rest * log_p, (k * k - k) / (2 * sigma**2)
        halves.append(np.stack([coefficient, chance, lift, special.log_ndtr(tail / sigma)], axis=1))
    return np.stack(halves, axis=1)


def to_epsilon(
    curves: ArrayLike, orders: Sequence[float], dp_delta: ArrayLike, *, is_classic: bool = False
) -> np.ndarray:
    """Converts Rényi curves of a whole composition, `[..., orders]`, to the smallest ε at one δ.

    `is_classic` uses `ρ(α) + ln(1/δ)/(α − 1)` (Mironov 2017, Proposition 3) in place of the tighter
    bound (Canonne, Kamath, Steinke 2020, Proposition 12). Infinite if no order yields a bound.

    Guarantee: rounding never lowers the result; its possible error is added.
    """
    rho = np.asarray(curves, float)
    alpha = np.asarray(orders, float)
    at = np.asarray(dp_delta, float)[..., None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        price = -np.log(at) / (alpha - 1)
        if is_classic:
            epsilon = rho + price
            lost = rho + np.abs(price)
        else:
            price, relief = price - np.log(alpha) / (alpha - 1), np.log1p(-1 / alpha)
            epsilon = rho + relief + price
            lost = rho - relief + (np.abs(np.log(at)) + np.log(alpha)) / (alpha - 1)
        epsilon = epsilon + 4 * EPS * np.abs(lost)
        if not is_classic:
            # δ ≤ √(1 − exp(−KL)): at a divergence this small the claim holds with ε = 0.
            is_free = at**2 > -np.expm1(-rho) * (1 + 8 * EPS)
            epsilon = np.where(is_free, 0.0, np.maximum(epsilon, 0.0))
        # At δ = 0 a Rényi curve promises something only if nothing was released.
        nothing = np.where(rho == 0, 0.0, np.inf)
        return np.min(np.where(at == 0, nothing.max(axis=-1, keepdims=True), epsilon), axis=-1)


def to_delta(
    curves: ArrayLike, orders: Sequence[float], epsilon: ArrayLike, *, is_classic: bool = False
) -> np.ndarray:
    """Converts curves as `to_epsilon` does, to the smallest δ at one ε, rounded up."""
    rho = np.asarray(curves, float)
    alpha = np.asarray(orders, float)
    at = np.asarray(epsilon, float)[..., None]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        exponent = (alpha - 1) * (rho - at)
        lost = (alpha - 1) * (rho + at)
        if not is_classic:
            relief = np.log1p(-1 / alpha)
            exponent = exponent + (alpha - 1) * relief - np.log(alpha)
            lost = lost - (alpha - 1) * relief + np.log(alpha)
        exponent = exponent + 4 * EPS * lost
        if not is_classic:
            by_kl = 0.5 * np.log(-np.expm1(-rho))
            exponent = np.minimum(by_kl + 8 * EPS * np.abs(by_kl), exponent)
        exponent = np.where(rho == 0, -np.inf, np.where(np.isnan(exponent), 0.0, exponent))
    return np.exp(np.minimum(np.min(exponent, axis=-1), 0.0))
