"""What all commands share: answers, options, and overrides of a configuration."""

import contextlib
import functools
import inspect
import json
import logging
import math
import os
import pathlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import IO, Annotated, Any, NamedTuple, get_type_hints

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from fedjax_dp.core.foreign_text import visible
from fedjax_dp.core.synonyms import meant

# Version of `--json` documents, raised when a key changes its meaning or is removed.
DOCUMENT_VERSION = 1


class LogLevel(StrEnum):
    """How much is printed besides the answer."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class Output(NamedTuple):
    """Where a command prints, and how much."""

    answers: Console  # The output stream.
    notes: Console  # The error stream, for progress and warnings.
    as_json: bool = False  # Whether to print the answer as one JSON document.
    is_quiet: bool = False  # Whether to print the shortest answer, without progress.
    level: LogLevel = LogLevel.info  # How much is printed besides the answer.

    @property
    def has_progress(self) -> bool:
        """Whether progress is shown."""
        return not self.is_quiet and self.level in (LogLevel.debug, LogLevel.info)

    def say(self, text: str) -> None:
        """Prints a part of the answer, with control characters escaped."""
        self.answers.print(visible(text, keeps_lines=True))

    def note(self, text: str) -> None:
        """Prints a step of the work."""
        if self.has_progress:
            self.notes.print(visible(text, keeps_lines=True))

    def warn(self, text: str) -> None:
        """Prints a warning."""
        if self.level != LogLevel.error:
            self.notes.print(f"warning: {visible(text, keeps_lines=True)}", style="yellow")

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Prints a table: framed on a terminal, elsewhere lines of cells between tabs."""
        if self.answers.is_terminal:
            framed = Table(*heads)
            for row in rows:
                framed.add_row(*(Text(visible(str(cell))) for cell in row))
            self.answers.print(framed, soft_wrap=False)
            return
        for row in (heads, *rows):
            cells = (visible(" ".join(str(cell).split())) for cell in row)
            self.answers.file.write("\t".join(cells) + "\n")


class Answer(NamedTuple):
    """The answer of a command."""

    document: dict[str, Any]  # Printed by `--json`, with version, command and status.
    show: Callable[[Output], None]  # Prints the answer for people.
    shortest: str  # Printed by `--quiet`, if it is not empty.
    status: int = 0  # The exit status.


def console(*, is_error: bool = False) -> Console:
    """Makes a console that prints text as it is and wraps no lines in a pipe."""
    # Bound now: other prints may be redirected later.
    file = None if is_error else sys.stdout
    return Console(
        file=file, stderr=is_error, soft_wrap=True, markup=False, emoji=False, highlight=False
    )


def note_loading(out: Output) -> None:
    """Prints the first step of a command, before it imports what takes seconds."""
    if "jax" not in sys.modules:
        out.note("loading libraries")


class _Visible(logging.Formatter):
    """Formats records, with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), keeps_lines=True)


@contextlib.contextmanager
def logging_at(level: LogLevel) -> Iterator[None]:
    """Logs what libraries report to the error stream, each once."""
    least = {LogLevel.debug: logging.DEBUG, LogLevel.error: logging.ERROR}
    root, handler = logging.getLogger(), logging.StreamHandler()
    before, handlers = root.level, root.handlers[:]
    # absl, on Orbax's import, adds a handler of the same stream.
    root.handlers[:] = [each for each in handlers if type(each) is not logging.StreamHandler]
    handler.setLevel(least.get(level, logging.WARNING))
    handler.setFormatter(_Visible("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(handler.level)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(before)
        root.handlers[:] = handlers


def print_answer(out: Output, command: str, answer: Answer) -> None:
    """Prints an answer as JSON, in short, or for people."""
    if out.as_json:
        print_document(out.answers.file, command, answer.status, answer.document)
    elif not out.is_quiet:
        answer.show(out)
    elif answer.shortest:
        out.say(answer.shortest)


def shown_path(path: pathlib.Path) -> str:
    """Writes a path from the current folder, if it is below it."""
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def print_document(file: IO[str], command: str, status: int, content: dict[str, Any]) -> None:
    """Prints the one JSON document of a command."""
    head = {"version": DOCUMENT_VERSION, "command": command, "status": status}
    file.write(json.dumps(plain(head | content), allow_nan=False) + "\n")
    file.flush()


def plain(value: Any) -> Any:
    """Converts to JSON values: infinities become "inf" or "-inf", NaN becomes None."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else repr(value)
    return value


ConfigFile = Annotated[
    str | None, typer.Argument(metavar="FILE", help="A TOML file; without one, the defaults.")
]
DataDir = Annotated[
    pathlib.Path | None,
    typer.Option(help="Folder of data files; by default FEDJAX_DP_DATA or ~/.cache/fedjax_dp."),
]


def completed(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Makes the completion of an option or argument by one of several words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return complete


_Json = Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")]
_Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the shortest answer, without progress.")
]
_Level = Annotated[LogLevel, typer.Option(help="What to print to the error stream.")]
_SHARED = {
    "as_json": (_Json, False),
    "is_quiet": (_Quiet, False),
    "log_level": (_Level, LogLevel.info),
}


def application(help: str | None = None) -> typer.Typer:
    """Makes the application of a command, or of a group if it has a help text."""
    return typer.Typer(
        help=help,
        no_args_is_help=help is not None,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )


def answering(
    app: typer.Typer, name: str | None = None, cls: type[TyperCommand] | None = None
) -> Callable[[Callable[..., Answer]], Callable[..., None]]:
    """Registers a function of options and `out` as a command that prints its `Answer`.

    A parameter of a NamedTuple stands for the options that are its fields.
    """

    def register(function: Callable[..., Answer]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(
            context: typer.Context, as_json: bool, is_quiet: bool, log_level: LogLevel, **given: Any
        ) -> None:
            # A shell leaves the "~" of `--output=~/runs` as it is.
            for key, each in given.items():
                if isinstance(each, pathlib.Path):
                    given[key] = pathlib.Path(os.path.expanduser(each))
            out = Output(console(), console(is_error=True), as_json, is_quiet, log_level)
            if "context" in own:
                given["context"] = context
            for key, kind in groups.items():
                given[key] = kind(*(given.pop(field) for field in kind._fields))
            # What the user's code prints would break the JSON document.
            aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
            with aside, logging_at(log_level):
                answer = function(out=out, **given)
            print_answer(out, _name_of(context), answer)
            raise typer.Exit(answer.status)

        own = inspect.signature(function, eval_str=True).parameters
        options = {key: each for key, each in own.items() if key not in ("out", "context")}
        groups = {
            key: each.annotation
            for key, each in options.items()
            if hasattr(each.annotation, "_fields")
        }
        parameters = [_option("context", typer.Context)]
        for key, each in options.items():
            of_group = get_type_hints(groups.get(key), include_extras=True) if key in groups else {}
            defaults = getattr(each.annotation, "_field_defaults", {})
            parameters += [_option(name, of_group[name], defaults[name]) for name in of_group]
            if key not in groups:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters += [_option(key, *shared) for key, shared in _SHARED.items()]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return app.command(name, cls=cls or Once)(command)

    return register


def _option(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def _name_of(context: typer.Context) -> str:
    """Returns the name of a command: "run", "privacy epsilon"."""
    names: list[str] = []
    level: Any = context
    while level.parent is not None:
        names.insert(0, str(level.info_name))
        level = level.parent
    return " ".join(names)


class Line(NamedTuple):
    """The words of a command line."""

    own: list[str]  # Options and arguments of the command.
    overrides: list[str]  # `--key=value` of a configuration.
    unfinished: list[str]  # Keys without a value.


def split_line(words: Iterable[str], options: Collection[str]) -> Line:
    """Splits a command line; a value never begins with two dashes."""
    rest, line = list(words), Line([], [], [])
    while rest:
        word = rest.pop(0)
        key, equals, _ = word.partition("=")
        if word == "--":
            return line._replace(own=[*line.own, word, *rest])
        if not word.startswith("--") or key in options:
            line.own.append(word)
        elif equals:
            line.overrides.append(word)
        elif rest and not rest[0].startswith("--"):
            line.overrides.append(f"{word}={rest.pop(0)}")
        else:
            line.unfinished.append(word)
    return line


# Where a command notes the key whose value a shell completes.
_COMPLETED = "fedjax_dp.completed"


class Once(TyperCommand):
    """A command whose options may be given only once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses an option that is given twice, as the first would be ignored."""
        for option in self.get_params(ctx):
            names = {*option.opts, *option.secondary_opts}
            given = [word for word in args if word.partition("=")[0] in names and word[:1] == "-"]
            is_once = not getattr(option, "multiple", False) and not ctx.resilient_parsing
            if len(given) > 1 and is_once:
                raise ValueError(f"{given[-1].partition('=')[0]} must be given once, got {given}")
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # The error of an unknown option, whose type differs between versions of Typer.
            if wrong := getattr(error, "option_name", None):
                opts = [name for option in self.get_params(ctx) for name in option.opts]
                known = {name.lstrip("-").replace("-", "_"): name for name in opts}
                hints = [known[name] for name in meant(wrong.lstrip("-"), known)]
                error.possibilities = hints or error.possibilities  # type: ignore[attr-defined]
            raise


class Configured(Once):
    """A command with overrides `--section.key VALUE`, which it finds in `context.args`."""

    keys, shown = "", "--section.key"

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Lists the parts of the usage line."""
        return [*super().collect_usage_pieces(ctx), f"[{self.shown} VALUE]..."]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Separates the overrides before parsing the rest."""
        options = {name for each in self.get_params(ctx) for name in each.opts}
        options |= {name for each in self.get_params(ctx) for name in each.secondary_opts}
        line = split_line(args, options)
        if line.unfinished and not ctx.resilient_parsing:
            from fedjax_dp.experiment.reading.config_files import require_key

            [key, *_] = line.unfinished
            require_key(key.removeprefix("--"))
            raise ValueError(f"{key} needs a value")
        super().parse_args(ctx, line.own)
        if ctx.resilient_parsing:
            self._note_completed(ctx, args, options)
        values: dict[str, list[str]] = {}
        for word in line.overrides:
            key, _, text = word.partition("=")
            values.setdefault(key, []).append(text)
        for key, given in values.items():
            if len(given) > 1 and not ctx.resilient_parsing:
                raise ValueError(f"{key} must be given once, got {given}")
        ctx.args = line.overrides
        return ctx.args

    def _note_completed(self, ctx: Any, args: list[str], options: Collection[str]) -> None:
        """Notes the key, if any, whose value a shell completes."""
        # Bash divides the words at "=".
        words = [word for word in args if word != "="]
        key = next(
            (w for w in words[-1:] if w.startswith(f"--{self.keys}") and w not in options), ""
        )
        if words[-2:-1] == ["--over"] and args[-1] == "=":
            key = f"--{words[-1]}"
        ctx.meta[_COMPLETED] = key
        for param in self.get_params(ctx) if key else ():
            source = ctx.get_parameter_source(param.name)
            if param.param_type_name == "argument" and source is not None:
                # Otherwise the first argument that is not given is completed.
                ctx.set_parameter_source(param.name, type(source).COMMANDLINE)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Lists completions, with keys of the configuration, and values after a key."""
        completions = super().shell_complete(ctx, incomplete)
        is_key, key = incomplete.startswith("--"), ctx.meta[_COMPLETED]
        if not is_key and not key:
            return completions
        head = "" if is_key else f"{key}="
        words = completed_keys(f"{head}{incomplete}".removeprefix("--"), ctx.args)
        words = [f"--{word}".removeprefix(head) for word in words if word.startswith(self.keys)]
        item = type(super().shell_complete(ctx, "--help")[0])
        return [*completions, *map(item, words)]


def completed_keys(incomplete: str, overrides: Sequence[str] = ()) -> list[str]:
    """Completes a key of a configuration, or, after `KEY=` and commas, its value."""
    from fedjax_dp.experiment.reading.keys import keys_and_values

    found = keys_and_values(overrides)
    key, equals, text = incomplete.partition("=")
    if not equals:
        return [each for each in found if each.startswith(key)]
    before, comma, last = text.rpartition(",")
    head = f"{key}={before}{comma}"
    return [head + value for value in found.get(key, []) if value.startswith(last)]


class ConfiguredData(Configured):
    """A command with overrides of the data section."""

    keys, shown = "data.", "--data.key"
