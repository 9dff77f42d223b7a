"""Rényi curves of any events: many at once, with dp-accounting's where it has them."""

from collections.abc import Sequence
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting import rdp as dpa_rdp

from fedjax_dp.privacy.accounting import rdp
from fedjax_dp.privacy.accounting.dp_accounting_adapter import translate
from fedjax_dp.privacy.events import CurveDpEvent, DpEvent, flatten

DPA_RELATION = {
    "add_remove": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dpa.NeighboringRelation.REPLACE_ONE,
}


def orders_of(accountant: str) -> tuple[float, ...]:
    """Names the Rényi orders that an accountant looks at.

    Args:
      accountant: "rdp" or "rdp-classic-64".

    Returns:
      The orders.
    """
    return rdp.CLASSIC_ORDERS if accountant == "rdp-classic-64" else rdp.DEFAULT_ORDERS


def rdp_curves(
    parts: Sequence[DpEvent], relation: str = "add_remove", accountant: str = "rdp"
) -> np.ndarray:
    """Computes the Rényi curves of many events, sampled Gaussians all at once.

    Args:
      parts: events as `events.flatten` returns them.
      relation: "add_remove" or "replace_one".
      accountant: "rdp" or "rdp-classic-64"; they differ in their orders.

    Returns:
      `[parts, orders]`: the divergences of one run of each event.

    Raises:
      UnsupportedEvent: if one of the events has no Rényi analysis under the relation.
    """
    told = [translate(part, relation, accountant) for part in parts]
    return _curves(told, relation, np.asarray(orders_of(accountant)))


def _curves(told: Sequence[Any], relation: str, orders: np.ndarray) -> np.ndarray:
    curves = np.empty((len(told), len(orders)))
    sampled: list[int] = []
    for i, event in enumerate(told):
        if isinstance(event, CurveDpEvent):
            curves[i] = event.rdp(orders, relation)
        elif not isinstance(event, dpa.PoissonSampledDpEvent):
            account = dpa_rdp.RdpAccountant(orders.tolist(), DPA_RELATION[relation])
            curves[i] = _lifted(event, account.compose(event).rdp, orders)
        elif isinstance(event.event, dpa.GaussianDpEvent):
            sampled.append(i)
        else:
            curves[i] = _poisson_of_any(event, relation, orders)
    if sampled:
        rates = [told[i].sampling_probability for i in sampled]
        multipliers = [told[i].event.noise_multiplier for i in sampled]
        curves[sampled] = rdp.poisson_gaussian(rates, multipliers, tuple(orders))
    return curves


def _lifted(event: Any, curve: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Adds what dp-accounting may have lost by adding little to 1, or subtracting what is near."""
    if isinstance(event, dpa.GaussianDpEvent | dpa.ZCDpEvent | dpa.NonPrivateDpEvent):
        return curve * (1 + 8 * rdp.EPS)
    lost = 8 * rdp.EPS / np.minimum(orders - 1, 1.0)
    if isinstance(event, dpa.LaplaceDpEvent):
        # Its terms are no larger than ε, and never is the whole above α·ε²/2 (ε-DP).
        epsilon = 1 / event.noise_multiplier
        return np.minimum(curve + lost * epsilon, orders * epsilon**2 / 2 * (1 + 8 * rdp.EPS))
    return curve * (1 + 64 * rdp.EPS) + lost


def _poisson_of_any(event: Any, relation: str, orders: np.ndarray) -> np.ndarray:
    """Bounds the curve of Poisson sampling before whatever has a curve itself."""

    def base(at: np.ndarray) -> np.ndarray:
        parts = flatten(event.event)
        told = [translate(part, relation, "rdp") for part, _ in parts]
        return np.array([count for _, count in parts]) @ _curves(told, relation, at)

    whole = np.arange(2.0, np.ceil(orders.max()) + 1)
    amplified = poisson_bound(event.sampling_probability, base(whole), orders)
    return np.minimum(amplified, base(orders))


def poisson_bound(sampling_probability: float, curve: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Bounds the Rényi curve of any mechanism behind Poisson sampling under add/remove.

    Between whole orders `(α − 1)·ρ(α)`, which is convex, is bounded by its chord.

    Args:
      sampling_probability: in [0, 1].
      curve: `[m]`, the mechanism's own divergences at orders 2, 3, ..., m + 1.
      orders: `[orders]` in (1, m + 1].

    Returns:
      `[orders]`.

    Source: Zhu and Wang 2019, "Poisson Subsampled Rényi Differential Privacy", theorem 5;
    Wang, Balle, Kasiviswanathan 2019, corollary 10 (chords).
    """
    q = float(sampling_probability)
    if q == 0:
        return np.zeros(len(orders))
    if q == 1:
        q = float(np.nextafter(1.0, 0.0))
    ends = np.unique(np.concatenate([np.floor(orders), np.ceil(orders)])).astype(int)
    moments = {1: 0.0}
    for alpha in ends[ends >= 2].tolist():
        lifts = np.arange(1, alpha) * curve[: alpha - 1]
        # What two draws cost beyond 1, e^x − 1, and what more cost, 3·e^x − 1: all positive.
        with np.errstate(over="ignore"):
            costs = np.append(rdp.log_expm1(lifts[:1]), np.log(3) + lifts[1:])
            costs[1:] += np.log1p(-np.exp(-costs[1:]))
        size = np.max(lifts, where=np.isfinite(lifts), initial=0.0)
        moments[alpha] = float(rdp.log_moment(alpha, q, costs, size))
    low, high = np.floor(orders), np.ceil(orders)
    below, above = (np.array([moments[int(a)] for a in end]) for end in (low, high))
    part = orders - low
    with np.errstate(invalid="ignore"):
        chord = (1 - part) * below + part * above
    return np.where(part == 0, below, chord) / (orders - 1)
