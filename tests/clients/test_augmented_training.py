"""Training on augmented records against NumPy: copies are averaged, then clipped as one record."""

import dataclasses
import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling
from oracles import local, logistic

from fedjax_dp.audit.steps import check_gradient_rule
from fedjax_dp.clients import LocalConfig, clipped, dp_sgd_trainer, local_trainer, plain
from fedjax_dp.clients.batches import WHOLE, augmented, gaussian_copies
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import FederatedData, augmentation, sampling
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.models.base import Model
from fedjax_dp.models.copies import Copies
from fedjax_dp.privacy import mechanisms

pytestmark = floats

KEY, SIDE, COPIES, BOUND = jax.random.key(4), 4, 3, 0.6
CONFIG = LocalConfig(batch_size=5.0, clip_norm=BOUND, noise_multiplier=0.0)
SHIFTED = augmentation.compose(augmentation.crop(2), augmentation.flip(), num_copies=COPIES)


def images(n, seed=0, side=SIDE):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, side, side, 1)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 2, n).astype(np.float32)}


def flat_model():
    def init(key):
        return {"b": jnp.float32(0.1), "w": 0.4 * jax.random.normal(key, (SIDE * SIDE,))}

    return Model.from_functions(
        init,
        lambda params, x: x.reshape(len(x), -1) @ params["w"] + params["b"],
        loss="sigmoid_binary_cross_entropy",
        name="flat",
    )


def theta_of(tree):
    return np.concatenate([[np.float64(tree["b"])], np.asarray(tree["w"], np.float64)])


@functools.cache
def one_copy(made):
    return jax.jit(
        lambda x, key, row, copy: made.transform(
            {"x": x}, jax.random.fold_in(jax.random.fold_in(key, row), copy)
        )["x"]
    )


def copies_of(batch, key, made=SHIFTED):
    """Copies of each record, by the keys of rows and copies, one at a time."""
    return np.array(
        [
            [one_copy(made)(x, key, row, copy) for copy in range(made.num_copies)]
            for row, x in enumerate(batch["x"])
        ],
        np.float64,
    )


def mean_gradients(theta, copies, y):
    """The mean gradient over the copies of each record, `[records, parameters]`."""
    of_copies = [
        logistic.gradients(theta, one.reshape(len(one), -1), np.full(len(one), label))
        for one, label in zip(copies, y.astype(float), strict=True)
    ]
    return np.array([each.mean(axis=0) for each in of_copies]), np.array(of_copies)


RULES = {
    "plain": plain,
    "norms by leaf": clipped,
    "per layer": partial(clipped, per_layer=True),
    "whole gradients": partial(clipped, make_mechanism=mechanisms.laplace),
}


def clip_of(name, vectors):
    if name == "plain":
        return vectors
    if name == "per layer":
        share = BOUND / np.sqrt(2)
        parts = vectors[:, :1], vectors[:, 1:]
        return np.concatenate([local.clip(part, share) for part in parts], axis=1)
    if name == "whole gradients":
        norms = np.abs(vectors).sum(axis=1, keepdims=True)
        return vectors * np.minimum(1, BOUND / norms)
    return local.clip(vectors, BOUND)


@pytest.mark.parametrize("name", later(RULES, but=["norms by leaf"], mark=telling))
def test_the_mean_over_copies_is_clipped_once(name):
    batch, real = images(6), np.array([1, 1, 0, 1, 1, 1], bool)
    batch["x"][2] = np.nan
    model = flat_model()
    params, rule = model.init(KEY), RULES[name](model)
    own = jax.random.key(8)

    @jax.jit
    def summed(batch):
        held = augmented(SHIFTED, batch, jnp.arange(6), own, is_private=True)
        return rule.micro_batch(params, held, jnp.asarray(real), KEY, CONFIG)

    out = summed(batch)
    copies = copies_of(batch, own)[real]
    theta, y = theta_of(params), batch["y"][real]
    means, each = mean_gradients(theta, copies, y)
    expected = clip_of(name, means).sum(axis=0)
    np.testing.assert_allclose(theta_of(out.gradient), expected, rtol=1e-5, atol=2e-6)
    losses = [
        logistic.losses(theta, one.reshape(COPIES, -1), label).mean()
        for one, label in zip(copies, y.astype(float), strict=True)
    ]
    np.testing.assert_allclose(out.loss, np.sum(losses), rtol=1e-5)
    if name == "plain":
        return
    # The opposite order, which is another estimator, would be seen.
    apart = np.mean([clip_of(name, each[:, i]) for i in range(COPIES)], axis=0).sum(axis=0)
    assert np.abs(theta_of(out.gradient) - apart).max() > 1e-3
    if name == "norms by leaf":
        assert 0 < out.clipped == np.sum(np.linalg.norm(means, axis=1) > BOUND)


class _Layers(nn.Module):
    convolves: bool

    @nn.compact
    def __call__(self, x):
        if self.convolves:
            x = nn.max_pool(nn.relu(nn.Conv(3, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(5)(x.reshape(x.shape[0], -1)))
        return nn.Dense(2)(x)


def bounded(tree, per_layer):
    """Clips a tree as a whole, which must be longer than the bound, or layer by layer."""
    leaves = jax.tree.leaves(tree)
    if per_layer:
        share = BOUND / np.sqrt(len(leaves))
        return jax.tree.map(lambda g: g * min(1, share / np.linalg.norm(g)), tree)
    norm = np.sqrt(sum(np.sum(g**2) for g in leaves))
    assert norm > BOUND
    return jax.tree.map(lambda g: g * BOUND / norm, tree)


@pytest.mark.parametrize(
    ("convolves", "lower", "per_layer"),
    later(
        [(False, True, False), (True, True, False), (True, False, False), (True, True, True)],
        mark=telling,
    ),
)
def test_every_way_to_a_sum_is_that_of_a_loop_over_copies(convolves, lower, per_layer):
    example = jax.ShapeDtypeStruct((8, 8, 1), jnp.float32)
    module = _Layers(convolves)
    model = Model.from_flax(module, example, loss="softmax_cross_entropy", lower=lower)
    params, batch = model.init(jax.random.key(0)), images(4, side=8)
    batch["y"] = batch["y"].astype(np.int32)
    own = jax.random.key(8)
    out = jax.jit(
        lambda b: clipped(model, per_layer=per_layer).micro_batch(
            params,
            augmented(SHIFTED, b, jnp.arange(4), own, is_private=False),
            jnp.ones(4, bool),
            None,
            CONFIG,
        )
    )(batch)

    def loss(p, x, y):
        return model.losses(p, {"x": x[None], "y": y[None]})[0][0]

    gradient = jax.jit(jax.grad(loss))
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
    for copies, y in zip(copies_of(batch, own), batch["y"], strict=True):
        each = [gradient(params, jnp.asarray(x, jnp.float32), jnp.asarray(y)) for x in copies]
        mean = jax.tree.map(lambda *g: np.mean(np.array(g, np.float64), axis=0), *each)
        total = jax.tree.map(np.add, total, bounded(mean, per_layer))
    # Norms of sums of outer products may be bounded from above by a few 1e-4.
    jax.tree.map(
        lambda got, right: np.testing.assert_allclose(got, right, rtol=0, atol=2e-3),
        out.gradient,
        total,
    )
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(total)) > 0.3


def client_of(size=5, before=3):
    batch = images(before + size)
    data = FederatedData(batch, np.array([0, before, before + size]))
    client = jax.tree.map(jnp.asarray, examples_of(data)).client(1)
    return client, {name: array[before:] for name, array in batch.items()}


def descended(batch, key, num_steps, learning_rate, bound):
    """Full-batch steps on the mean gradients over copies, with the keys of each step."""
    theta = theta_of(flat_model().init(KEY))
    for step in range(num_steps):
        own = fold(key, Purpose.AUGMENTATION, step)
        means, _ = mean_gradients(theta, copies_of(batch, own), batch["y"])
        theta = theta - learning_rate * local.clip(means, bound).mean(axis=0)
    return theta


NUMBERS = LocalConfig(learning_rate=0.3, batch_size=5, num_epochs=3)
PRIVATE = NUMBERS._replace(clip_norm=BOUND, noise_multiplier=0.0)


def full_batches(is_private, micro_batch_size=None):
    """Training whose batches hold all five records, in some order."""
    common = {"augmentation": SHIFTED, "micro_batch_size": micro_batch_size}
    if is_private:
        sampler = sampling.fixed_size()
        return dp_sgd_trainer(flat_model(), PRIVATE, sampler=sampler, **common)
    return local_trainer(flat_model(), NUMBERS, **common)


@pytest.mark.parametrize("micro_batch_size", later([None, 1, 2], but=[2]))
@pytest.mark.parametrize("is_private", later([False, True], but=[True], mark=telling))
def test_draws_follow_round_client_step_and_record(is_private, micro_batch_size):
    client, batch = client_of()
    key = jax.random.key(21)
    trainer = full_batches(is_private, micro_batch_size)
    start = flat_model().init(KEY)
    config = jax.tree.map(jnp.asarray, trainer.config)
    found = jax.jit(lambda: trainer.train(start, client, config, key))()
    bound = BOUND if is_private else np.inf
    expected = descended(batch, key, 3, 0.3, bound)
    np.testing.assert_allclose(theta_of(found.params), expected, rtol=0, atol=3e-6)
    assert found.num_steps == 3 and found.metrics.num_read == 15
    # Keys of another step, or of another record, would be seen.
    for other in (descended(batch, jax.random.key(22), 3, 0.3, bound), theta_of(start)):
        assert np.abs(theta_of(found.params) - other).max() > 1e-3


@telling
def test_devices_that_divide_a_batch_draw_the_same_copies():
    client, batch = client_of()
    trainer, start = full_batches(True), flat_model().init(KEY)
    key = jax.random.key(21)
    part = client.replace(batch_axis="devices")

    @jax.jit
    def each():
        train = partial(trainer.train, start, part, trainer.config, key)
        return jax.vmap(lambda _: train().params, axis_name="devices")(jnp.arange(2))

    expected = descended(batch, key, 3, 0.3, BOUND)
    for device in range(2):
        found = jax.tree.map(lambda leaf, device=device: leaf[device], each())
        np.testing.assert_allclose(theta_of(found), expected, rtol=0, atol=3e-6)


@telling
def test_perturbed_copies_of_whole_batches_are_augmented_each_by_its_own_draw():
    client, batch = client_of()
    key, num_copies = jax.random.key(21), 2
    trainer = dp_sgd_trainer(
        flat_model(),
        PRIVATE._replace(num_steps=1),
        micro_batch_size=2,
        augmentation=augmentation.compose(augmentation.crop(2)),
    ).reading_whole(gaussian_copies(num_copies, 0.3))
    config = trainer.config._replace(batch_size=WHOLE)
    start = flat_model().init(KEY)
    found = jax.jit(lambda: trainer.train(start, client, config, key))()
    theta, made = theta_of(start), augmentation.compose(augmentation.crop(2))
    total = np.zeros_like(theta)
    for copy in range(num_copies):
        x = np.array(batch["x"])
        for row in range(5) if copy else ():
            noise_key = fold(key, Purpose.COPIES, row, copy, 0)
            x[row] += 0.3 * np.asarray(jax.random.normal(noise_key, x[row].shape))
        held = {**batch, "x": x}
        means, _ = mean_gradients(
            theta, copies_of(held, fold(key, Purpose.AUGMENTATION, 0, copy), made), batch["y"]
        )
        total += local.clip(means, BOUND).sum(axis=0) / num_copies
    expected = theta - 0.3 * total / 5
    np.testing.assert_allclose(theta_of(found.params), expected, rtol=0, atol=3e-6)


def test_losses_of_copies_are_means_and_padding_is_zero():
    model, batch = flat_model(), images(6)
    params = model.init(KEY)
    held = Copies({name: array.reshape(2, 3, *array.shape[1:]) for name, array in batch.items()})
    batch["x"][3:] = np.inf
    mask = jnp.array([True, False])
    losses, same = model.losses(params, held, mask=mask)
    assert same is params
    exact = logistic.losses(theta_of(params), held.batch["x"][0].reshape(3, -1), batch["y"][:3])
    np.testing.assert_allclose(losses, [exact.mean(), 0], rtol=1e-6)


def check(rule, batch):
    row = LocalConfig(batch_size=3.0, clip_norm=0.7, noise_multiplier=1.3)
    params = flat_model().init(KEY)
    return {c.name: c for c in check_gradient_rule(rule, params, batch, row, KEY, num_draws=64)}


@telling
def test_a_record_contributes_no_more_than_without_augmentation():
    rotated = augmentation.compose(
        augmentation.rotation(40.0), augmentation.cutout(2), num_copies=COPIES
    )
    for made in (SHIFTED, rotated):
        found = check(clipped(flat_model()).augmented(made), images(4))
        assert not [name for name, each in found.items() if each.is_violated]
        alone = found["gradient of a record alone"]
        assert alone.measured > 0.99 * alone.allowed
        assert any("records" in name or "float" in name for name in found)


@jax.custom_batching.custom_vmap
def summed(x):
    return x


@summed.def_vmap
def of_all_records(size, is_batched, x):
    return jnp.broadcast_to(jnp.sum(x, axis=0), x.shape), True


def test_a_transform_that_gets_records_together_is_refused_under_privacy_of_records():
    mixing = augmentation.compose(lambda example, key: {**example, "x": summed(example["x"])})
    batch = jax.tree.map(jnp.asarray, images(4))

    def sum_of(rule, batch):
        params, is_real = flat_model().init(KEY), jnp.ones(4, bool)
        return rule.augmented(mixing).micro_batch(params, batch, is_real, KEY, CONFIG).gradient

    other = {**batch, "x": batch["x"].at[0].multiply(-9.0)}
    moved = [np.asarray(sum_of(plain(flat_model()), b)["w"]) for b in (batch, other)]
    assert not np.allclose(*moved)  # Allowed without a bound on one record.
    with pytest.raises(ValueError, match="a transform of records: custom_vmap_call must not be"):
        sum_of(clipped(flat_model()), batch)


@telling
def test_copies_that_are_clipped_as_records_of_their_own_are_seen():
    rule = clipped(flat_model())

    def micro_batch(params, batch, is_real, key, config, *, value=None):
        held = augmented(SHIFTED, batch, jnp.arange(is_real.shape[0]), key, is_private=True)
        each = jnp.repeat(is_real, COPIES)
        return rule.micro_batch(params, held.flat(), each, key, config, value=value)

    found = check(rule._replace(micro_batch=micro_batch), images(4))
    alone = found["gradient of a record alone"]
    assert alone.is_violated and alone.measured > 2 * alone.allowed
    assert found["sum with and without a record"].is_violated


def test_training_without_augmentation_is_the_same_program():
    client, _ = client_of()
    trainer = local_trainer(flat_model(), NUMBERS)
    start = flat_model().init(KEY)

    def text(train):
        return str(jax.make_jaxpr(lambda s, k: train(s, client, NUMBERS, k))(start, KEY))

    found = text(trainer.train)
    augmented_loop = dataclasses.replace(trainer.train, augmentation=SHIFTED)
    assert found == text(dataclasses.replace(augmented_loop, augmentation=None))
    assert text(augmented_loop) != found
    # Four purposes are folded into a client's key, and one more where records are augmented.
    assert text(augmented_loop).count("fold_in") > found.count("fold_in")


def test_noise_on_minimisers_is_refused():
    loop = local_trainer(flat_model(), NUMBERS, augmentation=SHIFTED).train
    with pytest.raises(ValueError, match="augmentation must be None for noise on minimisers"):
        loop.compensated(4)
