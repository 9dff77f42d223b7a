"""How the tests of lowered functions compare, and what they look for in a jaxpr."""

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

REPLACED = {
    *("conv_general_dilated", "reduce_window", "reduce_window_max", "reduce_window_min"),
    *("reduce_window_sum", "select_and_gather_add", "select_and_scatter_add"),
}


def assert_close(actual, expected, rtol=1e-5):
    """Compares array by array: the largest difference against the largest entry."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for a, e in pairs:
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(e))
        np.testing.assert_array_equal(a[~np.isfinite(a)], e[~np.isfinite(e)])
        a, e = a[np.isfinite(a)], e[np.isfinite(e)]
        if e.size:
            assert np.abs(a - e).max() <= rtol * max(np.abs(e).max(), 1e-6)


def assert_trees_close(a, b, **tolerance):
    """Compares entry by entry, exactly where no tolerance is given."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance or {"rtol": 0})


def primitives(fn, *args):
    """Collects the names of all primitives in the jaxpr of a function, at every depth."""
    found = set()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found.add(eqn.primitive.name)
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda v: isinstance(v, Jaxpr | ClosedJaxpr)
            ):
                if isinstance(value, ClosedJaxpr):
                    walk(value.jaxpr)
                elif isinstance(value, Jaxpr):
                    walk(value)

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def value_and_pullback(fn, args, cotangent):
    """Evaluates a function and its pullback of a cotangent."""
    out, pullback = jax.vjp(fn, *args)
    return out, pullback(cotangent)


def run(fn, *args):
    """Compiles and runs a function."""
    return jax.jit(fn)(*args)


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)
