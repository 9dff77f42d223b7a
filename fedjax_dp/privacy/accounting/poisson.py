"""ε of Poisson-sampled Gaussian steps, for many clients at once."""

import math
from collections.abc import Callable

import dp_accounting as dpa
import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.privacy.accounting import rdp
from fedjax_dp.privacy.accounting.dp_accounting_adapter import require_accountant
from fedjax_dp.privacy.accounting.ledger import Bound, Ledger
from fedjax_dp.privacy.accounting.renyi import orders_of
from fedjax_dp.privacy.events import DpEvent, require_noise
from fedjax_dp.privacy.sensitivities import RELATIONS


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
    checks.one_of("relation", relation, RELATIONS)
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
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Checks the numbers of clients and writes them as a table, one row per client.

    `first` is a client's budget or noise multiplier, checked by the caller. Returns `[clients, 3 +
    2·phases]` (first, δ, ρ, then the rates and the steps of all phases) and the shape of an answer.
    """
    require_accountant(accountant)
    require_delta(dp_delta)
    checks.probability("sampling_rate", sampling_rate, allow_zero=True)
    is_counted = bool(np.all(np.asarray(num_steps, float) <= 2.0**53))
    checks.require(is_counted, "num_steps", "be at most 2^53", num_steps)
    checks.non_negative("num_steps", num_steps)
    checks.non_negative("rho", rho)
    steps = np.asarray(num_steps, float)
    if accountant != "rdp-classic-64":
        whole = bool(np.all(steps == np.floor(steps)))
        checks.require(whole, "num_steps", "hold integers", num_steps)
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
    rates, steps = np.split(rows[:, 3:], 2, axis=1)
    curves = rows[:, 2:3] * orders
    for rate, count in zip(rates.T, steps.T, strict=True):
        runs = count > 0
        one = rdp.poisson_gaussian(rate[runs], rows[runs, 0], tuple(orders))
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
    rho, (rates, steps) = row[2], np.split(row[3:], 2)
    parts: list[DpEvent] = [
        dpa.SelfComposedDpEvent(step_event(rate, noise_multiplier), int(count))
        for rate, count in zip(rates.tolist(), steps.tolist(), strict=True)
    ]
    if rho:
        parts.append(dpa.ZCDpEvent(float(rho)))
    return dpa.ComposedDpEvent(parts)
