"""`fedjax-dp report`: writes a page about a run."""

import pathlib
from typing import Annotated

import typer

from fedjax_dp.cli.output import Answer, Output, answering, application
from fedjax_dp.core import checks
from fedjax_dp.experiment.running.report import Report, report

app = application()
_SECONDS = 5.0


@answering(app)
def command(
    out: Output,
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A run folder.")],
    output: Annotated[
        pathlib.Path | None,
        typer.Option(help="The page; by default report.html in the run folder."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Renew the page until the run ends.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help=f"How often to renew it; {_SECONDS:g} by default."),
    ] = None,
) -> Answer:
    """Write a page about a run: `fedjax-dp report DIR [--watch] [--output FILE.html]`.

    The page is one HTML file that a browser opens without a server. It says which of its parts may
    not be published; that of the folder `release` of a run may.
    """
    checks.require(watch or every is None, "--every", "come with --watch", every)
    seconds = (_SECONDS if every is None else every) if watch else None

    def note(written: Report) -> None:
        if written.state == "running":
            out.note(f"wrote {written.file} after round {written.rounds}")

    page = report(folder, output, every=seconds, progress=note)
    document = page._asdict() | {"file": str(page.file)}
    return Answer(document, lambda out: out.say(f"wrote {page.file}"), str(page.file))
