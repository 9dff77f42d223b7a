"""Grey-box check of a private choice: frequencies of its outcomes on neighbouring data."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from scipy import stats

from fedjax_dp.audit.extremes import extreme_records
from fedjax_dp.audit.noise import StepCheck
from fedjax_dp.clients.selection import Choice
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import flat, nested
from fedjax_dp.engine.cohort import Examples
from fedjax_dp.privacy.mechanisms.selection import BoundedRangeDpEvent

# Confidence of each limit on a frequency; there are some hundreds of them.
_CONFIDENCE = 1 - 1e-6


@checked
def check_choice(
    choice: Choice | None,
    numbers: Mapping[str, Any],
    models: PyTree,
    batch: Mapping[str, Any],
    key: PRNGKey,
    *,
    num_draws: int = 20_000,
) -> list[StepCheck]:
    """Compares how often each model is chosen, with one record exchanged or left out.

    A few records are the sharpest test, since each moves the score of a model most. The first is
    exchanged for everything that `extreme_records` lists; the last is left out.

    Args:
      choice: the choice, such as `FederatedAlgorithm.choice`, or None.
      numbers: its numbers, such as `Hyper.algorithm`.
      models: parameters of the offered models, `[models, ...]`, all different.
      batch: the client's records, named arrays `[examples, ...]`, or trees of dicts of them, at
        least two.
      key: root of all draws.
      num_draws: choices on each client, at least 1,000.

    Returns:
      One check: the largest proven log-ratio, compared with ε. Empty without a choice, and for one
      that claims nothing.

    Raises:
      ValueError: if the batch or the number of draws is too small.
    """
    if choice is None or choice.event is None:
        return []
    batch = {name: np.asarray(array) for name, array in flat(batch).items()}
    size = len(next(iter(batch.values())))
    checks.require(size >= 2, "batch", "hold at least two examples", size)
    checks.whole("num_draws", num_draws, at_least=1000)
    event, choose = choice.event(numbers), choice.of
    assert isinstance(event, BoundedRangeDpEvent)
    count = jax.tree.leaves(models)[0].shape[0]

    @jax.jit
    def frequencies(examples, size, key):
        held = Examples(
            nested(examples),
            jnp.zeros(1, jnp.int32),
            size[None],
            limit=len(next(iter(batch.values()))),
        )
        client = held.client(0)

        def one(key):
            return choose(key, models, client, jnp.ones(count, bool), numbers)

        drawn = jax.lax.map(one, jax.random.split(key, num_draws), batch_size=1000)
        return jnp.zeros(count, jnp.int32).at[drawn].add(1)

    clients = [(batch, size), (batch, size - 1)]
    first = {name: array[0] for name, array in batch.items()}
    for record in extreme_records(first, np.random.default_rng(0)):
        changed = {name: np.stack([record[name], *a[1:]]) for name, a in batch.items()}
        clients.append((changed, size))
    tables = [
        np.asarray(frequencies(examples, jnp.int32(n), jax.random.fold_in(key, i)))
        for i, (examples, n) in enumerate(clients)
    ]
    proven = max(
        _proven_ratio(one, other, num_draws)
        for table in tables[1:]
        for one, other in ((tables[0], table), (table, tables[0]))
    )
    return [StepCheck("choice with a record exchanged or left out", proven, event.epsilon)]


def _proven_ratio(one: np.ndarray, other: np.ndarray, num_draws: int) -> float:
    """Bounds the largest log-ratio of two discrete distributions from below."""
    tail = 1 - _CONFIDENCE
    least = stats.beta.ppf(tail, np.maximum(one, 1), num_draws - one + 1)
    most = stats.beta.ppf(_CONFIDENCE, other + 1, np.maximum(num_draws - other, 1))
    ratios = np.log(np.where(one > 0, least, 1e-300) / np.where(other < num_draws, most, 1.0))
    return max(float(np.max(ratios)), 0.0)
