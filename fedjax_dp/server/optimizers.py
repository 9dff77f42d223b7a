"""Server steps: an Optax optimiser that reads the aggregate as a negative gradient."""

from typing import Any

import jax
import optax

from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree, library_promotion
from fedjax_dp.server.masking import masked, unmasked


@checked
def apply_aggregate(
    optimizer: optax.GradientTransformation,
    opt_state: Any,
    params: PyTree,
    aggregate: PyTree,
    is_buffer: PyTree | None = None,
) -> tuple[Any, PyTree]:
    """Takes one server step along the aggregate.

    Args:
      optimizer: the server's optimiser; `optax.sgd(1.0)` adds the aggregate.
      opt_state: its state.
      params: the server's parameters.
      aggregate: the aggregated delta, local minus server, the structure of the parameters; of a
        `Masked` one the optimiser reads the mean, and its step is masked.
      is_buffer: marks leaves that are not weights, such as batch-norm statistics, to which the
        aggregate is added unchanged; a tree of bools, or None if there are none.

    Returns:
      The new optimiser state and parameters.

    Source: Reddi and others 2021, algorithm 1.
    """
    mean, mask = unmasked(aggregate)
    gradient = jax.tree.map(lambda a, p: (-a).astype(p.dtype), mean, params)
    with library_promotion():
        updates, after = optimizer.update(gradient, opt_state, params)
    # Traced numbers are float32, and would widen the state of a narrow model.
    opt_state = trees.cast_like(after, opt_state)
    updates = masked(updates, mask)
    if is_buffer is not None:
        updates = jax.tree.map(lambda u, g, plain: -g if plain else u, updates, gradient, is_buffer)
    with library_promotion():
        return opt_state, optax.apply_updates(params, updates)
