"""Grey-box check of what one client sends under record-level privacy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.values import Hyper
from fedjax_dp.audit.canaries import MARK, Planted
from fedjax_dp.audit.noise import StepCheck, measure_noise, stated_multiplier
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import received
from fedjax_dp.engine.population import examples_of
from fedjax_dp.engine.record_access import run_client
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.privacy.events import flatten


@checked
def check_client(
    planted: Planted, state: SimulationState, key: PRNGKey, *, num_draws: int = 256
) -> list[StepCheck]:
    """Compares everything that a client sends, with and without a canary among its records.

    In every stage in which a client only trains, it takes one local step on all of its records.
    Each part of what it sends (or its own model, where it sends nothing) must carry noise that
    hides the canary's share, or must not depend on the canary at all; its weight must not. Parts
    are compared one by one, since one may be a function of another, like a control variate of an
    update. Votes have no distance to compare with noise: `plant_votes` attacks them.

    Args:
      planted: canary records in an algorithm whose local optimiser is plain SGD; others change the
        ratio of differences to noise.
      state: a state of the planted algorithm.
      key: root of all draws.
      num_draws: steps from which the noise is measured, at least 2.

    Returns:
      The checks; empty where no event consists of equal releases with noise of a known kind.

    Raises:
      ValueError: if the canaries are not records.
    """
    checks.require(planted.unit == "record", "planted", "hold canary records", planted.unit)
    algorithm, record = planted.algorithm, planted.algorithm.claims.record
    assert record is not None
    owner = int(planted.owners[0])
    size = int(planted.data.sizes[owner])
    numbers = jax.tree.map(np.asarray, algorithm.hyper.of_client(owner))
    local = numbers.local._replace(num_steps=np.int32(1), batch_size=np.float32(size))
    hyper = numbers._replace(local=local)
    send, results = _sender(planted, hyper, owner), []
    for stage, event_of in enumerate(record.events):
        parts = flatten(event_of(size, hyper))
        # A stage in which the client chooses too releases more than steps: see `check_choice`. Two
        # trainings of a step each are two like releases, and what is sent carries the noise of one.
        kinds = {repr(event) for event, _ in parts}
        if len(kinds) == 1 and stated_multiplier(parts[0][0]):
            noise = measure_noise(send, (state, True, stage), key, num_draws=num_draws)
            sent = send(state, True, stage, key), send(state, False, stage, key)
            results += noise.compare_parts("what a client sends", *sent, parts[0][0])
    return results


def _sender(planted: Planted, hyper: Hyper, owner: int) -> Any:
    """Compiles `(state, is_included, stage, key) -> ` what a client sends, or its own model."""
    algorithm, examples = planted.algorithm, jax.device_put(examples_of(planted.data))

    @jax.jit
    def send(state, is_included, stage, key):
        coins = jnp.arange(len(planted.owners)) < jnp.where(is_included, 1, 0)
        held = examples.replace(arrays=examples.arrays | {MARK: planted.marks(coins)})
        own = None if state.clients is None else trees.take(state.clients, owner)
        client = held.client(owner, stage)
        message = received(algorithm.message_to(state.server, own, client))
        output = run_client(algorithm, message, own, client, hyper, key)
        sent = () if planted.sends_votes else output.update
        is_silent = not jax.tree.leaves(output.update)
        return sent, output.weight, output.state if is_silent else ()

    return send
