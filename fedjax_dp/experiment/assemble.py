"""Builds the parts of an experiment from its configuration, checking all of it before any work."""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.registry import Problem
from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.core import checks, trees
from fedjax_dp.data.federated import example_structure
from fedjax_dp.engine.calibration import calibrate
from fedjax_dp.engine.compile import Simulation, simulation
from fedjax_dp.engine.evaluation import Evaluator, evaluator
from fedjax_dp.engine.federation import init_key
from fedjax_dp.engine.layout import ExecutionConfig
from fedjax_dp.experiment.analysis import Asked, require_analysis
from fedjax_dp.experiment.budgets import with_named_lists
from fedjax_dp.experiment.config import (
    AlgorithmSection,
    Config,
    ExecutionSection,
    ModelSection,
    PrivacySection,
    RecordLevel,
    RunSection,
    TrainingSection,
)
from fedjax_dp.experiment.devices import offer_devices
from fedjax_dp.experiment.mechanism import Setting, client_aggregator, structure_of
from fedjax_dp.experiment.optimizers import local_optimizer, optimizer_numbers
from fedjax_dp.experiment.participation import batches_of, participation_of
from fedjax_dp.experiment.population import Population, build_population
from fedjax_dp.experiment.validate import check_one_for_each, validate
from fedjax_dp.models import registry as models
from fedjax_dp.models.base import Model


class Experiment(NamedTuple):
    """All parts of an experiment, ready to run.

    Attributes:
      config: what was asked for.
      population: the data of the clients.
      model: what is trained.
      simulation: the compiled rounds.
      evaluator: the compiled evaluations.
      client_clip_norm: bound on one client's update, or None where clients are not protected.
      dp_delta: δ by unit; of records, one number or one for each client.
      budget: ε by unit that must not be exceeded.
      num_parameters: size of what is trained and sent.
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


def assemble(config: Config) -> Experiment:
    """Builds an experiment.

    Here alone the configuration is taken apart: each section makes its part.

    Args:
      config: the configuration.

    Returns:
      The experiment; nothing has been compiled or trained.

    Raises:
      ValueError: for any choice that does not exist, does not fit the data, or claims a privacy
        that it would not have.
    """
    config = with_named_lists(config)
    validate(config)
    offer_devices(config.execution.devices)
    execution = execution_of(config.execution, config.run)
    population = population_of(config)
    train, privacy = population.train, config.privacy
    require_analysis(Asked(privacy, config.participation, config.training), train.sizes)
    model = build_model(config.model, population, config.run.seed)
    participation = participation_of(config.participation, train.num_clients)
    trainer = build_trainer(config.training, record_level(privacy), model, train.sizes)
    setting = Setting(participation, structure_of(model), config.run.rounds, privacy.promise)
    problem = build_problem(privacy, setting, population)
    algorithm = build_algorithm(config.algorithm, privacy.unit, model, trainer, problem)
    if "record" in privacy.units and privacy.record.noise_multiplier is None:
        algorithm = calibrated(
            config.algorithm.name, algorithm, privacy.record, setting, train.sizes
        )
    compiled = simulation(algorithm, train, participation, execution)
    share = config.data.client_test_share
    evaluations = _evaluator(compiled, model, population, share)
    levels = {u: getattr(privacy, u) for u in privacy.units}
    return Experiment(
        config=config.model_copy(update={"execution": _settled(config.execution, compiled)}),
        population=population,
        model=model,
        simulation=compiled,
        evaluator=evaluations,
        client_clip_norm=privacy.client.clip_norm if "client" in levels else None,
        dp_delta={u: level.dp_delta for u, level in levels.items()},
        budget={u: level.epsilon for u, level in levels.items() if level.epsilon is not None},
        num_parameters=trees.num_parameters(setting.structure),
    )


def population_of(config: Config) -> Population:
    """Gives the data that an experiment trains on and is judged by.

    Args:
      config: the configuration.

    Returns:
      The population; its clients are put together where the algorithm does so.

    Raises:
      ValueError: as `build_population`.
    """
    population = build_population(config.data, config.run.seed)
    is_pooled = algorithms.ALGORITHMS[config.algorithm.name].pools_clients
    return population.pooled() if is_pooled else population


def execution_of(section: ExecutionSection, run: RunSection) -> ExecutionConfig:
    """Makes the layout of rounds.

    Args:
      section: what was asked for.
      run: how often a run is looked at, which bounds how many rounds are one call.

    Returns:
      The layout, checked.

    Raises:
      ValueError: for a layout that does not exist.
    """
    stops = min(run.evaluate_every, run.checkpoint_every)
    execution = ExecutionConfig(
        clients_per_chunk=section.clients_per_chunk,
        devices=section.devices,
        placement=section.placement,
        rounds_per_call=min(stops, run.rounds),
    )
    execution.validate()
    return execution


def build_model(section: ModelSection, population: Population, seed: int) -> Model:
    """Builds the model of an experiment.

    Args:
      section: the model.
      population: the data of the clients.
      seed: root of the initial parameters.

    Returns:
      The model of what is trained; what is frozen has the values that the run would start with.

    Raises:
      ValueError: for patterns that freeze nothing or all.
    """
    example = example_structure(population.train)
    model = models.build(section.name, example, population.num_classes, **section.options)
    if not section.frozen:
        return model
    start = jax.jit(model.init)(init_key(jax.random.key(seed)))
    return model.freeze(section.frozen, start)


def record_level(privacy: PrivacySection) -> RecordLevel | None:
    """Gives the mechanism on records, where records are protected.

    Args:
      privacy: what is protected.

    Returns:
      The section, or None.
    """
    return privacy.record if "record" in privacy.units else None


def build_trainer(
    section: TrainingSection, level: RecordLevel | None, model: Model, sizes: np.ndarray
) -> LocalTrainer:
    """Builds the local training of an experiment.

    Args:
      section: local training.
      level: the mechanism on records; None where they are not protected.
      model: what is trained.
      sizes: examples of each client, `[num_clients]`.

    Returns:
      The trainer; its noise multiplier is 1 where it is still to be calibrated.

    Raises:
      ValueError: for numbers that are not one for each client.
    """
    numbers = LocalConfig(
        learning_rate=_numbers(section.learning_rate),
        batch_size=_numbers(section.batch_size),
        num_epochs=_numbers(section.num_epochs),
        num_steps=_numbers(section.num_steps),
        optimizer=optimizer_numbers(section.optimizer_options),
    )
    common: dict[str, Any] = {
        "optimizer": local_optimizer(section.optimizer, section.optimizer_options),
        "sampler": batches_of(section, is_private=level is not None),
        "micro_batch_size": section.micro_batch_size,
    }
    if level is None:
        return local_trainer(model, numbers, **common)
    for budget in ("epsilon", "dp_delta"):
        check_one_for_each(f"privacy.record.{budget}", getattr(level, budget), len(sizes))
    noise = 1.0 if level.noise_multiplier is None else level.noise_multiplier
    numbers = numbers._replace(
        clip_norm=_numbers(level.clip_norm), noise_multiplier=_numbers(noise)
    )
    numbers.validate(len(sizes))
    return dp_sgd_trainer(model, numbers, per_layer=level.per_layer, **common)


def _numbers(value: Any) -> Any:
    return np.asarray(value, dtype=np.float32) if value is not None else None


def build_problem(privacy: PrivacySection, setting: Setting, population: Population) -> Problem:
    """Gathers the facts that algorithms can be given.

    Args:
      privacy: what is protected.
      setting: participation, model and length of the run.
      population: the data of the clients.

    Returns:
      The facts; the private mean is calibrated.

    Raises:
      ValueError: as `client_aggregator`.
    """
    num_clients, units = setting.participation.num_clients, privacy.units
    epsilon = privacy.record.epsilon if "record" in units else None
    declared = None
    if epsilon is not None:
        declared = np.broadcast_to(np.asarray(epsilon, dtype=np.float64), num_clients)
    return Problem(
        num_clients=num_clients,
        num_rounds=setting.num_rounds,
        aggregator=client_aggregator(privacy.client, setting) if "client" in units else None,
        declared_epsilon=declared,
        public_x=population.public_x,
    )


def build_algorithm(
    section: AlgorithmSection, unit: str, model: Model, trainer: LocalTrainer, problem: Problem
) -> FederatedAlgorithm:
    """Builds the algorithm of an experiment.

    Args:
      section: the algorithm.
      unit: what is protected.
      model: what is trained.
      trainer: local training.
      problem: the facts that algorithms can be given.

    Returns:
      The algorithm.

    Raises:
      ValueError: as `algorithms.registry.build`.
    """
    return algorithms.build(
        section.name, model, trainer, problem, unit=unit, options=section.options
    )


def calibrated(
    name: str,
    algorithm: FederatedAlgorithm,
    level: RecordLevel,
    setting: Setting,
    sizes: np.ndarray,
) -> FederatedAlgorithm:
    """Gives each client the noise multiplier that its own budget asks for.

    Args:
      name: the algorithm's name in a configuration.
      algorithm: the algorithm.
      level: the mechanism on records, with budgets.
      setting: participation and length of the run, accountant and relation.
      sizes: examples of each client, `[num_clients]`.

    Returns:
      The algorithm with these multipliers.

    Raises:
      ValueError: for a budget that no noise reaches.
    """
    budgets = algorithms.ALGORITHMS[name].budgets
    target = np.broadcast_to(np.asarray(level.epsilon, dtype=np.float64), np.shape(sizes))
    target = target if budgets is None else budgets(target)
    # Rounds of several stages come by their number: a client may be drawn in the dearest.
    is_uniform = algorithm.record is not None and len(algorithm.record.events) == 1
    rounds = setting.charged if is_uniform else setting.num_rounds
    hyper = calibrate(algorithm, sizes, target, level.dp_delta, rounds, **setting.promise)
    return algorithm._replace(hyper=hyper)


def _evaluator(
    compiled: Simulation, model: Model, population: Population, client_test_share: float
) -> Evaluator:
    name, has_server_model = compiled.algorithm.name, compiled.algorithm.shared is not None
    checks.require(
        has_server_model or population.client_test is not None,
        "data.client_test_share",
        f"be above 0 for {name}, which has no server model that the test set could judge",
        client_test_share,
    )
    return evaluator(
        compiled, model, population.train, whole=population.test, clients=population.client_test
    )


def _settled(section: ExecutionSection, compiled: Simulation) -> ExecutionSection:
    """Writes down the layout that was found, so that a run is resumed in the same one."""
    found: dict[str, Any] = {"devices": compiled.layout.num_devices}
    if section.clients_per_chunk == "tuned":
        found["clients_per_chunk"] = compiled.layout.chunk
    return section.model_copy(update=found)
