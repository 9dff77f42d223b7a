"""An experiment and its data as values, and what a run calls: callbacks, a deployment."""

import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedjax_dp.algorithms.references import pool
from fedjax_dp.data import statistics
from fedjax_dp.data.datasets.base import Encoding
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.evaluation import Evaluator
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.components.clock import Clock
from fedjax_dp.experiment.components.numbers_by_client import named
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.models.base import Model


class Population(NamedTuple):
    """The data of an experiment.

    Attributes:
      train: training examples by client.
      client_test: held-out examples of each client, or None.
      test: the data set's own test part as one client, or None.
      public_x: public inputs without labels, `[queries, ...]`, or None.
      num_classes: number of classes or tokens.
      has_class_labels: whether `y` holds the class of each example.
      validation: examples of each client that its rounds may read besides the training ones, or
        None.
      exact_statistics: descriptions of exact statistics of the training part that entered examples.
      notes: descriptions of properties of the data that may be unintended.
      sharing: training records that several clients hold.
      class_names: names of the classes in the order of their labels, if the data set has them.
      feature_names: names of the inputs in their order, if the data set has them.
      chosen: keys of [data] that the data decided, with their values, such as the partition that
        made the clients.
      is_elsewhere: whether the training records are on other machines; `train` then has their sizes
        and shapes alone.
      clusters: the hidden cluster of each client, `[clients]`, or None.
      unseen: all examples of the clients that never take part, or None; no other part has them.
      encoding: how the cells of a table became inputs and labels, or None.
      is_test_of_clients: whether the test part has rows of the clients in `train`.
    """

    train: FederatedData
    client_test: FederatedData | None
    test: FederatedData | None
    public_x: np.ndarray | None
    num_classes: int
    has_class_labels: bool
    validation: FederatedData | None = None
    exact_statistics: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sharing: statistics.Sharing = statistics.Sharing()
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    is_elsewhere: bool = False
    chosen: Mapping[str, Any] = {}
    clusters: np.ndarray | None = None
    unseen: FederatedData | None = None
    encoding: Encoding | None = None
    is_test_of_clients: bool = False

    def statistics(self) -> statistics.PartitionStatistics:
        """Describes how examples are spread over clients."""
        label = "y" if self.has_class_labels else None
        described = statistics.describe_data(self.train, label)
        if self.class_names:
            named = tuple(self.class_names[int(each)] for each in described.labels)
            described = dataclasses.replace(described, labels=named)
        return dataclasses.replace(described, num_shared=self.sharing.num_shared)

    def pooled(self) -> "Population":
        """Pools the training data as one client, with nothing held out for it."""
        whole = self._replace(train=pool(self.train), client_test=None, validation=None, notes=())
        return whole._replace(clusters=None)


class Experiment(NamedTuple):
    """All parts of an experiment, ready to run.

    Attributes:
      config: the configuration, with one number for each client in the clients' order.
      population: the data of the clients.
      model: the model to train.
      simulation: the compiled rounds.
      evaluator: the compiled evaluations.
      client_clip_norm: bound on one client's update, or None if clients are not protected.
      dp_delta: δ by unit; of records, one number or one for each client.
      budget: ε by unit that must not be exceeded.
      num_parameters: number of parameters that are trained and sent.
      stated: further facts for the statement, by name: on masks, with the party that a claim for
        clients then trusts, and on a deployment.
      clock: the simulated clock, or None.
    """

    config: Config
    population: Population
    model: Model
    simulation: Simulation
    evaluator: Evaluator
    client_clip_norm: Any
    dp_delta: dict[str, float | list[float]]
    budget: dict[str, Any]
    num_parameters: int
    stated: Mapping[str, Any] = {}
    clock: Clock | None = None

    @property
    def claimed_delta(self) -> dict[str, float | list[float]]:
        """δ by unit that is claimed: the mean over realised cohorts claims none."""
        units = self.simulation.federation.claims.units
        return {unit: delta for unit, delta in self.dp_delta.items() if unit in units}

    @property
    def written(self) -> Config:
        """The configuration as stored in a run folder: numbers by client under their names."""
        return named(self.config, self.population.train)


class Progress(NamedTuple):
    """The input of a callback after an evaluation; the last of `rows` holds its metrics.

    `warn` reports a warning, which the summary of the run has too.
    """

    rows: Sequence[Mapping[str, Any]]
    state: SimulationState
    experiment: Experiment
    folder: pathlib.Path
    warn: Callable[[str], None] = warnings.warn


class Callback(NamedTuple):
    """A function that is called after each evaluation.

    A resumed run calls it again for the rounds that are run again, so its decision should depend on
    `Progress.rows` alone.

    Attributes:
      call: `(progress) -> bool | None`; true stops the run.
      is_private: whether its decision depends on released models and public facts alone. If so, and
        it stops a run, ε is that of all planned rounds, any of which could have been the last; if
        not, the statement declares that ε does not cover when the run ended.
    """

    call: Callable[[Progress], bool | None]
    is_private: bool = False


class Deployment(Protocol):
    """Where the rounds of an experiment run."""

    def population(self, config: Config, folder: pathlib.Path | None) -> Population | None:
        """Returns clients whose data are there; None if the configuration says where data are.

        The folder is that of a run that is resumed, or None.
        """

    def deploy(self, experiment: Experiment) -> Experiment:
        """Returns the experiment with another simulation, whose rounds run there."""

    def open(self, folder: pathlib.Path, rounds: int) -> Sequence[RoundRecord]:
        """Opens a run folder; returns the records of all rounds that it has sent, in order.

        They are charged when a run resumes, also those whose outcome was lost; a ValueError if the
        completed rounds, `rounds` of them, are not among them.
        """
