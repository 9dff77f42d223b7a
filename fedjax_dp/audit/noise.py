"""Measures the noise of a release and compares it with its event."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.events import DpEvent, effective_noise_multiplier
from fedjax_dp.privacy.mechanisms.distributed import (
    DistributedDiscreteGaussianDpEvent,
    SkellamDpEvent,
)
from fedjax_dp.privacy.mechanisms.noise import EntrywiseDpEvent

# Sums and norms are float32: this share of a bound is rounding, not a leak.
ROUNDING = 1e-4
# Allowed difference of measured from stated noise: a share, and a number of standard errors.
_TOLERANCE = 0.02
_STANDARD_ERRORS = 5.0


class StepCheck(NamedTuple):
    """One comparison of a step on neighbouring data.

    Attributes:
      name: what was compared.
      measured: the largest measured value; inf if something was not finite.
      allowed: the largest value that the stated sensitivity and noise allow.
    """

    name: str
    measured: float
    allowed: float

    @property
    def is_violated(self) -> bool:
        """Whether the measured value exceeds the allowed one."""
        return not self.measured <= self.allowed


class ReleaseNoise(NamedTuple):
    """The noise of a release, leaf by leaf."""

    stddevs: tuple[float, ...]  # Of an entry of each leaf.
    counts: tuple[int, ...]  # The number of independent deviations behind each.

    def compare(
        self, name: str, released: PyTree, neighbour: PyTree, event: DpEvent
    ) -> StepCheck | None:
        """Compares the distance of releases with the same noise with what the event allows.

        In units of the measured noise, over everything that is released, so that neither a divisor
        nor a second release is missed. None for an event of another kind.
        """
        gaps = _gaps(released, neighbour)
        multiplier = stated_multiplier(event)
        if multiplier:
            units = zip(gaps, self.stddevs, strict=True)
            terms = [_ratio(float(np.linalg.norm(gap)), s) ** 2 for gap, s in units]
            measured = math.sqrt(sum(terms))
        elif isinstance(event, dp_accounting.LaplaceDpEvent) and event.noise_multiplier > 0:
            multiplier, units = event.noise_multiplier, zip(gaps, self.stddevs, strict=True)
            terms = [_ratio(float(np.abs(gap).sum()), s / math.sqrt(2)) for gap, s in units]
            measured = sum(terms)
        elif isinstance(event, EntrywiseDpEvent) and event.noise_multiplier > 0:
            # Entries are bounded one by one, so the one that moves farthest is compared.
            multiplier, units = event.entry_stddev, zip(gaps, self.stddevs, strict=True)
            terms = [_ratio(float(np.abs(gap).max(initial=0)), s) for gap, s in units]
            measured = max(terms)
        else:
            return None
        # Leaves count in the error of the sum by their part in it.
        total = sum(terms)
        is_open = 0 < total < math.inf
        parts = zip(terms, self.counts, strict=True)
        error = sum(t / total * _standard_error(n) for t, n in parts) if is_open else 0.0
        slack = 1 + ROUNDING + _STANDARD_ERRORS * error
        return StepCheck(name, measured, slack / multiplier)

    def compare_parts(
        self, name: str, released: PyTree, neighbour: PyTree, event: DpEvent
    ) -> list[StepCheck]:
        """Compares each leaf on its own with what an event with Gaussian-like noise allows."""
        multiplier = stated_multiplier(event)
        if not multiplier:
            raise ValueError(f"event must state Gaussian-like noise, got {event!r}")
        results = []
        for i, gap in enumerate(_gaps(released, neighbour)):
            measured = _ratio(float(np.linalg.norm(gap)), self.stddevs[i])
            slack = 1 + ROUNDING + _STANDARD_ERRORS * _standard_error(self.counts[i])
            results.append(StepCheck(f"{name}, part {i}", measured, slack / multiplier))
        return results

    def against(
        self,
        name: str,
        stated: float,
        leaves: Sequence[int] | None = None,
        *,
        may_exceed: bool = False,
    ) -> StepCheck:
        """Compares the noise of some leaves with what is stated for each entry."""
        leaves = range(len(self.counts)) if leaves is None else leaves
        counts = [self.counts[i] for i in leaves]
        squares = [self.stddevs[i] ** 2 * self.counts[i] for i in leaves]
        measured = math.sqrt(sum(squares) / sum(counts))
        tolerance = _TOLERANCE + _STANDARD_ERRORS * _standard_error(sum(counts))
        excess = _ratio(measured, stated) - 1
        return StepCheck(name, max(-excess, 0.0) if may_exceed else abs(excess), tolerance)

    def same_as(self, name: str, other: "ReleaseNoise") -> StepCheck:
        """Compares the noise with that of a release on neighbouring data."""
        measured = 0.0
        for mine, theirs, count in zip(self.stddevs, other.stddevs, self.counts, strict=True):
            if mine > 0 or theirs > 0:
                tolerance = _TOLERANCE + _STANDARD_ERRORS * math.sqrt(2) * _standard_error(count)
                measured = max(measured, abs(_ratio(mine, theirs) - 1) / tolerance)
        return StepCheck(name, measured, 1.0)


def stated_multiplier(event: DpEvent) -> float | None:
    """Returns the noise multiplier, for L2 norms, of an event; None or 0 for other kinds."""
    if isinstance(event, DistributedDiscreteGaussianDpEvent):
        return math.sqrt(event.num_shares) * event.noise_scale / event.l2_norm
    if isinstance(event, SkellamDpEvent):
        return math.sqrt(event.variance) / event.l2_norm
    return effective_noise_multiplier(event)


def measure_noise(
    release: Callable[..., PyTree], arguments: tuple[Any, ...], key: PRNGKey, *, num_draws: int
) -> ReleaseNoise:
    """Measures the noise of `release(*arguments, key)` over `num_draws` keys."""
    checks.whole("num_draws", num_draws, at_least=2)
    sums, squares = _moments(release, arguments, jax.random.split(key, num_draws))
    stddevs, counts = [], []
    for total, square in zip(jax.tree.leaves(sums), jax.tree.leaves(squares), strict=True):
        total, square = np.asarray(total, np.float64), np.asarray(square, np.float64)
        counts.append(total.size * (num_draws - 1))
        deviation = np.maximum(square - total**2 / num_draws, 0).sum() / counts[-1]
        stddevs.append(math.sqrt(deviation))
    return ReleaseNoise(tuple(stddevs), tuple(counts))


def mean_release(
    release: Callable[..., PyTree], arguments: tuple[Any, ...], key: PRNGKey, *, num_draws: int
) -> PyTree:
    """Averages releases of the same value under different keys.

    Two such averages under the same keys differ by the effect of the value on a release. If noise
    is only added, one key suffices; if the noised value is transformed further, such as a clip norm
    that adapts to a noised count, the difference under one key depends on its noise.
    """
    keys = jax.random.split(key, num_draws)
    sums, _ = _moments(release, arguments, keys)
    first = release(*arguments, keys[0])
    return jax.tree.map(lambda x, s: np.asarray(x, np.float64) + s / num_draws, first, sums)


@partial(jax.jit, static_argnums=0)
def _moments(release, arguments, keys):
    # Deviations from the first release, since float32 would lose them beside a large value. It is
    # made by the loop too: a round is compiled once, and rounds alike.
    def wide(key):
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), release(*arguments, key))

    def add(carry, inputs):
        first, total = carry
        key, is_first = inputs
        released = wide(key)
        first = trees.where(is_first, released, first)
        gap = trees.subtract(released, first)
        return (first, trees.add(total, (gap, jax.tree.map(jnp.square, gap)))), None

    zeros = trees.zeros_like(jax.eval_shape(wide, keys[0]))
    inputs = keys, jnp.arange(len(keys)) == 0
    return jax.lax.scan(add, (zeros, (zeros, zeros)), inputs)[0][1]


def distance(a: PyTree, b: PyTree) -> float:
    """Computes the Euclidean distance of two trees in float64; inf where anything is not finite."""
    gaps = _gaps(a, b)
    if not all(np.isfinite(gap).all() for gap in gaps):
        return math.inf
    return math.sqrt(sum(float(np.sum(gap**2)) for gap in gaps))


def _gaps(a: PyTree, b: PyTree) -> list[np.ndarray]:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return [np.asarray(x, np.float64) - np.asarray(y, np.float64) for x, y in pairs]


def _standard_error(count: int) -> float:
    """The relative error of a standard deviation estimated from `count` deviations."""
    return 1 / math.sqrt(2 * count)


def _ratio(value: float, unit: float) -> float:
    if not math.isfinite(value):
        return math.inf
    return value / unit if unit > 0 else (math.inf if value > 0 else 0.0)
