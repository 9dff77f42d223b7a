"""The command `fedjax-dp`."""

import contextlib
import errno
import os
import re
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from fedjax_dp.cli.output import Output, console, note_loading, print_document
from fedjax_dp.core import terminal
from fedjax_dp.core.foreign_text import visible
from fedjax_dp.core.packages import MissingPackageError
from fedjax_dp.core.synonyms import suggestion

_SMALLER = (
    "nearest valid choices: a smaller execution.clients_per_chunk or training.micro_batch_size, "
    "execution.placement=host, a smaller model or fewer clients"
)
# The first line of each command's help, so that no command is imported to list them.
COMMANDS = {
    "init": "Write a first configuration: `fedjax-dp init [FILE.toml] [--section.key VALUE ...]`.",
    "run": "Run an experiment: `fedjax-dp run [FILE.toml] [--section.key VALUE ...]`.",
    "sweep": "Run a grid: `fedjax-dp sweep [FILE.toml] --over KEY=V1,V2 [--over …] "
    "[--section.key VALUE]`.",
    "evaluate": "Evaluate the model of a run: `fedjax-dp evaluate DIR [--data.key VALUE ...]`.",
    "predict": "Write the outputs of a run's model: `fedjax-dp predict DIR --output FILE.npz`.",
    "export": "Export: a run's parameters, or the Flower app of an experiment.",
    "report": "Write a page about a run: `fedjax-dp report DIR [--watch] [--output FILE.html]`.",
    "pack": "Pack a run folder into one file: `fedjax-dp pack DIR [--release]`.",
    "gateway": "Serve a node's models to a training script: `fedjax-dp gateway --state-dir DIR "
    "[--port N]`.",
    "data": "Data sets: list them, fetch them, store them by client.",
    "doctor": "Check the installation: versions, devices, data, and what is missing.",
    "privacy": "Accounting: ε, calibration, reports, comparisons.",
    "audit": "Audit an experiment: `fedjax-dp audit [FILE.toml] [--section.key VALUE ...]`.",
    "conformance": "Check whether code keeps its privacy claims: `fedjax-dp conformance "
    "SUBJECT.py`.",
    "estimate": "Estimate rounds on devices that are not here: `fedjax-dp estimate FILE.toml "
    "--device v5e`.",
    "measure": "Measure this GPU or TPU, for `execution.measured`: `fedjax-dp measure --output "
    "speeds.json`.",
    "bench": "Time a workload, or list them: `fedjax-dp bench list`, `fedjax-dp bench W1 --json`.",
}
# They import JAX, and more, before they can print a line of their own.
_LONG = ("sweep", "audit", "evaluate", "predict", "estimate", "measure", "bench", "conformance")
# Options that print no progress, or may not.
_SILENT = re.compile("-q|--quiet|--help|--log-level.*")
# Groups, whose commands have two words.
_GROUPS = ("data", "export", "privacy")


class _Commands(TyperGroup):
    """The commands, each imported when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns name, command and rest of the line; passes on a `--json` before the command."""
        is_known = ctx.resilient_parsing or args[0] in self.commands
        if not is_known:
            ctx.fail(f"no such command {args[0]!r}{suggestion(args[0], self.commands)}")
        name, found, rest = super().resolve_command(ctx, args)
        if ctx.params.get("as_json") and "--json" not in rest:
            end = rest.index("--") if "--" in rest else len(rest)
            rest = [*rest[:end], "--json", *rest[end:]]
        is_silent = ctx.resilient_parsing or any(map(_SILENT.fullmatch, rest))
        if name in _LONG and not is_silent:
            note_loading(Output(console(), console(is_error=True)))
        return name, found and command(str(name)), rest


def command(name: str) -> Any:
    """Imports a command of `COMMANDS`."""
    return get_command(import_module(f"fedjax_dp.cli.{name}").app)


app = typer.Typer(
    cls=_Commands,
    help="Federated learning under differential privacy, simulated in JAX.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _versions(is_asked: bool) -> None:
    if is_asked:
        from fedjax_dp.core.packages import libraries

        versions = libraries()
        if _wants_json():
            print_document(sys.stdout, "--version", 0, {"libraries": versions})
        else:
            typer.echo("\n".join(f"{name} {version}" for name, version in versions.items()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_versions, is_eager=True, help="Show all versions."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as one JSON document.")
    ] = False,
) -> None:
    """Federated learning under differential privacy, simulated in JAX."""


def _placeholder() -> None:
    """A placeholder for a command that is not imported yet."""


for _name, _about in COMMANDS.items():
    app.command(_name, help=_about)(_placeholder)


def main() -> None:
    """Runs the command line; a user error ends in one line, also in the document, and status 2."""
    try:
        status = app(prog_name="fedjax-dp", standalone_mode=False) or 0
        if terminal.is_interrupted():
            raise KeyboardInterrupt
        sys.exit(status)
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted", 130)
    except OSError as error:
        if error.errno == errno.EPIPE:
            _end_without_a_reader()
        if isinstance(error, ChildProcessError):
            # Of a worker of a sweep, whose error is in the text.
            _end_if_out_of_memory(error)
            _end(str(error), 1)
        is_plain = error.filename is None or error.strerror is None
        _end(str(error) if is_plain else f"{error.filename} cannot be used: {error.strerror}")
    except (ValueError, MissingPackageError) as error:
        _end(str(error))
    except MemoryError as error:
        _end(f"out of memory: {error or 'the system gave no more'}; {_SMALLER}")
    except Exception as error:
        # Errors of Typer, whose type differs between its versions.
        if hasattr(error, "format_message"):
            _end(error.format_message().strip())
        if isinstance(error, RuntimeError):
            _end_if_out_of_memory(error)
        if terminal.is_interrupted():
            _end("interrupted", 130)
        if not _wants_json():
            raise
        traceback.print_exc()
        _end(f"{type(error).__name__}: {error}", 1)


def _wants_json() -> bool:
    return "--json" in sys.argv[1:]


def _end(text: str, status: int = 2) -> NoReturn:
    if text:
        print(f"error: {visible(text, keeps_lines=True)}", file=sys.stderr)
    if _wants_json():
        names = [word for word in sys.argv[1:] if not word.startswith("-")]
        name = " ".join(names[: 2 if names[:1] and names[0] in _GROUPS else 1])
        # The error may be that nothing can be written there.
        with contextlib.suppress(OSError):
            print_document(sys.stdout, name, status, {"error": text})
    sys.exit(status)


def _end_if_out_of_memory(error: Exception) -> None:
    # JAX has no type for it.
    if "RESOURCE_EXHAUSTED" in str(error):
        _end(f"out of memory: {error}; {_SMALLER}")


def _end_without_a_reader() -> NoReturn:
    """Exits quietly when a reader such as `head` has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
