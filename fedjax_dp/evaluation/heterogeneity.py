"""Heterogeneity of clients: how much they disagree about the best shared model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.evaluation.evaluate import require_fitting
from fedjax_dp.models.base import Model


class Heterogeneity(NamedTuple):
    """The mean over clients of ‖∇f_i(θ*)‖², in two published conventions.

    Attributes:
      value: as defined, with the gradient of each client's mean loss.
      doubled: 4 times that, with twice the gradient, as in the chapter's figures: its losses have a
        factor ½ that its gradients lack.
      by_client: each client's term of `value`, `[num_clients]`.
    """

    value: float
    doubled: float
    by_client: np.ndarray


@checked
def heterogeneity(
    model: Model, data: FederatedData, params: PyTree, *, block_size: Count = 1024
) -> Heterogeneity:
    """Measures heterogeneity exactly, so the result is not private.

    Args:
      model: defines the loss f_i of a client, the mean over its examples; `least_squares` with the
        clients' size as its scale makes it the sum.
      data: the clients' examples; those without any have the gradient zero.
      params: θ*, a minimiser of the mean over clients; elsewhere H measures the disagreement there.
      block_size: examples that are computed at once; bounds memory.

    Returns:
      H, 0 if one model is best for every client.

    Raises:
      ValueError: for a block without examples, a population without any, or targets that the loss
        is not for.

    Source: Malekmohammadi 2025, section 2.4.6.
    """
    checks.require(data.num_examples > 0, "data", "hold examples", data.num_examples)
    require_fitting(model, data, on_disk=True)
    examples = jax.device_put(nested({k: np.asarray(v) for k, v in data.examples.items()}))
    last = data.num_examples - 1

    @jax.jit
    def square_of(start, size):
        def of_block(i):
            rows = i * block_size + jnp.arange(block_size)
            batch = jax.tree.map(lambda a: a[jnp.clip(start + rows, 0, last)], examples)
            is_real = rows < size

            def loss(params):
                return jnp.sum(model.losses(params, batch, mask=is_real)[0])

            return jax.grad(loss)(params)

        with jax.default_matmul_precision("highest"):
            total = jax.lax.fori_loop(
                0,
                -(-size // block_size),
                lambda i, total: sums.add(total, of_block(i)),
                sums.zeros_like(jax.eval_shape(of_block, 0)),
            )
        return jnp.square(trees.l2_norm(trees.scale(sums.value(total), trees.reciprocal(size))))

    spans = zip(data.offsets[:-1], data.sizes, strict=True)
    by_client = np.array([square_of(np.int32(a), np.int32(n)) for a, n in spans], np.float64)
    value = float(by_client.mean())
    return Heterogeneity(value, 4 * value, by_client)
