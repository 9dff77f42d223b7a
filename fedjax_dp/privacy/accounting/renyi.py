"""Rényi curves of any events: many at once, with those of dp-accounting if it has them."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
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
    """Returns the Rényi orders of the accountant "rdp" or "rdp-classic-64"."""
    return rdp.CLASSIC_ORDERS if accountant == "rdp-classic-64" else rdp.DEFAULT_ORDERS


def rdp_curves(
    parts: Sequence[DpEvent], relation: str = "add_remove", accountant: str = "rdp"
) -> np.ndarray:
    """Computes the Rényi curves of one run of each part, `[parts, orders]`."""
    events = [translate(part, relation, accountant) for part in parts]
    return _curves(events, relation, np.asarray(orders_of(accountant)))


def _curves(events: Sequence[Any], relation: str, orders: np.ndarray) -> np.ndarray:
    curves = np.empty((len(events), len(orders)))
    sampled: list[int] = []
    for i, event in enumerate(events):
        if isinstance(event, CurveDpEvent):
            curves[i] = event.rdp(orders, relation)
        elif not isinstance(event, dpa.PoissonSampledDpEvent):
            account = dpa_rdp.RdpAccountant(orders.tolist(), DPA_RELATION[relation])
            with _quiet():
                account.compose(event)
            curves[i] = _lifted(event, account.rdp, orders)
        elif isinstance(event.event, dpa.GaussianDpEvent):
            sampled.append(i)
        else:
            curves[i] = _poisson_of_any(event, relation, orders)
    if sampled:
        rates = [events[i].sampling_probability for i in sampled]
        multipliers = [events[i].event.noise_multiplier for i in sampled]
        curves[sampled] = rdp.poisson_gaussian(rates, multipliers, tuple(orders))
    return curves


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings of orders that dp-accounting leaves out, which makes no bound smaller."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _lifted(event: Any, curve: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Adds the largest possible cancellation error of dp-accounting."""
    if isinstance(event, dpa.GaussianDpEvent | dpa.ZCDpEvent | dpa.NonPrivateDpEvent):
        return curve * (1 + 8 * rdp.EPS)
    lost = 8 * rdp.EPS / np.minimum(orders - 1, 1.0)
    if isinstance(event, dpa.LaplaceDpEvent):
        # Its terms are no larger than ε, and the whole is never above α·ε²/2 (ε-DP).
        epsilon = 1 / event.noise_multiplier
        return np.minimum(curve + lost * epsilon, orders * epsilon**2 / 2 * (1 + 8 * rdp.EPS))
    return curve * (1 + 64 * rdp.EPS) + lost


def _poisson_of_any(event: Any, relation: str, orders: np.ndarray) -> np.ndarray:
    """Bounds the curve of a Poisson-sampled event that has a curve without sampling."""

    def base(at: np.ndarray) -> np.ndarray:
        parts = flatten(event.event)
        events = [translate(part, relation, "rdp") for part, _ in parts]
        return np.array([count for _, count in parts]) @ _curves(events, relation, at)

    whole = np.arange(2.0, np.ceil(orders.max()) + 1)
    amplified = rdp.poisson_of_any(event.sampling_probability, base(whole), orders)
    return np.minimum(amplified, base(orders))
