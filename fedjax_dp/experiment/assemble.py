"""Builds the parts of an experiment from its configuration, checking all of it before any work."""

import dataclasses
from typing import Any, NamedTuple

import dp_accounting
import jax
import numpy as np
import optax

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.core import checks, trees
from fedjax_dp.data import participants
from fedjax_dp.data.federated import example_structure
from fedjax_dp.engine.calibration import calibrate
from fedjax_dp.engine.evaluation import Evaluator, evaluator
from fedjax_dp.engine.execution import ExecutionConfig
from fedjax_dp.engine.simulate import Simulation, init_key, simulation
from fedjax_dp.experiment.analysis import SAMPLERS, participation_of, require_analysis
from fedjax_dp.experiment.budgets import with_named_lists
from fedjax_dp.experiment.config import Config, Numbers
from fedjax_dp.experiment.devices import offer_devices
from fedjax_dp.experiment.mechanism import (
    charged_rounds,
    client_aggregator,
    rounded_up,
    structure_of,
)
from fedjax_dp.experiment.population import Population, build_population
from fedjax_dp.experiment.validate import OPTIMIZERS, check_one_for_each, validate
from fedjax_dp.models import registry as models
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.calibration import calibrate_noise_multiplier, calibrate_poisson


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
    dp_delta: dict[str, Numbers]
    budget: dict[str, Any]
    num_parameters: int


def assemble(config: Config) -> Experiment:
    """Builds an experiment.

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
    stops = min(config.run.evaluate_every, config.run.checkpoint_every)
    execution = ExecutionConfig(
        clients_per_chunk=config.execution.clients_per_chunk,
        devices=config.execution.devices,
        placement=config.execution.placement,
        rounds_per_call=min(stops, config.run.rounds),
    )
    execution.validate()
    population = build_population(config)
    train = population.train
    model = build_model(config, population)
    participation = participation_of(config, train.num_clients)
    require_analysis(config, train.sizes)
    trainer = build_trainer(config, model, train.sizes)
    algorithm = build_algorithm(config, model, trainer, participation, population.public_x)
    if "record" in config.privacy.units and config.privacy.record.noise_multiplier is None:
        algorithm = _calibrated(config, algorithm, trainer, train.sizes, participation)
    compiled = simulation(algorithm, train, participation, execution)
    checks.require(
        algorithm.model_of is not None or population.client_test is not None,
        "data.client_test_share",
        f"be above 0 for {algorithm.name}, which has no server model that the test set could judge",
        config.data.client_test_share,
    )
    evaluations = evaluator(
        compiled, model, train, whole=population.test, clients=population.client_test
    )
    levels = {u: getattr(config.privacy, u) for u in config.privacy.units}
    return Experiment(
        config=_settled(config, compiled),
        population=population,
        model=model,
        simulation=compiled,
        evaluator=evaluations,
        client_clip_norm=config.privacy.client.clip_norm if "client" in levels else None,
        dp_delta={u: level.dp_delta for u, level in levels.items()},
        budget={u: level.epsilon for u, level in levels.items() if level.epsilon is not None},
        num_parameters=trees.num_parameters(structure_of(model)),
    )


def build_model(config: Config, population: Population) -> Model:
    """Builds the model of an experiment.

    Args:
      config: the configuration.
      population: the data of the clients.

    Returns:
      The model of what is trained; what is frozen has the values that the run would start with.

    Raises:
      ValueError: for an option that does not exist, or patterns that freeze nothing or all.
    """
    model = models.build(
        config.model.name,
        example_structure(population.train),
        population.num_classes,
        **config.model.options,
    )
    if not config.model.frozen:
        return model
    start = jax.jit(model.init)(init_key(jax.random.key(config.run.seed)))
    return model.freeze(config.model.frozen, start)


def build_algorithm(
    config: Config,
    model: Model,
    trainer: LocalTrainer,
    participation: participants.Participation,
    public_x: np.ndarray | None,
) -> FederatedAlgorithm:
    """Builds the algorithm of an experiment.

    Args:
      config: the configuration, named lists resolved.
      model: what is trained.
      trainer: local training.
      participation: who joins a round.
      public_x: public inputs, where the data have some.

    Returns:
      The algorithm, for the population of `participation`.

    Raises:
      ValueError: as `algorithms.registry.build`.
    """
    is_private = "client" in config.privacy.units
    structure = structure_of(model)
    return algorithms.build(
        config.algorithm.name,
        model,
        trainer,
        num_clients=participation.num_clients,
        num_rounds=config.run.rounds,
        unit=config.privacy.unit,
        aggregator=client_aggregator(config, participation, structure) if is_private else None,
        epsilon=_declared(config, participation.num_clients),
        public_x=public_x,
        options=config.algorithm.options,
    )


def _settled(config: Config, compiled: Simulation) -> Config:
    """Writes down the layout that was found, so that a run is resumed in the same one."""
    mesh = compiled.shape.mesh
    found: dict[str, Any] = {"devices": 1 if mesh is None else mesh.size}
    if config.execution.clients_per_chunk == "tuned":
        found["clients_per_chunk"] = compiled.shape.chunk
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, **found))


def _numbers(value: Any) -> Any:
    return np.asarray(value, dtype=np.float32) if value is not None else None


def build_trainer(config: Config, model: Model, sizes: np.ndarray) -> LocalTrainer:
    """Builds the local training of an experiment.

    Args:
      config: the configuration.
      model: what is trained.
      sizes: examples of each client, `[num_clients]`.

    Returns:
      The trainer; its noise multiplier is 1 where it is still to be calibrated.

    Raises:
      ValueError: for numbers out of range.
    """
    section, is_private = config.training, "record" in config.privacy.units
    name = section.sampler
    if name == "auto":
        name = "poisson" if is_private else "shuffled"
    sampler = SAMPLERS[name]()

    def configured(learning_rate: Any) -> optax.GradientTransformation:
        return OPTIMIZERS[section.optimizer](learning_rate, **section.optimizer_options)

    optimizer = configured if section.optimizer_options else OPTIMIZERS[section.optimizer]
    numbers = LocalConfig(
        learning_rate=_numbers(section.learning_rate),
        batch_size=_numbers(section.batch_size),
        num_epochs=_numbers(section.num_epochs),
        num_steps=_numbers(section.num_steps),
    )
    build = local_trainer
    common: dict[str, Any] = {
        "optimizer": optimizer,
        "sampler": sampler,
        "micro_batch_size": section.micro_batch_size,
    }
    if not is_private:
        return build(model, numbers, **common)
    level = config.privacy.record
    for budget in ("epsilon", "dp_delta"):
        check_one_for_each(f"privacy.record.{budget}", getattr(level, budget), len(sizes))
    noise = 1.0 if level.noise_multiplier is None else level.noise_multiplier
    numbers = numbers._replace(
        clip_norm=_numbers(level.clip_norm), noise_multiplier=_numbers(noise)
    )
    numbers.validate(len(sizes))
    return dp_sgd_trainer(model, numbers, per_layer=level.per_layer, **common)


def _declared(config: Config, num_clients: int) -> np.ndarray | None:
    """Gives the budgets that clients declare, where their records have some."""
    epsilon = config.privacy.record.epsilon
    if "record" not in config.privacy.units or epsilon is None:
        return None
    return np.broadcast_to(np.asarray(epsilon, dtype=np.float64), num_clients)


def _calibrated(
    config: Config,
    algorithm: FederatedAlgorithm,
    trainer: LocalTrainer,
    sizes: np.ndarray,
    participation: participants.Participation,
) -> FederatedAlgorithm:
    """Gives each client the noise multiplier that its own budget asks for."""
    level = config.privacy.record
    promise = {"accountant": config.privacy.accountant, "relation": config.privacy.relation}
    if algorithm.stages is not None:
        budget = (level.epsilon, level.dp_delta)
        return calibrate(algorithm, sizes, *budget, config.run.rounds, **promise)
    rounds = charged_rounds(config, participation)
    noise = _noise_multipliers(config, trainer, sizes, rounds, **promise)
    return algorithm._replace(config=algorithm.config._replace(noise_multiplier=_numbers(noise)))


def _noise_multipliers(
    config: Config, trainer: LocalTrainer, sizes: np.ndarray, rounds: int, **promise: str
) -> np.ndarray:
    """Finds each client's noise multiplier for its own budget over the rounds it may be drawn."""
    level, numbers = config.privacy.record, trainer.config
    target, delta = (
        np.broadcast_to(np.asarray(x, dtype=np.float64), sizes.shape)
        for x in (level.epsilon, level.dp_delta)
    )
    budgets = algorithms.ALGORITHMS[config.algorithm.name].budgets
    target = target if budgets is None else budgets(target)
    steps = rounds * np.asarray(trainer.num_steps(sizes, numbers))
    trains = (sizes > 0) & (steps > 0)
    noise = np.ones(len(sizes))
    if config.training.sampler in ("auto", "poisson"):
        batch = np.broadcast_to(np.asarray(numbers.batch_size, dtype=np.float64), sizes.shape)
        rate = np.minimum(1.0, batch / np.maximum(sizes, 1))
        noise[trains] = calibrate_poisson(
            target[trains], delta[trains], rate[trains], steps[trains], **promise
        )
        return rounded_up(noise)
    assert trainer.event is not None
    for client in np.flatnonzero(trains):
        row = jax.tree.map(np.asarray, numbers.row(client))

        def run_of(z: float, row: LocalConfig = row, size: int = int(sizes[client])) -> Any:
            one = trainer.event(size, row._replace(noise_multiplier=z))  # type: ignore[misc]
            return dp_accounting.SelfComposedDpEvent(one, rounds)

        noise[client] = calibrate_noise_multiplier(
            run_of, float(target[client]), float(delta[client]), **promise
        )
    return rounded_up(noise)
