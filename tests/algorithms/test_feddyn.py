"""FedDyn: where it goes and what it leaves alone. The oracle is in the cases."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from small_problem import normed

from fedjax_dp.algorithms import Round, fedavg, feddyn
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import FederatedData, full_participation, participation
from fedjax_dp.engine import simulation
from fedjax_dp.models import Model

KEY = jax.random.key(0)
# Clients pull with different force towards different places.
CURVATURES = np.array([0.2, 1.0, 3.0], np.float32)
TARGETS = np.array([-4.0, 1.0, 2.0], np.float32)


def _pulling(make, **options):
    """Many local steps on `c / 2 (w - t)²`, a pair for each client; where the model goes."""
    data = FederatedData({"x": CURVATURES, "y": TARGETS}, np.arange(4))
    model = Model.from_functions(
        lambda key: {"w": jnp.zeros(())},
        lambda params, x: jnp.stack([x, jnp.broadcast_to(params["w"], x.shape)], axis=-1),
        loss=lambda out, batch: 0.5 * out[..., 0] * (out[..., 1] - batch["y"]) ** 2,
    )
    config = LocalConfig(learning_rate=0.2, batch_size=1, num_steps=150)
    trainer = local_trainer(model, config, sampler=full_participation())
    sim = simulation(make(model, trainer, **options), data, participation(full_participation(), 3))
    state, *_ = sim.run(sim.init(KEY), KEY, 60)
    return float(state.server.params["w"])


@telling
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_it_finds_the_minimum_of_the_whole_where_averaging_does_not(alpha):
    minimum = np.sum(CURVATURES * TARGETS) / np.sum(CURVATURES)
    found = _pulling(feddyn, num_clients=3, alpha=alpha)
    assert found == pytest.approx(minimum, abs=1e-3)
    assert abs(_pulling(fedavg) - minimum) > 1


def _step(algorithm, server, share):
    mean = jax.tree.map(jnp.ones_like, server.params)
    if not share:
        mean = jax.tree.map(jnp.zeros_like, mean)
    aggregate = {"params": mean, "share": jnp.float32(share)}
    return algorithm.server_step(server, aggregate, algorithm.hyper, Round(0, 0), KEY)[0]


def test_a_round_without_clients_moves_nothing():
    model = normed()
    algorithm = feddyn(model, local_trainer(model, LocalConfig()), num_clients=4, alpha=0.5)
    before = _step(algorithm, algorithm.init(KEY), 0.5)
    assert any(np.any(x != 0) for x in jax.tree.leaves(before.correction))
    chex.assert_trees_all_equal(_step(algorithm, before, 0.0), before)


def test_statistics_are_averaged_and_nothing_else():
    model = normed()
    algorithm = feddyn(model, local_trainer(model, LocalConfig()), num_clients=4, alpha=0.5)
    before = algorithm.init(KEY)
    after = _step(algorithm, before, 0.5)
    # Half of the population moved by one: h is -0.25, and the model goes 1 + 0.25 / 0.5.
    for part, moved in (("params", 1.5), ("batch_stats", 1.0)):
        for old, new in zip(
            jax.tree.leaves(before.params[part]), jax.tree.leaves(after.params[part]), strict=True
        ):
            np.testing.assert_allclose(new - old, moved, atol=1e-6)
    for leaf in jax.tree.leaves(after.correction["batch_stats"]):
        np.testing.assert_array_equal(leaf, 0.0)
