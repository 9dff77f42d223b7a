"""What trees of arrays are asked before they enter a sum."""

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


def test_what_can_be_added_up_is_finite_and_what_cannot_is_not():
    assert trees.is_finite({"w": jnp.array([1e19, -1e19], jnp.float32)})
    assert trees.is_finite({"w": jnp.full(3, 6e4, jnp.float16)})
    assert not trees.is_finite({"w": jnp.array([1.0, 2e19], jnp.float32)})
    assert trees.is_finite({}) and trees.is_finite({"count": jnp.array([2**30])})
