"""Lists the algorithms of the registry, each with the facts of its declaration."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.algorithms.registry import ALGORITHMS, Entry, options_of
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import tariff_of
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.facts import population_of as sizes_and_shapes
from fedjax_dp.engine.federation import federation
from fedjax_dp.experiment.assembly.assemble import Parts, parts_of, population_of
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.experiment.components.mechanism import structure_of
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.running.results import covered_models, has_own_models

# Values for options without a default, with which a command runs on the default data.
_EXAMPLES: dict[str, tuple[str, ...]] = {
    "num_models": ("--algorithm.options.num_models=2",),
    "clusters": ("--algorithm.options.clusters=[0,0,0,0,0,1,1,1,1,1]",),
    "head": ("--model.name=mlp", "--algorithm.options.head=params/Dense_2"),
}
# The default learning rate is above the limit of their inner steps, or of their sensitivity.
_SLOWER = ("--training.learning_rate=0.5",)
_WHOLE = (*_SLOWER, "--training.sampler=full_batch", "--model.options.gradient_bound=1")
_ALSO = {
    **dict.fromkeys(("splitting", "fedsplit", "fedpi", "fedrp", "reflected_fedprox"), _SLOWER),
    **dict.fromkeys(("warm_start_averaging", "retrained_averaging"), _WHOLE),
}
_PUBLIC = "--data.public_examples=100"
_VALIDATED = "--data.client_validation_share=0.2"


class Method(NamedTuple):
    """An algorithm as a table of methods shows it.

    Attributes:
      name: its name in a configuration.
      summary: what it does, the first line of its docstring.
      source: where it was published, and which part of that is implemented.
      kept: the state that a client keeps from round to round, in bytes or models.
      down: the most that one client receives in a round.
      up: the most that one client sends in a round.
      units: the units of privacy that it can protect; empty if it can protect none.
      covered: the models that ε covers, by unit.
      not_covered: the reason if it can protect nothing, or what no ε covers; empty otherwise.
      clients: whether clients can be protected, and the parts of an update if there are several, or
        the reason if not.
      command: the words after `fedjax-dp` of a run of it on the default data.
    """

    name: str
    summary: str
    source: str
    kept: str
    down: str
    up: str
    units: tuple[str, ...]
    covered: dict[str, str]
    not_covered: str
    clients: str
    command: tuple[str, ...]


@checked
def methods(names: Sequence[str] | None = None) -> list[Method]:
    """Lists algorithms with the facts that their declarations state.

    Every algorithm is built for the default data and traced once; nothing is trained. Sizes are
    those of its messages and states there, before sparse entries are left out.

    Args:
      names: keys of the registry of algorithms; all by default.

    Returns:
      One entry for each, in the registry's order by default.

    Raises:
      ValueError: for an unknown name.
    """
    names = list(ALGORITHMS) if names is None else names
    for name in names:
        checks.one_of("names", name, ALGORITHMS)
    populations: dict[str, Population] = {}
    return [_method(name, ALGORITHMS[name], populations) for name in names]


@checked
def methods_table(listed: Sequence[Method]) -> str:
    """Writes methods as three tables in Markdown.

    Args:
      listed: as `methods` returns them.

    Returns:
      What each method does and sends; what ε covers, by methods that are alike in this; sources and
      commands.
    """
    sizes = [(f"**`{m.name}`**", m.summary, m.kept, m.down, m.up) for m in listed]
    alike: dict[tuple[str, str], list[str]] = {}
    for m in listed:
        alike.setdefault((_protection(m), m.clients), []).append(f"`{m.name}`")
    protected = [(", ".join(names), *facts) for facts, names in alike.items()]
    runs = [(f"`{m.name}`", m.source, f"`fedjax-dp {' '.join(m.command)}`") for m in listed]
    tables = (
        _table(("method", "what it does", "client state", "down", "up"), sizes),
        _table(("methods", "protects", "clients"), protected),
        _table(("method", "source", "command"), runs),
    )
    return "\n\n".join(tables)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (heads, ["---"] * len(heads), *rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in row)} |" for row in lines)


def _protection(method: Method) -> str:
    """Describes what is private, by unit."""
    by_cover: dict[str, list[str]] = {}
    for unit, cover in method.covered.items():
        by_cover.setdefault(cover, []).append(unit)
    parts = [f"{' or '.join(units)}: {cover}" for cover, units in by_cover.items()]
    if method.not_covered:
        parts.append(f"not covered: {method.not_covered}" if parts else method.not_covered)
    return "; ".join(parts)


def _method(name: str, entry: Entry, populations: dict[str, Population]) -> Method:
    units = tuple(unit for unit in entry.units if unit != "none")
    # Sizes are those of the method itself, which another mean may change.
    offered = [one for one in ("client", "record") if one in units]
    unit = next((one for one in offered if one != "client" or not entry.has_own_mean), "none")
    words, parts = _built(name, words_of(name, entry, unit), unit, populations)
    population = sizes_and_shapes(parts.population.train, parts.population.validation)
    bound = federation(parts.algorithm, population, parts.participation)
    facts, claims, has_shared = bound.facts, bound.claims, bound.shared is not None
    is_own = has_own_models(parts.algorithm, facts.own)
    text = " ".join((inspect.getdoc(entry.factory) or "").split())
    each = trees.num_bytes(structure_of(parts.model))
    return Method(
        name=name,
        summary=text.partition(". ")[0].removeprefix("Declares ").rstrip("."),
        source=_source(text),
        kept="nothing" if facts.own is None else _size(facts.own, each),
        down=_size((facts.down, facts.after), each),
        up=_size(facts.up, each),
        units=units,
        covered={
            of: covered_models(not has_shared, is_own, has_shared, of.split(), claims.not_covered)
            for of in units
            if of != "both"
        },
        not_covered=_reason(entry) if not units else claims.not_covered or "",
        clients=_of_clients(entry, parts.config.algorithm.options),
        command=words,
    )


def _source(docstring: str) -> str:
    """The first sentence of a source, in one line."""
    return re.split(r"\. (?=[A-Z])", docstring.partition("Source: ")[2])[0].rstrip(".")


def _reason(entry: Entry) -> str:
    """The reason for which nothing can be protected, as a sentence of its own."""
    return "nothing: " + re.sub("^(?:which|whose) ", "", entry.reason)


def _of_clients(entry: Entry, options: Mapping[str, Any]) -> str:
    """Whether a private mean can combine the updates of clients."""
    if not {"client", "both"} & {*entry.units}:
        reason = re.sub("^whose", "its", re.sub("^which", "it", entry.no_clients))
        return f"no: {reason or 'not declared'}"
    update = entry.noised((), options)
    parts = f", {' and '.join(update)} as one vector" if isinstance(update, Mapping) else ""
    return f"yes{', with records' * ('client' not in entry.units)}{parts}"


def words_of(name: str, entry: Entry, unit: str) -> tuple[str, ...]:
    """The words of a run, with values for options that have no default."""
    words = ["run", f"--algorithm.name={name}", f"--privacy.unit={unit}"]
    for option, default in options_of(name).items():
        words += _EXAMPLES[option] if default is inspect.Parameter.empty else ()
    return (*words, *_ALSO.get(name, ()), *([_PUBLIC] if entry.asks_public_inputs else []))


def _built(
    name: str, words: tuple[str, ...], unit: str, populations: dict[str, Population]
) -> tuple[tuple[str, ...], Parts]:
    """Builds the parts of a run, with validation data if clients read some."""
    # Shapes do not depend on the noise, whose calibration takes long.
    is_fixed = unit == "none" or ALGORITHMS[name].budgets is not None
    noise = () if is_fixed else (f"--privacy.{unit}.noise_multiplier=1",)
    config = load_config(None, [*words[1:], *noise])
    key = str((config.data, ALGORITHMS[name].pools_clients))
    if key not in populations:
        populations[key] = population_of(config)
    parts = parts_of(config, populations[key])
    if parts.algorithm.training.reads_validation and parts.population.validation is None:
        return _built(name, (*words, _VALIDATED), unit, populations)
    return words, parts


def _size(message: PyTree, each: int) -> str:
    """The size of a message or a state in models of so many bytes, and bytes."""
    tariff = tariff_of(message)
    of_types = tariff.bytes_of(np.array(tariff.most, np.int64), "dense")
    total = int(sum(of_types.values()))
    models, rest = divmod(total, each)
    if 10 * rest > each:
        return f"{total / each:.2f} models"
    parts = [f"{models} model{'s' * (models > 1)}"] if models else []
    return " and ".join([*parts, *([f"{rest} bytes"] if rest else [])]) or "nothing"
