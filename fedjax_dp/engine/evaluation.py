"""Evaluates the state of a simulation: the shared model, or every client's own."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.signatures import checked
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.cohort import Examples
from fedjax_dp.engine.compile import Simulation
from fedjax_dp.engine.federation import Federation, examples_of
from fedjax_dp.engine.layout import power_of_two
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.rows import Neighbours, Rows
from fedjax_dp.evaluation.evaluate import Evaluation, personal_evaluator, shared_evaluator
from fedjax_dp.evaluation.metrics import Metric
from fedjax_dp.models.base import Model

# Training examples that are on the device together while personal models look at them.
_PART_BYTES = 2**28


class Evaluator(NamedTuple):
    """Compiled evaluations of a simulation's state; each is None where there is nothing to do.

    Attributes:
      whole: `(state) -> Evaluation` of the shared model on one held-out set.
      clients: `(state) -> Evaluation` on the held-out data of each client, of the model that this
        client would use.
      is_personal: whether that is a model of its own, and not the shared one.
    """

    whole: Callable[[SimulationState], Evaluation] | None
    clients: Callable[[SimulationState], Evaluation] | None
    is_personal: bool = False


@checked
def evaluator(
    simulation: Simulation | Federation,
    model: Model,
    train: FederatedData,
    *,
    whole: FederatedData | None = None,
    clients: FederatedData | None = None,
    metrics: Mapping[str, Metric] = {},
) -> Evaluator:
    """Compiles what can be evaluated of a simulation.

    Args:
      simulation: the simulation, or its federation.
      model: the model that it trains.
      train: the clients' training data, which some algorithms read to choose a personal model.
      whole: held-out data for the shared model, clients not told apart.
      clients: held-out data of each client, as many clients as `train` has.
      metrics: figures beside loss and accuracy, by name.

    Returns:
      The evaluator.

    Raises:
      ValueError: if the number of clients differs.
    """
    federation = simulation.federation if isinstance(simulation, Simulation) else simulation
    shared, personal = federation.shared, federation.personal
    on_whole = on_clients = None
    if whole is not None and shared is not None:
        on_whole = _of_shared(shared, shared_evaluator(model, whole, metrics=metrics))
    if clients is not None:
        checks.require(
            clients.num_clients == train.num_clients,
            "clients",
            f"hold data of the {train.num_clients} clients that train",
            clients.num_clients,
        )
        if personal is not None:
            on_clients = _of_personal(personal, model, train, clients, metrics)
        elif shared is not None:
            on_clients = _of_shared(shared, shared_evaluator(model, clients, metrics=metrics))
    return Evaluator(on_whole, on_clients, clients is not None and personal is not None)


def _of_shared(shared: Any, run: Any) -> Callable[[SimulationState], Evaluation]:
    return lambda state: run(shared(state))


def _of_personal(
    personal: Any,
    model: Model,
    train: FederatedData,
    clients: FederatedData,
    metrics: Mapping[str, Metric],
) -> Callable[[SimulationState], Evaluation]:
    """Evaluates the model of every client, which may look at the client's training data.

    Only a model that does look brings them to the device: at once where they are few, and kept
    there; else so many clients at a time as fit. Rows on the disk come in such parts too.
    """
    examples = examples_of(train)

    def params_of(index, state, held):
        return personal(state, held.client(index))

    everybody = np.arange(train.num_clients, dtype=np.int32)
    placed: list[Any] = []

    def in_parts(state: SimulationState) -> Iterator[tuple[np.ndarray, Any]]:
        rows = state.clients if isinstance(state.clients, Rows) else None

        def of(few: np.ndarray) -> SimulationState:
            if rows is None:
                return state
            return state._replace(clients=Neighbours(np.int32(few[0]), rows.many(few)))

        is_read = _reads(params_of, of(everybody[:1]), examples)
        is_cut = is_read and train.num_bytes > _PART_BYTES
        num_bytes = max(
            train.num_bytes if is_cut else 1,
            0 if rows is None else rows.file.num_bytes * train.num_clients,
        )
        if not is_cut and not placed:
            placed.append(jax.device_put(examples if is_read else _without_records(examples)))
        count = min(train.num_clients, -(-num_bytes // _PART_BYTES))
        for few in np.array_split(everybody, count):
            yield few, (of(few), _part(train, examples, few) if is_cut else placed[0])

    return personal_evaluator(model, clients, params_of, in_parts=in_parts, metrics=metrics)


def _part(train: FederatedData, examples: Examples, clients: np.ndarray) -> Examples:
    """Copies the examples of neighbouring clients, in few sizes, so that few programs are made."""
    first, last = train.offsets[clients[0]], train.offsets[clients[-1] + 1]
    room = power_of_two(last - first)

    def rows(array: np.ndarray) -> np.ndarray:
        part = np.zeros((room, *array.shape[1:]), array.dtype)
        part[: last - first] = array[first:last]
        return part

    arrays = jax.tree.map(rows, examples.arrays)
    return dataclasses.replace(
        examples, arrays=arrays, starts=(train.offsets[:-1] - first).astype(np.int32)
    )


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
    return examples.replace(arrays=jax.tree.map(lambda v: np.asarray(v[:1]), examples.arrays))
