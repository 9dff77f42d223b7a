"""Local objectives as Optax transforms, and steps to a proximal point."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, ranges, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Bound, Count, NonNegative
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model


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


# The number of rows read at once.
_BLOCK = 1024
# A client's state holds the square of this number.
_MOST_PARAMETERS = 4096


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


@flax.struct.dataclass
class Quadratic:
    """The mean loss of a client, `½ wᵀ V Λ Vᵀ w − mᵀ Vᵀ w` up to a constant."""

    vectors: jax.Array  # V, eigenvectors of the Hessian, `[p, p]`, float32.
    values: jax.Array  # The diagonal of Λ, at least 0, `[p]`, float32.
    moment: jax.Array  # m, minus the gradient at zero by eigenvectors, `[p]`, float32.
    is_ready: jax.Array  # Whether it has been computed, bool.


def unread(params: PyTree) -> Quadratic:
    """Returns zeros, for a client whose records have not been read."""
    count = trees.num_parameters(params)
    rule = f"have at most {_MOST_PARAMETERS} parameters for an exact proximal step"
    checks.require(count <= _MOST_PARAMETERS, "model", rule, count)
    return Quadratic(
        jnp.zeros((count, count)), jnp.zeros(count), jnp.zeros(count), jnp.bool_(False)
    )


def factorise(model: Model, client: ClientData, like: PyTree) -> Quadratic:
    """Computes a client's quadratic loss: Hessian and gradient by blocks, compensated float32."""
    zero, to_params = ravel_pytree(trees.zeros_like(like))

    def of_block(i):
        rows = i * _BLOCK + jnp.arange(min(_BLOCK, client.limit))
        batch, is_real = client.gather(rows), rows < client.size

        def loss(flat):
            return jnp.sum(model.losses(to_params(flat), batch, mask=is_real)[0])

        slope = jax.grad(loss)
        return -slope(zero), jax.jacfwd(slope)(zero)

    with jax.default_matmul_precision("highest"):
        num_blocks = -(-client.size // _BLOCK)
        total = jax.lax.fori_loop(
            0,
            num_blocks,
            lambda i, total: sums.add(total, of_block(i)),
            sums.zeros_like(jax.eval_shape(of_block, 0)),
        )
        moment, hessian = trees.scale(sums.value(total), trees.reciprocal(client.size))
        values, vectors = jnp.linalg.eigh((hessian + hessian.T) / 2)
        return Quadratic(vectors, jnp.maximum(values, 0), moment @ vectors, jnp.bool_(True))


def proximal_move(quadratic: Quadratic, point: PyTree, step_size: jax.typing.ArrayLike) -> PyTree:
    """Computes `argmin_x f(x) + ‖x − v‖² / (2 η)` minus v, so that little is lost to rounding.

    Source: Malekmohammadi 2025, equation 2.5.
    """
    flat, to_params = ravel_pytree(point)
    with jax.default_matmul_precision("highest"):
        residual = quadratic.moment - quadratic.values * (flat @ quadratic.vectors)
        shrunk = residual * step_size / (1 + step_size * quadratic.values)
        return to_params(quadratic.vectors @ shrunk)


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
        plain, inner = transform.update(gradient, state.inner, params)
        newest = state.num_steps % places

        def written(rows, one):
            return jax.tree.map(lambda r, x: r.at[newest].set(x.astype(r.dtype)), rows, one)

        wide = weights_alone(jax.tree.map(trees.at_least_float32, plain))
        image = jax.tree.map(lambda x, g: x - learning_rate * g, params, wide)
        images, gradients = written(state.images, image), written(state.gradients, wide)
        row = sum(jax.tree.leaves(jax.tree.map(_products, gradients, wide)), jnp.zeros(places))
        products = state.products.at[newest, :].set(row).at[:, newest].set(row)
        counts = jnp.arange(places) <= state.num_steps
        weights = mixing_weights(products, counts, newest, ridge, 0.0)
        # Differences of images lose less to rounding than the images themselves.
        ahead = jax.tree.map(
            lambda rows, one: jnp.tensordot(
                weights, rows - one, 1, precision=jax.lax.Precision.HIGHEST
            ),
            images,
            image,
        )
        ahead = weights_alone(ahead)
        is_better = weights @ products @ weights <= row[newest]
        is_better &= trees.is_finite(ahead)
        scale = trees.reciprocal(learning_rate)

        def of_leaf(g, a):
            return (g - jnp.where(is_better, a, 0) * scale).astype(g.dtype)

        state = Steps(inner, state.num_steps + 1, images, gradients, products)
        return jax.tree.map(of_leaf, plain, ahead), state

    return optax.GradientTransformation(init, update)


def _products(rows: jax.Array, one: jax.Array) -> jax.Array:
    """Multiplies one leaf of all gradients with that of the newest, `[places]`."""
    flat = rows.reshape(len(rows), -1)
    return jnp.matmul(flat, one.reshape(-1), precision=jax.lax.Precision.HIGHEST)
