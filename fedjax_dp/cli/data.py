"""`fedjax-dp data`: which data sets are there, and how to get the others."""

import pathlib
from typing import Annotated

import rich.progress
import typer
from rich.console import Console
from rich.table import Table

from fedjax_dp.data import datasets

app = typer.Typer(
    help="Data sets: list them, fetch them.", no_args_is_help=True, add_completion=False
)

_DataDir = Annotated[
    pathlib.Path | None,
    typer.Option(help="Folder of data files; else FEDJAX_DP_DATA, else ~/.cache/fedjax_dp."),
]


@app.command("list")
def list_(data_dir: _DataDir = None) -> None:
    """List the data sets, whether they are here, and how to get those that are not."""
    console, table = Console(), Table("name", "here", "what")
    states = [datasets.status(name, data_dir) for name in datasets.available()]
    for state in states:
        table.add_row(state.name, "yes" if state.is_present else "no", state.summary)
    console.print(table)
    for state in states:
        if not state.is_present:
            how = f"fedjax-dp data fetch {state.name}, or by hand:\n" if state.can_fetch else ""
            console.print(f"\n{how}{state.how_to_get}", soft_wrap=True, markup=False)


@app.command()
def fetch(name: str, data_dir: _DataDir = None) -> None:
    """Download a data set with checksums, where there is a network."""
    console = Console()
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        console=console,
    ) as bar:
        tasks: dict[str, rich.progress.TaskID] = {}

        def progress(file: str, received: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=received, total=total)

        files = datasets.fetch(name, data_dir, progress)
    for file in files:
        console.print(f"fetched {file}", soft_wrap=True)
    if not files:
        console.print(f"nothing to fetch: all files of {name} are here")
