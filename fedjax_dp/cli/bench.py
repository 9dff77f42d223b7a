"""`fedjax-dp bench`: seconds per round, against the machine's own limit."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedjax_dp.core import checks
from fedjax_dp.experiment.devices import offer_devices
from fedjax_dp.experiment.timing import measure, settings
from fedjax_dp.experiment.workloads import WORKLOADS

app = typer.Typer(add_completion=False)


@app.command()
def command(
    name: Annotated[str, typer.Argument(help="A workload, or `list`.")],
    rounds: Annotated[int, typer.Option(help="Rounds that are timed.")] = 5,
    layout: Annotated[
        str, typer.Option(help="auto, tuned, sequential, vmap, or a chunk size.")
    ] = "auto",
    devices: Annotated[str, typer.Option(help="How many share a cohort, or auto.")] = "auto",
    scale: Annotated[
        str | None, typer.Option(help="A curve over clients, cohort, chunk, devices or model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a workload, or list them: `fedjax-dp bench list`, `fedjax-dp bench W1 --json`."""
    console = Console()
    if name == "list":
        table = Table("name", "what")
        for key, workload in WORKLOADS.items():
            table.add_row(key, workload.about)
        console.print(table)
        return
    checks.one_of("NAME", name, WORKLOADS)
    checks.require(
        devices == "auto" or (devices.isdigit() and int(devices) > 0),
        "--devices",
        "be auto or a number of devices",
        devices,
    )
    count: int | str = "auto" if devices == "auto" else int(devices)
    offer_devices("auto" if scale == "devices" else count)
    results = []
    for execution, changes in settings(name, _layout(layout), count, scale):
        results.append(measure(name, execution, rounds, **changes) | changes)
        if not as_json:
            _show(console, results[-1])
    if as_json:
        print(json.dumps(results if scale else results[0]))


def _layout(text: str) -> int | str:
    names: dict[str, int | str] = {
        "sequential": 1,
        "vmap": 2**30,
        "auto": "auto",
        "tuned": "tuned",
    }
    if text in names:
        return names[text]
    checks.require(
        text.isdigit() and int(text) > 0,
        "--layout",
        "be auto, tuned, sequential, vmap, or the number of clients in a chunk",
        text,
    )
    return int(text)


def _show(console: Console, result: dict[str, Any]) -> None:
    console.print(f"{result['name']}: {result['about']}", soft_wrap=True)
    table = Table("figure", "value")
    for key, value in result.items():
        if key not in ("name", "about") and value is not None:
            table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
