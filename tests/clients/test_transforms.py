"""What a client does to its update before it leaves."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import NoOpDpEvent
from marks import later, telling

from fedjax_dp import clients
from fedjax_dp.clients import (
    ClientData,
    LocalConfig,
    PublicClient,
    UpdateContext,
    UpdateTransform,
    add_client_noise,
    cast,
    clip_update,
    dp_sgd_trainer,
    keep_largest,
    local_trainer,
    scale_update,
    sparsify,
    transforms,
    update_transform,
)
from fedjax_dp.clients.base import Objective
from fedjax_dp.models.base import Model
from fedjax_dp.privacy import Ledger

CLIENT = PublicClient(jnp.int32(3), jnp.int32(0), limit=3)
CONTEXT = UpdateContext(None, None, CLIENT, None, jax.random.key(0))
DELTA = {"a": jnp.array([[3.0, -1.0], [0.5, -4.0]]), "b": jnp.array([2.0])}


def test_clip_update_bounds_the_norm():
    clipped = clip_update(1.0)(DELTA, CONTEXT)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(clipped)))
    np.testing.assert_allclose(norm, 1.0, rtol=1e-6)
    bad = {"a": jnp.array([jnp.nan]), "b": jnp.array([1.0])}
    assert all(np.all(x == 0) for x in jax.tree.leaves(clip_update(1.0)(bad, CONTEXT)))


@telling
def test_client_noise_has_its_scale():
    zeros = {"a": jnp.zeros((100, 100)), "b": jnp.zeros(7)}
    noise = np.asarray(add_client_noise(0.3)(zeros, CONTEXT)["a"]) / 0.3
    assert abs(noise.std() - 1) < 4 / np.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)


@pytest.mark.parametrize("share, kept", [(1.0, 4), (0.5, 2), (0.25, 1), (0.01, 1)])
def test_keep_largest_retains_that_many_in_each_layer(share, kept):
    sparse = np.asarray(keep_largest(share)(DELTA, CONTEXT)["a"]).ravel()
    order = np.argsort(-np.abs(np.asarray(DELTA["a"]).ravel()))
    expected = np.zeros(4)
    expected[order[:kept]] = np.asarray(DELTA["a"]).ravel()[order[:kept]]
    np.testing.assert_array_equal(sparse, expected)


def test_keep_largest_fills_up_with_the_first_of_those_that_tie_for_the_last_places():
    delta = {"a": jnp.array([2.0, -3.0, 2.0, 1.0, -2.0, 2.0])}
    sparse = keep_largest(0.5)(delta, CONTEXT)["a"]
    np.testing.assert_array_equal(sparse, [2.0, -3.0, 2.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("count", [1, 7, 30, 60, 64])
def test_the_largest_are_those_of_a_sort(dtype, count):
    """Negative scores, zeros of both signs, infinities, tiny numbers, numbers that are none."""
    rng = np.random.default_rng(count)
    values = rng.permutation(np.r_[rng.integers(-3, 4, 50), [0.0, -0.0, np.inf, -np.inf, np.nan]])
    values = jnp.asarray(np.r_[values, rng.normal(size=7), 1e-7, -1e-7], dtype)
    exact = np.asarray(values, np.float64)
    exact = np.where(np.isnan(exact), -np.inf, exact)
    expected = np.zeros(64, bool)
    expected[np.argsort(-exact, kind="stable")[:count]] = True
    found = transforms.mask_of_largest(values, count / 64)
    np.testing.assert_array_equal(found, expected)


def test_cast_rounds_and_preserves_the_type():
    out = cast(jnp.bfloat16)({"a": jnp.array([1.0 + 2**-12, 2.0])}, CONTEXT)["a"]
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, [1.0, 2.0])


def test_scale_update():
    np.testing.assert_allclose(scale_update(-2.0)(DELTA, CONTEXT)["b"], [-4.0])


# What reads records says so, and is not believed otherwise.

MODEL = Model.from_functions(
    lambda key: {"a": 0.1 * jax.random.normal(key, (2, 2)), "b": jnp.ones(1)},
    lambda params, x: x @ params["a"][0] + x**2 @ params["a"][1] + params["b"],
    loss="sigmoid_binary_cross_entropy",
)
BUILT_IN = {
    "clip_update": lambda: clip_update(1.0),
    "add_client_noise": lambda: add_client_noise(1.0),
    "keep_largest": lambda: keep_largest(0.5),
    "cast": lambda: cast(jnp.bfloat16),
    "scale_update": lambda: scale_update(0.3),
    "sparsify cost": lambda: sparsify(MODEL, 0.5),
    "sparsify cost of last step": lambda: sparsify(MODEL, 0.5, score="cost_of_last_step"),
    "sparsify magnitude": lambda: sparsify(MODEL, 0.5, score="magnitude"),
    "sparsify nothing": lambda: sparsify(MODEL, 0.0),
}
READERS = {"sparsify cost"}


def client_of(seed):
    rng = np.random.default_rng(seed)
    examples = {
        "x": jnp.asarray(rng.normal(size=(6, 2)), jnp.float32),
        "y": jnp.asarray(rng.integers(0, 2, 6), jnp.float32),
    }
    return ClientData(examples, jnp.int32(0), jnp.int32(6), jnp.int32(0), limit=6)


def test_every_transform_of_the_package_is_listed():
    makers = {
        name
        for name, value in vars(clients).items()
        if inspect.isfunction(value)
        and inspect.signature(value).return_annotation is UpdateTransform
    }
    assert makers == {name.split()[0] for name in BUILT_IN}


@pytest.mark.parametrize(
    "name", later(BUILT_IN, but=["clip_update", "sparsify cost"], mark=telling)
)
def test_a_declaration_is_what_other_records_change(name):
    """All else the same, handed the records whatever was declared: equal bits or not."""
    transform, delta = BUILT_IN[name](), {"a": DELTA["a"], "b": DELTA["b"]}
    gradient = jax.tree.map(lambda d: jnp.cos(d), delta)

    def after(seed):
        context = UpdateContext(delta, gradient, client_of(seed), LocalConfig(), CONTEXT.key)
        return jax.tree.leaves(transform.apply(delta, context))

    first = after(0)
    differs = any(
        not np.array_equal(x, y)
        for seed in range(1, 20)
        for x, y in zip(first, after(seed), strict=True)
    )
    assert differs == transform.reads_records == (name in READERS)


@telling
def test_what_promises_to_read_none_is_handed_none():
    def lying(delta, context):
        context.client.gather(jnp.arange(2))
        return delta

    def looking(delta, context):
        return scale_update(context.client.examples["x"][0, 0])(delta, context)

    def summing(delta, context):
        return jax.tree.map(jnp.add, delta, transforms.mean_gradient(MODEL, *context[0::2][:2]))

    shown = CONTEXT._replace(params=DELTA, client=client_of(0))
    for function in (lying, looking, summing):
        update_transform(function, reads_records=True)(DELTA, shown)
        liar = update_transform(function, reads_records=False)
        with pytest.raises(ValueError, match="client must be used for its public data"):
            liar(DELTA, shown)
        for trainer in (private_trainer(MODEL), local_trainer(MODEL, PLAIN)):
            with pytest.raises(ValueError, match="client must be used for its public data"):
                train(trainer, liar)
    with pytest.raises(ValueError, match="client must be used for its public data"):
        shown.client.public().read_by("a choice", lambda size, config: NoOpDpEvent())


def test_what_is_public_of_a_client_may_be_used():
    @update_transform(reads_records=False)
    def by_size(delta, context):
        client = context.client
        return scale_update(client.size + client.index + client.limit + client.round)(
            delta, context
        )

    assert isinstance(by_size, UpdateTransform) and by_size.name == "by_size"
    client = client_of(0).replace(index=jnp.int32(2), round=jnp.int32(4))
    scaled = by_size(DELTA, CONTEXT._replace(client=client))
    np.testing.assert_array_equal(scaled["b"], 18 * DELTA["b"])


PLAIN = LocalConfig(0.1, 6, num_steps=1)
PRIVATE = PLAIN._replace(clip_norm=1.0, noise_multiplier=1.0)


def private_trainer(model, **options):
    return dp_sgd_trainer(model, PRIVATE, **options)


def train(trainer, transform=None, seed=0):
    start = MODEL.init(jax.random.key(1))
    options = {} if transform is None else {"update_transform": transform}
    return trainer.train(start, client_of(seed), trainer.config, jax.random.key(seed), **options)


def bare(delta, context):
    return delta


REFUSED = [
    (sparsify(MODEL, 0.9), "sparsify with score 'cost'"),
    (update_transform(bare, reads_records=True), "'bare'"),
    (bare, "update_transform.function, reads_records.*'bare'"),
    (functools.partial(bare), "update_transform.function, reads_records"),
]


@pytest.mark.parametrize("transform, named", REFUSED)
def test_what_reads_records_behind_their_noise_is_refused_wherever_it_is_given(transform, named):
    quiet = [clip_update(1.0), cast(jnp.bfloat16)]
    for place in range(3):
        chain = [*quiet[:place], transform, *quiet[place:]]
        with pytest.raises(ValueError, match=f"update_transforms must .*records.*{named}"):
            private_trainer(MODEL, update_transforms=chain)
        local_trainer(MODEL, PLAIN, update_transforms=chain)
    with pytest.raises(ValueError, match=f"update_transform must .*records.*{named}"):
        train(private_trainer(MODEL, update_transforms=quiet), transform)
    train(local_trainer(MODEL, PLAIN, update_transforms=quiet), transform)


@telling
def test_transforms_that_read_no_records_run_after_the_noise():
    quiet = [make() for name, make in BUILT_IN.items() if name not in READERS]
    trainer = private_trainer(MODEL, update_transforms=quiet)
    assert trainer.is_private
    delta = train(trainer, update_transform(bare, reads_records=False)).delta
    chex.assert_tree_all_finite(delta)


@telling
def test_the_support_of_an_update_would_tell_whether_a_record_is_there():
    """Costs by raw records are refused: at ε = 0.2 one feature of one record gives it away."""
    size, features, trials = 200, 20, 10
    model = Model.from_functions(
        lambda key: jnp.zeros(features), lambda params, x: x @ params, loss="squared_error"
    )
    numbers = LocalConfig(0.1, 20.0, num_steps=5, clip_norm=1.0, noise_multiplier=4.0)
    trainer = dp_sgd_trainer(model, numbers)
    ledger = Ledger("record")
    ledger.charge(trainer.claim.events[0](size, numbers))
    assert ledger.epsilon(1e-5)[0] < 0.5
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, features)).astype(np.float32)
    x[:, -1] = 0
    held = x.copy()
    held[0, -1] = 1e4
    y = jnp.asarray(rng.integers(0, 2, size), jnp.float32)

    @jax.jit
    def ends(x, key):
        client = ClientData({"x": x, "y": y}, jnp.int32(0), jnp.int32(size), jnp.int32(0), size)
        result = trainer.train(jnp.zeros(features), client, numbers, key)
        context = UpdateContext(result.params, result.delta, client, numbers, key)
        # As it was before transforms had to declare what they read: applied all the same.
        return tuple(
            sparsify(model, 0.9, score=score).apply(result.delta, context)[-1] != 0
            for score in ("cost", "magnitude")
        )

    right = np.zeros(2, int)
    for trial in range(trials):
        is_there = trial % 2 == 0
        support = ends(held if is_there else x, jax.random.key(trial))
        right += [bool(kept) == is_there for kept in support]
    assert right[0] == trials, "by the cost every guess is right"
    assert right[1] < trials, "by what was noised it is not"
    with pytest.raises(ValueError, match="update_transforms must read no records"):
        dp_sgd_trainer(model, numbers, update_transforms=[sparsify(model, 0.9)])


@telling
def test_optimisers_and_penalties_are_handed_no_records():
    """By their signature: gradient, state, parameters; nothing besides."""
    seen = []

    def update(gradient, state, params=None, **more):
        seen.append((jax.tree.structure(gradient), jax.tree.structure(params), more))
        return gradient, state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

    def value(loss, *arguments):
        seen.append((*map(jax.tree.structure, arguments), {}))
        return loss

    structure = jax.tree.structure(MODEL.init(jax.random.key(0)))
    trainer = private_trainer(MODEL, optimizer=optax.chain(spy, optax.sgd(0.1)))
    trainer.train(
        MODEL.init(jax.random.key(0)),
        client_of(0),
        PRIVATE,
        jax.random.key(0),
        gradient_transform=spy,
        objective=Objective(value),
    )
    assert (structure, structure, {}) in seen and (structure, {}) in seen
    assert all(set(facts[:-1]) == {structure} and facts[-1] == {} for facts in seen)
