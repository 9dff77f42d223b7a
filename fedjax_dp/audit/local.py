"""Grey-box check of what one client sends under record-level privacy."""

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.audit.canaries import MARK, Planted, Watched
from fedjax_dp.audit.noise import StepCheck, measure_noise, stated_multiplier
from fedjax_dp.clients.base import ClientData
from fedjax_dp.core import checks, trees
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.privacy.events import flatten


def check_client(
    planted: Planted, state: SimulationState, key: PRNGKey, *, num_draws: int = 256
) -> list[StepCheck]:
    """Compares everything that a client sends, with and without a canary among its records.

    The client takes one local step on all of its records. Each part of what it sends (and its own
    model, where it sends nothing) must carry noise to hide the canary's share in it, or must not
    depend on the canary at all, as its weight must not. Parts are looked at one by one, since one
    may be a function of another, like a control variate of an update. Votes have no distance that
    noise could be held against: they are left to the canaries, and all else is looked at.

    Args:
      planted: canary records in an algorithm whose local optimiser is plain SGD; others do not
        keep differences in proportion to the noise.
      state: a state of the planted algorithm.
      key: root of all draws.
      num_draws: steps from which the noise is measured, at least 2.

    Returns:
      The checks; empty where the event of a step states no noise of a known kind.

    Raises:
      ValueError: if the canaries are not records.
    """
    checks.require(planted.unit == "record", "planted", "hold canary records", planted.unit)
    algorithm, data = planted.algorithm, planted.data
    owner = int(planted.owners[0])
    size = int(data.sizes[owner])
    config = jax.tree.map(np.asarray, state.config.row(owner))
    config = config._replace(num_steps=np.int32(1), batch_size=np.float32(size))
    assert algorithm.record_event is not None
    [(event, count)] = flatten(algorithm.record_event(size, config))
    if count != 1 or not stated_multiplier(event):
        return []
    start = jnp.int32(data.offsets[owner])
    examples = {name: jnp.asarray(array) for name, array in data.examples.items()}

    @jax.jit
    def send(state, is_included, key):
        coins = jnp.arange(len(planted.owners)) < jnp.where(is_included, 1, 0)
        held = examples | {MARK: planted.marks(coins)}
        limit = int(data.sizes.max())
        client = ClientData(held, start, jnp.int32(size), jnp.int32(owner), limit=limit)
        row = trees.take(state.rows, owner)
        output = algorithm.client(state.server, row, client, config, key)
        kept: Watched = output.row
        sent = () if planted.sends_votes else output.update
        return sent, output.weight, () if algorithm.sends_updates else kept.inner

    noise = measure_noise(send, (state, True), key, num_draws)
    with_canary, without = send(state, True, key), send(state, False, key)
    return noise.compare_parts("what a client sends", with_canary, without, event)
