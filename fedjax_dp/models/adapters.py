"""Turns Linen modules and plain functions into a common `init` and `apply`."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core import checks, jaxprs
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
    settings = settings_of(module.__call__)

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
        return outputs, {**params, **keep_if_empty(refreshed, variables, mask)}

    return init, apply, buffer_keys, shapes


def plain_apply(apply: Callable[..., Any], refreshes_buffers: bool) -> Apply:
    """Adapts a plain function to the signature that `Model` documents."""
    settings = settings_of(apply)

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


def settings_of(
    function: Callable[..., Any],
) -> Callable[[bool, PRNGKey | None, jax.Array | None], dict[str, Any]]:
    """Returns `(is_training, key, mask) -> options`, those that a function's arguments name."""
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


def keep_if_empty(refreshed: PyTree, before: PyTree, mask: jax.Array | None) -> PyTree:
    """Returns refreshed buffers, or those before where a mask leaves no example."""
    if mask is None:
        return refreshed
    before = {name: before[name] for name in refreshed}
    return jax.tree.map(lambda new, old: jnp.where(jnp.any(mask), new, old), refreshed, before)
