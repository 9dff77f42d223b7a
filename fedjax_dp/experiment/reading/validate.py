"""Checks of an experiment that need no data: values and combinations."""

import os
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import optax

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.algorithms.base import Needs
from fedjax_dp.algorithms.ifca import check_clusters
from fedjax_dp.algorithms.registry import Entry
from fedjax_dp.clients.base import check_plain_sgd
from fedjax_dp.clients.sgd import check_whole
from fedjax_dp.clients.transforms import declared
from fedjax_dp.core import checks, files
from fedjax_dp.core.registry import is_own
from fedjax_dp.data import datasets
from fedjax_dp.data.datasets.tabular import EXACT_SCALINGS
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine import layout
from fedjax_dp.engine.accounts.privacy_accounting import require_public_sizes
from fedjax_dp.experiment.components.augmentation import augmentation_of
from fedjax_dp.experiment.components.clock import Clock, clock_of
from fedjax_dp.experiment.components.keeping import check_kept
from fedjax_dp.experiment.components.noised import check_followed, check_noised
from fedjax_dp.experiment.components.numbers_by_client import KEYS
from fedjax_dp.experiment.components.optimizers import local_optimizer
from fedjax_dp.experiment.components.participation import batches_of, participation_of
from fedjax_dp.experiment.components.partitions import PARTITIONS
from fedjax_dp.experiment.components.planned import check_planned
from fedjax_dp.experiment.components.schedules import check_schedules, entries_of, tables_of
from fedjax_dp.experiment.components.secure_aggregation import checked_graph
from fedjax_dp.experiment.components.unseen import check_unseen, num_unseen
from fedjax_dp.experiment.components.wrappers import check_numbers, check_wrappers
from fedjax_dp.experiment.reading.analysis import Sections, require_analysis
from fedjax_dp.experiment.schema.config import (
    AlgorithmSection,
    ClientLevel,
    Config,
    DataSection,
    ExecutionSection,
    GaussianLevel,
    LaplaceLevel,
    ModelSection,
    ObliviousLevel,
    PrivacySection,
    RecordLevel,
    SecureAggregationSection,
    TrainingSection,
)
from fedjax_dp.experiment.schema.constraints import keyed
from fedjax_dp.experiment.schema.sections import OptionalSection, given_in
from fedjax_dp.io.hugging_face import LAYOUTS
from fedjax_dp.server.masking import check_clipping, check_noise
from fedjax_dp.server.parts import check_parts, check_shares
from fedjax_dp.server.registry import AROUND
from fedjax_dp.server.secure import MaskGraph

# Rules of algorithms for options with an entry for each client.
_BY_CLIENT: Mapping[str, Callable[[str, Any, int], Any]] = {
    "declared_epsilon": checks.positive_for_each_client,
    "clusters": check_clusters,
}


class Counted(NamedTuple):
    """The parts of a configuration that need the number of clients alone."""

    participation: Participation
    clock: Clock | None
    graph: MaskGraph | None


def validate(config: Config) -> Counted | None:
    """Checks what is known before data are read; None if only the data count the clients."""
    name, privacy = config.algorithm.name, config.privacy
    entry = algorithms.ALGORITHMS[name]
    algorithms.require_unit(name, privacy.unit)
    algorithms.require_public_inputs(name, config.data.public_examples)
    _check_unused(name, entry, config)
    _check_scaling(config.data, privacy)
    is_exact = config.model.class_weights == "balanced"
    rule = "be numbers under privacy: balanced weights count labels exactly, which no ε covers"
    checks.require(not (privacy.units and is_exact), "model.class_weights", rule, "balanced")
    _check_test_part(config.data)
    check_unseen(config.data)
    check_kept(config.run)
    _check_release(config)
    _check_inactive(config)
    epochs, rule = config.evaluation.references.epochs, "be left out without evaluation.clusters"
    fits = epochs is None or config.evaluation.clusters
    checks.require(fits, "evaluation.references.epochs", rule, epochs)
    check_wrappers(config)
    check_schedules(config)
    check_noised(config)
    check_followed(config)
    _check_masks(config.secure_aggregation)
    _check_aggregator(config.algorithm, entry, privacy)
    options = algorithms.options_of(name) | config.algorithm.options
    with keyed("algorithm.options"):
        needs = entry.needs(options)
        is_client = "client" in privacy.units
        needs.check_weights(is_client or config.algorithm.aggregator is not None)
        if is_client:
            needs.check_clients()
        needs.check_bound(_is_bounded(config.algorithm.aggregator, privacy))
    _check_steps(name, needs, config.training)
    _check_scheduled_rate(name, needs, config)
    _check_augmentation(name, needs, config.data)
    sampler = batches_of(config.training, is_private="record" in privacy.units)
    with keyed("training"):
        check_whole(sampler, config.training.num_steps, config.training.batch_size)
    _check_adapters(config.model)
    _check_paths(config)
    check_processes(config.execution)
    declared("algorithm.options", needs.transforms, is_private="record" in privacy.units)
    require_public_sizes(privacy.relation, "privacy.relation")
    if "record" in privacy.units:
        _check_budget(privacy.record, "privacy.record")
    if "client" in privacy.units:
        _check_client(privacy.client, name, entry)
        _check_update(config, entry, options)
    if (num_clients := known_clients(config)) is not None:
        return counted(config, num_clients)
    clock_of(config, None)
    return None


def counted(config: Config, num_clients: int) -> Counted:
    """Checks everything that is known once the training clients are counted; builds these parts."""
    privacy, options = config.privacy, config.algorithm.options
    for key in KEYS:
        if not key.startswith("privacy.") or "record" in privacy.units:
            checks.one_for_each(key, attrgetter(key)(config), num_clients)
    for key, check in _BY_CLIENT.items():
        if options.get(key) is not None:
            check(f"algorithm.options.{key}", options[key], num_clients)
    check_numbers(config, num_clients)
    num_models, rule = options.get("num_models", 1), f"be at most the {num_clients} clients"
    checks.require(num_models <= num_clients, "algorithm.options.num_models", rule, num_models)
    participation = participation_of(config.participation, num_clients)
    check_planned(config, participation)
    clock = clock_of(config, num_clients, participation)
    _check_parties(config, participation)
    require_analysis(Sections(privacy, config.participation, config.training), num_clients)
    return Counted(participation, clock, checked_graph(config, participation))


def _check_parties(config: Config, participation: Participation) -> None:
    """Refuses oblivious noise that a part of the parties would make, or of which one knows all."""
    level = config.privacy.client
    if "client" not in config.privacy.units or not isinstance(level, ObliviousLevel):
        return
    rule = "draw cohorts of one size for oblivious noise, of which each client makes a share"
    sampler = participation.sampler
    is_fixed = not sampler.varies and participation.min_drawn == participation.cohort_size
    checks.require(is_fixed, "participation.sampler", rule, sampler.name)
    rule = "be at least 2 for oblivious noise"
    count = participation.min_drawn
    checks.require(count >= 2, "the number of clients of a round", rule, count)
    rule = "be left out for oblivious noise, whose protocol has masks of its own"
    form = config.secure_aggregation.form
    checks.require(form is None, "secure_aggregation.form", rule, form)


def known_clients(config: Config) -> int | None:
    """Counts the clients that train; None if the number depends on the data."""
    if algorithms.ALGORITHMS[config.algorithm.name].pools_clients:
        return 1
    data, partition = config.data, PARTITIONS[config.data.partition]
    if is_own(data.name) and not data.is_divided:
        return None
    if partition.counts_clients:
        return data.num_clients - num_unseen(data, data.num_clients)
    if partition.num_clients_of is None:
        return None
    count = partition.num_clients_of(data.partition_options)
    return count - num_unseen(data, count)


def _check_unused(name: str, entry: Entry, config: Config) -> None:
    """Refuses what an algorithm does not use."""
    count, noise = config.data.public_examples, config.privacy.record.noise_multiplier
    rule = f"be 0 for {name}, which queries no public inputs"
    checks.require(count == 0 or entry.asks_public_inputs, "data.public_examples", rule, count)
    rule = f"be none for {name}, which calibrates the noise itself"
    fits = entry.budgets is None or noise is None
    checks.require(fits, "privacy.record.noise_multiplier", rule, noise)


def _check_test_part(data: DataSection) -> None:
    """Refuses two test parts of a table, one of which a run would leave out."""
    given = [name for name in ("split", "test_fraction") if data.options.get(name)]
    path = data.options.get("test_path")
    rule = f"be left out with {' and '.join(given)}, except to evaluate or predict after a run"
    is_one = data.name != "table" or path is None or not given
    checks.require(is_one, "data.options.test_path", rule, path)


def _check_scaling(data: DataSection, privacy: PrivacySection) -> None:
    """Refuses exact scaling of private data unless it is configured explicitly."""
    usual = datasets.options(data.name).get("scaling")
    if not privacy.units or "scaling" in data.options or usual not in EXACT_SCALINGS:
        return
    rule = (
        "be given under privacy: 'range' scales by public ranges and learns nothing from the data, "
        f"{usual!r} scales by exact means and deviations, which no ε covers and the statement names"
    )
    checks.require(False, "data.options.scaling", rule, None)


def _check_release(config: Config) -> None:
    """Refuses `run.release` if nothing protects the contents of the folder."""
    section, privacy, name = config.run, config.privacy, "run.release"
    if section.release is None:
        return
    rule = "be left out if privacy.unit is none: no ε covers anything"
    checks.require(bool(privacy.units), name, rule, section.release)
    rule = (
        "be true if run.release is 'private': the seed is in the configuration, and the noise "
        "that is drawn from it could be taken away"
    )
    checks.require(section.secret, "run.secret", rule, section.secret)
    for unit in privacy.units:
        noise = getattr(privacy, unit).noise_multiplier
        is_noised = noise is None or bool(np.all(np.asarray(noise) > 0))
        rule = "be above 0 if run.release is 'private'"
        checks.require(is_noised, f"privacy.{unit}.noise_multiplier", rule, noise)
    rule = "be false if run.release is 'private': it names clients by exact numbers"
    checks.require(not config.execution.debug, "execution.debug", rule, True)
    scaling = config.data.options.get("scaling")
    rule = "be 0 if run.release is 'private': these training records are read without noise"
    count = config.data.public_examples
    checks.require(count == 0, "data.public_examples", rule, count)
    rule = "be 'range' if run.release is 'private': no ε covers exact means and deviations"
    checks.require(scaling not in EXACT_SCALINGS, "data.options.scaling", rule, scaling)


def _check_inactive(config: Config) -> None:
    """Refuses settings of a section that is off, which would have no effect."""
    off, given = config.without_effect(), given_in(config)
    for key, section in off.items():
        for name in [name for name in given if name.startswith(f"{key}.")]:
            assert isinstance(section, OptionalSection)
            article = "an" if key.startswith("a") else "a"
            rule = f"be left out without {article} {key}.{section.switch}"
            if not section.switch:
                protected = key.removeprefix("privacy.")
                rule = (
                    f"be left out, since privacy.unit = {config.privacy.unit!r} does not protect a "
                    f"{protected}"
                )
            rule += f" (--{key}=none leaves the section of a file out)"
            # Mechanisms may be set before privacy.unit is.
            fits = not section.switch and not config.privacy.units
            checks.require(fits, name, rule, given[name])


def _check_masks(section: SecureAggregationSection) -> None:
    """Refuses settings without effect."""
    if section.form is not None and section.graph == "all_pairs":
        rule = "be none for secure_aggregation.graph = 'all_pairs', of which nothing is random"
        for name in ("num_neighbors", "failure"):
            value = getattr(section, name)
            checks.require(value is None, f"secure_aggregation.{name}", rule, value)


def _check_aggregator(section: AlgorithmSection, entry: Entry, privacy: PrivacySection) -> None:
    is_around = section.aggregator in AROUND
    is_client = "client" in privacy.units and not is_around
    if is_client:
        rule = "be none if clients are protected, since their mechanism combines updates"
    else:
        rule = f"be none for {section.name}, which has its own aggregation"
    is_open = entry.takes_aggregator and not is_client
    fits = section.aggregator is None or is_open
    checks.require(fits, "algorithm.aggregator", rule, section.aggregator)
    if is_around and "client" in privacy.units:
        level = privacy.client
        check_noise("privacy.client.denominator", not level.is_realised, "realised")
        is_gaussian = isinstance(level, GaussianLevel)
        check_noise("privacy.client.mechanism", is_gaussian, level.mechanism)
        check_clipping("privacy.client.per_layer", not getattr(level, "per_layer", False), True)


def _check_steps(name: str, needs: Needs, section: TrainingSection) -> None:
    checks.one_of(f"the needed steps of {name}", needs.steps, ("any", "plain", "none"))
    if needs.steps == "none":
        rule = f"be left out for {name} with exact steps, which have no learning rate"
        is_given = "learning_rate" in section.model_fields_set
        checks.require(not is_given, "training.learning_rate", rule, section.learning_rate)
    if needs.steps == "plain":
        key = "optimizer" if section.optimizer != "sgd" else "optimizer_options"
        is_plain = local_optimizer(section.optimizer, section.optimizer_options) is optax.sgd
        check_plain_sgd(is_plain, f"training.{key}", needs.reason, getattr(section, key))
    with keyed("training"):
        needs.check_rate(section.learning_rate)


def _check_scheduled_rate(name: str, needs: Needs, config: Config) -> None:
    """Refuses a schedule of a rate that an algorithm does not have, or cannot use in some round."""
    factors = tables_of(config.schedules, config.run.rounds).get("local.learning_rate")
    if factors is None:
        return
    rule = f"be left out for {name} with exact steps, which have no learning rate"
    curve = entries_of(config.schedules)["training.learning_rate"]
    key = "schedules.training.learning_rate"
    checks.require(needs.steps != "none", key, rule, curve)
    with keyed("training", {"learning_rate": f"{key} makes a rate that"}):
        for factor in (np.min(factors), np.max(factors)):
            needs.check_rate(np.asarray(config.training.learning_rate) * factor)


def _check_augmentation(name: str, needs: Needs, section: DataSection) -> None:
    rule = f"be left out for {name} with exact steps, which read no batches"
    chosen = list(section.augmentation)
    checks.require(not chosen or needs.steps != "none", "data.augmentation", rule, chosen)
    augmentation_of(section)


def _is_bounded(aggregator: str | None, privacy: PrivacySection) -> bool:
    """Whether updates have a bound as far as is known: a user's aggregator is asked when built."""
    is_private = "client" in privacy.units and not privacy.client.is_realised
    return is_private or (aggregator is not None and is_own(aggregator))


def _check_adapters(section: ModelSection) -> None:
    adapters = section.adapters
    if adapters.rank is None:
        return
    rule = "name at least one kernel, such as params/*/query/kernel"
    checks.require(bool(adapters.targets), "model.adapters.targets", rule, adapters.targets)
    rule = (
        "be left out with model.adapters.rank, which freezes all but adapters and adapters.trained"
    )
    checks.require(not section.frozen, "model.frozen", rule, section.frozen)


def _check_paths(config: Config) -> None:
    """Requires readable files, and folders that can be made."""
    if config.data.data_dir is not None:
        files.require_folder(config.data.data_dir, "data.data_dir")
    pretrained, has_layout = config.model.pretrained, config.model.name in LAYOUTS
    if pretrained is not None and not (has_layout and os.path.isdir(pretrained)):
        files.require_file(pretrained, "model.pretrained")
    cache = config.execution.compilation_cache
    if cache not in (None, "auto"):
        files.require_folder(cache, "execution.compilation_cache")


def check_processes(section: ExecutionSection) -> None:
    """Checks how processes find each other, and that they can run this configuration."""
    has_address = section.coordinator not in (None, "auto")
    for key in ("num_processes", "process_id"):
        value = getattr(section, key)
        rule = "be given with an address as execution.coordinator, and only then"
        checks.require((value is not None) == has_address, f"execution.{key}", rule, value)
    if section.coordinator is None:
        return
    if has_address:
        assert section.num_processes is not None and section.process_id is not None
        host, _, port = section.coordinator.rpartition(":")
        is_address = host and "/" not in host and port.isdecimal() and 0 < int(port) < 2**16
        rule = "be auto, or an address and a port, such as 10.0.0.1:4567"
        checks.require(bool(is_address), "execution.coordinator", rule, section.coordinator)
        rule = f"be below execution.num_processes = {section.num_processes}"
        is_below = section.process_id < section.num_processes
        checks.require(is_below, "execution.process_id", rule, section.process_id)
        rule = f"be 'auto' or a multiple of the {section.num_processes} processes"
        is_even = section.devices == "auto" or section.devices % section.num_processes == 0
        checks.require(is_even, "execution.devices", rule, section.devices)
    size, is_tuned = section.model_devices, section.clients_per_chunk == "tuned"
    with keyed("execution", {"model_axis": "execution.model_devices"}):
        of_model = size if size > 1 else None
        layout.check_processes(of_model, is_tuned, section.placement, section.split_clients)


def _check_budget(level: RecordLevel | ClientLevel, key: str) -> None:
    noise, epsilon = level.noise_multiplier, level.epsilon
    is_given = noise is not None or epsilon is not None
    checks.require(is_given, key, "give an epsilon to calibrate to, or a noise_multiplier", None)
    if noise is not None:
        is_noised = bool(np.all(np.asarray(noise) > 0))
        rule = f"be above 0 to keep the budget {key}.epsilon; without noise set that to none"
        checks.require(is_noised or epsilon is None, f"{key}.noise_multiplier", rule, noise)


def _check_update(config: Config, entry: Entry, options: Mapping[str, Any]) -> None:
    """Requires parts that an update has, and votes on one part alone."""
    level, key = config.privacy.client, "privacy.client"
    update = entry.noised((), options)
    shares = getattr(level, "part_shares", None)
    rule = f"be left out with {key}.part_scales: shares bound each part by itself"
    checks.require(shares is None or level.part_scales is None, f"{key}.part_shares", rule, shares)
    of = f"an update of {config.algorithm.name}"
    if level.part_scales is not None:
        check_parts(level.part_scales, update, f"{key}.part_scales", needs_all=False, of=of)
    if shares is not None:
        check_parts(shares, update, f"{key}.part_shares", needs_all=True, of=of)
        check_shares(shares, f"{key}.part_shares")
        for name in ("per_layer", "adaptive_clipping"):
            rule = f"be false with {key}.part_shares, which bound each part by a fixed number"
            checks.require(not getattr(level, name, False), f"{key}.{name}", rule, True)
    rule = f"be expected for {config.algorithm.name}, whose server computes with that number"
    fits = not (level.is_realised and entry.has_own_mean)
    checks.require(fits, f"{key}.denominator", rule, "realised")
    rule = f"be none for {config.algorithm.name}, whose update has several parts"
    is_whole = config.algorithm.aggregator not in AROUND or not isinstance(update, Mapping)
    checks.require(is_whole, "algorithm.aggregator", rule, config.algorithm.aggregator)


def _check_client(level: ClientLevel, name: str, entry: Entry) -> None:
    key = "privacy.client"
    _check_budget(level, key)
    fits_votes = isinstance(level, GaussianLevel | LaplaceLevel)
    if isinstance(level, ObliviousLevel):
        rule = "be true for form 'one', of which each client draws its share"
        fits = level.self_noise or level.form == "pairs"
        checks.require(fits, f"{key}.self_noise", rule, level.self_noise)
    rule = f"be gaussian or laplace for {name}, whose updates are not models"
    checks.require(entry.sends_model or fits_votes, f"{key}.mechanism", rule, level.mechanism)
    is_claimed = level.epsilon is not None or level.noise_multiplier is None
    rule = (
        "be expected under a budget; dividing by the realised number of clients claims no privacy, "
        f"and needs {key}.epsilon=none and a {key}.noise_multiplier"
    )
    fits = not (level.is_realised and is_claimed)
    checks.require(fits, f"{key}.denominator", rule, "realised")
