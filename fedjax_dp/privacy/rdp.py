"""Rényi curves of the sampled Gaussian for many settings at once, and their conversions."""

from collections.abc import Sequence

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
_CHUNK = 512


def poisson_gaussian(
    sampling_probability: ArrayLike,
    noise_multiplier: ArrayLike,
    orders: Sequence[float] = DEFAULT_ORDERS,
) -> np.ndarray:
    """Computes the Rényi curves of the Poisson-sampled Gaussian mechanism under add/remove.

    Evaluates the formulas of dp-accounting for all settings and orders at once, in float64:
    the binomial sum at whole orders, the two-sided series at others.

    Args:
      sampling_probability: `[settings]` in [0, 1], or a scalar.
      noise_multiplier: `[settings]`, standard deviation over the largest contribution, at least
        0, or a scalar.
      orders: the Rényi orders, above 1.

    Returns:
      `[settings, orders]`: the divergences of one step; inf where there is no noise.

    Source: Mironov, Talwar, Zhang, "Rényi Differential Privacy of the Sampled Gaussian
    Mechanism", 2019, sections 3.1 to 3.3.
    """
    q, z = np.broadcast_arrays(
        np.atleast_1d(np.asarray(sampling_probability, float)),
        np.atleast_1d(np.asarray(noise_multiplier, float)),
    )
    alpha = np.asarray(orders, float)
    curves = np.zeros((q.size, alpha.size))
    everybody = (q == 1) & (z > 0)
    curves[everybody] = alpha / (2 * z[everybody, None] ** 2)
    curves[(q > 0) & (z == 0)] = np.inf
    is_whole = alpha == np.floor(alpha)
    (sampled,) = np.nonzero((q > 0) & (q < 1) & (z > 0))
    for start in range(0, sampled.size, _CHUNK):
        rows = sampled[start : start + _CHUNK]
        log_moments = np.empty((rows.size, alpha.size))
        log_moments[:, ~is_whole] = _log_moments_fractional(q[rows], z[rows], alpha[~is_whole])
        for column in np.nonzero(is_whole)[0]:
            log_moments[:, column] = _log_moments_whole(q[rows], z[rows], int(alpha[column]))
        curves[rows] = log_moments / (alpha - 1)
    return curves


def _log_comb(n: np.ndarray | float, k: np.ndarray | float) -> np.ndarray:
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)


def _log_moments_whole(q: np.ndarray, z: np.ndarray, alpha: int) -> np.ndarray:
    i = np.arange(alpha + 1.0)
    exponent = np.log(q)[:, None] * i + np.log1p(-q)[:, None] * (alpha - i)
    exponent += _log_comb(float(alpha), i) + (i * i - i) / (2 * z[:, None] ** 2)
    largest = exponent.max(axis=1)
    return largest + np.log(np.exp(exponent - largest[:, None]).sum(axis=1))


def _log_moments_fractional(q: np.ndarray, z: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Sums both halves of the series term by term; what has converged drops out."""
    shape = (q.size, alpha.size)
    log_q, log_p, sigma, order = (
        np.broadcast_to(x, shape).ravel()
        for x in (np.log(q)[:, None], np.log1p(-q)[:, None], z[:, None], alpha)
    )
    crossing = sigma**2 * (log_p - log_q) + 0.5
    result = np.full(log_q.size, np.inf)
    active = np.arange(log_q.size)
    total = np.full(log_q.size, -np.inf)
    previous = np.full((2, log_q.size), -np.inf)
    for i in range(_MAX_TERMS):
        j = order - i
        coefficient = _log_comb(order, float(i))
        terms = np.stack(
            [
                coefficient
                + i * log_q
                + j * log_p
                + (i * i - i) / (2 * sigma**2)
                + special.log_ndtr((crossing - i) / sigma),
                coefficient
                + j * log_q
                + i * log_p
                + (j * j - j) / (2 * sigma**2)
                + special.log_ndtr((j - crossing) / sigma),
            ]
        )
        total = np.logaddexp(total, np.logaddexp(terms[0], terms[1]))
        done = np.all(terms < previous, axis=0) & (terms.max(axis=0) < total - 30)
        previous = terms
        if done.any():
            result[active[done]] = total[done]
            left = ~done
            active, total, previous = active[left], total[left], previous[:, left]
            log_q, log_p, sigma, order, crossing = (
                x[left] for x in (log_q, log_p, sigma, order, crossing)
            )
            if not active.size:
                break
    return result.reshape(shape)


def to_epsilon(
    curves: ArrayLike, orders: Sequence[float], dp_delta: ArrayLike, *, is_classic: bool = False
) -> np.ndarray:
    """Converts Rényi curves to the smallest ε at one δ.

    Args:
      curves: `[..., orders]`, the divergences of the whole composition.
      orders: the Rényi orders, above 1.
      dp_delta: δ in [0, 1), a scalar or one for each curve, `[...]`.
      is_classic: whether to use `ρ(α) + ln(1/δ)/(α − 1)` (Mironov 2017, Proposition 3) in place
        of the tighter bound (Canonne, Kamath, Steinke 2020, Proposition 12).

    Returns:
      `[...]`: ε, at least 0; inf where no order gives a bound.
    """
    rho = np.asarray(curves, float)
    alpha = np.asarray(orders, float)
    at = np.asarray(dp_delta, float)[..., None]
    with np.errstate(invalid="ignore", divide="ignore"):
        if is_classic:
            epsilon = rho - np.log(at) / (alpha - 1)
        else:
            epsilon = rho + np.log1p(-1 / alpha) - np.log(at * alpha) / (alpha - 1)
            # δ ≤ √(1 − exp(−KL)): at a divergence this small the claim holds with ε = 0.
            epsilon = np.where(at**2 + np.expm1(-rho) > 0, 0.0, epsilon)
            epsilon = np.maximum(epsilon, 0.0)
        # Without any δ a Rényi curve promises something only where nothing was released.
        nothing = np.where(rho == 0, 0.0, np.inf)
        return np.min(np.where(at == 0, nothing.max(axis=-1, keepdims=True), epsilon), axis=-1)


def to_delta(
    curves: ArrayLike, orders: Sequence[float], epsilon: ArrayLike, *, is_classic: bool = False
) -> np.ndarray:
    """Converts Rényi curves to the smallest δ at one ε.

    Args:
      curves: `[..., orders]`, the divergences of the whole composition.
      orders: the Rényi orders, above 1.
      epsilon: ε, at least 0, a scalar or one for each curve, `[...]`.
      is_classic: as for `to_epsilon`.

    Returns:
      `[...]`: δ in [0, 1].
    """
    rho = np.asarray(curves, float)
    alpha = np.asarray(orders, float)
    at = np.asarray(epsilon, float)[..., None]
    if is_classic:
        exponent = np.where(rho == 0, -np.inf, (alpha - 1) * (rho - at))
    else:
        with np.errstate(divide="ignore"):
            by_kl = 0.5 * np.log(-np.expm1(-rho))
        exponent = (alpha - 1) * (rho - at + np.log1p(-1 / alpha)) - np.log(alpha)
        exponent = np.where(rho == 0, -np.inf, np.minimum(by_kl, exponent))
    return np.exp(np.minimum(np.min(exponent, axis=-1), 0.0))
