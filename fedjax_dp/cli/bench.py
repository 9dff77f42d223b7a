"""`fedjax-dp bench`: times the rounds of a workload."""

import pathlib
from typing import Annotated, Any

import typer

from fedjax_dp.cli.output import Answer, Configured, Output, answering, application
from fedjax_dp.core import checks, files
from fedjax_dp.experiment.assembly.devices import offer_devices
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.studies.timing import (
    Change,
    Network,
    Projecting,
    compare,
    measure,
    measure_experiment,
    require_comparable,
    settings,
)
from fedjax_dp.experiment.studies.workloads import WORKLOADS

# Not for the table of a result.
_HIDDEN = ("name", "about", "model", "seconds", "gemm_gflops")

app = application()


@answering(app, cls=Configured)
def command(
    context: typer.Context,
    out: Output,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A workload, a TOML file, or `list`.")
    ],
    rounds: Annotated[int, typer.Option(help="Rounds that are timed.")] = 5,
    layout: Annotated[
        str, typer.Option(help="auto, tuned, sequential, vmap, or a chunk size.")
    ] = "auto",
    devices: Annotated[str, typer.Option(help="Number of devices, or auto.")] = "auto",
    scale: Annotated[
        str | None, typer.Option(help="A curve over clients, cohort, chunk, devices or model.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(metavar="N1,N2", help="Project rounds to these numbers of devices: a model."),
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(help="Assumed by a projection: GB per second into each device.")
    ] = 35.0,
    latency: Annotated[
        float, typer.Option(help="Assumed by a projection: microseconds per message.")
    ] = 10.0,
    old: Annotated[
        pathlib.Path | None,
        typer.Option("--compare", metavar="OLD.json", help="Compare with what `--json` wrote."),
    ] = None,
) -> Answer:
    """Time a workload, or list them: `fedjax-dp bench list`, `fedjax-dp bench W1 --json`.

    With a TOML file, and overrides as for `fedjax-dp run`, it times rounds of that experiment.

    `--project N` also computes the expected seconds of a round on N devices, from measured seconds,
    the real sizes of clients in the packing of real rounds, and an assumed network. These figures
    are a model, marked as one, and in a table of their own.

    `--compare OLD.json` says what changed since `fedjax-dp bench ... --json > OLD.json`, with an
    interval of 95 % that allows for the noise of rounds and the speed of the machine.
    """
    earlier = None if old is None else _earlier(old)
    if name == "list":
        lines = [(key, workload.about) for key, workload in WORKLOADS.items()]
        document = {"workloads": [{"name": key, "about": about} for key, about in lines]}
        return Answer(
            document, lambda out: out.table(("name", "what"), lines), "\n".join(WORKLOADS)
        )
    projecting = _projecting(project, bandwidth, latency)
    if name.endswith(".toml"):
        found = _experiment(context, name, rounds, layout, devices, scale, projecting, earlier, out)
        return _answer(found, earlier)
    checks.one_of("NAME", name, WORKLOADS)
    if earlier is not None:
        require_comparable(earlier, name, rounds)
    rule = "be left out for a workload: only the keys of a TOML file can be changed"
    checks.require(not context.args, "overrides", rule, list(context.args))
    checks.require(
        devices == "auto" or (devices.isdecimal() and int(devices) > 0),
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
        results.append(measure(name, execution, rounds, projecting, **changes) | changes)
        out.note(f"{results[-1]['seconds_per_round']:.4g} s per round")
    return _answer(results, earlier)


def _earlier(file: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the results of an earlier benchmark."""
    files.require_file(file, "--compare")
    try:
        return list(files.parse_json(files.read_text(file), file)["results"])
    except (ValueError, KeyError, TypeError):
        rule = "be a file that `fedjax-dp bench NAME --json` wrote"
        raise ValueError(f"--compare must {rule}, got {str(file)!r}") from None


def _projecting(project: str | None, bandwidth: float, latency: float) -> Projecting | None:
    """Reads the numbers of devices and the network of a projection."""
    checks.positive("--bandwidth", bandwidth)
    checks.non_negative("--latency", latency)
    if project is None:
        return None
    counts = project.split(",")
    rule = "be a number of devices, or several with commas between them"
    checks.require(all(c.isdecimal() and int(c) > 0 for c in counts), "--project", rule, project)
    return Projecting([int(c) for c in counts], Network(bandwidth * 1e9, latency / 1e6))


def _experiment(
    context: typer.Context,
    file: str,
    rounds: int,
    layout: str,
    devices: str,
    scale: str | None,
    projecting: Projecting | None,
    earlier: list[dict[str, Any]] | None,
    out: Output,
) -> list[dict[str, Any]]:
    """Times rounds of an experiment, whose file has its layout."""
    changed = {
        "--layout": layout != "auto",
        "--devices": devices != "auto",
        "--scale": scale is not None,
    }
    given = [name for name, is_given in changed.items() if is_given]
    rule = "be left out for a TOML file, which has `execution.clients_per_chunk` and others"
    checks.require(not given, "--layout, --devices and --scale", rule, given)
    config = load_config(file, context.args)
    if earlier is not None:
        require_comparable(earlier, config.title, rounds)
    out.note(f"timing {file}")
    return [measure_experiment(config, rounds, projecting)]


def _answer(results: list[dict[str, Any]], earlier: list[dict[str, Any]] | None) -> Answer:
    changes = [] if earlier is None else compare(earlier, results)

    def show(out: Output) -> None:
        for result in results:
            _show(out, result)
        for change in changes:
            out.say(_in_words(change))

    times = "\n".join(f"{result['seconds_per_round']:.6g}" for result in results)
    document: dict[str, Any] = {"results": results}
    if changes:
        document["changes"] = [change._asdict() for change in changes]
    return Answer(document, show, times)


def _in_words(change: Change) -> str:
    once = "".join(f"; {key} {ratio:.3g} times" for key, ratio in change.once.items())
    return (
        f"{change.name}: {change.verdict}: a round takes {change.ratio:.3g} times as long, 95 % "
        f"interval {change.low:.3g} to {change.high:.3g}{once}"
    )


def _layout(text: str) -> int | str:
    names: dict[str, int | str] = {"sequential": 1, "vmap": 2**30, "auto": "auto", "tuned": "tuned"}
    if text in names:
        return names[text]
    checks.require(
        text.isdecimal() and int(text) > 0,
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
        if key not in _HIDDEN and value is not None
    ]
    out.table(("measured", "value"), lines)
    if "model" in result:
        _show_model(out, result["model"])


def _show_model(out: Output, model: dict[str, Any]) -> None:
    """Prints a projection apart from everything measured."""

    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    out.say("model, not measured; it assumes:")
    out.table(("assumption", "value"), [(k, text(v)) for k, v in model["assumptions"].items()])
    heads = list(model["rows"][0])
    out.table(("model", *heads), [("model", *map(text, row.values())) for row in model["rows"]])
