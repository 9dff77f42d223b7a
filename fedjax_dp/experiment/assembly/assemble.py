"""Assembles an experiment from its configuration, and checks everything before any work."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import checks, files, trees
from fedjax_dp.core.backend import programs_folder
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.evaluation import Evaluator, evaluator
from fedjax_dp.engine.execution.compile import Simulation, simulation
from fedjax_dp.engine.facts import population_of as sizes_and_shapes
from fedjax_dp.engine.federation import Federation, federation
from fedjax_dp.engine.layout import ExecutionConfig, Tuned
from fedjax_dp.engine.model_axis import ModelAxis
from fedjax_dp.evaluation.metrics import AnyMetric, metrics_of, require_fits
from fedjax_dp.evaluation.noised import by_rows
from fedjax_dp.experiment.assembly.build import (
    build_algorithm,
    build_model,
    build_problem,
    build_trainer,
    calibrated,
    fitting_augmentation,
    parameter_facts,
    record_level,
    setting_of,
)
from fedjax_dp.experiment.assembly.devices import devices_here, offer_devices, require_connected
from fedjax_dp.experiment.assembly.hidden_clusters import hidden_clusters
from fedjax_dp.experiment.assembly.population import build_population
from fedjax_dp.experiment.components.clock import Clock, with_latencies
from fedjax_dp.experiment.components.experiment import Experiment, Population
from fedjax_dp.experiment.components.mechanism import Setting, plans, structure_of
from fedjax_dp.experiment.components.noised import check_evaluated
from fedjax_dp.experiment.components.numbers_by_client import (
    listed,
    names_of,
    with_client_numbers,
    with_named_lists,
)
from fedjax_dp.experiment.components.partitions import PARTITIONS
from fedjax_dp.experiment.components.secure_aggregation import stated_facts, under_masks
from fedjax_dp.experiment.components.unseen import key_of
from fedjax_dp.experiment.components.wrappers import wrapper_of
from fedjax_dp.experiment.reading.analysis import Sections, require_analysis
from fedjax_dp.experiment.reading.validate import Counted, counted, validate
from fedjax_dp.experiment.schema.config import (
    Config,
    DiscreteGaussianLevel,
    EvaluationSection,
    ExecutionSection,
    RunSection,
)
from fedjax_dp.experiment.schema.constraints import keyed
from fedjax_dp.io.trials import TrialFiles, read_measured
from fedjax_dp.models.base import Model
from fedjax_dp.server.secure import MaskKeys

# The keys of the division of a model.
_MODEL_AXIS = {
    "model_axis": "execution.model_devices",
    "model_axis.size": "execution.model_devices",
    "model_axis.rules": "execution.model_rules",
}


class Parts(NamedTuple):
    """What server and nodes of a federation both need: data, model and algorithm."""

    config: Config  # With one number for each client in the clients' order.
    population: Population
    model: Model
    participation: Participation
    trainer: LocalTrainer
    setting: Setting  # The numbers that privacy is planned with.
    algorithm: FederatedAlgorithm  # With calibrated noise and messages under masks.
    keys: MaskKeys | None  # Those of masks.
    clock: Clock | None
    metrics: Mapping[str, AnyMetric]  # Those of evaluations.


def parts_of(config: Config, population: Population | None = None) -> Parts:
    """Builds the parts that a node of a federation needs too, as `assemble` does."""
    config, built = _planned(config)
    if population is None:
        population = population_of(config)
    if population.chosen:
        data = config.data.model_copy(update=population.chosen)
        config = config.model_copy(update={"data": data})
    config = listed(config, names_of(population.train))
    train, privacy = population.train, config.privacy
    _require_client_test(config.evaluation, population)
    if built is None or built.participation.num_clients != train.num_clients:
        built = counted(config, train.num_clients)
    participation = built.participation
    sections = Sections(privacy, config.participation, config.training)
    require_analysis(sections, train.num_clients, train.sizes)
    model = build_model(config.model, population, config.run.seed)
    metrics = metrics_of(config.run.metrics, population.class_names)
    require_fits(metrics, model)
    augmentation = fitting_augmentation(config.data, train)
    trainer = build_trainer(config.training, record_level(privacy), model, augmentation)
    setting = setting_of(config, participation, built.graph, model)
    problem = build_problem(config.algorithm, privacy, setting, population)
    algorithm = build_algorithm(config.algorithm, privacy.unit, model, trainer, problem)
    if "record" in privacy.units and privacy.record.noise_multiplier is None:
        algorithm = calibrated(
            config.algorithm.name, algorithm, privacy.record, setting, train.sizes
        )
    facts = sizes_and_shapes(train, population.validation)
    algorithm, keys = under_masks(
        config.secure_aggregation, setting.graph, participation, algorithm, facts
    )
    return Parts(
        config,
        population,
        model,
        participation,
        trainer,
        setting,
        algorithm,
        keys,
        built.clock,
        metrics,
    )


def checked_config(config: Config) -> Config:
    """Checks a configuration before data are read; returns it with its lists by client in place."""
    return _planned(config)[0]


def _planned(config: Config) -> tuple[Config, Counted | None]:
    """Checks a configuration; also returns the parts that need the number of clients alone."""
    # A copy with other values was not checked when it was made.
    config = Config(**{name: each for name, each in config if name in config.model_fields_set})
    config = with_latencies(with_named_lists(with_client_numbers(config)))
    return config, validate(listed(config, None))


def assemble(config: Config, population: Population | None = None) -> Experiment:
    """Assembles an experiment; nothing is compiled or trained yet.

    Args:
      config: the configuration.
      population: the data, where they are built already or on other machines; None to build those
        of the configuration.

    Returns:
      The parts of the experiment.

    Raises:
      ValueError: if a choice does not exist, does not fit the data, or claims privacy that it would
        not have.
    """
    require_connected(config.execution)
    offer_devices(devices_here(config.execution))
    execution = execution_of(config.execution, config.run)
    if population is not None and population.is_elsewhere:
        # No device holds records that are not here.
        rule = "be 1 for clients on other machines, which train there"
        size = config.execution.model_devices
        checks.require(size == 1, "execution.model_devices", rule, size)
        rule, splits = "be false for clients on other machines", config.execution.split_clients
        checks.require(not splits, "execution.split_clients", rule, splits)
        rule, products = "be 'exact' for clients on other machines", config.execution.products
        checks.require(products == "exact", "execution.products", rule, products)
        execution = execution._replace(placement="host", clients_per_chunk=1)
    parts = parts_of(config, population)
    config, population, model, setting = parts.config, parts.population, parts.model, parts.setting
    privacy, secure = config.privacy, config.secure_aggregation
    level = privacy.client if "client" in privacy.units else None
    plan = plans(level, setting)(1.0) if isinstance(level, DiscreteGaussianLevel) else None
    compiled = simulation(
        parts.algorithm,
        population.train,
        parts.participation,
        execution,
        validation=population.validation,
        wrapper=wrapper_of(config, model, population.train.num_clients, parts.clock),
    )
    levels = {u: getattr(privacy, u) for u in privacy.units}
    return Experiment(
        config=config.model_copy(update={"execution": _settled(config.execution, compiled)}),
        population=population,
        model=model,
        simulation=compiled,
        evaluator=_evaluator(compiled, parts),
        client_clip_norm=privacy.client.clip_norm if "client" in levels else None,
        dp_delta={u: level.dp_delta for u, level in levels.items()},
        budget={u: level.epsilon for u, level in levels.items() if level.epsilon is not None},
        num_parameters=trees.num_parameters(structure_of(model)),
        stated=stated_facts(secure, setting.graph, parts.keys, plan)
        | parameter_facts(config.model, model),
        clock=parts.clock,
    )


def federation_of(config: Config, population: Population) -> Federation:
    """Binds the algorithm of an experiment to its clients, under its wrappers; compiles nothing."""
    parts = parts_of(config, population)
    facts = sizes_and_shapes(population.train, population.validation)
    bound = federation(parts.algorithm, facts, parts.participation)
    wrapper = wrapper_of(parts.config, parts.model, population.train.num_clients, parts.clock)
    return bound if wrapper is None else wrapper(bound)


def population_of(config: Config) -> Population:
    """Builds the data that an experiment trains on and is evaluated on."""
    population = build_population(config.data, config.data_seed)
    is_pooled = algorithms.ALGORITHMS[config.algorithm.name].pools_clients
    return population.pooled() if is_pooled else population


def execution_of(section: ExecutionSection, run: RunSection) -> ExecutionConfig:
    """Returns the checked layout; no compiled call runs past an evaluation or a checkpoint."""
    stops = min(run.evaluate_every, run.checkpoint_every)
    size, rules = section.model_devices, section.model_rules
    rule = "be left out without execution.model_devices above 1"
    checks.require(size > 1 or not rules, "execution.model_rules", rule, rules)
    with keyed("execution"):
        measured = None if section.measured is None else read_measured(section.measured)
    with keyed("execution", _MODEL_AXIS):
        execution = ExecutionConfig(
            clients_per_chunk=_chunk_of(section),
            devices=section.devices,
            placement=section.placement,
            rounds_per_call=min(stops, run.rounds),
            model_axis=ModelAxis(size, rules) if size > 1 else None,
            split_clients=section.split_clients,
            debug=section.debug,
            products=section.products,
            measured=measured,
        )
        execution.validate()
    return execution


def _chunk_of(section: ExecutionSection) -> int | str | Tuned:
    """Returns the clients per chunk; times of layouts are kept beside compiled programs."""
    folder = programs_folder()
    if section.clients_per_chunk != "tuned" or folder is None or "://" in folder:
        return section.clients_per_chunk
    return Tuned(TrialFiles(files.expanded(folder) / "layouts"))


def _require_client_test(section: EvaluationSection, population: Population) -> None:
    checks.require(
        section.personal == "received" or population.client_test is not None,
        "evaluation.personal",
        "be 'received' if clients have no test data, as with data.client_test_share = 0",
        section.personal,
    )


def _evaluator(compiled: Simulation, parts: Parts) -> Evaluator:
    config, population, section = parts.config, parts.population, parts.config.evaluation
    name, has_server_model = compiled.algorithm.name, compiled.federation.shared is not None
    # One client that holds all data is in no cluster.
    hidden = None
    if not algorithms.ALGORITHMS[config.algorithm.name].pools_clients:
        hidden = hidden_clusters(section, population, parts.model, config.run.seed)
    is_tested = has_server_model or population.client_test is not None
    partition = config.data.partition
    rule = f"hold out examples of each client for {name}, which has no server model to evaluate"
    is_asked = partition is None or not PARTITIONS[partition].changes_examples
    checks.require(is_tested or is_asked, "data.partition", rule, partition)
    checks.require(
        is_tested,
        "data.client_test_share",
        f"be above 0 for {name}, which has no server model to evaluate on the test set",
        config.data.client_test_share,
    )
    rule = f"be left out for {name}, which has no server model for clients that never take part"
    has_model = has_server_model or population.unseen is None
    held_out = config.data.unseen_clients or config.data.unseen_client_share
    checks.require(has_model, key_of(config.data), rule, held_out)
    is_noised = section.noise_multiplier is not None and parts.model.correct_fn is not None
    made = evaluator(
        compiled,
        # What is released must hold for a model that mixes rows and does not say so.
        by_rows(parts.model) if is_noised else parts.model,
        population.train,
        whole=population.test,
        clients=population.client_test,
        metrics=parts.metrics,
        trainer=parts.trainer if section.personal == "after_local" else None,
        on_training=section.training,
        hidden=hidden,
        unseen=population.unseen,
    )
    check_evaluated(config, parts.model, made)
    return made


def _settled(section: ExecutionSection, compiled: Simulation) -> ExecutionSection:
    """Records the chosen layout, so that a resumed run uses the same, in one process or more."""
    found: dict[str, Any] = {"devices": compiled.layout.mesh_size}
    found |= {"coordinator": None, "num_processes": None, "process_id": None}
    found["products"] = compiled.layout.arithmetic.products
    if section.clients_per_chunk == "tuned":
        found["clients_per_chunk"] = compiled.layout.chunk
    return section.model_copy(update=found)
