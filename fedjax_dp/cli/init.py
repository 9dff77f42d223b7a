"""`fedjax-dp init`: asks for data, unit, ε and method, and writes a first configuration."""

import json
import pathlib
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import tomli_w
import typer

from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.cli.output import Answer, Configured, Output, answering, application, completed
from fedjax_dp.core import checks, files
from fedjax_dp.data import datasets
from fedjax_dp.data.datasets.cells import without_ending
from fedjax_dp.experiment.assembly.assemble import checked_config, parts_of
from fedjax_dp.experiment.components.catalogue import CHOICES
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.json_schema import json_schema
from fedjax_dp.experiment.reading.keys import describe, describe_choice
from fedjax_dp.experiment.schema.config import Config, PrivacySection
from fedjax_dp.experiment.studies.methods import words_of

app = application()

# The methods that are proposed, by unit of privacy.
_METHODS = {"record": "dp_sgd", "client": "dp_fedavg", "both": "dp_sgd", "none": "fedavg"}
# Keys that are answers to questions, by option.
_ASKED = {"data.name": "--data", "privacy.unit": "--unit", "algorithm.name": "--method"}
# The models of data that the default one does not fit.
_MODELS = dict.fromkeys(("shakespeare", "tiny_shakespeare", "stackoverflow"), "char_lstm")
# The keys that are written besides those that were given; the others have their defaults.
_WRITTEN = (
    *("run.rounds", "run.evaluate_every", "run.seed", "data.name", "data.options"),
    *("data.partition", "data.num_clients", "model.name", "algorithm.name", "algorithm.options"),
    *("training.optimizer", "training.learning_rate", "training.batch_size", "training.num_epochs"),
    *("participation.sampler", "privacy.unit"),
    *(f"privacy.record.{name}" for name in ("epsilon", "dp_delta", "clip_norm")),
    *(f"privacy.client.{name}" for name in ("epsilon", "dp_delta", "clip_norm")),
)
_SCHEMA = "fedjax-dp.schema.json"
_Check = Callable[[str], Any]
_Ask = Callable[[str | None, str, str, _Check], str]


@answering(app, cls=Configured)
def command(
    context: typer.Context,
    out: Output,
    file: Annotated[
        pathlib.Path, typer.Argument(metavar="FILE", help="The TOML file to write.")
    ] = pathlib.Path("experiment.toml"),
    data: Annotated[
        str | None,
        typer.Option(
            help="A name of `fedjax-dp data list`, or a table such as my.csv.",
            autocompletion=completed(datasets.available),
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="The column of a table to predict.", show_default=False)
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="The column of a table that names the client of each row.")
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(
            help="What ε protects: record, client, both or none.",
            autocompletion=completed(lambda: _METHODS),
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε at the end of the run.")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="A name that algorithm.name may have and that fits the unit.",
            autocompletion=completed(lambda: ALGORITHMS),
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help=f"Also write {_SCHEMA}, which FILE names for editors.")
    ] = False,
) -> Answer:
    """Write a first configuration: `fedjax-dp init [FILE.toml] [--section.key VALUE ...]`.

    Asks for data, unit of privacy, ε and method on a terminal; elsewhere, what no option answers
    has its default. Any other key may be given as for `fedjax-dp run`. The configuration is checked
    before it is written, and a table is read to do so.
    """
    for path in (file, *([file.parent / _SCHEMA] if schema else [])):
        kind = files.kind_of(path, "FILE")
        rule = "be a new file; --force overwrites it"
        checks.require(kind == "missing" or (force and kind == "file"), "FILE", rule, str(path))
    files.require_folder(file.parent, "the folder of FILE", writable=True)
    for key, option in _ASKED.items():
        words = [word for word in context.args if word.startswith(f"--{key}=")]
        checks.require(not words, key, f"be given as {option}", words)

    can_ask = sys.stdin is not None and sys.stdin.isatty() and not (out.as_json or out.is_quiet)

    def ask(given: str | None, question: str, default: str, check: _Check) -> str:
        while True:
            is_asked = given is None and can_ask
            text = str(typer.prompt(question, default, err=True)) if is_asked else given or default
            try:
                check(text)
            except ValueError as error:
                if not is_asked:
                    raise
                out.warn(str(error))
            else:
                return text

    asked: dict[str, Any] = {f"privacy.{each}.epsilon": epsilon for each in ("record", "client")}
    table = {"path": data, "label": label, "client": client}
    asked |= {f"data.options.{name}": given for name, given in table.items()}
    both = sorted(key for key in _keys(context.args) if asked.get(key) is not None)
    checks.require(not both, "--data, --label, --client, --epsilon", "be the only values", both)

    words, notes = _data_of(data, label, client, ask)
    question = "Unit of privacy (record, client, both or none)"
    unit = ask(unit, question, "record", partial(checks.one_of, "--unit", choices=_METHODS))
    units = PrivacySection(unit=unit).units
    rule = "be left out with --unit none"
    checks.require(bool(units) or epsilon is None, "--epsilon", rule, epsilon)
    if units:
        given = None if epsilon is None else str(epsilon)
        budget = ask(given, "ε at the end of the run", "8", _check_budget)
        words += [f"--privacy.{each}.epsilon={budget}" for each in units]
    methods = [name for name, entry in ALGORITHMS.items() if unit in entry.units]
    fits = partial(checks.one_of, f"--method with --unit {unit}", choices=methods)
    question = f"Method ({', '.join(name for name in methods if _is_plain(name, unit))})"
    method = ask(method, question, _METHODS[unit], fits)
    words = [*words_of(method, ALGORITHMS[method], unit)[1:], *words]
    config = config_files.load_config(None, _merged([*words, *context.args]))
    # Of a table it depends on its columns, and on what is in them, whether it can be used.
    if config.data.name == "table":
        parts_of(config)
    else:
        checked_config(config)
    text = _as_toml(config, file.name, _keys(words) | _keys(context.args), has_schema=schema)
    again = config_files.from_toml(text, str(file))
    assert again.model_dump() == config.model_dump()
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(file, text)
    if schema:
        files.write_text(file.with_name(_SCHEMA), json.dumps(json_schema(), indent=1) + "\n")
    line = f"fedjax-dp run {shlex.quote(str(file))}"
    document = {"file": str(file), "run": line, "notes": notes}
    document |= {"data": config.data.name, "unit": unit, "method": method}

    def show(out: Output) -> None:
        out.say(f"wrote {file}; to run it: {line}")
        for note in notes:
            out.say(f"note: {note}")

    return Answer(document, show, str(file))


def _is_plain(method: str, unit: str) -> bool:
    """Whether a method protects a unit without options that only the user can choose."""
    try:
        checked_config(
            config_files.load_config(None, words_of(method, ALGORITHMS[method], unit)[1:])
        )
    except ValueError:
        return False
    return True


def _check_budget(text: str) -> None:
    try:
        checks.positive("--epsilon", float(text))
    except ValueError:
        raise ValueError(f"--epsilon must be a number above 0, got {text!r}") from None


def _data_of(
    data: str | None, label: str | None, client: str | None, ask: _Ask
) -> tuple[list[str], list[str]]:
    """Returns the words that choose the data, and notes about files that are missing."""
    question = "Data (a name of `fedjax-dp data list`, or a table such as my.csv)"
    data = ask(data, question, "digits", _check_data)
    slower = [] if data == "digits" else ["--training.learning_rate=0.5"]
    if not _is_table(data):
        for option, given in (("--label", label), ("--client", client)):
            checks.require(given is None, option, "be left out unless --data is a table", given)
        state = datasets.status(data)
        get = f"fedjax-dp data fetch {data}" if state.can_fetch else "fedjax-dp data list"
        missing = [] if state.is_present else [f"files of {data} are missing: {get}"]
        model = [f"--model.name={_MODELS[data]}"] if data in _MODELS else []
        return [f"--data.name={data}", *slower, *model], missing
    label = ask(label, "Column to predict", "", _check_label)
    client = ask(client, "Column with the client of each row (empty for none)", "", str)
    options = {"path": data, "label": label} | ({"client": client} if client else {})
    quoted = [f"--data.options.{k}={json.dumps(v, ensure_ascii=False)}" for k, v in options.items()]
    return ["--data.name=table", *slower, *quoted], []


def _is_table(data: str) -> bool:
    return without_ending(data) != data


def _check_data(data: str) -> None:
    if _is_table(data):
        files.require_file(files.expanded(data), "--data")
    else:
        checks.one_of("--data", data, datasets.available())


def _check_label(label: str) -> None:
    checks.require(bool(label), "--label", "name the column of the table to predict", label)


def _merged(words: Sequence[str]) -> list[str]:
    """Lists `--key=value` once for each key, the last that is given."""
    return [f"{key}={text}" for key, text in (dict(word.split("=", 1) for word in words)).items()]


def _keys(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].removeprefix("--") for word in words}


def _as_toml(config: Config, name: str, given: Collection[str], *, has_schema: bool) -> str:
    """Writes the main keys of a configuration, and those that are given, each with its meaning."""
    rows = [*describe()]
    for key in CHOICES:
        section, _, last = key.partition(".")
        if (part := getattr(getattr(config, section), last)) is not None:
            rows += describe_choice(f"{key}={part}")
    about = {key: text for key, _, _, text in rows}
    head = [f"#:schema {_SCHEMA}"] if has_schema else []
    head += [
        f"# An experiment of fedjax_dp. To run it: fedjax-dp run {shlex.quote(name)}",
        "# All keys and their defaults: fedjax-dp run --keys",
    ]
    tables = tomllib.loads(config_files.to_toml(config))
    lines = _lines(tables, (), {*_WRITTEN, *given}, about)
    return "\n".join([*head, *lines]) + "\n"


def _lines(
    table: Mapping[str, Any],
    path: tuple[str, ...],
    wanted: Collection[str],
    about: Mapping[str, str],
) -> list[str]:
    """Lists the lines of a table of TOML: its values, then the tables in it."""
    lines, inner = list[str](), list[str]()
    for name, value in table.items():
        key = ".".join((*path, name))
        if not any(config_files.overlap(key, each) for each in wanted):
            continue
        if isinstance(value, dict):
            inner += _lines(value, (*path, name), wanted, about)
        else:
            lines += [f"# {line}" for line in textwrap.wrap(about.get(key, ""), 96)]
            lines.append(tomli_w.dumps({name: value}).strip())
    is_bare = re.compile("[A-Za-z0-9_-]+").fullmatch
    head = ".".join(
        each if is_bare(each) else json.dumps(each, ensure_ascii=False) for each in path
    )
    return [*(["", f"[{head}]", *lines] if lines else []), *inner]
