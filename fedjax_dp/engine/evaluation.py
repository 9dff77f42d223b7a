"""Evaluates the state of a simulation: the shared model, or every client's own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.compile import Simulation
from fedjax_dp.engine.federation import Federation, examples_of
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.evaluation.evaluate import Evaluation, personal_evaluator, shared_evaluator
from fedjax_dp.models.base import Model


class Evaluator(NamedTuple):
    """Compiled evaluations of a simulation's state; each is None where there is nothing to do.

    Attributes:
      whole: `(state) -> Evaluation` of the shared model on one held-out set.
      clients: `(state) -> Evaluation` on the held-out data of each client, of the model that this
        client would use.
    """

    whole: Callable[[SimulationState], Evaluation] | None
    clients: Callable[[SimulationState], Evaluation] | None


def evaluator(
    simulation: Simulation | Federation,
    model: Model,
    train: FederatedData,
    *,
    whole: FederatedData | None = None,
    clients: FederatedData | None = None,
) -> Evaluator:
    """Compiles what can be evaluated of a simulation.

    Args:
      simulation: the simulation, or its federation.
      model: the model that it trains.
      train: the clients' training data, which some algorithms read to choose a personal model.
      whole: held-out data for the shared model, clients not told apart.
      clients: held-out data of each client, as many clients as `train` has.

    Returns:
      The evaluator.

    Raises:
      ValueError: if the number of clients differs.
    """
    federation = simulation.federation if isinstance(simulation, Simulation) else simulation
    shared, personal = federation.shared, federation.personal
    on_whole = on_clients = None
    if whole is not None and shared is not None:
        on_whole = _of_shared(shared, shared_evaluator(model, whole))
    if clients is not None:
        checks.require(
            clients.num_clients == train.num_clients,
            "clients",
            f"hold data of the {train.num_clients} clients that train",
            clients.num_clients,
        )
        if personal is not None:
            on_clients = _of_personal(personal, model, train, clients)
        elif shared is not None:
            on_clients = _of_shared(shared, shared_evaluator(model, clients))
    return Evaluator(on_whole, on_clients)


def _of_shared(shared: Any, run: Any) -> Callable[[SimulationState], Evaluation]:
    return lambda state: run(shared(state))


def _of_personal(
    personal: Any, model: Model, train: FederatedData, clients: FederatedData
) -> Callable[[SimulationState], Evaluation]:
    """Evaluates the model of every client, which may look at the client's training data.

    Only a model that does look brings them to the device; a population that streams is never put
    there for models that do not.
    """
    examples = examples_of(train)

    def params_of(index, state, held):
        return personal(state, held.client(index))

    placed: list[Any] = []

    def on_clients(state: SimulationState) -> Evaluation:
        if not placed:
            is_read = _reads(params_of, state, examples)
            placed.append(jax.device_put(examples if is_read else _without_records(examples)))
        return own(state, placed[0])

    own = personal_evaluator(model, clients, params_of)
    return on_clients


def _reads(params_of: Any, state: Any, examples: Any) -> bool:
    """Tells whether a personal model depends on the training data."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), examples)

    def of_arrays(arrays, state):
        return params_of(
            jnp.int32(0),
            state,
            shapes.replace(
                arrays=arrays, starts=jnp.zeros(1, jnp.int32), sizes=jnp.ones(1, jnp.int32)
            ),
        )

    jaxpr = jax.make_jaxpr(of_arrays)(shapes.arrays, state).jaxpr
    read = {var for eqn in jaxpr.eqns for var in eqn.invars if not hasattr(var, "val")}
    of_data = jaxpr.invars[: len(jax.tree.leaves(shapes.arrays))]
    return any(var in read for var in of_data)


def _without_records(examples: Any) -> Any:
    """Leaves one row of each array."""
    return examples.replace(arrays={k: np.asarray(v[:1]) for k, v in examples.arrays.items()})
