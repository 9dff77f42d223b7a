"""Turns NNX modules into the `init` and `apply` of `adapters`; imported for them alone."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from chex import PRNGKey
from flax import nnx

from fedjax_dp.core import checks, trees
from fedjax_dp.core.marks import mark, marks_reaching
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models import kinds
from fedjax_dp.models.adapters import Apply, Init, keep_if_empty, settings_of


def nnx_functions(
    constructor: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[Init, Apply, tuple[str, ...], PyTree, str]:
    """Builds `init`, `apply`, buffer keys, shapes and class name of an NNX module."""
    abstract = nnx.eval_shape(lambda: constructor(nnx.Rngs(0)))
    graph, shapes, streams, buffer_shapes = _split(abstract)
    buffer_keys = ("batch_stats",) if jax.tree.leaves(buffer_shapes) else ()
    settings = settings_of(abstract.__call__)
    class_name = type(abstract).__name__
    takes_mask = "mask" in inspect.signature(abstract.__call__).parameters
    if jax.tree.leaves(nnx.state(abstract, nnx.BatchStat)):
        checks.require(
            takes_mask,
            "constructor",
            "build a module whose __call__ takes a mask and passes it to its batch norms, "
            "because padding would enter the statistics",
            class_name,
        )

    def named(state: nnx.State, buffers: nnx.State) -> PyTree:
        params = {"params": nnx.to_pure_dict(state)}
        return {**params, "batch_stats": nnx.to_pure_dict(buffers)} if buffer_keys else params

    def init(key: PRNGKey) -> PyTree:
        _, state, _, buffers = _split(constructor(nnx.Rngs(key)))
        return named(state, buffers)

    def apply(
        params: PyTree,
        x: PyTree,
        *,
        is_training: bool = False,
        key: PRNGKey | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[Any, PyTree]:
        safe_mask = None if mask is None else mask | ~jnp.any(mask)
        buffers = jax.lax.stop_gradient(params["batch_stats"]) if buffer_keys else {}

        def run(x: PyTree) -> tuple[Any, PyTree]:
            module = nnx.merge(
                graph,
                _filled(shapes, params["params"]),
                _keyed(streams, key, is_training),
                _filled(buffer_shapes, buffers),
            )
            if is_training:
                module.train()
            else:
                module.eval()
            outputs = module(x, **settings(is_training, None, safe_mask))
            # Without what the module has recorded in this call.
            return outputs, _restricted(nnx.to_pure_dict(_split(module)[3]), buffers)

        outputs, refreshed = run(x)
        if not (is_training and buffer_keys):
            return outputs, params
        kinds.require_floats({"batch_stats": buffers}, {"batch_stats": refreshed})
        if mask is not None and not takes_mask:
            _require_apart(lambda x: run(x)[1], x, class_name)
        return outputs, {**params, "batch_stats": keep_if_empty(refreshed, buffers, mask)}

    return init, apply, buffer_keys, named(shapes, buffer_shapes), class_name


def _require_apart(state_of: Callable[[PyTree], PyTree], x: PyTree, name: str) -> None:
    """Requires refreshed state that does not depend on examples, padding among them."""
    closed, shapes = jax.make_jaxpr(lambda x: state_of(jax.tree.map(mark, x)), return_shape=True)(x)
    pairs = zip(trees.paths(shapes), marks_reaching(closed).outputs, strict=True)
    reached = [path for path, is_reached in pairs if is_reached]
    rule = (
        "not be computed from examples, padding among them, unless __call__ takes a mask and "
        "leaves out what it excludes"
    )
    checks.require(not reached, f"state {', '.join(reached)} of {name}", rule, "one that is")


def _restricted(state: PyTree, like: PyTree) -> PyTree:
    """Takes the entries of nested dicts that another has."""
    if not isinstance(like, dict):
        return state
    return {name: _restricted(state[name], part) for name, part in like.items()}


def _split(module: nnx.Module) -> Any:
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _filled(shapes: nnx.State, values: PyTree) -> nnx.State:
    state = jax.tree.map(lambda leaf: leaf, shapes)
    nnx.replace_by_pure_dict(state, values)
    return state


def _keyed(streams: nnx.State, key: PRNGKey | None, is_training: bool) -> nnx.State:
    leaves, structure = jax.tree.flatten(streams)
    rule = "be given in training to a model that draws random numbers"
    checks.require(key is not None or not is_training or not leaves, "key", rule, key)
    if key is None:
        key = jax.random.key(0)
    elif not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)

    def fresh(index: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        folded = jax.random.fold_in(key, index)
        return jax.random.split(folded, leaf.shape) if leaf.shape else folded

    return jax.tree.unflatten(structure, [fresh(i, leaf) for i, leaf in enumerate(leaves)])
