"""What trees of arrays are asked before they enter a sum."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.core import jaxprs, trees
from fedjax_dp.core.backend import traced_for
from fedjax_dp.privacy.mechanisms import clipping


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_entry_that_is_not_finite_is_seen(dtype, bad):
    tree = {"w": jnp.ones((3, 4), dtype), "count": jnp.arange(3), "b": [jnp.zeros(2, dtype), None]}
    assert trees.is_finite(tree)
    assert not trees.is_finite(tree | {"w": tree["w"].at[2, 3].set(bad)})
    assert not trees.is_finite(tree | {"b": [jnp.full(2, bad, dtype), None]})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [5_000, 100_000])
def test_one_entry_of_many_is_seen_whichever_way_it_is_compiled(bad, size):
    """Reductions of long arrays to their largest entry may pass over nan."""
    x = jnp.ones(size).at[size // 3].set(bad)
    assert not jax.jit(trees.is_finite)(x)
    seen = jax.jit(jax.vmap(trees.is_finite))(jnp.stack([jnp.ones(size), x]))
    np.testing.assert_array_equal(seen, [True, False])


def test_what_can_be_summed_over_any_population():
    largest = jnp.float32(2.0**96)
    assert trees.can_be_summed({"w": jnp.array([1.0, -largest]), "count": jnp.array([2**30])})
    assert float(largest) * (2**31 - 1) < np.finfo(np.float32).max
    for bad in (np.nan, np.inf, -np.inf, np.nextafter(np.float32(largest), np.float32(np.inf))):
        for size in (5, 5_000):
            assert not jax.jit(trees.can_be_summed)(jnp.ones(size).at[size // 3].set(bad))


@pytest.mark.parametrize("check", [trees.is_finite, trees.can_be_summed])
@pytest.mark.parametrize("place", ["first", "second", "third"])
def test_a_bad_entry_is_seen_among_leaves_of_one_size(check, place):
    tree = {"first": jnp.ones((3, 4)), "second": jnp.ones(12), "third": jnp.ones((4, 3))}
    assert jax.jit(check)(tree)
    assert not jax.jit(check)(tree | {place: tree[place].at[-1].set(np.nan)})


def test_the_largest_numbers_and_nothing_at_all_are_finite():
    assert trees.is_finite({"w": jnp.array([1.0, -3e38], jnp.float32), "none": jnp.zeros((0, 3))})
    assert trees.is_finite({}) and trees.is_finite({"count": jnp.array([2**30])})


def _largest_error(shape):
    """The largest relative error of norms of arrays that chains of additions would lose most of."""
    errors = []
    for norm, small, power in ((trees.l2_norm, 2.0**-12.6, 2), (trees.l1_norm, 2.0**-25.2, 1)):
        x = np.full(shape, small, np.float32)
        x.reshape(-1)[0] = 1.0
        exact = (x.astype(np.float64) ** power).sum() ** (1 / power)

        @jax.jit
        def norms(x, scale, norm=norm):
            several = jax.vmap(norm)(jnp.stack([x, x * scale]))
            return jnp.stack([norm({"w": x * scale}), *several])

        errors.append(np.max(np.abs(np.asarray(norms(x, 1.0), np.float64) / exact - 1)))
    return max(errors)


def _of_rank(rank, num_entries=1 << 17):
    """A shape of axes from 1 to 8, of `num_entries` at most and more than an eighth of them."""
    rng, shape = np.random.default_rng(rank), [1] * rank
    while np.prod(shape) * 8 <= num_entries:
        free = [axis for axis in range(rank) if shape[axis] < 8]
        if not free:
            break
        shape[rng.choice(free)] += 1
    return tuple(shape)


# Chains of 4,096 would err by this much in a sum; half of it in the root of one.
_OF_CHAINS = 2.6e-4


@pytest.mark.parametrize("shape", [(1 << 20,), (64, 9, 700), (2,) * 17, (4, 1, 8) * 4])
def test_norms_do_not_stand_still_behind_a_large_entry(shape):
    assert _largest_error(shape) <= _OF_CHAINS


@pytest.mark.parametrize("shape", [(1 << 17,), (2,) * 17])
def test_totals_do_not_stand_still_behind_a_large_entry(shape):
    """As they are: norms hand over leaves that are flat already."""
    x = np.full(shape, 2.0**-25.2, np.float32)
    x.reshape(-1)[0] = 1.0
    found = jax.jit(jax.vmap(trees.total))(jnp.stack([x, x]))
    exact = x.astype(np.float64).sum()
    assert exact > 1.003
    assert np.max(np.abs(np.asarray(found, np.float64) / exact - 1)) <= _OF_CHAINS


def test_a_total_of_what_is_flattened_in_the_same_program_does_not_stand_still():
    """The compiler would sum over the axes that were there before."""
    x = np.full((2,) * 22, 2.0**-25.2, np.float32)
    x.reshape(-1)[0] = 1.0
    exact = x.astype(np.float64).sum()
    for found in (
        jax.jit(lambda x: trees.total(x.reshape(-1)))(x),
        jax.jit(jax.vmap(lambda x: trees.total(x.reshape(-1))))(x[None])[0],
    ):
        assert abs(float(found) / exact - 1) <= _OF_CHAINS


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(1, 25))
def test_norms_of_any_rank_do_not_stand_still(rank):
    assert _largest_error(_of_rank(rank)) <= _OF_CHAINS


def test_many_leaves_are_added_in_pairs():
    """One after another they would stand still behind the first, and lose 1e-5 of the sum."""
    leaves = [np.float32([1.0]), *[np.float32([2.0**-25.2])] * 400]
    exact = 1 + 400 * 2.0**-25.2
    assert abs(float(jax.jit(trees.l1_norm)(leaves)) / exact - 1) <= 1e-6


@pytest.mark.parametrize("shape", [(2,) * 17, (3, 1, 8) * 4])
def test_a_long_array_of_short_axes_is_clipped_to_its_bound(shape):
    x = np.full(shape, 2.0**-12.6, np.float32)
    x.reshape(-1)[0] = 1.0
    for clip, power in ((clipping.clip_by_global_norm, 2), (clipping.clip_by_l1_norm, 1)):
        small = jnp.asarray(x) ** (2 / power)
        clipped = np.asarray(jax.jit(clip)(small, 0.5)[0], np.float64)
        assert (np.abs(clipped) ** power).sum() ** (1 / power) <= 0.5 * (1 + _OF_CHAINS)


@pytest.mark.parametrize(
    "shape",
    [
        (30000, 200),
        (8388608,),
        (25088, 4096),
        (4096, 4096),
        (50257, 768),
        (3, 3, 512, 512),
        (),
        (7,),
    ],
)
def test_chains_of_a_sum_on_accelerators_have_a_bound_in_any_order(shape):
    """All reductions of one array together, by the lengths in the trace."""

    def chains(closed):
        for eqn in closed.jaxpr.eqns:
            if eqn.primitive.name == "reduce_sum":
                yield math.prod(eqn.invars[0].aval.shape[axis] for axis in eqn.params["axes"])
            for body in jaxprs.inner_jaxprs(eqn):
                yield from chains(body)

    with traced_for("tpu"):
        traced = jax.make_jaxpr(trees.total)(jax.ShapeDtypeStruct(shape, jnp.float32))
    assert sum(chains(traced)) <= 4096


def test_sums_on_accelerators_are_those_of_all_entries():
    x = np.random.default_rng(0).normal(size=(2, 3000, 5)).astype(np.float32)
    with traced_for("gpu"):
        found = jax.jit(trees.total)({"a": x, "b": np.ones(5000, np.float32)})
    np.testing.assert_allclose(found, x.sum(dtype=np.float64) + 5000, rtol=1e-5)
    with traced_for("gpu"):
        for bad, holds in ((np.nan, False), (np.inf, False), (2.0**97, False), (2.0**96, True)):
            spoiled = x.copy()
            spoiled[1, 2999, 4] = bad
            assert bool(jax.jit(trees.can_be_summed)(spoiled)) == holds
