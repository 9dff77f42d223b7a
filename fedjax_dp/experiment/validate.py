"""Checks of an experiment that need no data: names, options, ranges, what does not go together."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.clients.transforms import declared
from fedjax_dp.core import checks
from fedjax_dp.engine.accounting import require_public_sizes
from fedjax_dp.experiment.config import Config
from fedjax_dp.models import registry as models

OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "adam": optax.adam,
    "adamw": optax.adamw,
    "adagrad": optax.adagrad,
    "rmsprop": optax.rmsprop,
    "yogi": optax.yogi,
}


def validate(config: Config) -> None:
    """Checks all that can be known before any data are read.

    Args:
      config: the configuration.

    Raises:
      ValueError: naming the key, the rule, the value and the nearest valid one.
    """
    for key in ("rounds", "evaluate_every", "checkpoint_every"):
        checks.whole(f"run.{key}", getattr(config.run, key))
    checks.whole("run.seed", config.run.seed, at_least=0)
    # A key holds 32 bits of its seed: beyond them two seeds would share all noise.
    checks.require(config.run.seed < 2**32, "run.seed", "be below 2**32", config.run.seed)
    checks.whole("data.num_clients", config.data.num_clients)
    checks.whole("data.public_examples", config.data.public_examples, at_least=0)
    _check_parts(config)
    _check_training(config)
    _check_participation(config)
    require_public_sizes(config.privacy.relation, "privacy.relation")
    for unit in config.privacy.units:
        _check_level(config, unit)
    if "client" in config.privacy.units:
        _check_client_mechanism(config)


def check_options(key: str, chosen: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Checks a table of options against a function that will take them.

    Args:
      key: the table's dotted name.
      chosen: the options.
      known: every option with its default; a choice must be of the default's kind where there is
        one.

    Raises:
      ValueError: naming the option, the rule, the value and the nearest valid one.
    """
    for option, value in chosen.items():
        checks.require(bool(known), key, "be empty: there are no options", dict(chosen))
        checks.one_of(key, option, known)
        default, here = known[option], f"{key}.{option}"
        if isinstance(default, bool):
            checks.require(isinstance(value, bool), here, "be true or false", value)
        elif isinstance(default, int | float):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            checks.require(is_number, here, "be a number", value)
        elif isinstance(default, str):
            checks.require(isinstance(value, str), here, "be a text", value)
        elif isinstance(default, list | tuple):
            checks.require(isinstance(value, list), here, "be a list", value)


def keyword_defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    """Lists the keyword-only parameters of a function.

    Args:
      factory: the function.

    Returns:
      Their defaults; `inspect.Parameter.empty` where there is none.
    """
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _check_parts(config: Config) -> None:
    checks.one_of("model.name", config.model.name, models.FACTORIES)
    check_options("model.options", config.model.options, models.options(config.model.name))
    name, options = config.algorithm.name, config.algorithm.options
    checks.one_of("algorithm.name", name, algorithms.ALGORITHMS)
    known = algorithms.options_of(name)
    check_options("algorithm.options", options, known)
    for option, default in known.items():
        if default is inspect.Parameter.empty:
            rule = f"hold {option!r}, which {name} needs"
            checks.require(option in options, "algorithm.options", rule, options)
    asks = "public_x" in inspect.signature(algorithms.ALGORITHMS[name].factory).parameters
    wanted, asked = ("at least 1", "public inputs") if asks else ("0", "no public inputs")
    rule = f"be {wanted} for {name}, which asks about {asked}"
    count = config.data.public_examples
    checks.require((count > 0) == asks, "data.public_examples", rule, count)
    offered = algorithms.ALGORITHMS[name].units
    rule = f"be {' or '.join(offered)} for the algorithm {name}"
    checks.require(config.privacy.unit in offered, "privacy.unit", rule, config.privacy.unit)
    transforms = algorithms.ALGORITHMS[name].transforms({**known, **options})
    declared("algorithm.options", transforms, is_private="record" in config.privacy.units)
    if algorithms.ALGORITHMS[name].budgets is not None:
        noise = config.privacy.record.noise_multiplier
        rule = f"be none for {name}, which calibrates the noise itself"
        checks.require(noise is None, "privacy.record.noise_multiplier", rule, noise)


def _check_training(config: Config) -> None:
    section = config.training
    checks.one_of("training.optimizer", section.optimizer, OPTIMIZERS)
    parameters = inspect.signature(OPTIMIZERS[section.optimizer]).parameters.values()
    known = {p.name: p.default for p in parameters if p.name != "learning_rate"}
    check_options("training.optimizer_options", section.optimizer_options, known)
    checks.non_negative("training.learning_rate", section.learning_rate)
    is_batch = bool(np.all(np.asarray(section.batch_size) >= 1))
    checks.require(is_batch, "training.batch_size", "be at least 1", section.batch_size)
    checks.non_negative("training.num_epochs", section.num_epochs)
    if section.num_steps is not None:
        checks.non_negative("training.num_steps", section.num_steps)
    if section.micro_batch_size is not None:
        checks.whole("training.micro_batch_size", section.micro_batch_size)
    for name in ("learning_rate", "batch_size", "num_epochs", "num_steps"):
        _check_length(config, f"training.{name}", getattr(section, name))


def _num_clients(config: Config) -> int | None:
    """Counts the clients, or None where only the data can tell."""
    if config.algorithm.name == "centralized":
        return 1
    comes_with_data = config.data.partition in ("natural", "shifted_clusters")
    return None if comes_with_data else config.data.num_clients


def _check_length(config: Config, key: str, value: Any) -> None:
    expected = _num_clients(config)
    if expected is not None:
        check_one_for_each(key, value, expected)


def check_one_for_each(key: str, value: Any, num_clients: int) -> None:
    """Requires a list to hold as many numbers as there are clients.

    Args:
      key: the dotted name of the value.
      value: a list, or anything else, which passes.
      num_clients: how many there must be.

    Raises:
      ValueError: naming the key, the rule and the list.
    """
    rule = f"be one number or have one for each of the {num_clients} clients"
    fits = not isinstance(value, list) or len(value) == num_clients
    checks.require(fits, key, rule, value)


def _check_participation(config: Config) -> None:
    section, num_clients = config.participation, _num_clients(config)
    if section.capacity is not None:
        checks.whole("participation.capacity", section.capacity)
        is_poisson = section.sampler == "poisson"
        rule = "be poisson if a capacity is given"
        checks.require(is_poisson, "participation.sampler", rule, section.sampler)
    size = section.cohort_size
    if size is None:
        return
    checks.positive("participation.cohort_size", size)
    draws = section.sampler != "everybody"
    rule = "be left out under the sampler everybody, which draws all clients"
    checks.require(draws, "participation.cohort_size", rule, size)
    if num_clients is not None:
        rule = f"be at most the population of {num_clients} clients"
        checks.require(size <= num_clients, "participation.cohort_size", rule, size)


def _check_level(config: Config, unit: str) -> None:
    level, key = getattr(config.privacy, unit), f"privacy.{unit}"
    checks.positive(f"{key}.clip_norm", level.clip_norm)
    delta = np.asarray(level.dp_delta)
    inside = bool(np.all((delta > 0) & (delta < 1)))
    checks.require(inside, f"{key}.dp_delta", "lie in (0, 1)", level.dp_delta)
    noise, epsilon = level.noise_multiplier, level.epsilon
    is_given = noise is not None or epsilon is not None
    checks.require(is_given, key, "give an epsilon to calibrate to, or a noise_multiplier", None)
    if epsilon is not None:
        checks.positive(f"{key}.epsilon", epsilon)
    if noise is not None:
        checks.non_negative(f"{key}.noise_multiplier", noise)
        is_noised = bool(np.all(np.asarray(noise) > 0))
        rule = f"be above 0 to keep the budget {key}.epsilon; without noise set that to none"
        checks.require(is_noised or epsilon is None, f"{key}.noise_multiplier", rule, noise)
    for name in ("clip_norm", "noise_multiplier", "epsilon", "dp_delta"):
        value = getattr(level, name)
        if unit == "record":
            _check_length(config, f"{key}.{name}", value)
        else:
            rule = "be one number, since all clients are treated alike"
            checks.require(not isinstance(value, list), f"{key}.{name}", rule, value)


def _check_client_mechanism(config: Config) -> None:
    level, key = config.privacy.client, "privacy.client"
    is_gaussian = level.mechanism == "gaussian"
    rule = "be gaussian if the clip norm adapts"
    checks.require(
        is_gaussian or not level.adaptive_clipping, f"{key}.mechanism", rule, level.mechanism
    )
    follows_model = level.mechanism not in ("gaussian", "laplace")
    sends_model = algorithms.ALGORITHMS[config.algorithm.name].sends_model
    rule = f"be gaussian or laplace for {config.algorithm.name}, whose updates are no models"
    checks.require(sends_model or not follows_model, f"{key}.mechanism", rule, level.mechanism)
    is_claimed = level.epsilon is not None or level.noise_multiplier is None
    rule = (
        "be expected under a budget; dividing by the realised number of clients claims no privacy, "
        f"and needs {key}.epsilon=none and a {key}.noise_multiplier"
    )
    is_expected = level.denominator == "expected"
    checks.require(is_expected or not is_claimed, f"{key}.denominator", rule, level.denominator)
    rule = "be expected for discrete noise, which has no other divisor"
    is_discrete = level.mechanism in ("discrete_gaussian", "central_discrete_gaussian")
    checks.require(is_expected or not is_discrete, f"{key}.denominator", rule, level.denominator)
    clips_layers = level.mechanism in ("gaussian", "correlated_gaussian")
    rule = "be false for this mechanism, which clips whole updates"
    checks.require(clips_layers or not level.per_layer, f"{key}.per_layer", rule, level.per_layer)
    checks.probability(f"{key}.target_quantile", level.target_quantile, allow_zero=True)
    checks.whole(f"{key}.bands", level.bands)
    is_correlated = level.mechanism == "correlated_gaussian"
    rule = "be 1 unless the mechanism is correlated_gaussian"
    checks.require(is_correlated or level.bands == 1, f"{key}.bands", rule, level.bands)
    is_known = level.bits == "auto" or 2 <= level.bits <= 32
    checks.require(is_known, f"{key}.bits", "lie between 2 and 32, or be auto", level.bits)
    checks.whole("participation.separation", config.participation.separation)
