"""Checks of an experiment that need no data: values and combinations."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.algorithms.base import Needs
from fedjax_dp.algorithms.registry import Entry
from fedjax_dp.clients.transforms import declared
from fedjax_dp.core import checks, files
from fedjax_dp.core.registry import is_own
from fedjax_dp.data import datasets
from fedjax_dp.data.datasets.tabular import EXACT_SCALINGS
from fedjax_dp.engine.accounts.privacy_accounting import require_public_sizes
from fedjax_dp.experiment.components.asynchrony import check_asynchronous
from fedjax_dp.experiment.components.clock import check_clock
from fedjax_dp.experiment.components.participation import batches_of, participation_of
from fedjax_dp.experiment.components.partitions import PARTITIONS
from fedjax_dp.experiment.components.secure_aggregation import check_secure_aggregation
from fedjax_dp.experiment.components.wrappers import check_wrappers
from fedjax_dp.experiment.reading.analysis import Sections, require_possible_analysis
from fedjax_dp.experiment.reading.config_files import is_on
from fedjax_dp.experiment.schema.config import (
    AccelerationSection,
    AlgorithmSection,
    ClientLevel,
    Config,
    DataSection,
    GaussianLevel,
    LaplaceLevel,
    ModelSection,
    PrivacySection,
    RecordLevel,
    RunSection,
    SecureAggregationSection,
    TrainingSection,
)
from fedjax_dp.experiment.schema.sections import OptionalSection, given_in, sections_in
from fedjax_dp.server.registry import AROUND

# For whom an algorithm is taken instead, and which, by unit of privacy.
_INSTEAD = {
    "none": ("without privacy", "fedavg"),
    "record": ("to protect records", "dp_sgd"),
    "client": ("to protect clients", "dp_fedavg"),
    "both": ("to protect both", "dp_fedavg"),
}
# Options of algorithms that may be a list with one entry for each client.
_BY_CLIENT = ("declared_epsilon", "clusters")


def validate(config: Config) -> None:
    """Checks everything that is known before data are read, with named lists resolved."""
    name, privacy = config.algorithm.name, config.privacy
    entry = algorithms.ALGORITHMS[name]
    _check_public_examples(name, entry, config.data.public_examples)
    _check_unit(name, entry, privacy)
    _check_scaling(config.data, privacy)
    _check_test_part(config.data)
    _check_release(config)
    _check_inactive(config)
    _check_acceleration(config.acceleration, config.run)
    check_wrappers(config)
    check_asynchronous(config)
    _check_leaving(config)
    _check_servers(config)
    _check_masks(config.secure_aggregation, not config.communication.serverless)
    _check_aggregator(config.algorithm, entry, privacy)
    options = algorithms.options_of(name) | config.algorithm.options
    needs = _needs_of(entry, options)
    if config.algorithm.aggregator is not None and "aggregator" in entry.given:
        rule = "be false with an algorithm.aggregator, which has its own weights"
        is_weighted = options.get("is_weighted", False)
        checks.require(not is_weighted, "algorithm.options.is_weighted", rule, is_weighted)
    _check_steps(name, needs.steps, config.training)
    _check_bound(needs.option_for_bound, config.algorithm.aggregator, privacy)
    _check_batches(config.training, is_private="record" in privacy.units)
    _check_adapters(config.model)
    _check_paths(config)
    check_processes(config)
    declared("algorithm.options", needs.transforms, is_private="record" in privacy.units)
    require_public_sizes(privacy.relation, "privacy.relation")
    if "record" in privacy.units:
        _check_budget(privacy.record, "privacy.record")
    if "client" in privacy.units:
        _check_client(privacy.client, name, entry)
    if (num_clients := known_clients(config)) is not None:
        check_clients(config, num_clients)
    else:
        check_clock(config, None)


def check_clients(config: Config, num_clients: int) -> None:
    """Checks everything that is known once the training clients are counted."""
    privacy, options = config.privacy, config.algorithm.options
    for key in ("learning_rate", "batch_size", "num_epochs", "num_steps"):
        checks.one_for_each(f"training.{key}", getattr(config.training, key), num_clients)
    if "record" in privacy.units:
        for key in ("clip_norm", "noise_multiplier", "epsilon", "dp_delta"):
            checks.one_for_each(f"privacy.record.{key}", getattr(privacy.record, key), num_clients)
    checks.one_for_each("acceleration.weights", config.acceleration.weights, num_clients)
    for key in _BY_CLIENT:
        checks.one_for_each(f"algorithm.options.{key}", options.get(key), num_clients)
    if config.leaving.tolerance is not None:
        least, rule = config.leaving.min_active, f"be at most the {num_clients} clients"
        checks.require(least <= num_clients, "leaving.min_active", rule, least)
    servers = config.communication.servers
    rule = f"have at most one entry for each of the {num_clients} clients"
    checks.require(len(servers) <= num_clients, "communication.servers", rule, len(servers))
    num_models, rule = options.get("num_models", 1), f"be at most the {num_clients} clients"
    checks.require(num_models <= num_clients, "algorithm.options.num_models", rule, num_models)
    participation = participation_of(config.participation, num_clients)
    check_clock(config, num_clients)
    require_possible_analysis(Sections(privacy, config.participation, config.training), num_clients)
    check_secure_aggregation(config, participation)


def known_clients(config: Config) -> int | None:
    """Counts the clients that train; None if the number depends on the data."""
    if algorithms.ALGORITHMS[config.algorithm.name].pools_clients:
        return 1
    data, partition = config.data, PARTITIONS[config.data.partition]
    if is_own(data.name) and not data.is_divided:
        return None
    if partition.counts_clients:
        return data.num_clients
    count = partition.num_clients_of
    return None if count is None else count(data.partition_options)


def _needs_of(entry: Entry, options: Mapping[str, Any]) -> Needs:
    """Returns what an algorithm needs; refuses incompatible options."""
    try:
        return entry.needs(options)
    except ValueError as error:
        raise ValueError(f"algorithm.options.{error}") from error


def _check_public_examples(name: str, entry: Entry, count: int) -> None:
    asks = entry.asks_public_inputs
    wanted, queried = ("at least 1", "public inputs") if asks else ("0", "no public inputs")
    rule = f"be {wanted} for {name}, which queries {queried}"
    checks.require((count > 0) == asks, "data.public_examples", rule, count)


def _check_unit(name: str, entry: Entry, privacy: PrivacySection) -> None:
    what = f"be {' or '.join(entry.units)} for the algorithm {name}"
    whom, other = _INSTEAD[privacy.unit]
    hint = f"{whom} take another algorithm.name, such as {other}"
    if is_own(name):
        hint = "an Entry states the units of an algorithm of your own"
    rule = f"{what}, {entry.reason}" if entry.reason else f"{what}; {hint}"
    checks.require(privacy.unit in entry.units, "privacy.unit", rule, privacy.unit)
    if entry.budgets is not None:
        noise = privacy.record.noise_multiplier
        rule = f"be none for {name}, which calibrates the noise itself"
        checks.require(noise is None, "privacy.record.noise_multiplier", rule, noise)


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
    for key, section in sections_in(config):
        given = {} if is_on(config, key, section) else given_in(section)
        for name, value in given.items():
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
            checks.require(fits, f"{key}.{name}", rule, value)


def _check_acceleration(section: AccelerationSection, run: RunSection) -> None:
    if section.memory is not None:
        rule = f"be below the {run.rounds} rounds"
        checks.require(section.memory < run.rounds, "acceleration.memory", rule, section.memory)
        first = section.first
        rule = f"be at least acceleration.memory = {section.memory}"
        fits = first is None or first >= section.memory
        checks.require(fits, "acceleration.first", rule, first)
        rule = "be left out for acceleration.of = 'shared', which has one point"
        fits = section.weights is None or section.of == "clients"
        checks.require(fits, "acceleration.weights", rule, section.weights)


def _check_masks(section: SecureAggregationSection, has_server: bool) -> None:
    """Refuses settings without effect, and masks that hide nothing from a client."""
    if section.form is None:
        return
    rule = "be at least 1 with communication.serverless, where each client receives all messages"
    fits = has_server or section.colluders > 0
    checks.require(fits, "secure_aggregation.colluders", rule, section.colluders)
    if section.graph == "all_pairs":
        rule = "be none for secure_aggregation.graph = 'all_pairs', of which nothing is random"
        for name in ("num_neighbors", "failure"):
            value = getattr(section, name)
            checks.require(value is None, f"secure_aggregation.{name}", rule, value)


def _check_servers(config: Config) -> None:
    """Refuses what has no meaning without a server, or with several."""
    section, servers = config.communication, config.communication.servers
    has_shares = ("mechanism", "gamma_shares") in config.algorithm.options.items()
    if section.serverless:
        key = "communication.serverless"
        rule = "be false for noise in shares: each client that has the sum knows its own share"
        checks.require(not has_shares, key, rule, True)
        rule = "be false under privacy of clients: no party is trusted with the noise"
        checks.require("client" not in config.privacy.units, key, rule, True)
    if not servers:
        rule, period = "be left out without communication.servers", section.exchange_every
        checks.require(period is None, "communication.exchange_every", rule, period)
        return
    key = "communication.servers"
    is_used = len(set(servers)) == max(servers) + 1 > 1
    checks.require(is_used, key, "be numbers from 0, all of them used, and at least 2", servers)
    checks.require(not has_shares, key, "be left out for noise in shares of all clients", servers)
    rule = (
        "be left out under privacy of clients: a server divides by the expected number of its own "
        "clients, for which no configuration calibrates"
    )
    checks.require("client" not in config.privacy.units, key, rule, servers)


def _check_leaving(config: Config) -> None:
    section = config.leaving
    if section.tolerance is None:
        return
    name, shares = config.algorithm.name, ("mechanism", "gamma_shares")
    rule = f"be left out for {name}, whose clients do not send models of their own"
    fits = name in ("warm_start_averaging", "retrained_averaging")
    checks.require(fits, "leaving.tolerance", rule, section.tolerance)
    rule = "be left out for noise in shares, which does not protect the model that it would compare"
    fits = shares not in config.algorithm.options.items()
    checks.require(fits, "leaving.tolerance", rule, section.tolerance)


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
        fits = isinstance(level, GaussianLevel) and not level.per_layer and not level.is_realised
        rule = (
            f"be gaussian, clip whole updates and divide by the expected size for "
            f"{section.aggregator}, whose votes share the bound of the update"
        )
        checks.require(fits, "privacy.client.mechanism", rule, level.mechanism)


def _check_steps(name: str, steps: str, section: TrainingSection) -> None:
    if steps == "any":
        return
    if steps == "none":
        rule = f"be left out for {name} with exact steps, which have no learning rate"
        is_given = "learning_rate" in section.model_fields_set
        checks.require(not is_given, "training.learning_rate", rule, section.learning_rate)
        return
    rule = f"be sgd for {name}, which reads gradients from updates"
    checks.require(section.optimizer == "sgd", "training.optimizer", rule, section.optimizer)
    options = section.optimizer_options
    rule = f"be empty for {name}, which reads gradients from updates of plain steps"
    checks.require(not options, "training.optimizer_options", rule, options)
    moves = steps == "plain" or bool(np.all(np.asarray(section.learning_rate) > 0))
    rule = f"be above 0 for {name}, which divides by it"
    checks.require(moves, "training.learning_rate", rule, section.learning_rate)


def _check_bound(option: str, aggregator: str | None, privacy: PrivacySection) -> None:
    """Requires an option if no aggregator bounds an update; a user's is checked when built."""
    is_bounded = "client" in privacy.units and not privacy.client.is_realised
    is_open = not option or is_bounded or (aggregator is not None and is_own(aggregator))
    rule = "be given if no aggregator bounds an update"
    checks.require(is_open, f"algorithm.options.{option}", rule, None)


def _check_batches(section: TrainingSection, *, is_private: bool) -> None:
    """Requires integers for samplers that draw a fixed number of examples or steps."""
    sampler = batches_of(section, is_private=is_private)
    for name in ("num_steps",) if sampler.varies else ("num_steps", "batch_size"):
        value = getattr(section, name)
        is_whole = value is None or bool(np.all(np.mod(value, 1) == 0))
        rule = f"be an integer with the sampler {sampler.name!r}"
        checks.require(is_whole, f"training.{name}", rule, value)


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
    pretrained, is_llama = config.model.pretrained, config.model.name == "llama"
    if pretrained is not None and not (is_llama and os.path.isdir(pretrained)):
        files.require_file(pretrained, "model.pretrained")
    cache = config.execution.compilation_cache
    if cache not in (None, "auto"):
        files.require_folder(cache, "execution.compilation_cache")


def check_processes(config: Config) -> None:
    """Checks how processes find each other, and that they can run this configuration."""
    section = config.execution
    has_address = section.coordinator not in (None, "auto")
    for key in ("num_processes", "process_id"):
        value = getattr(section, key)
        rule = "be given with an address as execution.coordinator, and only then"
        checks.require((value is not None) == has_address, f"execution.{key}", rule, value)
    if section.coordinator is None:
        return
    if has_address:
        host, _, port = section.coordinator.rpartition(":")
        is_address = host and "/" not in host and port.isdecimal() and 0 < int(port) < 2**16
        rule = "be auto, or an address and a port, such as 10.0.0.1:4567"
        checks.require(bool(is_address), "execution.coordinator", rule, section.coordinator)
    if section.num_processes is not None and section.process_id is not None:
        rule = f"be below execution.num_processes = {section.num_processes}"
        is_below = section.process_id < section.num_processes
        checks.require(is_below, "execution.process_id", rule, section.process_id)
    if section.num_processes is not None and section.devices != "auto":
        rule = f"be 'auto' or a multiple of the {section.num_processes} processes"
        is_even = section.devices % section.num_processes == 0
        checks.require(is_even, "execution.devices", rule, section.devices)
    rule = "be 1 for several processes, which do not divide a model"
    checks.require(
        section.model_devices == 1, "execution.model_devices", rule, section.model_devices
    )
    rule = "be false for several processes"
    splits = section.split_clients
    checks.require(not splits, "execution.split_clients", rule, splits)
    rule = "not be 'disk' for several processes"
    is_held = section.placement != "disk"
    checks.require(is_held, "execution.placement", rule, section.placement)
    rule = "be a number or 'auto' for several processes"
    is_same = section.clients_per_chunk != "tuned"
    checks.require(is_same, "execution.clients_per_chunk", rule, section.clients_per_chunk)


def _check_budget(level: RecordLevel | ClientLevel, key: str) -> None:
    noise, epsilon = level.noise_multiplier, level.epsilon
    is_given = noise is not None or epsilon is not None
    checks.require(is_given, key, "give an epsilon to calibrate to, or a noise_multiplier", None)
    if noise is not None:
        is_noised = bool(np.all(np.asarray(noise) > 0))
        rule = f"be above 0 to keep the budget {key}.epsilon; without noise set that to none"
        checks.require(is_noised or epsilon is None, f"{key}.noise_multiplier", rule, noise)


def _check_client(level: ClientLevel, name: str, entry: Entry) -> None:
    key = "privacy.client"
    _check_budget(level, key)
    fits_votes = isinstance(level, GaussianLevel | LaplaceLevel)
    rule = f"be gaussian or laplace for {name}, whose updates are not models"
    checks.require(entry.sends_model or fits_votes, f"{key}.mechanism", rule, level.mechanism)
    is_claimed = level.epsilon is not None or level.noise_multiplier is None
    rule = (
        "be expected under a budget; dividing by the realised number of clients claims no privacy, "
        f"and needs {key}.epsilon=none and a {key}.noise_multiplier"
    )
    fits = not (level.is_realised and is_claimed)
    checks.require(fits, f"{key}.denominator", rule, "realised")
