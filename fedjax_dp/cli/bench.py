"""`fedjax-dp bench`: times the rounds of a workload."""

from typing import Annotated, Any

import typer

from fedjax_dp.cli.options import answering, application
from fedjax_dp.cli.output import Answer, Output
from fedjax_dp.core import checks
from fedjax_dp.experiment.assembly.devices import offer_devices
from fedjax_dp.experiment.studies.timing import measure, settings
from fedjax_dp.experiment.studies.workloads import WORKLOADS

app = application()


@answering(app)
def command(
    out: Output,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A workload, or `list`.")],
    rounds: Annotated[int, typer.Option(help="Rounds that are timed.")] = 5,
    layout: Annotated[
        str, typer.Option(help="auto, tuned, sequential, vmap, or a chunk size.")
    ] = "auto",
    devices: Annotated[str, typer.Option(help="Number of devices, or auto.")] = "auto",
    scale: Annotated[
        str | None, typer.Option(help="A curve over clients, cohort, chunk, devices or model.")
    ] = None,
) -> Answer:
    """Time a workload, or list them: `fedjax-dp bench list`, `fedjax-dp bench W1 --json`."""
    if name == "list":
        lines = [(key, workload.about) for key, workload in WORKLOADS.items()]
        document = {"workloads": [{"name": key, "about": about} for key, about in lines]}
        return Answer(
            document, lambda out: out.table(("name", "what"), lines), "\n".join(WORKLOADS)
        )
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
        which = "".join(f", {key} {value}" for key, value in changes.items())
        out.note(f"timing {name}{which}")
        results.append(measure(name, execution, rounds, **changes) | changes)
        out.note(f"{results[-1]['seconds_per_round']:.4g} s per round")

    def show(out: Output) -> None:
        for result in results:
            _show(out, result)

    times = "\n".join(f"{result['seconds_per_round']:.6g}" for result in results)
    return Answer({"results": results}, show, times)


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


def _show(out: Output, result: dict[str, Any]) -> None:
    out.say(f"{result['name']}: {result['about']}")
    lines = [
        (key, f"{value:.4g}" if isinstance(value, float) else str(value))
        for key, value in result.items()
        if key not in ("name", "about") and value is not None
    ]
    out.table(("figure", "value"), lines)
