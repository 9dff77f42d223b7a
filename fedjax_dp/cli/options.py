"""What all commands share: their options, how a line is taken apart, and how it is answered."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from fedjax_dp.cli.output import (
    Answer,
    LogLevel,
    Output,
    console,
    logging_at,
    print_answer,
)

_Json = Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")]
_Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the answer in its shortest form, no progress.")
]
_Level = Annotated[
    LogLevel,
    typer.Option(help="What the error stream gets: all that libraries log, progress, or less."),
]
_SHARED = {
    "as_json": (_Json, False),
    "is_quiet": (_Quiet, False),
    "log_level": (_Level, LogLevel.info),
}


def application(help: str | None = None) -> typer.Typer:
    """Makes what a command, or a group of them, is registered with.

    Args:
      help: what a group is for; None for a command.

    Returns:
      The application.
    """
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
    """Registers a function as a command that prints its answer as `--json` or `--quiet` ask for.

    Args:
      app: what it is registered with.
      name: the name of the command; that of the function if None.
      cls: the class of the command.

    Returns:
      A decorator of functions of their options, `out`, the `Output`, among them, and `context` if
      they want it; they return an `Answer`.
    """

    def register(function: Callable[..., Answer]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(
            context: typer.Context, as_json: bool, is_quiet: bool, log_level: LogLevel, **given: Any
        ) -> None:
            out = Output(console(), console(is_error=True), as_json, is_quiet, log_level)
            if "context" in own:
                given["context"] = context
            # Whatever a part of the user's own prints would be no JSON.
            aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
            with aside, logging_at(log_level):
                answer = function(out=out, **given)
            print_answer(out, _name_of(context), answer)
            raise typer.Exit(answer.status)

        own = inspect.signature(function, eval_str=True).parameters
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("context", kind, annotation=typer.Context)]
        parameters += [
            each.replace(kind=kind) for key, each in own.items() if key not in ("out", "context")
        ]
        parameters += [
            inspect.Parameter(key, kind, default=default, annotation=annotation)
            for key, (annotation, default) in _SHARED.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return app.command(name, cls=cls or Once)(command)

    return register


def _name_of(context: typer.Context) -> str:
    """Names a command without the program: "run", "privacy epsilon"."""
    names: list[str] = []
    at: Any = context
    while at.parent is not None:
        names.insert(0, str(at.info_name))
        at = at.parent
    return " ".join(names)


class Line(NamedTuple):
    """The words of a command line, taken apart.

    Attributes:
      own: what the command itself reads.
      overrides: `--key=value` of a configuration, in their order.
      unfinished: the keys behind which no value stands.
    """

    own: list[str]
    overrides: list[str]
    unfinished: list[str]


def taken_apart(words: Iterable[str], options: Collection[str]) -> Line:
    """Takes a line apart: a key of a configuration may stand before or after what else there is.

    Args:
      words: of the command line.
      options: the options of the command itself, with their dashes.

    Returns:
      The line. A value never begins with two dashes.
    """
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


class Once(TyperCommand):
    """A command whose options are given once each."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses an option that is given twice, of which the first would be dropped in silence."""
        for option in self.get_params(ctx):
            names = {*option.opts, *option.secondary_opts}
            given = [word for word in args if word.partition("=")[0] in names and word[:1] == "-"]
            is_once = not getattr(option, "multiple", False) and not ctx.resilient_parsing
            if len(given) > 1 and is_once:
                raise ValueError(f"{given[-1].partition('=')[0]} must be given once, got {given}")
        return super().parse_args(ctx, args)


class Configured(Once):
    """A command whose line may override keys of a configuration: `--section.key VALUE`.

    The function finds them in `context.args`, as `--section.key=VALUE`.
    """

    keys, shown = "", "--section.key"

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Lists what may stand on the line."""
        return [*super().collect_usage_pieces(ctx), f"[{self.shown} VALUE]..."]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Sets overrides aside before the rest of the line is read."""
        options = {name for each in self.get_params(ctx) for name in each.opts}
        options |= {name for each in self.get_params(ctx) for name in each.secondary_opts}
        line = taken_apart(args, options)
        if line.unfinished and not ctx.resilient_parsing:
            from fedjax_dp.experiment.reading.config_files import require_key

            [key, *_] = line.unfinished
            require_key(key.removeprefix("--"))
            raise ValueError(f"{key} needs a value")
        super().parse_args(ctx, line.own)
        values: dict[str, list[str]] = {}
        for word in line.overrides:
            key, _, text = word.partition("=")
            values.setdefault(key, []).append(text)
        for key, given in values.items():
            if len(given) > 1:
                raise ValueError(f"{key} must be given once, got {given}")
        ctx.args = line.overrides
        return ctx.args

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Lists what an unfinished word may become, keys of a configuration among it."""
        found = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("--"):
            return found
        from fedjax_dp.experiment.reading.config_files import all_keys

        item = type(super().shell_complete(ctx, "--help")[0])
        keys = (f"--{key}" for key in all_keys() if key.startswith(self.keys))
        return [*found, *(item(key) for key in keys if key.startswith(incomplete))]


class ConfiguredData(Configured):
    """A command whose line may override keys of the data section."""

    keys, shown = "data.", "--data.key"
