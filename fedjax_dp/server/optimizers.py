"""Server steps: an Optax optimiser that reads the aggregate as a negative gradient."""

from typing import Any

import jax
import optax

from fedjax_dp.core.trees import PyTree


def apply_aggregate(
    optimizer: optax.GradientTransformation, opt_state: Any, params: PyTree, aggregate: PyTree
) -> tuple[Any, PyTree]:
    """Takes one server step along the aggregate.

    Args:
      optimizer: the server's optimiser; `optax.sgd(1.0)` adds the aggregate.
      opt_state: its state.
      params: the server's parameters.
      aggregate: the aggregated delta, local minus server, the structure of the parameters.

    Returns:
      The new optimiser state and parameters.

    Source: Reddi and others 2021, algorithm 1.
    """
    gradient = jax.tree.map(lambda a, p: (-a).astype(p.dtype), aggregate, params)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return opt_state, optax.apply_updates(params, updates)
