"""Local objectives as Optax transforms that chain with any optimiser."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.core import ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Bound, NonNegative
from fedjax_dp.core.trees import PyTree


class AnchorState(NamedTuple):
    """The parameters that local training started from."""

    anchor: PyTree


@checked
def proximal(strength: NonNegative) -> optax.GradientTransformation:
    """Adds the gradient of `strength / 2 * ‖w − w₀‖²`, with w₀ the parameters at the start.

    It reads parameters only: after clipping and noise it is post-processing and costs no privacy.

    Args:
      strength: the weight of the term, at least 0; 0 leaves gradients as they are.

    Returns:
      The transform.

    Source: Li and others 2020 (FedProx), equation 2.
    """
    ranges.check({"strength": strength}, {"strength": NonNegative})

    def update(gradient, state, params):
        pulled = jax.tree.map(
            lambda g, w, anchor: g + strength * (w - anchor), gradient, params, state.anchor
        )
        return pulled, state

    return optax.GradientTransformation(AnchorState, update)


@checked
def proximal_norm(
    strength: NonNegative, is_weight: PyTree | None = None
) -> optax.GradientTransformation:
    """Adds the gradient of `strength * ‖w − w₀‖`, of the distance from the start, not its square.

    At any distance the gradient has the norm `strength`; at the start it is 0. It
    reads parameters only, as `proximal` does.

    Args:
      strength: the weight of the term, at least 0; 0 leaves gradients as they are.
      is_weight: marks the parameters that count, a tree of bools; buffers, which training
        refreshes, should not. All if None.

    Returns:
      The transform.

    Source: Mugunthan 2022 (FedLTN), chapter 4, algorithm 1.
    """
    ranges.check({"strength": strength}, {"strength": NonNegative})

    def update(gradient, state, params):
        def of_weights(moved):
            if is_weight is None:
                return moved
            return jax.tree.map(lambda m, w: m if w else jnp.zeros_like(m), moved, is_weight)

        # The way back has the same norm, to the last bit. A compiler does not see that, and writes
        # neither way to memory.
        moved = of_weights(trees.subtract(params, state.anchor))
        distance = trees.l2_norm(of_weights(trees.subtract(state.anchor, params)))
        pull = strength * trees.reciprocal(distance)
        pulled = jax.tree.map(lambda g, m: (g + pull * m).astype(g.dtype), gradient, moved)
        return pulled, state

    return optax.GradientTransformation(AnchorState, update)


@checked
def blur(strength: float, radius: Bound) -> optax.GradientTransformation:
    """Adds the gradient of `strength / 2 * max(0, ‖w − w₀‖² − radius²)`: BLUR.

    Inside the ball around the start and on its sphere it does nothing; outside it pulls as
    `proximal` does, so that fewer updates are longer than the clip norm. It reads parameters only:
    after clipping and noise it is post-processing and costs no privacy.

    Args:
      strength: λ, at least 0; plain SGD needs it below 1 / learning rate.
      radius: S, the clip norm of the update, at least 0; 0 is `proximal(strength)`, infinity leaves
        gradients as they are.

    Returns:
      The transform.

    Source: Cheng and others 2022 (BLUR), equations 5 and 7.
    """
    ranges.check({"strength": strength}, {"strength": NonNegative})
    ranges.check({"radius": radius}, {"radius": Bound})

    def update(gradient, state, params):
        moved = trees.subtract(params, state.anchor)
        pull = jnp.where(trees.l2_norm(moved) > radius, strength, 0.0)
        pulled = jax.tree.map(lambda g, m: (g + pull * m).astype(g.dtype), gradient, moved)
        return pulled, state

    return optax.GradientTransformation(AnchorState, update)


@checked
def towards(anchor: PyTree, strength: float) -> optax.GradientTransformation:
    """Adds the gradient of `strength / 2 * ‖w − anchor‖²`, with a given anchor.

    It reads parameters only, as `proximal` does.

    Args:
      anchor: the structure of the parameters; may be traced.
      strength: the weight of the term, at least 0.

    Returns:
      The transform.

    Source: Liu and others 2022 (MR-MTL), equation 2.
    """
    ranges.check({"strength": strength}, {"strength": NonNegative})

    def update(gradient, state, params):
        pulled = jax.tree.map(lambda g, w, a: g + strength * (w - a), gradient, params, anchor)
        return pulled, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Watched(NamedTuple):
    """The state of a watched transform, and the norm of its last gradient, infinite at first."""

    inner: PyTree
    norm: jax.Array


def watched(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Adds the norm of a transform's gradient to its state, for `until` of `Train`."""

    def init(params):
        return Watched(transform.init(params), jnp.float32(jnp.inf))

    def update(gradient, state, params=None):
        gradient, inner = transform.update(gradient, state.inner, params)
        return gradient, Watched(inner, trees.l2_norm(gradient))

    return optax.GradientTransformation(init, update)


@checked
def distance_to(anchor: PyTree, strength: NonNegative) -> Callable[[PyTree], jax.Array]:
    """Builds the penalty `strength / 2 * ‖w − anchor‖²` for `LocalTrainer.train`.

    Args:
      anchor: the structure of the parameters; may be traced.
      strength: the weight of the term, at least 0.

    Returns:
      `(params) -> scalar`.

    Source: Liu and others 2022 (MR-MTL), equation 2.
    """
    ranges.check({"strength": strength}, {"strength": NonNegative})

    def penalty(params):
        squares = jax.tree.map(
            lambda w, a: jnp.sum(jnp.square(trees.at_least_float32(w - a))), params, anchor
        )
        return strength / 2 * sum(jax.tree.leaves(squares))

    return penalty


def shift(direction: PyTree) -> optax.GradientTransformation:
    """Adds a fixed direction to every gradient, such as a control variate.

    Args:
      direction: the structure of the parameters; may be traced.

    Returns:
      The transform.

    Source: Karimireddy and others 2020 (SCAFFOLD), equation 3.
    """

    def update(gradient, state, params=None):
        del params
        return jax.tree.map(jnp.add, gradient, direction), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
