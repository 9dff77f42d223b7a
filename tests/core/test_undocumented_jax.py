"""All that the package uses of JAX without a promise that it stays: where, and whether it still is.

A failure says which version of JAX changed which part. `fedjax_dp/core/jaxprs.py` does without
what it does not know; the rest has to be replaced.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas, topologies

import fedjax_dp
from fedjax_dp.core import checks, devices, jaxprs, keys, marks

ROOT = pathlib.Path(fedjax_dp.__file__).parent
X = np.ones(3, np.float32)


class Part(NamedTuple):
    """A part of JAX, the files that name it, a check that it is as it was, and its history."""

    files: str
    holds: Callable[[], Any]
    history: str = ""


def equation(fn, *arguments, x=X):
    return jax.make_jaxpr(fn)(x, *arguments).jaxpr.eqns[-1]


def is_laid_out(kind, fn):
    return lambda: isinstance(jaxprs.layout(equation(fn)), kind)


def has_known_parameters(fn, *arguments, x=X):
    return lambda: jaxprs.has_parameters(equation(fn, *arguments, x=x))


def with_own_derivative():
    own = jax.custom_vjp(jnp.sin)
    own.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    return own


def has_own_batches():
    like, method = jax.ShapeDtypeStruct(X.shape, X.dtype), {"vmap_method": "expand_dims"}
    own = jax.custom_batching.custom_vmap(jnp.sin)
    own.def_vmap(lambda size, batched, x: (jnp.sin(x), True))
    called = functools.partial(jax.pure_callback, np.sin, like, **method)
    foreign = jax.ffi.ffi_call("of C", like, **method)
    found = [equation(fn) for fn in (called, foreign, own)]
    return {each.primitive.name for each in found} == jaxprs.OWN_BATCHES and all(
        each.params["vmap_method"] == "expand_dims" for each in found[:2]
    )


def doubles():
    primitive = jaxprs.define(
        "doubles", lambda x: 2 * x, abstract=lambda x: x, batch=lambda xs, axes: (xs[0], axes[0])
    )
    return primitive.bind(X), jax.jit(primitive.bind)(X)


IMAGES, KERNEL, WINDOW = np.ones((1, 4, 4, 1), np.float32), np.ones((2, 2, 1, 1)), (1, 2, 2, 1)
MATRIX = np.ones((3, 3), np.float32)
LAYOUTS = {
    "scan": is_laid_out(jaxprs.Scan, lambda x: lax.scan(lambda c, y: (c + y, y), x, MATRIX)),
    "while": is_laid_out(
        jaxprs.While, lambda x: lax.while_loop(lambda c: jnp.sum(c) < 0, lambda c: c, x)
    ),
    "cond": is_laid_out(jaxprs.Cond, lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)),
    "jit": is_laid_out(jaxprs.Call, jax.jit(jnp.sin)),
    "remat2": is_laid_out(jaxprs.Call, jax.checkpoint(jnp.sin)),
    "custom_jvp_call": is_laid_out(jaxprs.Call, lambda x: jax.nn.relu(x)),
    "custom_vjp_call": is_laid_out(jaxprs.Call, with_own_derivative()),
    "dot_general": has_known_parameters(lambda x: x @ x),
    "conv_general_dilated": has_known_parameters(
        lambda x: lax.conv(x, jnp.ones((1, 4, 1, 1)), (1, 1), "SAME"), x=IMAGES
    ),
    "reduce_window_max": has_known_parameters(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, WINDOW, WINDOW, "VALID"), x=IMAGES
    ),
    "transpose": has_known_parameters(lambda x: x.T, x=MATRIX),
    "convert_element_type": has_known_parameters(lambda x: x.astype(jnp.bfloat16)),
}
HISTORY = {
    "scan": "`num_consts` and `num_carry` became `ft_in` and `ft_out` in 0.11",
    "jit": "called pjit before 0.7",
    "custom_vjp_call": "its functions are parameters since 0.9",
}
PARTS = {
    **{
        f"the layout of {name}": Part("core/jaxprs.py", holds, HISTORY.get(name, ""))
        for name, holds in LAYOUTS.items()
    },
    "the names of what has a rule for batches of its own": Part("core/jaxprs.py", has_own_batches),
    "jax.extend.core": Part(
        "core/jaxprs.py",
        lambda: jaxprs.jaxpr_as_fun(jaxprs.inlined(jax.make_jaxpr(jax.jit(jnp.sin))(X)))(X),
        "ClosedJaxpr and Jaxpr became one in 0.11",
    ),
    "jax.interpreters": Part("core/jaxprs.py", lambda: np.array_equal(*doubles())),
    "jax.extend.random": Part(
        "core/keys.py",
        lambda: keys.threefry_2x32(jnp.zeros(2, "uint32"), jnp.zeros(2, "uint32"))[0] == 0x6B200159,
    ),
    "jax.experimental.multihost_utils": Part("core/devices.py", lambda: devices.whole(X).shape),
    "jax.experimental.topologies": Part(
        "core/targets.py", lambda: callable(topologies.get_topology_desc)
    ),
    "jax.experimental.pallas": Part(
        "models/lowering/tpu.py", lambda: hasattr(pallas, "pallas_call") and pallas.BlockSpec
    ),
    "jax.core.Tracer": Part(
        "core/checks.py",
        lambda: jax.make_jaxpr(lambda x: x if checks.is_traced(x) else 1 / 0)(X),
    ),
    "how checkpoint_name is shown": Part("core/marks.py", marks._is_seen),
    "jax.make_user_context": Part("models/kinds.py", lambda: jax.make_user_context()),
    "jax.config.jax_disable_jit": Part(
        "engine/sides.py", lambda: jax.config.jax_disable_jit is False
    ),
    "jax.config.jax_platforms": Part(
        "core/backend.py engine/execution/compile.py",
        lambda: hasattr(jax.config, "jax_platforms"),
    ),
    "jax.config.jax_compilation_cache_dir": Part(
        "core/backend.py", lambda: hasattr(jax.config, "jax_compilation_cache_dir")
    ),
    "axis_env": Part(
        "engine/facts.py",
        lambda: jax.make_jaxpr(lambda x: lax.all_gather(x, "a"), axis_env=[("a", 2)])(X),
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_jax_does_not_document_is_as_it_was(name):
    part = PARTS[name]
    try:
        holds = part.holds()
    except Exception as error:
        holds = None
        reason = f": {type(error).__name__}: {error}"
    else:
        reason = ""
    said = f" ({part.history})" if part.history else ""
    assert holds is not None and np.all(holds), (
        f"JAX {jax.__version__} changed {name}{said}, which fedjax_dp/{part.files} reads{reason}"
    )


_PRIVATE = re.compile(
    r"jax\._src|jax\.extend\.\w+|jax\.interpreters|jax\.experimental\.\w+|jaxlib\.|jax\.core\.\w+"
    r"|jax\.make_user_context|jax\.config\.jax_\w+|axis_env"
)


def _first_name(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def test_every_such_part_is_listed_with_the_files_that_name_it():
    found = set()
    for file in ROOT.rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.keyword):
                names = [node.arg or ""]
            elif isinstance(node, ast.Attribute) and _first_name(node).startswith("jax"):
                names = [ast.unparse(node)]
            else:
                continue
            found |= {
                (match[0], file.relative_to(ROOT).as_posix())
                for name in names
                if (match := _PRIVATE.match(name))
            }
    listed = {(name, file) for name, part in PARTS.items() for file in part.files.split()}
    assert found <= listed, found - listed
