"""Turns Linen modules, NNX modules and plain functions into a common `init` and `apply`."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import PRNGKey
from flax import nnx

from fedjax_dp.core import checks, jaxprs, trees
from fedjax_dp.core.marks import mark, marks_reaching
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models import kinds

Init = Callable[[PRNGKey], PyTree]

_TRAINING = ("is_training", "train", "training")
_EVALUATION = ("deterministic", "use_running_average")


class Apply(Protocol):
    """A model's outputs."""

    def __call__(
        self,
        params: PyTree,
        x: PyTree,
        /,
        *,
        is_training: bool = False,
        key: PRNGKey | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[Any, PyTree]:
        """Computes outputs, `[examples, ...]`, and the parameters with refreshed buffers."""
        ...


def linen_functions(
    module: nn.Module, example_x: PyTree, rng_streams: tuple[str, ...]
) -> tuple[Init, Apply, tuple[str, ...], PyTree]:
    """Builds `init`, `apply`, buffer collections and variables' shapes of a module for an input."""

    def with_axis(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype))

    one = jax.tree.map(with_axis, example_x)
    settings = _settings_of(module.__call__)

    def init(key: PRNGKey) -> PyTree:
        def initial(x: PyTree) -> PyTree:
            return module.init(key, x, **settings(False, None, None))

        # Without running the network, so that no input is ever allocated.
        name = f"initial parameters of {type(module).__name__}"
        return jaxprs.of_shapes(name, initial, one)

    shapes = jax.eval_shape(init, jax.random.key(0))
    buffer_keys = tuple(sorted(name for name in shapes if name != "params"))

    def apply(
        params: PyTree,
        x: PyTree,
        *,
        is_training: bool = False,
        key: PRNGKey | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[Any, PyTree]:
        rngs = (
            {}
            if key is None
            else {name: jax.random.fold_in(key, i) for i, name in enumerate(rng_streams)}
        )
        variables = {
            name: jax.lax.stop_gradient(part) if name in buffer_keys else part
            for name, part in params.items()
        }
        arguments = settings(is_training, None, mask)
        with _masked_batch_norm(mask):
            if not (is_training and buffer_keys):
                return module.apply(variables, x, rngs=rngs, **arguments), params
            outputs, refreshed = module.apply(
                variables, x, rngs=rngs, mutable=list(buffer_keys), **arguments
            )
        kinds.require_floats({name: variables[name] for name in refreshed}, refreshed)
        return outputs, {**params, **_keep_if_empty(refreshed, variables, mask)}

    return init, apply, buffer_keys, shapes


def nnx_functions(
    constructor: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[Init, Apply, tuple[str, ...], PyTree, str]:
    """Builds `init`, `apply`, buffer keys, shapes and class name of an NNX module."""
    abstract = nnx.eval_shape(lambda: constructor(nnx.Rngs(0)))
    graph, shapes, streams, buffer_shapes = _split(abstract)
    buffer_keys = ("batch_stats",) if jax.tree.leaves(buffer_shapes) else ()
    settings = _settings_of(abstract.__call__)
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
        return outputs, {**params, "batch_stats": _keep_if_empty(refreshed, buffers, mask)}

    return init, apply, buffer_keys, named(shapes, buffer_shapes), class_name


def plain_apply(apply: Callable[..., Any], refreshes_buffers: bool) -> Apply:
    """Adapts a plain function to the signature that `Model` documents."""
    settings = _settings_of(apply)

    def wrapped(
        params: PyTree,
        x: PyTree,
        *,
        is_training: bool = False,
        key: PRNGKey | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[Any, PyTree]:
        result = apply(params, x, **settings(is_training, key, mask))
        return result if refreshes_buffers else (result, params)

    return wrapped


def _settings_of(
    function: Callable[..., Any],
) -> Callable[[bool, PRNGKey | None, jax.Array | None], dict[str, Any]]:
    named = set(inspect.signature(function).parameters)

    def settings(is_training: bool, key: PRNGKey | None, mask: jax.Array | None) -> dict[str, Any]:
        values: dict[str, Any] = dict.fromkeys(_TRAINING, is_training)
        values |= dict.fromkeys(_EVALUATION, not is_training)
        values |= {"key": key, "mask": mask}
        return {name: value for name, value in values.items() if name in named}

    return settings


@contextlib.contextmanager
def _masked_batch_norm(mask: jax.Array | None) -> Iterator[None]:
    """Passes the mask of examples to every Linen batch norm that is called in the context."""
    if mask is None:
        yield
        return
    # Statistics over no example would be 0/0; they are computed over the padding instead, which is
    # zero, and discarded afterwards.
    real = mask | ~jnp.any(mask)

    def interceptor(next_fn: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext):
        if not isinstance(context.module, nn.BatchNorm) or context.method_name != "__call__":
            return next_fn(*args, **kwargs)
        inputs = args[0] if args else kwargs["x"]
        fits = inputs.shape[0] == mask.shape[0]
        rule = f"keep the {mask.shape[0]} examples on its first axis, as the mask does"
        checks.require(fits, f"input of {context.module.name}", rule, inputs.shape)
        if kwargs.get("mask") is None:
            kwargs = {**kwargs, "mask": real.reshape(real.shape + (1,) * (inputs.ndim - 1))}
        return next_fn(*args, **kwargs)

    with nn.intercept_methods(interceptor):
        yield


def _keep_if_empty(refreshed: PyTree, before: PyTree, mask: jax.Array | None) -> PyTree:
    if mask is None:
        return refreshed
    before = {name: before[name] for name in refreshed}
    return jax.tree.map(lambda new, old: jnp.where(jnp.any(mask), new, old), refreshed, before)


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
