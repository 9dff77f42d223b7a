"""`fedjax-dp init`: asks for data, unit, ε and method, and writes a first configuration."""

import json
import math
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
from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.data import datasets
from fedjax_dp.data.datasets import proposals
from fedjax_dp.data.datasets.cells import without_ending
from fedjax_dp.experiment.assembly.assemble import checked_config, parts_of
from fedjax_dp.experiment.components.catalogue import CHOICES
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.json_schema import json_schema
from fedjax_dp.experiment.reading.keys import describe, describe_choice
from fedjax_dp.experiment.schema.config import Config, PrivacySection
from fedjax_dp.experiment.studies.methods import words_of

app = application()

# The methods that are proposed, by unit of privacy; the first is the default.
_METHODS = {
    "record": ("dp_sgd", "fedavg", "fedprox", "scaffold", "ditto", "local_only"),
    "client": ("dp_fedavg", "fedadam", "fedprox", "scaffold", "ditto", "fedrep"),
    "both": ("dp_sgd", "dp_fedavg", "fedprox", "scaffold", "ditto", "fedrep"),
    "none": ("fedavg", "fedadam", "fedprox", "scaffold", "ditto", "q_ffl"),
}
_OTHERS = "others: fedjax-dp run --keys"
# The most characters of choices in a comment.
_SHORT = 100
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
# Comments of the options of a table.
_READ = "These options were chosen by reading the table, which ε does not cover."
_CATEGORIES = (
    "Nor does it cover which values occur in {}; declare them from public knowledge by categories "
    "= {{ NAME = [VALUE, ...] }}."
)
_MISSING = (
    '"drop" leaves out rows with an empty input, in predictions too; "mean" takes exact means, '
    'which ε does not cover; "fill" takes the values of fill = { NAME = VALUE }.'
)
_SCALING = (
    'How numbers are scaled. "standard" takes exact means and deviations, which ε does not cover, '
    "as the statement says. If you know the lowest and highest values without the table, write"
)
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

    words, notes, about = _data_of(data, label, client, context.args, ask)
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
    offered = f"{', '.join(_METHODS[unit])}; {_OTHERS}"
    method = ask(method, f"Method ({offered})", _METHODS[unit][0], fits)
    about["algorithm.name"] = f"method of training: {offered}"
    words = [*words_of(method, ALGORITHMS[method], unit)[1:], *words]
    config = config_files.load_config(None, _merged([*words, *context.args]))
    # Of a table it depends on its columns, and on what is in them, whether it can be used.
    if config.data.name == "table":
        parts_of(config)
    else:
        checked_config(config)
    given_keys = _keys(words) | _keys(context.args)
    text = _as_toml(config, file.name, given_keys, about, has_schema=schema)
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


def _check_budget(text: str) -> None:
    try:
        checks.positive("--epsilon", float(text))
    except ValueError:
        raise ValueError(f"--epsilon must be a number above 0, got {text!r}") from None


def _data_of(
    data: str | None, label: str | None, client: str | None, words: Sequence[str], ask: _Ask
) -> tuple[list[str], list[str], dict[str, str]]:
    """Returns the words that choose the data, notes for the user, and comments of keys."""
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
        return [f"--data.name={data}", *slower, *model], missing, {}
    options, notes, about = _table_options(data, label, client, words, ask)
    quoted = [f"--data.options.{key}={_inline(value)}" for key, value in options.items()]
    comments = {f"data.options{key and '.'}{key}": text for key, text in about.items() if text}
    model = ["--model.name=linear_regression"] if options.get("task") == "regression" else []
    return ["--data.name=table", *slower, *model, *quoted], notes, comments


def _table_options(
    data: str, label: str | None, client: str | None, words: Sequence[str], ask: _Ask
) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Returns the options of a table, notes for the user, and comments of the options."""
    own = [
        "--data.name=table",
        f"--data.options.path={json.dumps(data)}",
        "--data.options.label=''",
    ]
    section = config_files.load_config(
        None, [*own, *(word for word in words if word.startswith("--data."))]
    ).data
    given = {key: each for key, each in section.options.items() if key != "label"}
    data_dir = datasets.resolve_data_dir(section.data_dir)
    table, options = proposals.open_as_written(data_dir, given)

    def check(option: str, name: str) -> None:
        if name or option == "--label":
            disclosure.require_column(option, name, data, table.columns)

    known = checks.listed(table.columns, 300)
    options["label"] = ask(label, f"Column to predict ({known})", "", partial(check, "--label"))
    question = "Column with the client of each row (empty for none)"
    if client := ask(client, question, "", partial(check, "--client")):
        options["client"] = client
    found = proposals.propose(table, data_dir, options)
    options |= {key: each for key, each in found.options.items() if key not in options}
    notes = [f"the column {name} is no input: {why}" for name, why in found.left_out.items()]
    left_out = ", ".join(f"{name} ({why})" for name, why in found.left_out.items())
    about = {"": _READ, "features": left_out and f"The input columns, without {left_out}."}
    for name, forms in found.formats.items():
        question, some = f"Format of the dates of {name}, such as {', '.join(forms[:3])}", forms[0]
        if len(forms) > 1:
            some = ask(None, question, some, partial(checks.one_of, question, choices=forms))
            about["dates"] = "%d is the day, %m the month: check that they are not exchanged."
        options["dates"] = {name: proposals.date_rule(some), **options.get("dates", {})}
    if found.empty and not {"missing", "fill"} & given.keys():
        question = (
            f"Empty cells of {', '.join(found.empty)}: drop their rows, take the mean, or fill "
        )
        question += f"with values from public knowledge, such as {found.empty[0]}=0"
        default = "drop" if found.keeps_most else "mean"
        filled = partial(_filled, found.empty, found.numbers)
        options |= filled(ask(None, question, default, filled))
        about["missing"] = _MISSING if "fill" not in options else ""
    options |= {"missing": "fill"} if "fill" in given else {}
    if found.is_large and not {"scaling", "ranges"} & given.keys():
        question = "Lowest and highest value of numbers, from public knowledge, such as "
        question += f"{' '.join(f'{name}=0:99' for name in found.numbers)} (empty for exact means)"
        scaled = partial(_ranges, found.numbers)
        options |= scaled(ask(None, question, "", scaled))
        needed = ", ".join(f"{_bare(name)} = [LOW, HIGH]" for name in found.numbers)
        if "ranges" not in options:
            about["scaling"] = f'{_SCALING} scaling = "range" and ranges = {{ {needed} }}.'
    options |= {"scaling": "range"} if "ranges" in given else {}
    if found.read_off:
        about[""] += f" {_CATEGORIES.format(', '.join(found.read_off))}"
    return options, notes, about


def _filled(empty: Sequence[str], numbers: Sequence[str], text: str) -> dict[str, Any]:
    """Reads how empty cells are treated: "drop", "mean", or `NAME=VALUE` for each column."""
    if text in ("drop", "mean"):
        return {"missing": text}
    fill = {k: _number(v) if k in numbers else v for k, v in _values(text).items()}
    rule = f"be drop, mean, or NAME=VALUE for each of {', '.join(empty)}"
    is_complete = set(fill) == set(empty) and not any(each != each for each in fill.values())
    checks.require(is_complete, "the answer", rule, text)
    return {"missing": "fill", "fill": fill}


def _ranges(names: Sequence[str], text: str) -> dict[str, Any]:
    """Reads `NAME=LOW:HIGH` for each column of numbers; without any, takes exact statistics."""
    if not text:
        return {"scaling": "standard"}
    ranges = {k: [_number(each) for each in v.split(":")] for k, v in _values(text).items()}
    rule = f"be empty, or NAME=LOW:HIGH for each of {', '.join(names)}"
    is_range = [len(pair) == 2 and pair[0] < pair[1] for pair in ranges.values()]
    checks.require(set(ranges) == set(names) and all(is_range), "the answer", rule, text)
    return {"scaling": "range", "ranges": ranges}


def _values(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in shlex.split(text))}


def _number(text: str) -> float:
    """Reads a number; NaN, which no rule accepts, for other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_table(data: str) -> bool:
    return without_ending(data) != data


def _check_data(data: str) -> None:
    if _is_table(data):
        files.require_file(files.expanded(data), "--data")
    else:
        checks.one_of("--data", data, datasets.available())


def _merged(words: Sequence[str]) -> list[str]:
    """Lists `--key=value` once for each key, the last that is given."""
    return [f"{key}={text}" for key, text in (dict(word.split("=", 1) for word in words)).items()]


def _keys(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].removeprefix("--") for word in words}


def _as_toml(
    config: Config,
    name: str,
    given: Collection[str],
    comments: Mapping[str, str],
    *,
    has_schema: bool,
) -> str:
    """Writes the main keys of a configuration, and those that are given, each with its meaning."""
    rows = describe()
    for key in CHOICES:
        section, _, last = key.partition(".")
        if (part := getattr(getattr(config, section), last)) is not None:
            rows += describe_choice(f"{key}={part}")
    about = {key: f"{text}{_choices(rule)}" for key, rule, _, text in rows} | {**comments}
    head = [f"#:schema {_SCHEMA}"] if has_schema else []
    head += [
        f"# An experiment of fedjax_dp. To run it: fedjax-dp run {shlex.quote(name)}",
        "# All keys and their defaults: fedjax-dp run --keys",
    ]
    tables = tomllib.loads(config_files.to_toml(config))
    lines = _lines(tables, (), {*_WRITTEN, *given}, about)
    return "\n".join([*head, *lines]) + "\n"


def _choices(rule: str) -> str:
    """Lists the choices of a key, or some of many."""
    if not (choices := rule.partition("one of ")[2]) or not rule.startswith("one of "):
        return ""
    if len(choices) <= _SHORT:
        return f": {choices}"
    return f": {choices[:_SHORT].rpartition(',')[0]}; {_OTHERS}"


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
            lines += [*_comment(about.get(key, "")), f"{_bare(name)} = {_inline(value)}"]
    head = ".".join(map(_bare, path))
    opening = ["", f"[{head}]"]
    if text := about.get(".".join(path)):
        opening += [*_comment(text), *([""] if lines and lines[0][0] == "#" else [])]
    return [*([*opening, *lines] if lines else []), *inner]


def _bare(name: str) -> str:
    """Writes a name as a key of TOML."""
    is_bare = re.fullmatch("[A-Za-z0-9_-]+", name)
    return name if is_bare else json.dumps(name, ensure_ascii=False)


def _inline(value: Any) -> str:
    """Writes a value as TOML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_bare(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53
    return tomli_w.dumps({"value": int(value) if is_whole else value})[len("value = ") : -1]


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 96)]
