"""Evaluates the state of a simulation: the server's model, or every client's own."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from fedjax_dp.clients.base import ClientData
from fedjax_dp.core import checks, trees
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.simulate import Simulation
from fedjax_dp.evaluation.evaluate import Evaluation, personal_evaluator, shared_evaluator
from fedjax_dp.models.base import Model


class Evaluator(NamedTuple):
    """Compiled evaluations of a simulation's state; each is None where there is nothing to do.

    Attributes:
      whole: `(state) -> Evaluation` of the server's model on one held-out set.
      clients: `(state) -> Evaluation` on the held-out data of each client, of the model that this
        client would use.
    """

    whole: Callable[[SimulationState], Evaluation] | None
    clients: Callable[[SimulationState], Evaluation] | None


def evaluator(
    simulation: Simulation,
    model: Model,
    train: FederatedData,
    *,
    whole: FederatedData | None = None,
    clients: FederatedData | None = None,
) -> Evaluator:
    """Compiles what can be evaluated of a simulation.

    Args:
      simulation: the simulation.
      model: the model that it trains.
      train: the clients' training data, which some algorithms read to choose a personal model.
      whole: held-out data for the server's model, clients not told apart.
      clients: held-out data of each client, as many clients as `train` has.

    Returns:
      The evaluator.

    Raises:
      ValueError: if the number of clients differs.
    """
    algorithm = simulation.algorithm
    on_whole = on_clients = None
    if whole is not None and algorithm.model_of is not None:
        model_of, run = algorithm.model_of, shared_evaluator(model, whole)

        def on_whole(state: SimulationState) -> Evaluation:
            return run(model_of(state.server))

    if clients is not None:
        checks.require(
            clients.num_clients == train.num_clients,
            "clients",
            f"hold data of the {train.num_clients} clients that train",
            clients.num_clients,
        )
        personal = algorithm.personal_model_of
        if personal is None and algorithm.model_of is not None:
            shared_of, shared = algorithm.model_of, shared_evaluator(model, clients)

            def on_clients(state: SimulationState) -> Evaluation:
                return shared(shared_of(state.server))

        elif personal is not None:
            limit = simulation.shape.limit
            starts = jax.device_put(train.offsets[:-1].astype(np.int32))
            sizes = jax.device_put(train.sizes.astype(np.int32))
            examples = jax.device_put({k: np.asarray(v) for k, v in train.examples.items()})

            def params_of(index, server, rows, examples, starts, sizes):
                view = ClientData(examples, starts[index], sizes[index], index, limit=limit)
                row = None if rows is None else trees.take(rows, index)
                return personal(server, row, view)

            own = personal_evaluator(model, clients, params_of)

            def on_clients(state: SimulationState) -> Evaluation:
                return own(state.server, state.rows, examples, starts, sizes)

    return Evaluator(on_whole, on_clients)
