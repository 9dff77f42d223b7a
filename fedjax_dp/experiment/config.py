"""The configuration of an experiment: its shape, its defaults, and errors that name the mistake."""

import dataclasses
import pathlib
import tomllib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tomli_w

from fedjax_dp.core import checks
from fedjax_dp.experiment.values import ConfigError, kinds_of, read_value

Numbers = float | list[float]
# Published lists with one number for each of 20, 40 or 60 clients, see `privacy.budgets`.
NamedBudgets = Literal[
    "Dist1", "Dist2", "Dist3", "Dist4", "Dist5", "Dist6", "Dist7", "Dist8", "Dist9"
]
NamedBatchSizes = Literal["heterogeneous"]

_COMMAND_LINE = "command line"
# Options of the command itself, which a misspelt key may have meant.
_COMMAND_OPTIONS = ["output", "resume", "keys"]


def _setting(default: Any, about: str) -> Any:
    factory = default if callable(default) else None
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata={"about": about})
    return dataclasses.field(default=default, metadata={"about": about})


@dataclasses.dataclass(frozen=True)
class RunSection:
    """How long a run is, and how often it looks up."""

    name: str = _setting("digits", "name of the run, used in titles")
    seed: int = _setting(0, "root of all random draws, of the partition too")
    secret: bool = _setting(
        False, "draw cohorts, batches and noise from a root that only the checkpoint holds"
    )
    rounds: int = _setting(30, "number of rounds")
    evaluate_every: int = _setting(1, "rounds between two evaluations")
    checkpoint_every: int = _setting(10, "rounds between two checkpoints")


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Which examples, and how they are spread over clients."""

    name: str = _setting("digits", "a data set, see `fedjax-dp data list`")
    data_dir: str | None = _setting(None, "folder of data files; else FEDJAX_DP_DATA, else a cache")
    options: dict[str, Any] = _setting(dict, "options of the data set's loader")
    partition: str = _setting("label_and_quantity_skew", "how examples are spread over clients")
    num_clients: int = _setting(10, "number of clients; natural clients come with the data")
    partition_options: dict[str, Any] = _setting(dict, "options of the partition")
    client_test_share: float = _setting(0.2, "share of each client's examples held out for it")
    public_examples: int = _setting(
        0, "examples taken out of the pool, without labels, for algorithms that ask about them"
    )
    check_finite: bool = _setting(True, "refuse data with NaN or infinity before any work")


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """What is trained."""

    name: str = _setting("logistic_regression", "a model of the zoo")
    options: dict[str, Any] = _setting(dict, "options of the model")
    frozen: list[str] = _setting(
        list, "paths or patterns, such as params/Conv_0/*, of parameters that stay as they start"
    )


@dataclasses.dataclass(frozen=True)
class AlgorithmSection:
    """How the parts are put together."""

    name: str = _setting("dp_sgd", "an algorithm")
    options: dict[str, Any] = _setting(dict, "options of the algorithm")


@dataclasses.dataclass(frozen=True)
class TrainingSection:
    """Local training at the clients; numbers may be one for all or a list, one a client."""

    optimizer: str = _setting("sgd", "an Optax optimiser that takes a learning rate")
    optimizer_options: dict[str, Any] = _setting(dict, "options of the optimiser")
    learning_rate: Numbers = _setting(2.0, "step size")
    batch_size: Numbers | NamedBatchSizes = _setting(
        64.0, "examples a step, expected ones under Poisson sampling; or a published list"
    )
    num_epochs: Numbers = _setting(1.0, "passes over the client's data in a round")
    num_steps: Numbers | None = _setting(None, "local steps in a round, instead of epochs")
    sampler: Literal["auto", "shuffled", "poisson", "fixed_size", "everybody"] = _setting(
        "auto", "how batches are drawn; auto is poisson under record-level privacy, else shuffled"
    )
    micro_batch_size: int | None = _setting(None, "examples computed at once; bounds memory")


@dataclasses.dataclass(frozen=True)
class ParticipationSection:
    """Who joins a round."""

    sampler: Literal["everybody", "poisson", "fixed_size", "cyclic", "min_separated"] = _setting(
        "everybody", "how a cohort is drawn"
    )
    cohort_size: float | None = _setting(None, "(expected) clients a round; everybody if not given")
    capacity: int | None = _setting(None, "slots of a Poisson cohort; larger draws are truncated")
    separation: int = _setting(1, "rounds between two draws of a client under min_separated")


@dataclasses.dataclass(frozen=True)
class LevelSection:
    """The mechanism at one unit of privacy; a noise multiplier, or an ε to calibrate it to."""

    clip_norm: Numbers = _setting(1.0, "bound on the L2 norm of one unit's contribution")
    noise_multiplier: Numbers | None = _setting(None, "noise standard deviation over the bound")
    epsilon: Numbers | NamedBudgets | None = _setting(
        8.0, "ε at the end of the run, and its budget; or, of records, a published list"
    )
    dp_delta: Numbers = _setting(1e-5, "δ, one for all clients or one for each")
    per_layer: bool = _setting(False, "clip layer by layer")


@dataclasses.dataclass(frozen=True)
class ClientLevelSection(LevelSection):
    """The mechanism on clients' updates."""

    dp_delta: float = _setting(1e-5, "δ")
    mechanism: Literal[
        "gaussian",
        "laplace",
        "staircase",
        "bounded_laplace",
        "discrete_gaussian",
        "central_discrete_gaussian",
        "correlated_gaussian",
    ] = _setting(
        "gaussian", "the noise; discrete noise is added by the clients, in shares, unless central"
    )
    denominator: Literal["expected", "realised"] = _setting(
        "expected", "what the noised sum is divided by; realised claims no privacy"
    )
    adaptive_clipping: bool = _setting(False, "let the bound follow a private quantile of norms")
    target_quantile: float = _setting(0.5, "share of updates to leave unclipped, if adaptive")
    bits: int | Literal["auto"] = _setting(
        16, "bits that a client sends for each parameter, if discrete; auto takes what costs 1 %"
    )
    bands: int = _setting(1, "rounds whose noise is tied together, if correlated")


@dataclasses.dataclass(frozen=True)
class PrivacySection:
    """What is protected, and how it is accounted."""

    unit: Literal["none", "record", "client", "both"] = _setting("record", "unit of privacy")
    relation: Literal["zero_out", "add_remove", "replace_one"] = _setting(
        "zero_out", "neighbouring data; add_remove is refused, since sizes are public"
    )
    accountant: Literal["rdp", "pld", "rdp-classic-64"] = _setting("rdp", "how ε is computed")
    record: LevelSection = _setting(LevelSection, "record-level mechanism")
    client: ClientLevelSection = _setting(ClientLevelSection, "client-level mechanism")

    @property
    def units(self) -> tuple[str, ...]:
        """Lists the units that are protected."""
        return {"none": (), "both": ("client", "record")}.get(self.unit, (self.unit,))


@dataclasses.dataclass(frozen=True)
class ExecutionSection:
    """Speed and memory; never results."""

    clients_per_chunk: int | Literal["auto", "tuned"] = _setting(
        "auto", "clients computed side by side"
    )
    devices: int | Literal["auto"] = _setting("auto", "devices that share a cohort; a CPU's cores")
    placement: Literal["auto", "device", "host"] = _setting("auto", "where examples are kept")
    compilation_cache: str | None = _setting(None, "folder that keeps compiled programs")


@dataclasses.dataclass(frozen=True)
class Config:
    """An experiment.

    Attributes:
      run: how long a run is.
      data: which examples, and how they are spread.
      model: what is trained.
      algorithm: how the parts are put together.
      training: local training.
      participation: who joins a round.
      privacy: what is protected.
      execution: speed and memory.
    """

    run: RunSection = dataclasses.field(default_factory=RunSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    algorithm: AlgorithmSection = dataclasses.field(default_factory=AlgorithmSection)
    training: TrainingSection = dataclasses.field(default_factory=TrainingSection)
    participation: ParticipationSection = dataclasses.field(default_factory=ParticipationSection)
    privacy: PrivacySection = dataclasses.field(default_factory=PrivacySection)
    execution: ExecutionSection = dataclasses.field(default_factory=ExecutionSection)


def load(path: str | pathlib.Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration: defaults, then a TOML file, then overrides.

    Args:
      path: a TOML file; the defaults alone where it is None.
      overrides: words of a command line, `--section.key value` or `--section.key=value`.

    Returns:
      The configuration, every value of the right type.

    Raises:
      ConfigError: naming the key or value and the nearest valid one.
    """
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"there is no configuration file {str(path)!r}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    origin = str(path) if path is not None else "defaults"
    config = _section(Config, tables, (), origin)
    changes: dict[str, Any] = {}
    for key, text in _pairs(overrides):
        _put(changes, key, text)
    return _section(Config, _merged(_tables(config), changes), (), _COMMAND_LINE)


def to_toml(config: Config) -> str:
    """Writes a configuration with every value that has one.

    Args:
      config: the configuration.

    Returns:
      TOML text that `load` reads back to an equal configuration.
    """
    return tomli_w.dumps(_tables(config))


def describe() -> list[tuple[str, str, str]]:
    """Lists every key.

    Returns:
      For each key its dotted name, its default as text, and what it means.
    """
    rows = []

    def visit(section: Any, prefix: str) -> None:
        for field in dataclasses.fields(section):
            value, name = getattr(section, field.name), f"{prefix}{field.name}"
            if dataclasses.is_dataclass(value):
                visit(value, f"{name}.")
            else:
                rows.append((name, _shown(value), field.metadata["about"]))

    visit(Config(), "")
    return rows


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _tables(section: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            tables[field.name] = _tables(value)
        elif value is not None:
            tables[field.name] = value
        elif field.default is not None:
            # TOML has no null: a value that was taken away is written as the word.
            tables[field.name] = "none"
    return tables


def _merged(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tables)
    for name, value in changes.items():
        old = merged.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"expected --section.key, got {word!r}")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key} needs a value")
            text = rest.pop(0)
        pairs.append((key, text))
    return pairs


def _put(changes: dict[str, Any], key: str, text: str) -> None:
    *path, last = key.split(".")
    _require_known(Config, tuple(path), last, _COMMAND_LINE)
    table = changes
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{_COMMAND_LINE}: --{key} enters a value that was given as a whole")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    # A name such as 2024-05-01 is a text where a text belongs, quoted or not.
    is_text = key in _all_keys() and str in kinds_of(_kind_of(key))
    table[last] = text if is_text and not isinstance(value, str) else value


def _kind_of(key: str) -> Any:
    kind: Any = Config
    for part in key.split("."):
        kind = typing.get_type_hints(kind)[part]
    return kind


def _all_sections(cls: Any = Config, prefix: str = "") -> list[str]:
    sections = []
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            sections += [f"{prefix}{name}", *_all_sections(kind, f"{prefix}{name}.")]
        elif kind == dict[str, Any]:
            sections.append(f"{prefix}{name}")
    return sections


def _all_keys(cls: Any = Config, prefix: str = "") -> list[str]:
    keys = []
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            keys += _all_keys(kind, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _require_known(cls: Any, path: tuple[str, ...], last: str, origin: str) -> None:
    kind, hints = cls, typing.get_type_hints(cls)
    for depth, part in enumerate((*path, last)):
        if part not in hints:
            raise _unknown((*path, last), origin)
        kind = hints[part]
        if kind == dict[str, Any]:
            return
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
        elif depth < len(path):
            raise _unknown((*path, last), origin)
    if dataclasses.is_dataclass(kind):
        raise ConfigError(f"{origin}: {'.'.join((*path, last))} is a section, not a key")


def _unknown(path: tuple[str, ...], origin: str, *, is_section: bool = False) -> ConfigError:
    key, noun = ".".join(path), "section" if is_section else "key"
    known = _all_sections() if is_section else _all_keys()
    if origin == _COMMAND_LINE:
        known += _COMMAND_OPTIONS
    return ConfigError(
        f"{origin}: there is no {noun} {key!r}; did you mean {checks.nearest(key, known)!r}?"
    )


def _section(cls: Any, tables: Any, path: tuple[str, ...], origin: str) -> Any:
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{origin}: {'.'.join(path)} must be a section, got {tables!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in tables.items():
        if name not in hints:
            raise _unknown((*path, name), origin, is_section=isinstance(value, Mapping))
        kind = hints[name]
        here = (*path, name)
        values[name] = (
            _section(kind, value, here, origin)
            if dataclasses.is_dataclass(kind)
            else read_value(kind, value, ".".join(here), origin)
        )
    return cls(**values)
