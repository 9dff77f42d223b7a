"""The memory of a chunk of clients with adapters, as the compiled round states it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later

from fedjax_dp.algorithms import dp_sgd, fedavg
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.core import trees
from fedjax_dp.engine.cohort import Cohort, Examples, typed
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.round import SimulationState, run_round
from fedjax_dp.models import lora, mlp

FEATURES, WIDTHS = 512, [1024, 1024]
# The numbers of one example that a forward and a backward pass have at once.
ACTIVATIONS = 2 * 4 * (FEATURES + 3 * sum(WIDTHS))
CLIENTS = 16


def models():
    """A model of 6.4 MB, the same with adapters, and the bytes of a base and of adapters."""
    base = mlp(jax.ShapeDtypeStruct((FEATURES,), jnp.float32), 10, hidden_sizes=WIDTHS)
    shapes = jax.eval_shape(base.init, jax.random.key(0))
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    adapted = lora(base, zeros, rank=2, targets="params/*/kernel")
    own = trees.num_bytes(jax.eval_shape(adapted.init, jax.random.key(0)))
    return base, adapted, trees.num_bytes(shapes), own


def temporary_bytes(model, chunk, is_private):
    """Memory that a compiled round needs beyond its arguments and results."""
    config = LocalConfig(0.1, 1, 1)
    if is_private:
        private = config._replace(clip_norm=1.0, noise_multiplier=1.0)
        algorithm = dp_sgd(model, dp_sgd_trainer(model, private))
    else:
        algorithm = fedavg(model, local_trainer(model, config))
    slots = jax.ShapeDtypeStruct((CLIENTS,), jnp.int32)
    examples = {
        "x": jax.ShapeDtypeStruct((2 * CLIENTS, FEATURES), jnp.float32),
        "y": jax.ShapeDtypeStruct((2 * CLIENTS,), jnp.int32),
    }
    server = jax.eval_shape(algorithm.init, jax.random.key(0))
    arguments = (
        SimulationState(server, (), None, jnp.int32(0)),
        typed(algorithm.hyper),
        Examples(examples, slots, slots, is_by_slot=True),
        Cohort(slots, jax.ShapeDtypeStruct((CLIENTS,), jnp.int8), jnp.int32(0)),
        jax.random.key(0),
    )

    def run(frozen, *arguments):
        with model.given(frozen):
            return functools.partial(run_round, algorithm, Layout(chunk))(*arguments)

    compiled = jax.jit(run).lower(model.constants, *arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("is_private", later([False, True], soon=[False, True]))
def test_sixteen_clients_hold_the_base_once_and_an_adapter_each(is_private):
    whole, adapted, of_base, of_adapter = models()
    assert of_base > 40 * of_adapter
    one, many = (temporary_bytes(adapted, chunk, is_private) for chunk in (1, CLIENTS))
    # A client's own adapter: the current one, its gradient, its noise, and what is sent.
    each = 4 * of_adapter + ACTIVATIONS
    assert 0 < many - one < (CLIENTS - 1) * each < of_base
    if not is_private:
        # The same figure of the whole model shows that it counts what clients hold.
        more = temporary_bytes(whole, CLIENTS, False) - temporary_bytes(whole, 1, False)
        assert more > (CLIENTS - 1) * of_base
