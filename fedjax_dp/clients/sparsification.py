"""Local update sparsification: a client keeps the part of its update that its own loss needs."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.clients.transforms import UpdateTransform, mask_of_largest
from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Form
from fedjax_dp.core.ranges import Decay
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model

Score = Literal["cost", "cost_of_last_step", "magnitude"]
SCORES = get_args(Score)


@checked
def sparsify(model: Model, sparsity: Decay, *, score: Score = "cost") -> UpdateTransform:
    """Zeroes the entries of an update that matter least to the client: LUS.

    The cost of an entry is `|∂f/∂w · Δw|`, what undoing it would change in the client's own loss,
    to first order. In every layer (each parameter tensor) the costliest entries stay.

    The choice is never sent: noise must be on all entries. "cost" reads records, so that training
    which is private for records refuses it; the two others are post-processing of what was
    released.

    Args:
      model: the model; buffers, such as batch-norm statistics, are left as they are.
      sparsity: c, the share of entries to drop in each layer, in [0, 1); at least one stays. 0
        leaves the update as it is.
      score: "cost" takes the gradient of the mean loss over all of the client's data at its final
        model, "cost_of_last_step" the gradient of the last local step, which was taken just before
        that model, and "magnitude" ignores gradients.

    Returns:
      The transform. It keeps exactly `max(1, round((1 − c) · size))` entries of each layer; ties by
      index.

    Raises:
      ValueError: for a number or a name that is out of range.

    Source: Cheng and others 2022 (LUS), section 4.2, equations 11 to 13.
    """
    declaration = declared_sparsification(sparsity, score)
    share = 1 - sparsity

    def scores_of(delta, context):
        if score == "magnitude":
            return jax.tree.map(jnp.abs, delta)
        gradient = context.gradient
        if score == "cost":
            gradient = mean_gradient(model, context.params, context.client)
        return jax.tree.map(lambda g, d: jnp.abs(g * d), gradient, delta)

    def keep(delta, context):
        if sparsity == 0:
            return delta

        def kept(d, s, is_buffer):
            return d if is_buffer else jnp.where(mask_of_largest(s, share), d, 0)

        return jax.tree.map(kept, delta, scores_of(delta, context), model.is_buffer(delta))

    return dataclasses.replace(declaration, apply=keep)


@checked
def declared_sparsification(sparsity: Decay, score: Score) -> UpdateTransform:
    """Returns the declaration of `sparsify`, before there is a model to build it for."""
    return UpdateTransform(
        lambda delta, context: delta,
        reads_records=score == "cost" and sparsity > 0,
        name=f"sparsify with score {score!r}",
        instead="the scores 'cost_of_last_step' and 'magnitude' read none",
        form=Form.sparse if sparsity > 0 else lambda form: form,
    )


def mean_gradient(
    model: Model, params: PyTree, client: ClientData, *, block_size: int = 128
) -> PyTree:
    """Computes the gradient of a client's mean loss, without dropout; not private."""
    block = min(block_size, client.limit)

    def body(i, total):
        rows = i * block + jnp.arange(block)
        is_real = rows < client.size
        batch = client.gather(rows)

        def loss(p):
            return jnp.sum(model.losses(p, batch, mask=is_real)[0])

        return trees.add(total, jax.tree.map(trees.at_least_float32, jax.grad(loss)(params)))

    zeros = jax.tree.map(lambda p: trees.at_least_float32(jnp.zeros_like(p)), params)
    num_blocks = client.widest(-(-client.size // block))
    total = jax.lax.fori_loop(0, num_blocks, body, zeros)
    return trees.scale(total, 1 / jnp.maximum(client.size, 1))
