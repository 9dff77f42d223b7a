"""`fedjax-dp data`: lists and fetches data sets, and writes them as stores."""

import pathlib
from typing import Annotated

import numpy as np
import rich.progress
import typer

from fedjax_dp.cli.output import (
    Answer,
    ConfiguredData,
    DataDir,
    Output,
    answering,
    application,
    completed,
)
from fedjax_dp.core import checks
from fedjax_dp.data import datasets

_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A name of `fedjax-dp data list`.",
        autocompletion=completed(datasets.available),
    ),
]
app = application("Data sets: list them, fetch them, store them by client.")


@answering(app, "list")
def list_(out: Output, data_dir: DataDir = None) -> Answer:
    """List the data sets, and how to get those that are missing."""
    states = [datasets.status(name, data_dir) for name in datasets.available()]

    def show(out: Output) -> None:
        lines = [(s.name, "yes" if s.is_present else "no", s.summary) for s in states]
        out.table(("name", "here", "what"), lines)
        for state in states:
            if not state.is_present:
                how = f"fedjax-dp data fetch {state.name}, or by hand:\n" if state.can_fetch else ""
                out.say(f"\n{how}{state.how_to_get}")

    names = ("name", "is_present", "can_fetch", "summary", "how_to_get")
    document = {"data": [{name: getattr(each, name) for name in names} for each in states]}
    return Answer(document, show, "\n".join(s.name for s in states if s.is_present))


@answering(app)
def fetch(
    out: Output,
    name: _Name,
    data_dir: DataDir = None,
) -> Answer:
    """Download a data set and verify its checksums."""
    is_live = out.has_progress and out.notes.is_terminal
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        console=out.notes,
        disable=not is_live,
    ) as bar:
        tasks: dict[str, rich.progress.TaskID] = {}

        def progress(file: str, received: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
                if not is_live:
                    size = "" if total is None else f", {total:,} bytes"
                    out.note(f"fetching {file}{size}")
            bar.update(tasks[file], completed=received, total=total)

        files = [str(file) for file in datasets.fetch(name, data_dir, progress)]

    def show(out: Output) -> None:
        for file in files:
            out.say(f"fetched {file}")
        if not files:
            out.say(f"nothing to fetch: all files of {name} are here")

    return Answer({"name": name, "files": files}, show, "\n".join(files))


@answering(app, cls=ConfiguredData)
def store(
    context: typer.Context,
    out: Output,
    name: _Name,
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A new folder.")],
    form: Annotated[str, typer.Option("--format", help="npy (memory maps) or zarr.")] = "npy",
) -> Answer:
    """Write a data set as a store: `fedjax-dp data store NAME DIR [--data.options.key VALUE ...]`.

    The data set must have natural clients. Training then reads one cohort after another, by
    `data.name = "store"` and `data.options.path = "DIR"`. The folder is as private as the data.
    """
    from fedjax_dp.experiment.reading import config_files

    checks.one_of("--format", form, ("npy", "zarr"))
    section = config_files.load_config(None, [f"--data.name={name}", *context.args]).data
    out.note(f"reading {name}")
    data = datasets.load(section.name, section.data_dir, **section.options)
    out.note(f"writing {folder}")
    datasets.save(data, folder, format=form)  # type: ignore[arg-type]
    document = {
        "name": name,
        "folder": str(folder),
        "format": form,
        "num_clients": len(np.unique(np.asarray(data.train_clients))),
        "num_examples": len(data.train["y"]),
        "num_test_examples": len(data.test["y"]),
    }
    words = (
        f"wrote {folder}: {document['num_examples']:,} examples of {document['num_clients']:,} "
        f"clients, {document['num_test_examples']:,} for testing"
    )
    return Answer(document, lambda out: out.say(words), str(folder))
