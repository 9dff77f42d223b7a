"""What trees of arrays are asked before they enter a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.core import trees


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


def test_the_largest_numbers_and_nothing_at_all_are_finite():
    assert trees.is_finite({"w": jnp.array([1.0, -3e38], jnp.float32), "none": jnp.zeros((0, 3))})
    assert trees.is_finite({}) and trees.is_finite({"count": jnp.array([2**30])})


@pytest.mark.parametrize("shape", [(1 << 20,), (3, 1 << 18), (64, 9, 700)])
def test_norms_do_not_stand_still_behind_a_large_entry(shape):
    """A chain of additions would lose every square that is below half a rounding of the first."""
    x = np.full(shape, 2.0**-12.6, np.float32)
    x.reshape(-1)[0] = 1.0
    exact = np.sqrt((x.astype(np.float64) ** 2).sum())

    @jax.jit
    def norms(x, scale):
        return trees.l2_norm({"w": x * scale}), jax.vmap(trees.l2_norm)(jnp.stack([x, x * scale]))

    # Chains of 4,096 would err by this much.
    np.testing.assert_allclose(norms(x, 1.0)[0], exact, rtol=1.3e-4)
    np.testing.assert_allclose(norms(x, 1.0)[1], exact, rtol=1.3e-4)
