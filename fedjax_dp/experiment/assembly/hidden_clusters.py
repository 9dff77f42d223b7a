"""The true clusters of an experiment's clients, and models without privacy to compare with."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.references import local_only
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.core import checks
from fedjax_dp.core.devices import is_distributed
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData, flat
from fedjax_dp.engine.execution.compile import simulation
from fedjax_dp.evaluation.clusters import HiddenClusters, References
from fedjax_dp.evaluation.evaluate import personal_evaluator
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.experiment.schema.config import EvaluationSection, ReferencesSection
from fedjax_dp.models.base import Model

_BATCH_SIZE = 32


def hidden_clusters(
    section: EvaluationSection, population: Population, model: Model, seed: int
) -> HiddenClusters | None:
    """Returns the clusters to compare with; references are trained when they are first used."""
    true, references = population.clusters, section.references
    if not section.clusters:
        return None
    rule = "be false for a partition that makes no clusters of clients"
    checks.require(true is not None, "evaluation.clusters", rule, section.clusters)
    assert true is not None
    if references.epochs is None:
        return HiddenClusters(true)
    rule = "be left out with several processes"
    checks.require(not is_distributed(), "evaluation.references.epochs", rule, references.epochs)
    return HiddenClusters(true, cache(lambda: _references(references, population, model, seed)))


def _references(
    section: ReferencesSection, population: Population, model: Model, seed: int
) -> References:
    """Trains a model on each cluster's pooled data, and evaluates it on each of its clients."""
    train, true = population.train, population.clusters
    assert true is not None and section.epochs is not None
    names, place = np.unique(true, return_inverse=True)
    pooled = FederatedData.from_clients(
        [
            {
                key: np.concatenate([flat(train.client(int(i)))[key] for i in members])
                for key in train.examples
            }
            for members in (np.flatnonzero(true == name) for name in names)
        ]
    )
    config = LocalConfig(learning_rate=section.learning_rate, batch_size=_BATCH_SIZE)
    all_clients = participants.participation(sampling.full_participation(), pooled.num_clients)
    trained = simulation(local_only(model, local_trainer(model, config)), pooled, all_clients)
    key = jax.random.key(seed)
    state, *_ = trained.run(trained.init(key), key, section.epochs)
    table = jnp.asarray(place)

    def params_of(client: jax.Array, models: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[table[client]], models)

    held_out = population.client_test
    accuracy = None
    if held_out is not None:
        found = personal_evaluator(model, held_out, params_of)(state.clients)
        accuracy = found.client_accuracy
    loss = personal_evaluator(model, train, params_of)(state.clients).client_loss
    return References(accuracy, loss)
