"""Clipping keeps its bound on any input, and its sensitivity is the one that is stated."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, telling

from fedjax_dp.privacy import gaussian, sensitivities
from fedjax_dp.privacy.mechanisms import clipping as c

pytestmark = floats


def norm64(tree):
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(leaves)))


def random_tree(seed, scale=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = {"dense": {"kernel": (7, 5), "bias": (5,)}, "scalar": ()}
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1.0, 1e5, 1e15])
@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 40.0, np.inf])
def test_global_clipping_matches_float64(scale, clip_norm):
    tree = random_tree(0, scale)
    clipped, norm = jax.jit(c.clip_by_global_norm)(tree, clip_norm)
    true_norm = norm64(tree)
    factor = min(1.0, clip_norm / true_norm)
    np.testing.assert_allclose(norm, true_norm, rtol=1e-6, atol=1e-18)
    for got, leaf in zip(jax.tree.leaves(clipped), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(got, factor * np.asarray(leaf, np.float64), rtol=2e-6)
    assert norm64(clipped) <= clip_norm * (1 + 1e-6)


def test_a_tree_within_the_bound_is_unchanged_bit_for_bit():
    tree = random_tree(1)
    clipped, _ = c.clip_by_global_norm(tree, norm64(tree) * 1.001)
    chex.assert_trees_all_equal(clipped, tree)


@pytest.mark.parametrize("clip", [c.clip_by_global_norm, c.clip_per_layer])
def test_zero_update_stays_zero_without_dividing_by_zero(clip):
    tree = jax.tree.map(jnp.zeros_like, random_tree(0))
    for bound in (1.0, np.inf):
        clipped, norm = jax.jit(clip)(tree, bound)
        assert norm == 0
        chex.assert_trees_all_equal(clipped, tree)


@pytest.mark.parametrize("clip", [c.clip_by_global_norm, c.clip_per_layer])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bound", [1.0, np.inf])
def test_an_update_that_is_not_finite_contributes_exactly_zero(clip, bad, bound):
    tree = random_tree(2)
    tree["dense"]["kernel"] = tree["dense"]["kernel"].at[3, 2].set(bad)
    clipped, norm = jax.jit(clip)(tree, bound)
    assert np.isposinf(norm)
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(clipped))


@pytest.mark.parametrize("clip", [c.clip_by_global_norm, c.clip_per_layer, c.clip_entries])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [2, 100, 5_000, 100_000])
def test_one_bad_entry_of_many_makes_the_whole_update_zero(clip, bad, size):
    """Reductions of long arrays to their largest entry may pass over nan."""
    tree = {"a": jnp.ones(size).at[size // 2].set(bad), "b": jnp.ones(3)}
    clipped, norm = jax.jit(clip)(tree, 1.0)
    assert np.isposinf(norm)
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(clipped))


@pytest.mark.parametrize("clip", [c.clip_by_global_norm, c.clip_per_layer])
def test_a_norm_beyond_float32_contributes_zero(clip):
    clipped, norm = clip({"a": jnp.full(3, 1e30)}, 1.0)
    assert np.isposinf(norm)
    assert np.all(clipped["a"] == 0)


@pytest.mark.parametrize("clip", [c.clip_by_global_norm, c.clip_per_layer])
@pytest.mark.parametrize("bound", [np.nan, 0.0, -1.0])
def test_a_traced_bound_that_is_none_lets_nothing_through(clip, bound):
    clipped, _ = jax.jit(clip)(random_tree(0), jnp.float32(bound))
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(clipped))


def test_entries_too_small_to_square_still_respect_a_tiny_bound():
    tree = {"a": jnp.full(100, 5e-20, jnp.float32)}
    clipped, _ = c.clip_by_global_norm(tree, jnp.float32(1e-21))
    assert norm64(clipped) <= 1e-21 * (1 + 1e-6)


@pytest.mark.parametrize("clip", [c.clip_by_global_norm, c.clip_per_layer])
def test_bfloat16_is_clipped_in_float32(clip):
    tree = random_tree(3, dtype=jnp.bfloat16)
    clipped, norm = clip(tree, 1.0)
    np.testing.assert_allclose(norm, norm64(tree), rtol=1e-6)
    assert norm.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(clipped)} == {jnp.dtype("float32")}
    assert norm64(clipped) <= 1 + 1e-6


@pytest.mark.parametrize("clip_norm", [0.01, 1.0, 3.0])
def test_per_layer_clipping_matches_float64_and_bounds_the_whole(clip_norm):
    tree = random_tree(4)
    tree["dense"]["bias"] = tree["dense"]["bias"] * 1e-3
    clipped, norm = jax.jit(c.clip_per_layer)(tree, clip_norm)
    np.testing.assert_allclose(norm, norm64(tree), rtol=1e-6)
    share = clip_norm / np.sqrt(3)
    for got, leaf in zip(jax.tree.leaves(clipped), jax.tree.leaves(tree), strict=True):
        wide = np.asarray(leaf, np.float64)
        np.testing.assert_allclose(got, wide * min(1, share / np.linalg.norm(wide)), rtol=2e-6)
    assert norm64(clipped) <= clip_norm * (1 + 1e-6)


@telling
def test_clipping_under_vmap_clips_each_row_alone():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
    rows = rows.at[2].set(jnp.nan)
    clipped, norms = jax.vmap(lambda x: c.clip_by_global_norm(x, 0.5))(rows)
    assert np.isinf(norms[2]) and np.all(clipped[2] == 0)
    keep = np.array([0, 1, 3, 4, 5])
    np.testing.assert_allclose(np.linalg.norm(clipped[keep], axis=1), 0.5, rtol=1e-6)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="tree must hold floats only"):
        c.clip_by_global_norm({"a": jnp.ones(2, jnp.int32)}, 1.0)


@pytest.mark.parametrize("name", ["global", "per_layer"])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_no_neighbour_moves_a_weighted_sum_further_than_stated(name, relation):
    clip_norm, max_weight = 0.7, 3.0
    rng = np.random.default_rng(5)

    def contribution(direction, weight):
        clipped, _ = c.METHODS[name](
            jax.tree.map(lambda x: direction * x, random_tree(6, 50.0)), clip_norm
        )
        return jax.tree.map(lambda x: weight * np.asarray(x, np.float64), clipped)

    others = [contribution(rng.choice([-1, 1]), w) for w in rng.uniform(0, max_weight, 4)]
    total = lambda parts: jax.tree.map(lambda *x: sum(x), *parts)  # noqa: E731
    mine = contribution(1, max_weight)
    away = contribution(-1, max_weight)
    neighbour = [*others, away] if relation == "replace_one" else others
    moved = jax.tree.map(np.subtract, total([*others, mine]), total(neighbour))
    stated = gaussian(clip_norm, 1.0, method=name, relation=relation, max_weight=max_weight)
    stated = stated.sensitivity
    assert stated.relation == relation
    # The worst case is attained here, so a bound that is too small or too large both show.
    np.testing.assert_allclose(norm64(moved), stated.l2, rtol=1e-6)


def test_noise_is_measured_in_contributions_under_either_relation():
    for relation in sensitivities.RELATIONS:
        stated = sensitivities.sensitivity_of_sum(3.0, relation)
        assert float(sensitivities.noise_stddev(stated, 1.5)) == pytest.approx(4.5)


def test_no_noise_without_clipping_is_no_noise():
    stddev = jax.jit(sensitivities.noise_stddev)(
        sensitivities.sensitivity_of_sum(jnp.inf), jnp.float32(0)
    )
    assert stddev == 0
