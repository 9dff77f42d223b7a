"""The command `fedjax-dp`."""

import sys

import typer

from fedjax_dp.cli import audit, bench, data, privacy, run

app = typer.Typer(
    help="Federated learning under differential privacy, simulated in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command("run", context_settings=_ANY_OPTION)(run.command)
app.add_typer(data.app, name="data")
app.add_typer(privacy.app, name="privacy")
app.command("bench")(bench.command)
app.command("audit", context_settings=_ANY_OPTION)(audit.command)


def main() -> None:
    """Runs the command line; a mistake of the user ends in one line and status 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
