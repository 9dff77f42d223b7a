"""Builds model, local training and algorithm, each from its own section."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.registry import Problem
from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.core import checks, trees
from fedjax_dp.core.registry import is_own
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.augmentation import Augmentation
from fedjax_dp.data.federated import FederatedData, example_structure
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.accounts.calibration import calibrate, priced_factors
from fedjax_dp.engine.federation import init_key
from fedjax_dp.engine.wrappers.budgets import check_claim
from fedjax_dp.experiment.assembly.population import require_vocabulary
from fedjax_dp.experiment.components.augmentation import augmentation_of
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.experiment.components.mechanism import Setting, client_aggregator, structure_of
from fedjax_dp.experiment.components.noised import noised_accuracy_of
from fedjax_dp.experiment.components.optimizers import local_optimizer, optimizer_numbers
from fedjax_dp.experiment.components.participation import batches_of
from fedjax_dp.experiment.components.planned import KEY, planned_of
from fedjax_dp.experiment.components.schedules import tables_of
from fedjax_dp.experiment.schema.config import (
    AlgorithmSection,
    Config,
    DataSection,
    ModelSection,
    PrivacySection,
    RecordLevel,
    TrainingSection,
)
from fedjax_dp.experiment.schema.constraints import keyed
from fedjax_dp.io.hugging_face import LAYOUTS
from fedjax_dp.io.params import by_path, read_params
from fedjax_dp.models import kinds
from fedjax_dp.models import registry as models
from fedjax_dp.models.base import Model
from fedjax_dp.models.lora import lora
from fedjax_dp.models.weights import EXAMPLE_WEIGHT, balanced, declared, weighted
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.registry import AGGREGATORS, AROUND
from fedjax_dp.server.secure import MaskGraph


def build_model(section: ModelSection, population: Population, seed: int) -> Model:
    """Builds the model; frozen parameters are those of the file, else the seed's initial ones."""
    example = example_structure(population.train)
    options, given = model_options(section, population), dict[str, np.ndarray]()
    if section.pretrained is not None and os.path.isdir(section.pretrained):
        given = LAYOUTS[section.name].params(section.pretrained)
    elif section.pretrained is not None:
        given = read_params(section.pretrained)
    plain = models.build(section.name, example, population.num_classes, **options)
    _require_fitting_loss(section, population, plain)
    require_vocabulary(section, population)
    plain = weighted(
        plain,
        class_weights=class_weights_of(section, population),
        example_weights=EXAMPLE_WEIGHT if EXAMPLE_WEIGHT in example else None,
    )
    model = plain if section.pretrained is None else plain.with_params(given)
    if section.pretrained is not None and os.path.isdir(section.pretrained):
        _require_whole(section, structure_of(plain), given)
    rank, options = section.adapters.rank, section.adapters.model_dump(exclude={"rank"})
    if rank is None and not section.frozen:
        return model
    paths = set(trees.paths(structure_of(plain)))
    # Not from `model.init`, whose program would contain what the file holds.
    drawn = {} if paths <= given.keys() else by_path(_initial(plain, seed))
    base = {**drawn, **given}
    if rank is None:
        return model.freeze(section.frozen, base)
    return lora(model, base, rank=rank, **options)


def _require_fitting_loss(section: ModelSection, population: Population, model: Model) -> None:
    """Refuses losses of numbers, or of several labels, where each example has one class."""
    if is_own(section.name) or not population.has_class_labels:
        return
    loss = declared(model.loss_fn)
    is_of_numbers = model.is_quadratic or (loss and loss.targets in ("numbers", "counts"))
    rule = "be a model of classes, since labels are classes (see the options task and label)"
    checks.require(not is_of_numbers, "model.name", rule, section.name)
    given, rule = section.options.get("loss"), "be a loss of one class for each example"
    checks.require(given != "binary_cross_entropy", "model.options.loss", rule, given)


def model_options(section: ModelSection, population: Population) -> dict[str, Any]:
    """Returns the options of the model: those of its folder, if it has one, and those chosen."""
    if section.pretrained is None or not os.path.isdir(section.pretrained):
        return dict(section.options)
    layout = LAYOUTS[section.name]
    return layout.options(section.pretrained, population.num_classes) | dict(section.options)


def class_weights_of(section: ModelSection, population: Population) -> tuple[float, ...]:
    """Returns the weights of classes in their order; nothing without any."""
    given, key = section.class_weights, "model.class_weights"
    if given is None:
        return ()
    if given == "balanced":
        rule = "be numbers where there is not one class for each example"
        checks.require(population.has_class_labels, key, rule, given)
        with keyed("model"):
            return balanced(np.asarray(population.train.examples["y"]), population.num_classes)
    if isinstance(given, Mapping):
        names, rule = population.class_names, "be a list where classes have no names"
        checks.require(bool(names), key, rule, dict(given))
        rule = f"hold a weight for each of {', '.join(names)}, and no others"
        checks.require(set(given) == set(names), key, rule, sorted(given))
        return tuple(given[name] for name in names)
    return tuple(given)


def _require_whole(section: ModelSection, shapes: PyTree, given: Mapping[str, Any]) -> None:
    """Requires of a folder all but what adapters, or frozen parameters, leave to be trained."""
    others = jax.tree.map(lambda x: False, shapes)
    if section.adapters.rank is not None:
        others = kinds.marked(shapes, section.adapters.trained)
    elif section.frozen:
        others = jax.tree.map(lambda x: not x, kinds.marked(shapes, section.frozen))
    pairs = zip(trees.paths(shapes), jax.tree.leaves(others), strict=True)
    missing = [path for path, is_trained in pairs if not is_trained and path not in given]
    rule = f"hold {missing[0]!r} of the model" if missing else ""
    checks.require(not missing, f"{section.pretrained}", rule, f"{len(missing)} missing")


def _initial(model: Model, seed: int) -> PyTree:
    return jax.jit(model.init)(init_key(jax.random.key(seed)))


def parameter_facts(section: ModelSection, model: Model) -> dict[str, Any]:
    """Collects what a statement says of parameters that the run did not train from nothing."""
    frozen = trees.num_parameters(model.constants)
    if not frozen and section.pretrained is None:
        return {}
    trained = trees.num_parameters(structure_of(model))
    is_pretrained = section.pretrained is not None
    facts = {"num_trained": trained, "num_frozen": frozen, "is_pretrained": is_pretrained}
    return {"parameters": facts}


def record_level(privacy: PrivacySection) -> RecordLevel | None:
    """Returns the mechanism on records, or None if records are not protected."""
    return privacy.record if "record" in privacy.units else None


def fitting_augmentation(section: DataSection, train: FederatedData) -> Augmentation | None:
    """Builds the augmentation of training records, whose shapes must fit it; None without any."""
    made = augmentation_of(section)
    if made is not None:
        with keyed("data.augmentation"):
            made.check(example_structure(train))
    return made


def build_trainer(
    section: TrainingSection,
    level: RecordLevel | None,
    model: Model,
    augmentation: Augmentation | None,
) -> LocalTrainer:
    """Builds local training; a noise multiplier to be calibrated is 1 until then."""
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
        "augmentation": augmentation,
    }
    if level is None:
        return local_trainer(model, numbers, **common)
    noise = 1.0 if level.noise_multiplier is None else level.noise_multiplier
    numbers = numbers._replace(
        clip_norm=_numbers(level.clip_norm), noise_multiplier=_numbers(noise)
    )
    return dp_sgd_trainer(model, numbers, per_layer=level.per_layer, **common)


def _numbers(value: Any) -> Any:
    return np.asarray(value, dtype=np.float32) if value is not None else None


def setting_of(
    config: Config, participation: Participation, graph: MaskGraph | None, model: Model
) -> Setting:
    """Collects the facts that a mechanism on updates depends on besides its numbers."""
    name, promise, rounds = config.algorithm.name, config.privacy.promise, config.run.rounds
    options = algorithms.options_of(name) | config.algorithm.options
    structure = algorithms.ALGORITHMS[name].noised(structure_of(model), options)
    most, factors = config.asynchronous.max_participations, tables_of(config.schedules, rounds)
    noised = noised_accuracy_of(config)
    return Setting(participation, structure, rounds, promise, graph, most, factors, noised)


def build_problem(
    section: AlgorithmSection, privacy: PrivacySection, setting: Setting, population: Population
) -> Problem:
    """Collects the facts that an algorithm may need, with the private mean calibrated."""
    num_clients, units = setting.participation.num_clients, privacy.units
    epsilon = privacy.record.epsilon if "record" in units else None
    declared = None
    if epsilon is not None:
        declared = np.broadcast_to(np.asarray(epsilon, dtype=np.float64), num_clients)
    mechanism = client_aggregator(privacy.client, setting) if "client" in units else None
    aggregator: Aggregator | None = mechanism
    if section.aggregator is not None:
        options = dict(section.aggregator_options)
        if section.aggregator in AROUND:
            options[AROUND[section.aggregator]] = mechanism
        aggregator = AGGREGATORS[section.aggregator](**options)
    return Problem(
        num_clients=num_clients,
        num_rounds=setting.num_rounds,
        aggregator=aggregator,
        declared_epsilon=declared,
        public_x=population.public_x,
    )


def build_algorithm(
    section: AlgorithmSection, unit: str, model: Model, trainer: LocalTrainer, problem: Problem
) -> FederatedAlgorithm:
    """Builds the algorithm of an experiment for one unit of privacy."""
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
    """Sets the noise multiplier of each client to what its own budget needs."""
    planned = planned_of(level, setting.participation, setting.num_rounds)
    if planned is not None:
        with keyed("", {"federation": f"{KEY} must be left out: the algorithm"}):
            check_claim(algorithm.claims.record, name)
    budgets = algorithms.ALGORITHMS[name].budgets
    target = np.broadcast_to(np.asarray(level.epsilon, dtype=np.float64), np.shape(sizes))
    target = target if budgets is None else budgets(target)
    # With several stages all rounds are charged, since a client may be drawn in the costliest.
    is_uniform = algorithm.claims.record is not None and len(algorithm.claims.record.events) == 1
    rounds, factors = setting.num_rounds, setting.factors
    if is_uniform:
        priced = priced_factors(algorithm, sizes, factors)
        rule = f"be left out with schedules of {', '.join(sorted(priced))}, which set prices"
        checks.require(planned is None or not priced, KEY, rule, level.planned_participations)
        factors, rounds = setting.charged_factors(priced, "local.noise_multiplier")
    rounds = min(rounds, planned or rounds)
    deltas = np.asarray(level.dp_delta, dtype=np.float64)
    hyper = calibrate(algorithm, sizes, target, deltas, rounds, factors=factors, **setting.promise)
    return algorithm.with_hyper(hyper)
