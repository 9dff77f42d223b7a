"""Anderson acceleration of plain gradient steps, as an Optax transform."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative
from fedjax_dp.core.trees import PyTree


def mixing_weights(
    products: jax.Array, counts: jax.Array, newest: jax.Array, ridge: Any, damping: Any
) -> jax.Array:
    """Computes the weights, of sum 1, that minimise the norm of the mix of residuals.

    Solves `(G + ridge · tr(G) I) w = 1` and divides by the sum; weights may be negative. With the
    damping a in [0, 1] they become (1 − a) w, and the newest gains a. Not finite without a
    solution.

    Source: Malekmohammadi 2025, section 2.5, the closed form under "Acceleration".
    """
    both = counts[:, None] & counts[None, :]
    products = jnp.where(both, products, 0)
    # Scaled first, so that small residuals do not vanish.
    trace = jnp.trace(products)
    scaled = products / jnp.where(trace > 0, trace, 1)
    system = scaled + jnp.diag(jnp.where(counts, ridge, 1.0).astype(scaled.dtype))
    found = jnp.linalg.solve(system, counts.astype(scaled.dtype))
    found = jnp.where(counts, found, 0)
    found = found / jnp.sum(found)
    found = jnp.where(trace > 0, found, jnp.nan)
    return (1 - damping) * found + damping * (jnp.arange(len(found)) == newest).astype(found.dtype)


class Steps(NamedTuple):
    """The last τ + 1 steps in a ring: images are where plain steps end, `[τ + 1, ...]`, float32."""

    inner: PyTree
    num_steps: jax.Array
    images: PyTree
    gradients: PyTree
    products: jax.Array


@checked
def accelerated(
    transform: optax.GradientTransformation,
    learning_rate: jax.typing.ArrayLike,
    *,
    memory: Count,
    ridge: NonNegative = 1e-8,
    is_buffer: Callable[[PyTree], PyTree] | None = None,
) -> optax.GradientTransformation:
    """Accelerates gradient descent: each step is a mix of the last `memory + 1` plain steps.

    A plain step maps x to T(x) = x − r g(x). With weights of sum 1 under which the mix of the last
    gradients is shortest, the next point is the same mix of the T(x). The transform returns the
    gradient whose plain step leads there, so `optax.sgd(r)` must follow it. If there is no
    solution, or its mix is not shorter than the newest gradient, the step is plain; buffers always
    take plain steps.

    Source: Anderson 1965; Malekmohammadi 2025, section 2.5, last paragraph on acceleration.
    """
    places = memory + 1

    def weights_alone(tree: PyTree) -> PyTree:
        if is_buffer is None:
            return tree
        return jax.tree.map(lambda b, x: jnp.zeros_like(x) if b else x, is_buffer(tree), tree)

    def init(params):
        def zeros(x):
            return jnp.zeros((places, *x.shape), trees.at_least_float32(x).dtype)

        kept = jax.tree.map(zeros, params)
        return Steps(transform.init(params), jnp.int32(0), kept, kept, jnp.zeros((places, places)))

    def update(gradient, state, params):
        given, inner = transform.update(gradient, state.inner, params)
        place = state.num_steps % places

        def written(rows, one):
            return jax.tree.map(lambda r, x: r.at[place].set(x.astype(r.dtype)), rows, one)

        wide = weights_alone(jax.tree.map(trees.at_least_float32, given))
        image = jax.tree.map(lambda x, g: x - learning_rate * g, params, wide)
        images, gradients = written(state.images, image), written(state.gradients, wide)
        row = sum(jax.tree.leaves(jax.tree.map(_products, gradients, wide)), jnp.zeros(places))
        products = state.products.at[place, :].set(row).at[:, place].set(row)
        counts = jnp.arange(places) <= state.num_steps
        found = mixing_weights(products, counts, place, ridge, 0.0)
        # Differences of images lose less to rounding than the images themselves.
        ahead = jax.tree.map(
            lambda rows, one: jnp.tensordot(
                found, rows - one, 1, precision=jax.lax.Precision.HIGHEST
            ),
            images,
            image,
        )
        ahead = weights_alone(ahead)
        is_better = found @ products @ found <= row[place]
        is_better &= trees.is_finite(ahead)
        scale = trees.reciprocal(learning_rate)

        def of_leaf(g, a):
            return (g - jnp.where(is_better, a, 0) * scale).astype(g.dtype)

        state = Steps(inner, state.num_steps + 1, images, gradients, products)
        return jax.tree.map(of_leaf, given, ahead), state

    return optax.GradientTransformation(init, update)


def _products(rows: jax.Array, one: jax.Array) -> jax.Array:
    """Multiplies one leaf of all gradients with that of the newest, `[places]`."""
    flat = rows.reshape(len(rows), -1)
    return jnp.matmul(flat, one.reshape(-1), precision=jax.lax.Precision.HIGHEST)
