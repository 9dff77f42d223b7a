"""A client's loss as a quadratic function: its proximal step is exact, by one factorisation."""

import flax.struct
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model

# The number of rows read at once.
_BLOCK = 1024
# A client's state holds the square of this number.
_MOST_PARAMETERS = 4096


@flax.struct.dataclass
class Quadratic:
    """The mean loss of a client, `½ wᵀ V Λ Vᵀ w − mᵀ Vᵀ w` up to a constant."""

    vectors: jax.Array  # V, eigenvectors of the Hessian, `[p, p]`, float32.
    values: jax.Array  # The diagonal of Λ, at least 0, `[p]`, float32.
    moment: jax.Array  # M, minus the gradient at zero by eigenvectors, `[p]`, float32.
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


def proximal_move(quadratic: Quadratic, at: PyTree, step_size: jax.typing.ArrayLike) -> PyTree:
    """Computes `argmin_x f(x) + ‖x − v‖² / (2 η)` minus v, so that little is lost to rounding.

    Source: Malekmohammadi 2025, equation 2.5.
    """
    flat, to_params = ravel_pytree(at)
    with jax.default_matmul_precision("highest"):
        residual = quadratic.moment - quadratic.values * (flat @ quadratic.vectors)
        shrunk = residual * step_size / (1 + step_size * quadratic.values)
        return to_params(quadratic.vectors @ shrunk)
