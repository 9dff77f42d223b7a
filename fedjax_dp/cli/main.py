"""The command `fedjax-dp`."""

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

_SMALLER = (
    "nearest valid choices: a smaller execution.clients_per_chunk or training.micro_batch_size, "
    "execution.placement=host, a smaller model or fewer clients"
)
# The first line of each command's own help: to list them, none is imported.
COMMANDS = {
    "run": "Run an experiment: `fedjax-dp run [FILE.toml] [--section.key VALUE ...]`.",
    "evaluate": "Evaluate the model of a run: `fedjax-dp evaluate DIR [--data.key VALUE ...]`.",
    "predict": "Write what a run's model says: `fedjax-dp predict DIR --output FILE.npz`.",
    "export": "Write a run's parameters: `fedjax-dp export DIR --output FILE.safetensors`.",
    "data": "Data sets: list them, fetch them.",
    "privacy": "Accounting: ε, calibration, reports, comparisons.",
    "audit": "Audit an experiment: `fedjax-dp audit [FILE.toml] [--section.key VALUE ...]`.",
    "bench": "Time a workload, or list them: `fedjax-dp bench list`, `fedjax-dp bench W1 --json`.",
}


class _Commands(TyperGroup):
    """The commands, each imported when it is called; until then a stand-in is listed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Gives name, command and what follows."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and command(str(name)), rest


def command(name: str) -> Any:
    """Imports a command.

    Args:
      name: a key of `COMMANDS`.

    Returns:
      The command.
    """
    return get_command(import_module(f"fedjax_dp.cli.{name}").app)


app = typer.Typer(
    cls=_Commands,
    help="Federated learning under differential privacy, simulated in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _versions(is_asked: bool) -> None:
    if is_asked:
        from fedjax_dp.core.versions import libraries

        typer.echo("\n".join(f"{name} {version}" for name, version in libraries().items()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_versions, is_eager=True, help="Show all versions."),
    ] = False,
) -> None:
    """Federated learning under differential privacy, simulated in JAX."""


def _stand_in() -> None:
    """Is listed for a command that has not been imported."""


for _name, _about in COMMANDS.items():
    app.command(_name, help=_about)(_stand_in)


def main() -> None:
    """Runs the command line; a mistake of the user ends in one line and status 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        _end(str(error))
    except MemoryError as error:
        _end(f"out of memory: {error or 'the system gave no more'}; {_SMALLER}")
    except RuntimeError as error:
        # JAX has no type of its own for it.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _end(f"out of memory: {error}; {_SMALLER}")


def _end(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)
