"""Means that weigh clients by name: weights, what is remembered, projections."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aggregating import closed, sent_by
from marks import telling
from oracles import noise_aware

from fedjax_dp.algorithms import public_clients
from fedjax_dp.privacy.accounting import budgets
from fedjax_dp.server import (
    inverse_noise_weights,
    noise_aware_mean,
    projected_mean,
    weighted_by_client,
)
from fedjax_dp.server.noise_aware import NoiseState

NUM_CLIENTS, PARAMETERS = 6, 300


def updates_of(clients, seed=0, spread=None):
    """A common direction with noise that grows with the client's index."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=PARAMETERS)
    spread = np.linspace(0.5, 3, NUM_CLIENTS) if spread is None else spread
    noise = rng.normal(size=(NUM_CLIENTS, PARAMETERS)) * spread[:, None]
    rows = (common + noise)[list(clients)].astype(np.float32)
    return {"a": jnp.asarray(rows[:, :100].reshape(-1, 4, 25)), "b": jnp.asarray(rows[:, 100:])}


def flat(tree):
    leaves = [np.asarray(x, float) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(-1) for x in leaves])


def rows_of(tree, count):
    leaves = [np.asarray(x, float).reshape(count, -1) for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=1)


def combine(aggregator, state, clients, deltas, *, weights=None, slots=NUM_CLIENTS + 2):
    """One round of a stacked aggregator, with empty slots that hold garbage."""
    count = len(clients)
    weights = np.ones(count, np.float32) if weights is None else np.float32(weights)
    ids = np.pad(np.int32(clients), (0, slots - count))
    deltas = jax.tree.map(
        lambda x: jnp.pad(x, ((0, slots - count), *[(0, 0)] * (x.ndim - 1)), constant_values=0.0),
        deltas,
    )
    sent = (deltas, jnp.pad(jnp.asarray(weights), (0, slots - count)))
    return aggregator.combine(state, {}, sent, closed(ids, np.arange(slots) < count))


@functools.cache
def aware(**options):
    """Compiled once for all tests."""
    aggregator = noise_aware_mean(NUM_CLIENTS, **options)
    return aggregator._replace(combine=jax.jit(aggregator.combine))


def test_streamed_weights_are_shares_by_name():
    aggregator = weighted_by_client(4)
    parts = [
        aggregator.contribute((), {}, {"w": jnp.full(2, v)}, sent_by(c, w))
        for c, v, w in ((3, 1.0, 1.0), (0, 5.0, 3.0), (2, 7.0, 0.0))
    ]
    total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)
    _, aggregate, info = aggregator.combine((), {}, total, closed())
    np.testing.assert_allclose(aggregate["w"], 4.0)
    np.testing.assert_allclose(info["weights"], [0.75, 0, 0, 0.25])
    empty = jax.tree.map(jnp.zeros_like, total)
    _, aggregate, info = aggregator.combine((), {}, empty, closed())
    assert not np.any(aggregate["w"]) and not np.any(info["weights"])


def test_weights_are_inverse_to_levels():
    counts = jnp.array([True, True, False, True])
    weights = inverse_noise_weights(jnp.array([1.0, 4.0, 0.5, 2.0]), counts)
    np.testing.assert_allclose(weights, np.array([4, 1, 0, 2]) / 7, rtol=1e-6)
    np.testing.assert_allclose(inverse_noise_weights(jnp.zeros(4), counts).sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(inverse_noise_weights(jnp.ones(4), counts), [1 / 3, 1 / 3, 0, 1 / 3])
    assert not np.any(inverse_noise_weights(jnp.ones(4), jnp.zeros(4, bool)))
    # One without noise takes nearly all; the scale is of no account, however small or large.
    for scale in (1e-30, 1.0, 1e30):
        levels = scale * jnp.array([0.0, 1.0, 1.0, 1.0])
        np.testing.assert_allclose(inverse_noise_weights(levels, counts), [1, 0, 0, 0], atol=1e-8)


@telling
def test_the_mean_uses_the_weights_that_it_reports():
    aggregator, deltas = aware(), updates_of(range(NUM_CLIENTS))
    state, aggregate, info = combine(aggregator, aggregator.init(None), range(NUM_CLIENTS), deltas)
    weights = np.asarray(info["weights"], float)
    assert weights.sum() == pytest.approx(1, abs=1e-6) and np.all(weights > 0)
    assert np.all(np.diff(weights) < 0), "the noisier, the lighter"
    np.testing.assert_allclose(weights, noise_aware.inverse(np.asarray(state.levels)), rtol=1e-5)
    np.testing.assert_allclose(flat(aggregate), weights @ rows_of(deltas, NUM_CLIENTS), atol=1e-5)
    _, sparse = noise_aware.pursuit(rows_of(deltas, NUM_CLIENTS).T, mode="inexact", tolerance=1e-6)
    np.testing.assert_allclose(info["noise_levels"], np.sum(sparse**2, axis=0), rtol=1e-3)
    assert info["rpca_iterations"] > 1 and 0 < info["rpca_residual"] <= 1e-6
    assert 1 <= info["rpca_rank"] <= NUM_CLIENTS


@telling
def test_equal_updates_get_equal_weights():
    aggregator = aware()
    deltas = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), updates_of(range(6)))
    _, aggregate, info = combine(aggregator, aggregator.init(None), range(6), deltas)
    np.testing.assert_allclose(info["weights"], 1 / 6, rtol=1e-4)
    np.testing.assert_allclose(flat(aggregate), rows_of(deltas, 6)[0], atol=1e-5)


def levels_over_rounds(reestimate, cohorts):
    aggregator = aware(reestimate=reestimate)
    state, seen = aggregator.init(None), []
    for r, clients in enumerate(cohorts):
        # The noise of the second round and of those after it lies elsewhere.
        spread = np.linspace(0.5, 3, 6) if r == 0 else np.linspace(3, 0.5, 6)
        deltas = updates_of(clients, seed=r, spread=spread)
        state, _, info = combine(aggregator, state, clients, deltas)
        seen.append((np.asarray(state.levels), np.asarray(info["weights"]), info))
    return state, seen


def test_first_estimates_are_kept():
    state, seen = levels_over_rounds("first", [range(6), range(6), range(6)])
    np.testing.assert_array_equal(seen[0][0], seen[2][0])
    np.testing.assert_array_equal(seen[0][1], seen[1][1])
    assert seen[0][2]["rpca_iterations"] > 0
    assert seen[1][2]["rpca_iterations"] == 0 and seen[1][2]["rpca_residual"] == 0
    assert state.rounds == 3 and np.all(state.is_known)


def test_a_late_client_is_estimated_when_it_joins():
    state, seen = levels_over_rounds("first", [range(3), (0, 1, 4), range(3)])
    assert np.all(seen[0][0][3:] == 0) and np.all(seen[0][1][3:] == 0)
    np.testing.assert_array_equal(seen[1][0][:3], seen[0][0][:3])
    assert seen[1][0][4] > 0 and seen[1][0][5] == 0
    np.testing.assert_array_equal(np.asarray(state.is_known), [1, 1, 1, 0, 1, 0])
    np.testing.assert_array_equal(seen[2][1], seen[0][1])


def test_estimates_of_every_round_follow_the_noise():
    _, seen = levels_over_rounds("every", [range(6), range(6)])
    assert np.all(np.diff(seen[0][1]) < 0) and np.all(np.diff(seen[1][1]) > 0)


def test_estimates_of_every_second_round():
    _, seen = levels_over_rounds(2, [range(6)] * 4)
    np.testing.assert_array_equal(seen[1][0], seen[0][0])
    assert np.all(seen[2][0] != seen[0][0])
    np.testing.assert_array_equal(seen[3][0], seen[2][0])
    assert [bool(s[2]["rpca_iterations"] > 0) for s in seen] == [True, False, True, False]


def test_empty_slots_and_clients_without_examples_change_nothing():
    aggregator = aware()
    start = aggregator.init(None)
    for clients, weights in (((), ()), ((2, 4), (0.0, 0.0))):
        state, aggregate, info = combine(
            aggregator, start, clients, updates_of(clients), weights=weights
        )
        for old, new in zip(start, state, strict=True):
            np.testing.assert_array_equal(old, new)
        assert not np.any(flat(aggregate)) and not np.any(info["weights"])
    deltas = jax.tree.map(lambda x: x.at[1].set(0.0), updates_of((0, 3, 5)))
    state, _, info = combine(aggregator, start, (0, 3, 5), deltas, weights=(1.0, 0.0, 1.0))
    assert info["weights"][3] == 0 and not state.is_known[3]
    assert info["weights"][0] > info["weights"][5] > 0


def test_state_is_that_of_the_population():
    state = noise_aware_mean(9).init(None)
    assert isinstance(state, NoiseState) and state.levels.shape == state.is_known.shape == (9,)


# PFA.

EPSILON = np.array([0.3, 0.4, 4.0, 5.0, 4.5, 0.2])
PUBLIC = np.array([False, False, True, True, True, False])


@functools.cache
def projected(**options):
    aggregator = projected_mean(PUBLIC, **options)
    return aggregator._replace(combine=jax.jit(aggregator.combine))


@pytest.mark.parametrize("clients", [range(6), (5, 3, 1, 2), (2, 4), (0, 1, 5), (0, 3), (3,)])
@pytest.mark.parametrize("num_components", [1, 2])
def test_projection_agrees_with_scikit_learn(clients, num_components):
    clients = np.array(clients)
    deltas = updates_of(clients)
    # A coordinate that no client moves has no spread to divide by.
    deltas["b"] = deltas["b"].at[:, 3].set(0.0)
    _, aggregate, info = combine(
        projected(num_components=num_components), (), clients, deltas, weights=EPSILON[clients]
    )
    rows = rows_of(deltas, len(clients))
    expected = noise_aware.pfa_mean(rows, EPSILON[clients], PUBLIC[clients], num_components)
    np.testing.assert_allclose(flat(aggregate), expected, atol=2e-4)
    share = EPSILON[clients] / EPSILON[clients].sum()
    np.testing.assert_allclose(np.asarray(info["weights"])[clients], share, rtol=1e-5)
    combination = np.asarray(info["combination"], float)
    np.testing.assert_allclose(combination[clients] @ rows, flat(aggregate), atol=1e-4)
    if PUBLIC[clients].sum() >= 2 and not PUBLIC[clients].all():
        # Beyond rounding it is not the plain mean.
        assert np.abs(flat(aggregate) - share @ rows).max() > 0.01


def test_projection_without_standardising():
    from sklearn.decomposition import PCA

    deltas = updates_of(range(6))
    rows, share = rows_of(deltas, 6), EPSILON / EPSILON.sum()
    _, aggregate, _ = combine(
        projected(is_standardized=False), (), range(6), deltas, weights=EPSILON
    )
    space = PCA(1).fit(rows[PUBLIC])
    back = np.where(PUBLIC[:, None], rows, space.inverse_transform(space.transform(rows)))
    np.testing.assert_allclose(flat(aggregate), share @ back, atol=2e-4)


def test_equal_public_updates_span_nothing():
    """Private updates then become the public mean."""
    deltas = updates_of(range(6))
    deltas = jax.tree.map(lambda x: x.at[jnp.array([3, 4])].set(x[2]), deltas)
    _, aggregate, _ = combine(projected(), (), range(6), deltas, weights=EPSILON)
    np.testing.assert_allclose(flat(aggregate), rows_of(deltas, 6)[2], atol=1e-4)


@pytest.mark.parametrize("split", ["mixture", "kmeans", "agglomerative"])
def test_large_budgets_are_public(split):
    np.testing.assert_array_equal(public_clients(EPSILON, split), PUBLIC)


def test_the_tenth_with_the_largest_budgets_is_public():
    epsilon = budgets.published_budgets("Dist2", 20)
    public = public_clients(epsilon, "top_tenth")
    assert public.sum() == 2 and epsilon[public].min() > epsilon[~public].max()
    assert public_clients([1.0, 2.0, 2.0], "top_tenth").tolist() == [False, True, False]


@pytest.mark.parametrize("split", ["mixture", "kmeans", "agglomerative", "top_tenth"])
def test_with_equal_budgets_all_clients_are_public(split):
    assert public_clients(np.full(5, 2.0), split).all()


def test_split_of_published_budgets():
    """Dist2 is .2 N(.2, .01) + .6 N(1, .1) + .2 N(5, 1): the last part is public."""
    epsilon = budgets.published_budgets("Dist2", 20)
    np.testing.assert_array_equal(public_clients(epsilon), epsilon > 2)


@pytest.mark.parametrize(
    "call, message",
    [(lambda: projected_mean([0.5, 1.0]), "is_public must hold a bool for each client")],
)
def test_bad_choices_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@telling
def test_an_update_of_zeros_has_no_weight():
    clients = range(NUM_CLIENTS)
    deltas = jax.tree.map(lambda x: x.at[2].set(0.0), updates_of(clients))
    aggregator = noise_aware_mean(NUM_CLIENTS)
    _, _, info = combine(aggregator, aggregator.init(None), clients, deltas)
    weights = np.asarray(info["weights"])
    assert weights[2] == 0 and np.delete(weights, 2).min() > 0
    assert weights.sum() == pytest.approx(1, rel=1e-5)
