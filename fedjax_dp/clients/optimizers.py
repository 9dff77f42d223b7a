"""The numbers of optimisers of local training, and what these must do."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.clients.base import RANGES
from fedjax_dp.core import ranges, trees
from fedjax_dp.core.ranges import Decay, NonNegative, Positive
from fedjax_dp.core.trees import PyTree, library_promotion
from fedjax_dp.models.base import Model

Optimizer: TypeAlias = optax.GradientTransformation | Callable[..., Any]
# Optimisers that gather several gradients before they step move nothing until then.
_MOST_STEPS = 100
# A model above so many bytes is tried with at most so many entries along each axis.
_MOST_BYTES, _MOST_ENTRIES = 2**30, 256


def sgd(
    learning_rate: Any,
    *,
    momentum: Decay | None = None,
    nesterov: bool = False,
    weight_decay: NonNegative | None = None,
) -> optax.GradientTransformation:
    """Takes steps along the gradient, with a penalty that Optax's SGD does not have.

    Args:
      momentum: the share of earlier steps to retain, in [0, 1); none takes plain steps.
      nesterov: look ahead along the momentum.
      weight_decay: strength of a squared penalty on the parameters, whose gradient is added to that
        of the loss before momentum, at least 0; none adds nothing.
    """
    steps = optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
    if weight_decay is None:
        return steps
    return optax.chain(optax.add_decayed_weights(weight_decay), steps)


_MOMENTS = {"b1": Decay, "b2": Decay, "eps": NonNegative}
_ADAM = {**_MOMENTS, "eps_root": NonNegative, "nesterov": bool}
# By name, the options of Optax's own optimisers that have a kind here.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "adam": _ADAM,
    "adamw": {**_ADAM, "weight_decay": NonNegative},
    "adagrad": {"initial_accumulator_value": NonNegative, "eps": NonNegative},
    "rmsprop": {
        "decay": Decay,
        "eps": Positive,
        "initial_scale": NonNegative,
        "centered": bool,
        "momentum": Decay | None,
        "nesterov": bool,
    },
    "yogi": _MOMENTS,
}
# Options of the same names in all of Optax.
_OF_OPTAX = {**_ADAM, "b3": Decay, "decay": Decay, "momentum": Decay, "weight_decay": NonNegative}


def ranges_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the ranges of all numbers of training, with those of an optimiser factory.

    They are those of its annotations; Optax has none, and `KINDS` or `sgd` has those of its own.
    """
    factory: Any = inspect.unwrap(optimizer)
    while isinstance(factory, partial):
        factory = inspect.unwrap(factory.func)
    kinds = next((kinds for name, kinds in KINDS.items() if getattr(optax, name) is factory), None)
    if kinds is None:
        kinds = _annotations(sgd if factory is optax.sgd else optimizer)
        is_of_optax = str(getattr(factory, "__module__", "")).startswith("optax.")
        if is_of_optax and factory is not optax.sgd:
            kinds = {name: _OF_OPTAX.get(name) for name in kinds}
    found = {name: ranges.of_annotation(kind) for name, kind in kinds.items()}
    return {**RANGES, "optimizer": {name: kind for name, kind in found.items() if kind is not None}}


def _annotations(factory: Any) -> dict[str, Any]:
    """Lists the options of an optimiser factory with their annotations, as far as Python knows."""
    for evaluated in (True, False):
        # Annotations may be texts that only a type checker can read.
        with contextlib.suppress(Exception):
            options = inspect.signature(factory, eval_str=evaluated).parameters.items()
            return {name: option.annotation for name, option in options}
    return {}


def check_noised(
    model: Model,
    make_optimizer: Callable[[], optax.GradientTransformation],
    is_sent: PyTree | None = None,
) -> None:
    """Requires that training moves every parameter, so that noise may be added to updates of it.

    Noise on others only harms: a frozen base drifts, a variance turns negative. Optimisers are
    tested on random gradients, with a learning rate above 0.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    names = trees.paths(shapes)
    is_buffer = jax.tree.leaves(model.is_buffer(shapes))
    sent = [True] * len(names) if is_sent is None else jax.tree.leaves(is_sent)
    buffers = [
        name for name, flag, goes in zip(names, is_buffer, sent, strict=True) if flag and goes
    ]
    if buffers:
        raise ValueError(
            f"model must have no buffers if noise is added to their updates, got {model.name} "
            f"with {_some(buffers)}: replace batch norm by group norm, or freeze the buffers "
            "(Model.freeze), which are then not sent"
        )
    is_moved = jax.device_get(_is_moved(make_optimizer(), _at_most(_MOST_BYTES, shapes)))
    # Empty arrays cannot move and need not; parameters that are not sent get no noise.
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]
    tried = [
        (name, moved)
        for name, moved, size, goes in zip(names, is_moved, sizes, sent, strict=True)
        if size and goes
    ]
    left = [name for name, moved in tried if not moved]
    # An optimiser that moves nothing at all does not freeze a part.
    if 0 < len(left) < len(tried):
        raise ValueError(
            "optimizer must move every parameter if noise is added to the updates, got one "
            f"that leaves {_some(left)} as it is: freeze those parameters instead (Model.freeze, "
            "or model.frozen in a configuration), which are then not sent"
        )


def _at_most(num_bytes: int, shapes: PyTree) -> PyTree:
    """Shortens the axes of a large model, which this machine may not hold."""
    if trees.num_bytes(shapes) <= num_bytes:
        return shapes
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct([min(n, _MOST_ENTRIES) for n in s.shape], s.dtype), shapes
    )


def _is_moved(optimizer: optax.GradientTransformation, shapes: Any) -> list[jax.Array]:
    """Returns for each parameter whether the optimiser's first steps move it."""
    leaves, structure = jax.tree.flatten(shapes)
    params = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)

    def gradient(i: jax.Array) -> Any:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), i), len(leaves))
        drawn = [
            jax.random.normal(key, s.shape).astype(s.dtype)
            for key, s in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, drawn)

    def continues(carry: Any) -> jax.Array:
        i, _, moved = carry
        return (i < 2) | ((i < _MOST_STEPS) & ~jnp.any(jnp.stack(moved)))

    def step(carry: Any) -> Any:
        i, state, moved = carry
        with library_promotion():
            updates, state = optimizer.update(gradient(i), state, params)
        now = [jnp.any(u != 0) for u in jax.tree.leaves(updates)]
        return i + 1, state, [a | b for a, b in zip(moved, now, strict=True)]

    start = (0, optimizer.init(params), [jnp.bool_(False)] * len(leaves))
    return jax.lax.while_loop(continues, step, start)[2]


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def warn_of_schedules(model: Model, optimizer: optax.GradientTransformation) -> None:
    """Warns of an Optax schedule, whose count of steps starts at 0 in each round."""
    with library_promotion():
        state = jax.eval_shape(lambda: optimizer.init(model.init(jax.random.key(0))))
    counts = optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState

    def has_schedule(part: Any) -> bool:
        is_fixed = getattr(part, "hyperparams_states", None) == {}
        inner = jax.tree.leaves(part.inner_state, is_leaf=_is_count) if is_fixed else ()
        return isinstance(part, counts) and (not is_fixed or any(map(has_schedule, inner)))

    def _is_count(part: Any) -> bool:
        return isinstance(part, counts)

    if any(map(has_schedule, jax.tree.leaves(state, is_leaf=_is_count))):
        warnings.warn(
            "the optimizer has an Optax schedule, which begins anew in each round, as the "
            "optimiser of a client does; for a rate that changes over rounds use "
            "schedules.training.learning_rate in a configuration, or engine.scheduled with "
            "'local.learning_rate'",
            stacklevel=4,
        )
