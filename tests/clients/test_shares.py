"""Several devices divide a client's batches: a vmapped axis stands for them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling
from small_problem import make_data, make_model, normed

from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.clients.base import Objective
from fedjax_dp.clients.batches import WHOLE, Share, gaussian_copies
from fedjax_dp.core import sums
from fedjax_dp.data import sampling
from fedjax_dp.engine.facts import examples_of

pytestmark = floats

KEY, AXIS, DEVICES = jax.random.key(5), "devices", 4
PUBLIC = LocalConfig(learning_rate=0.2, batch_size=5, num_epochs=2)
PRIVATE = PUBLIC._replace(clip_norm=0.5, noise_multiplier=0.8)


def on_devices(function):
    """Runs a function on each of some devices; results are `[devices, ...]`."""
    return jax.vmap(lambda _: function(), axis_name=AXIS)(jnp.arange(DEVICES))


@pytest.mark.parametrize(("count", "capacity"), [(7, 7), (0, 5), (9, 16)])
def test_shares_are_a_partition_and_differ_by_one_example(count, capacity):
    order = np.random.default_rng(0).permutation(100)[:capacity].astype(np.int32)
    draw = sampling.Draw(jnp.asarray(order), jnp.arange(capacity) < count, jnp.int32(0))

    def own():
        share = Share(AXIS)
        part, counted = share.of(draw), share.counts(jnp.int32(count))
        positions = share.positions(jnp.arange(share.capacity(capacity)))
        return part.indices, part.is_real, share.own(counted), positions

    indices, is_real, counted, positions = map(np.asarray, on_devices(own))
    assert sorted(indices[is_real]) == sorted(order[:count])
    np.testing.assert_array_equal(counted, is_real.sum(axis=1))
    assert counted.max() - counted.min() <= 1
    # Real ones come first, in the places of the batch that `positions` names.
    assert np.all(is_real == (np.arange(is_real.shape[1]) < counted[:, None]))
    np.testing.assert_array_equal(indices[is_real], order[positions[is_real]])


def test_sums_of_shares_are_those_of_all_and_the_same_bits_on_each_device():
    parts = np.random.default_rng(1).normal(size=(DEVICES, 1000)).astype(np.float32) * 1e4
    held = jnp.asarray(parts)

    def own():
        part = Share(AXIS).own(held)
        part = {"a": part[:400].reshape(20, 20), "b": (part[400], part[401:])}
        found = Share(AXIS).value(sums.add(sums.zeros_like(part), part))
        return jnp.concatenate([found["a"].reshape(-1), found["b"][0][None], found["b"][1]])

    exact = parts.astype(np.float64).sum(axis=0).astype(np.float32)
    np.testing.assert_array_equal(on_devices(own), np.tile(exact, (DEVICES, 1)))


def made_client():
    return jax.tree.map(jnp.asarray, examples_of(make_data((4, 11)))).client(1)


def trainer_of(name):
    model = make_model()
    if name == "shuffled":
        return local_trainer(model, PUBLIC)
    if name == "poisson":
        return dp_sgd_trainer(model, PRIVATE, micro_batch_size=2)
    if name == "per layer":
        return dp_sgd_trainer(model, PRIVATE, per_layer=True, sampler=sampling.fixed_size())
    whole = PRIVATE._replace(batch_size=WHOLE, num_steps=2)
    made = dp_sgd_trainer(model, whole._replace(batch_size=5), micro_batch_size=2)
    return made.reading_whole(gaussian_copies(2, 0.3))._replace(config=whole)


NAMES = ("shuffled", "poisson", "per layer", "whole batches of copies")


@pytest.mark.parametrize("name", later(NAMES, but=["shuffled"], mark=telling))
def test_training_by_shares_is_training(name):
    trainer, start, client = trainer_of(name), make_model().init(KEY), made_client()
    config = jax.tree.map(jnp.asarray, trainer.config)
    one = jax.jit(lambda: trainer.train(start, client, config, KEY))()
    part = client.replace(batch_axis=AXIS)
    each = jax.jit(partial(on_devices, lambda: trainer.train(start, part, config, KEY)))()
    for field, expected in zip(each.delta, one.delta, strict=True):
        got, delta = np.asarray(each.delta[field]), np.asarray(one.delta[expected])
        np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))
        np.testing.assert_allclose(got[0], delta, rtol=0, atol=1e-6)
        assert np.abs(delta).max() > 1e-3
    found, whole = each.metrics, one.metrics
    assert np.all(found.num_read == whole.num_read) and whole.num_read > 0
    np.testing.assert_allclose(found.loss_sum, np.full(DEVICES, whole.loss_sum), rtol=1e-5)
    np.testing.assert_array_equal(found.num_clipped, np.full(DEVICES, whole.num_clipped))
    # The devices compute shares, not all of the batch each: at most a micro-batch more for each.
    steps, micro = int(one.num_steps), 2
    copies = 2 if name.startswith("whole") else 1
    assert np.all(found.num_computed <= copies * whole.num_read + steps * copies * DEVICES * micro)
    assert np.all(found.num_computed >= copies * whole.num_read)


def test_training_that_devices_cannot_divide_is_refused():
    client = made_client().replace(batch_axis=AXIS)
    mixing = local_trainer(normed(), PUBLIC)
    with pytest.raises(ValueError, match="model must keep examples apart and have no buffers"):
        on_devices(lambda: mixing.train(normed().init(KEY), client, PUBLIC, KEY))
    trainer, start = local_trainer(make_model(), PUBLIC), make_model().init(KEY)

    def never(state):
        return jnp.bool_(False)

    with pytest.raises(ValueError, match="until must be None where devices divide"):
        on_devices(
            lambda: trainer.train(
                start,
                client,
                PUBLIC,
                KEY,
                objective=Objective(until=lambda state: jnp.bool_(False)),
            )
        )
