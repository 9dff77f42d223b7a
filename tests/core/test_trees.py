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


def test_the_largest_numbers_and_nothing_at_all_are_finite():
    assert trees.is_finite({"w": jnp.array([1.0, -3e38], jnp.float32), "none": jnp.zeros((0, 3))})
    assert trees.is_finite({}) and trees.is_finite({"count": jnp.array([2**30])})
