"""Local objectives as Optax transforms that chain with any optimiser."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.core import checks
from fedjax_dp.core.trees import PyTree


class AnchorState(NamedTuple):
    """The parameters that local training started from.

    Attributes:
      anchor: the start parameters.
    """

    anchor: PyTree


def proximal(strength: float) -> optax.GradientTransformation:
    """Adds the gradient of `strength / 2 * ‖w − w₀‖²`, with w₀ the parameters at the start.

    It reads parameters only: behind clipped and noised gradients it is post-processing and costs no
    privacy.

    Args:
      strength: the weight of the term, at least 0; 0 leaves gradients as they are.

    Returns:
      The transform.

    Source: Li and others 2020 (FedProx), equation 2.
    """
    checks.non_negative("strength", strength)

    def update(gradient, state, params):
        pulled = jax.tree.map(
            lambda g, w, anchor: g + strength * (w - anchor), gradient, params, state.anchor
        )
        return pulled, state

    return optax.GradientTransformation(AnchorState, update)


def shift(direction: PyTree) -> optax.GradientTransformation:
    """Adds a fixed direction to every gradient, such as a control variate.

    Args:
      direction: the structure of the parameters; traced arrays are welcome.

    Returns:
      The transform.

    Source: Karimireddy and others 2020 (SCAFFOLD), equation 3.
    """

    def update(gradient, state, params=None):
        del params
        return jax.tree.map(jnp.add, gradient, direction), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
