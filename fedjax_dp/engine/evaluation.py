"""Evaluates the state of a simulation: the shared model, or every client's own."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import ClusterModel, Hyper
from fedjax_dp.clients.base import LocalTrainer, Objective
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, jaxprs, masks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.arrays import require_same_rows
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.engine.client_store import ClientStore, StorePart
from fedjax_dp.engine.cohort import Examples, typed
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.evaluation.clusters import HiddenClusters
from fedjax_dp.evaluation.evaluate import Evaluation, personal_evaluator, shared_evaluator
from fedjax_dp.evaluation.metrics import AnyMetric
from fedjax_dp.models.base import Model

# Bytes of training examples that are on the device at once for personal models.
_PART_BYTES = 2**28


class FoundClusters(NamedTuple):
    """The clusters of clients, `(state) -> [clients]` or None, beside the hidden ones."""

    hidden: HiddenClusters
    assigned: Callable[[SimulationState], np.ndarray | None]


class Evaluator(NamedTuple):
    """Compiled evaluations of a simulation's state; each is None if there is nothing to do.

    Attributes:
      whole: `(state) -> Evaluation` of the shared model on one held-out set.
      clients: `(state) -> Evaluation` on the held-out data of each client, of the model that this
        client would use.
      is_personal: whether that is a personal model, not the shared one.
      after_local: `(state, hyper, key) -> Evaluation` on the same data, of the model that each
        client would have after one more round of local training.
      training: `(state) -> Evaluation` on the training data of each client, of the model that this
        client would use.
      clusters: the clusters of the clients, and the true ones that they are compared with.
      unseen: `(state) -> Evaluation` of the shared model on the data of each client that never
        takes part.
    """

    whole: Callable[[SimulationState], Evaluation] | None
    clients: Callable[[SimulationState], Evaluation] | None
    is_personal: bool = False
    after_local: Callable[..., Evaluation] | None = None
    training: Callable[[SimulationState], Evaluation] | None = None
    clusters: FoundClusters | None = None
    unseen: Callable[[SimulationState], Evaluation] | None = None


@checked
def evaluator(
    simulation: Simulation | Federation,
    model: Model,
    train: FederatedData,
    *,
    whole: FederatedData | None = None,
    clients: FederatedData | None = None,
    metrics: Mapping[str, AnyMetric] = {},
    trainer: LocalTrainer | None = None,
    on_training: bool = False,
    hidden: HiddenClusters | None = None,
    unseen: FederatedData | None = None,
) -> Evaluator:
    """Compiles the evaluations of a simulation.

    `trainer` is plain local training from the model that a client would use, without an algorithm's
    additions, such as proximal terms or control variates; pruned weights stay 0. No state, record
    or ledger sees it. Like every evaluation it is exact, for the experimenter, whatever is claimed.

    Args:
      simulation: the simulation, or its federation.
      model: the model that it trains.
      train: the clients' training data, which some algorithms read to choose a personal model.
      whole: held-out data for the shared model, of all clients together.
      clients: held-out data of each client, as many clients as `train` has.
      metrics: metrics in addition to loss and accuracy, by name.
      trainer: local training of clients' models for `Evaluator.after_local`, which is None without
        it or without `clients`.
      on_training: whether to evaluate on `train` too, see `Evaluator.training`; with references
        of hidden clusters it is.
      hidden: the true clusters of the clients, if results are to be compared with them.
      unseen: data of clients that never take part. They have no states, so that only a shared
        model can be evaluated on them; without one `Evaluator.unseen` is None.

    Returns:
      The evaluator.

    Raises:
      ValueError: if the number of clients, or the shape of their examples, differs.
    """
    for part, held_out in (("whole", whole), ("clients", clients), ("unseen", unseen)):
        if held_out is not None:
            require_same_rows(part, held_out.examples, "training", train.examples)
    federation = simulation.federation if isinstance(simulation, Simulation) else simulation
    shared, personal = federation.shared, federation.personal
    on_whole = on_clients = after_local = on_unseen = None
    if whole is not None and shared is not None:
        on_whole = _of_shared(shared, shared_evaluator(model, whole, metrics=metrics))
    if clients is not None:
        checks.require(
            clients.num_clients == train.num_clients,
            "clients",
            f"hold data of the {train.num_clients} clients that train",
            clients.num_clients,
        )
        on_clients = _of_each(federation, model, train, clients, metrics)
        if trainer is not None:
            trained = _after(trainer, personal or _always(shared))
            run = _of_personal(trained, model, train, clients, metrics)
            after_local = partial(_with_numbers, run)
    if unseen is not None and shared is not None:
        on_unseen = _of_shared(shared, shared_evaluator(model, unseen, metrics=metrics))
    compares = hidden is not None and hidden.references is not None
    has_train = on_training or compares
    on_train = _of_each(federation, model, train, train, metrics) if has_train else None
    is_personal = clients is not None and personal is not None
    found = None if hidden is None else _found(hidden, federation, train)
    return Evaluator(on_whole, on_clients, is_personal, after_local, on_train, found, on_unseen)


def of_shared(evaluator: Evaluator) -> Evaluator:
    """Leaves out personal models, for a server that has no client states."""
    if not evaluator.is_personal:
        return evaluator
    return Evaluator(evaluator.whole, None, unseen=evaluator.unseen)


def _of_each(
    federation: Federation,
    model: Model,
    train: FederatedData,
    data: FederatedData,
    metrics: Mapping[str, AnyMetric],
) -> Callable[[SimulationState], Evaluation] | None:
    """Evaluates the model that each client would use on data of the same clients."""
    shared, personal = federation.shared, federation.personal
    if personal is not None:
        return _of_personal(personal, model, train, data, metrics)
    if shared is not None:
        return _of_shared(shared, shared_evaluator(model, data, metrics=metrics))
    return None


def _of_shared(shared: Any, run: Any) -> Callable[[SimulationState], Evaluation]:
    return lambda state: run(shared(state))


def _always(shared: Any) -> Callable[[SimulationState, ClientData], PyTree]:
    """Returns the shared model for every client."""
    return lambda state, client: shared(state)


def _after(trainer: LocalTrainer, model_of: Any) -> Callable[..., PyTree]:
    """Trains the model of a client for one more round, whose state is discarded."""

    def trained(state: SimulationState, client: ClientData, hyper: Hyper, key: PRNGKey) -> PyTree:
        start, mask = masks.parted(model_of(state, client))
        own_key = fold(key, Purpose.EVALUATION, state.round, client.index)
        numbers = hyper.at(state.round).of_client(client.index).local
        return trainer.train(start, client, numbers, own_key, objective=Objective(mask=mask)).params

    return trained


def _with_numbers(run: Any, state: SimulationState, hyper: Hyper, key: PRNGKey) -> Evaluation:
    return run(state, typed(hyper), key)


def _of_personal(
    personal: Any,
    model: Model,
    train: FederatedData,
    clients: FederatedData,
    metrics: Mapping[str, AnyMetric],
) -> Callable[..., Evaluation]:
    """Evaluates each client's model; training data and stored states come in parts if large."""

    def params_of(index, state, held, *numbers):
        return masks.parted(personal(state, held.client(index), *numbers))[0]

    in_parts = _in_parts(params_of, train)
    return personal_evaluator(model, clients, params_of, in_parts=in_parts, metrics=metrics)


def _found(hidden: HiddenClusters, federation: Federation, train: FederatedData) -> FoundClusters:
    """Finds the cluster of each client, as its personal model has it."""
    view = federation.views.personal

    def cluster_of(index, state, held):
        found = None if view is None else view(state, held.client(index))
        return found.cluster if isinstance(found, ClusterModel) else None

    in_parts = _in_parts(cluster_of, train)

    @jax.jit
    def of_clients(clients, state, held):
        return jax.lax.map(lambda index: cluster_of(index, state, held), clients)

    def assigned(state: SimulationState) -> np.ndarray | None:
        parts = [of_clients(few, *numbers) for few, numbers in in_parts(state)]
        return None if parts[0] is None else np.concatenate(parts)

    return FoundClusters(hidden, assigned)


def _in_parts(read: Any, train: FederatedData) -> Callable[..., Iterator[tuple[np.ndarray, Any]]]:
    """Divides clients into groups whose states and training data, if they are read, fit."""
    examples = examples_of(train)
    indices = np.arange(train.num_clients, dtype=np.int32)
    placed: list[Any] = []

    def in_parts(state: SimulationState, *numbers: Any) -> Iterator[tuple[np.ndarray, Any]]:
        store = state.clients if isinstance(state.clients, ClientStore) else None

        def of(few: np.ndarray) -> SimulationState:
            if store is None:
                return state
            return state._replace(clients=StorePart(np.int32(few[0]), store.many(few)))

        is_read = _reads(read, of(indices[:1]), examples, *numbers)
        is_cut = is_read and train.num_bytes > _PART_BYTES
        num_bytes = max(
            train.num_bytes if is_cut else 1,
            0 if store is None else store.file.num_bytes * train.num_clients,
        )
        if not is_cut and not placed:
            placed.append(jax.device_put(examples if is_read else _without_records(examples)))
        count = min(train.num_clients, -(-num_bytes // _PART_BYTES))
        for few in np.array_split(indices, count):
            held = _part(train, examples, few) if is_cut else placed[0]
            yield few, (of(few), held, *numbers)

    return in_parts


def _part(train: FederatedData, examples: Examples, clients: np.ndarray) -> Examples:
    """Takes the examples of neighbouring clients out of those of all."""
    arrays, starts = train.slab(clients)
    return dataclasses.replace(examples, arrays=nested(arrays), starts=starts)


def _reads(read: Any, state: Any, examples: Any, *numbers: Any) -> bool:
    """Checks whether a view of a client depends on the training data."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), examples)

    def of_arrays(arrays, state):
        return read(
            jnp.int32(0),
            state,
            shapes.replace(
                arrays=arrays, starts=jnp.zeros(1, jnp.int32), sizes=jnp.ones(1, jnp.int32)
            ),
            *numbers,
        )

    is_read = jaxprs.inputs_read(jax.make_jaxpr(of_arrays)(shapes.arrays, state))
    return any(is_read[: len(jax.tree.leaves(shapes.arrays))])


def _without_records(examples: Any) -> Any:
    """Keeps one record of each array."""
    return examples.replace(arrays=jax.tree.map(lambda v: np.asarray(v[:1]), examples.arrays))
