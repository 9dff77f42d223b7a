"""Numbers over rounds in a configuration: curves by name, and what goes with what."""

import functools
import inspect
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic.fields import FieldInfo

from fedjax_dp.algorithms import schedules
from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.algorithms.schedules import Curve
from fedjax_dp.core import checks
from fedjax_dp.core.ranges import Count, NonNegative, Probability, ProperFraction
from fedjax_dp.core.registry import Registry, is_own
from fedjax_dp.core.synonyms import suggestion
from fedjax_dp.engine.accounts.calibration import priced_factors
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.schedules import names_of, require_scheduled, scheduled
from fedjax_dp.experiment.components.measured import RELEASED, Measured, measured
from fedjax_dp.experiment.schema.config import (
    CentralDiscreteLevel,
    Config,
    DiscreteGaussianLevel,
    GaussianLevel,
)
from fedjax_dp.experiment.schema.constraints import keyed, refused
from fedjax_dp.experiment.schema.options import Fields, fields_of, read_options

_HERE = "schedules"
_PLANNED = "not be a plateau: the privacy of a run is planned before its metrics are known"
# Sections and tables of options whose numbers can have a curve, and where `Hyper` has them.
_SECTIONS = {
    "training": "local.",
    "training.optimizer_options": "local.optimizer.",
    "privacy.record": "local.",
    "privacy.client": "aggregator.",
    "algorithm.options": "algorithm.",
    "algorithm.aggregator_options": "aggregator.",
    "acceleration": "algorithm.anderson_",
    "leaving": "algorithm.leaving_",
    "clock": "algorithm.clock_",
}
_OF_WRAPPERS = "acceleration", "leaving", "clock"
_MECHANISM = ("clip_norm", "noise_multiplier")
# The keys of those that are sections of fixed keys.
_KEYS = {
    "training": ("learning_rate", "batch_size", "num_epochs", "num_steps"),
    "privacy.record": _MECHANISM,
    "privacy.client": _MECHANISM,
    "acceleration": ("ridge", "damping", "growth"),
    "leaving": ("tolerance",),
    "clock": ("deadline", "dropout"),
}
_WARM_UP = FieldInfo(
    annotation=Count | None,
    default=None,
    description="rounds before the curve, below run.rounds, in which the factor grows linearly.",
)
_ON_A_LATTICE = DiscreteGaussianLevel, CentralDiscreteLevel


class Plateau(NamedTuple):
    """A number that is multiplied where a metric has stopped improving.

    Attributes:
      metric: a name in `metrics.jsonl`, of a number and not of a table; no ε covers what
        it decides unless it is released with noise.
      goal: whether "smaller" or "larger" is better.
      patience: values in a row without a better one after which the number is multiplied, at
        least 1; there is one in each evaluation, or in each round for metrics of rounds.
      min_change: the least improvement, at least 0.
      factor: what it is multiplied by, in (0, 1).
      least: the least factor in all, in (0, 1].
    """

    metric: Measured = "test_loss"
    goal: Literal["smaller", "larger"] = "smaller"
    patience: Count = 5
    min_change: NonNegative = 0.0
    factor: ProperFraction = 0.5
    least: Probability = 1e-4

    def after(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Computes the factor after each of some rows."""
        values = measured(rows, self.metric, "metric of plateau")
        best, waited, factors = np.inf, 0, [1.0]
        for value in values * (1 if self.goal == "smaller" else -1):
            is_better = value < best - self.min_change
            best, waited = (value, 0) if is_better else (best, waited + 1)
            is_lowered, last = waited == self.patience, factors[-1]
            factors.append(max(last * self.factor, self.least) if is_lowered else last)
            waited = 0 if is_lowered else waited
        counts = np.cumsum([isinstance(row.get(self.metric), int | float) for row in rows])
        return [factors[count] for count in counts]

    @property
    def is_private(self) -> bool:
        """Whether the metric is computed from noised releases alone."""
        return self.metric in RELEASED


def _adopted(curve: Any) -> Callable[..., Curve]:
    """Adopts a user's curve, a function of the round, and of options by keyword."""
    rule = "be a function of the round, from 0, and of options by keyword"
    checks.require(callable(curve), "a curve", rule, curve)

    @functools.wraps(curve)
    def factory(**options: Any) -> Curve:
        return functools.partial(curve, **options)

    return factory


CURVES: Registry[Callable[..., Curve | Plateau]] = Registry(
    {
        "constant": schedules.constant,
        "linear": schedules.linear,
        "cosine": schedules.cosine,
        "steps": schedules.steps,
        "exponential": schedules.exponential,
        "inverse": schedules.inverse,
        "inverse_log": schedules.inverse_log,
        "list": schedules.listed,
        "plateau": Plateau,
    },
    _adopted,
)


@functools.cache
def fields_of_curve(name: str) -> Fields:
    """Reads the options of a curve; its rounds are those of the run by default."""
    factory = CURVES[name]
    if is_own(name):
        first = next(iter(inspect.signature(factory).parameters), "")
        return {**fields_of(name, factory, given=(first,)), "warm_up": _WARM_UP}
    has_rounds = "rounds" in inspect.signature(factory).parameters
    more: dict[str, Any] = {"kinds": {"rounds": Count | None}, "defaults": {"rounds": None}}
    fields = fields_of(name, factory, **(more if has_rounds else {}))
    return fields if name == "plateau" else {**fields, "warm_up": _WARM_UP}


def entries_of(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Lists what a configuration has below `schedules`, by the key of the number."""
    return {key: table[name] for key, table, name in _leaves(tables)}


def _leaves(tables: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields the key of each curve, the table that holds it, and its name there."""
    for name, value in tables.items():
        key = f"{prefix}{name}"
        is_outer = any(f"{section}.".startswith(f"{key}.") for section in _SECTIONS)
        if is_outer and isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, tables, name


def read_schedules(config: Config, fields_of: Callable[[str, str], Fields]) -> None:
    """Checks the curves of a new configuration, and writes each as a table with its rounds.

    `fields_of` maps a key and the name of a curve to its options.
    """
    for key, tables, last in list(_leaves(config.schedules)):
        here, value = f"{_HERE}.{key}", tables[last]
        section, _, name = key.rpartition(".")
        if section not in _SECTIONS or name not in _KEYS.get(section, (name,)):
            known = [f"{each}.{one}" for each, names in _KEYS.items() for one in names]
            known += [f"{each}.NAME" for each in _SECTIONS if each not in _KEYS]
            text = f"{_HERE} must be of a number that can change, of {', '.join(known)}"
            raise refused(here, f"{text}, got {key!r}{suggestion(key, known)}")
        table = dict(value) if isinstance(value, Mapping) else {"curve": value}
        curve = table.pop("curve", "constant" if table.keys() == {"warm_up"} else None)
        if not isinstance(curve, str):
            rule = "be the name of a curve, or a table with one at its key curve"
            raise refused(here, f"{here} must {rule}, got {checks.shown(value)}")
        fields = fields_of(here, curve)
        options = read_options(fields, curve, here, table)
        warm_up, rounds = options.pop("warm_up", None), config.run.rounds
        if warm_up is not None and warm_up >= rounds:
            text = f"{here}.warm_up must be below run.rounds = {rounds}, got {warm_up}"
            raise refused(f"{here}.warm_up", text)
        if "rounds" in fields and not is_own(curve) and options.get("rounds") is None:
            options["rounds"] = rounds - (warm_up or 0)
        ahead = {} if warm_up is None else {"warm_up": warm_up}
        tables[last] = {"curve": curve, **ahead, **options}


def name_of(key: str) -> str:
    """Returns the dotted name in `Hyper` of the number at a key."""
    section, _, name = key.rpartition(".")
    return f"{_SECTIONS[section]}{name}"


def _place_of(hyper: Hyper, key: str) -> str:
    """Returns the dotted name in `hyper` of the number at a key.

    Some options of an algorithm belong to its aggregator, and some of that to the part "params".
    """
    name = name_of(key)
    place, _, rest = name.partition(".")
    within = {"algorithm": f"aggregator.{rest}", "aggregator": f"aggregator.params.{rest}"}
    own = within.get(place, name)
    is_elsewhere = hyper.number(name) is None and hyper.number(own) is not None
    return own if is_elsewhere else name


def _curve_of(table: Mapping[str, Any], key: str) -> Curve | Plateau:
    """Makes a curve of its table."""
    options = {name: x for name, x in table.items() if name not in ("curve", "warm_up")}
    with keyed(f"{_HERE}.{key}"):
        curve = CURVES[table["curve"]](**options)
    if isinstance(curve, Plateau) or "warm_up" not in table:
        return curve
    return schedules.warm_up(curve, table["warm_up"])


def plateaus_of(config: Config) -> dict[str, Plateau]:
    """Makes the rules of numbers that follow a metric, by key."""
    curves = {key: _curve_of(table, key) for key, table in entries_of(config.schedules).items()}
    return {key: curve for key, curve in curves.items() if isinstance(curve, Plateau)}


def tables_of(tables: Mapping[str, Any], num_rounds: int) -> dict[str, np.ndarray]:
    """Computes the factors of a run by the names of their numbers; 1 until a metric is known."""
    factors = {}
    for key, table in entries_of(tables).items():
        curve = _curve_of(table, key)
        if isinstance(curve, Plateau):
            curve = schedules.constant()
        factors[name_of(key)] = schedules.table_of(curve, num_rounds, f"{_HERE}.{key}")
    return factors


def after_plateaus(
    hyper: Hyper, plateaus: Mapping[str, Plateau], rows: Sequence[Mapping[str, Any]], every: int
) -> Hyper:
    """Sets the factors that metrics decide, which change after every so many rounds alone.

    Rounds that ran have those that they ran with, and all others the last one.
    """
    decided, factors = rows[: len(rows) - len(rows) % every], dict(hyper.factors)
    for key, rule in plateaus.items() if decided else ():
        name = _place_of(hyper, key)
        found, rounds = np.array([1.0, *rule.after(decided)]), np.arange(len(factors[name]))
        before = np.minimum(rounds - rounds % every, len(decided))
        factors[name] = found[before].astype(np.float32)
    return hyper._replace(factors=factors)


def ended_curves(config: Config, planned: int) -> Iterator[str]:
    """Describes curves that lasted as many rounds as were planned, in a run that is extended."""
    rounds = config.run.rounds
    factors = tables_of(config.schedules, rounds) if planned < rounds else {}
    for key, table in entries_of(config.schedules).items():
        length = table.get("rounds", len(table.get("factors", ())))
        end = length + table.get("warm_up", 0)
        if length and not is_own(table["curve"]) and planned <= end < rounds:
            yield (
                f"{_HERE}.{key} ends with round {end}: each later round has its final factor, "
                f"{factors[name_of(key)][-1]:.4g}; for a curve over {rounds} rounds start a new run"
            )


def over_rounds(hyper: Hyper, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Computes the smallest and the largest value of a number in all rounds."""
    table = np.asarray(hyper.factors.get(name, 1.0), np.float64)
    number = np.asarray(hyper.number(name), np.float64)
    return number * np.min(table), number * np.max(table)


def described(config: Config, hyper: Hyper) -> list[str]:
    """Describes for a statement what multiplied the numbers of a run."""
    texts = []
    for key, table in entries_of(config.schedules).items():
        # Not computed anew: a function of the user's may return others.
        factors = hyper.factors[_place_of(hyper, key)]
        ends = f"{np.min(factors):.4g} to {np.max(factors):.4g}"
        ends = "at most 1" if table["curve"] == "plateau" else ends
        # A statement names no folder.
        texts.append(f"{key} by factors of {ends} ({pathlib.PurePath(table['curve']).name})")
    return texts


def exact_plateaus(config: Config) -> list[str]:
    """Names what exact metrics decided, which no ε covers."""
    return [
        f"{key} in each round, which followed the exact {rule.metric}"
        for key, rule in plateaus_of(config).items()
        if not rule.is_private
    ]


def without_wrappers(config: Config) -> Config:
    """Leaves out curves of the numbers of wrappers, for a federation that has none."""
    entries = entries_of(config.schedules).items()
    left = {key: table for key, table in entries if key.partition(".")[0] not in _OF_WRAPPERS}
    return config.model_copy(update={"schedules": left})


def with_schedules(config: Config) -> Callable[[Federation], Federation] | None:
    """Returns the function that gives a federation its curves; None without any."""
    tables, entries = tables_of(config.schedules, config.run.rounds), entries_of(config.schedules)
    if not tables:
        return None

    def scheduled_as_configured(federation: Federation) -> Federation:
        for key in entries:
            _require_number(federation, key)
        places = {key: _place_of(federation.hyper, key) for key in entries}
        for key, place in places.items():
            same = [other for other in entries if places[other] == place]
            rule = f"be of another number than {_HERE}.{same[0]}"
            checks.require(same[0] == key, f"{_HERE}.{key}", rule, entries[key])
        for key in plateaus_of(config):
            smaller = {places[key]: np.array([1, 0.5], np.float32)}
            sizes = federation.population.sizes
            is_free = not priced_factors(federation.algorithm, sizes, smaller)
            checks.require(is_free, f"{_HERE}.{key}", _PLANNED, "plateau")
        of_numbers = {place: tables[name_of(key)] for key, place in places.items()}
        with keyed("", {_HERE: ", ".join(f"{_HERE}.{key}" for key in entries)}):
            return scheduled(federation, of_numbers, config.run.rounds)

    return scheduled_as_configured


def _require_number(federation: Federation, key: str) -> None:
    """Requires of a key that the run has its number as one that fixes no shape."""
    try:
        require_scheduled(federation, _place_of(federation.hyper, key))
    except ValueError as error:
        names, known = names_of(federation.hyper._replace(factors={})), []
        for section, start in _SECTIONS.items():
            last = [name.removeprefix(start) for name in names if name.startswith(start)]
            known += [
                f"{section}.{n}" for n in last if n in _KEYS.get(section, (n,)) and "." not in n
            ]
        rule = f"be of a number that can change in this run, of {', '.join(known)}"
        raise ValueError(f"{_HERE} must {rule}, got {key!r}") from error


def check_schedules(config: Config) -> None:
    """Refuses curves of numbers that a run does not have, or that fit nothing else of it."""
    entries, privacy, training = entries_of(config.schedules), config.privacy, config.training
    tables = tables_of(config.schedules, config.run.rounds)
    for key in entries:
        here = f"{_HERE}.{key}"
        section, _, name = key.rpartition(".")
        unit = section.removeprefix("privacy.")
        is_of_privacy = unit != section
        if is_of_privacy:
            rule = f"be left out, since privacy.unit = {privacy.unit!r} does not protect a {unit}"
            checks.require(unit in privacy.units, here, rule, entries[key])
        rule = f"be {_HERE}.privacy.client.{name}, the number of the private mean"
        is_twice = section.startswith("algorithm.") and name in _MECHANISM
        checks.require(not is_twice or "client" not in privacy.units, here, rule, entries[key])
        if section in _KEYS and name != "noise_multiplier":
            rule = f"be left out without {key}, which its factors would multiply"
            is_given = attrgetter(key)(config) is not None
            checks.require(is_given, here, rule, entries[key])
        factors = tables[name_of(key)]
        rule = "have factors of at most 1, since arrays are made for the batch size itself"
        fits = key != "training.batch_size" or np.max(factors) <= 1
        checks.require(bool(fits), here, rule, entries[key])
        # A given noise multiplier may end in rounds without noise.
        is_above = is_of_privacy and (name == "clip_norm" or attrgetter(key)(config) is None)
        rule = "have factors above 0, as 0 would leave a round without a bound or a finite ε"
        checks.require(bool(not is_above or np.min(factors) > 0), here, rule, entries[key])
    rule = "be left out with training.num_steps, which replaces epochs"
    fits = training.num_steps is None or "training.num_epochs" not in entries
    checks.require(fits, f"{_HERE}.training.num_epochs", rule, entries.get("training.num_epochs"))
    level, key = privacy.client, "privacy.client.clip_norm"
    rule = f"be left out with {level.mechanism} noise, whose lattice is made for one number"
    for name in (f"privacy.client.{name}" for name in _MECHANISM):
        fits = name not in entries or not isinstance(level, _ON_A_LATTICE)
        checks.require(fits, f"{_HERE}.{name}", rule, entries.get(name))
    is_adaptive = isinstance(level, GaussianLevel) and level.adaptive_clipping
    rule = "be left out with privacy.client.adaptive_clipping, which changes the clip norm itself"
    checks.require(not (is_adaptive and key in entries), f"{_HERE}.{key}", rule, entries.get(key))
    _check_plateaus(config)


def _check_plateaus(config: Config) -> None:
    """Refuses a metric that decides what must be known before a run, or what is published."""
    for key, plateau in plateaus_of(config).items():
        here, name = f"{_HERE}.{key}", key.rpartition(".")[2]
        planned = ("noise_multiplier", "batch_size", "num_epochs", "num_steps")
        fits = not (config.privacy.units and name in planned)
        checks.require(fits, here, _PLANNED, "plateau")
        rule = f"be {' or '.join(RELEASED)} if run.release is 'private': other metrics are exact"
        fits = config.run.release is None or plateau.is_private
        checks.require(fits, f"{here}.metric", rule, plateau.metric)
