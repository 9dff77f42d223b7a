"""`fedjax-dp measure`: measures the GPU or TPU at hand, for automatic choices of layout."""

import pathlib
from typing import Annotated, Any

import typer

from fedjax_dp.cli.output import Answer, Output, answering, application
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import choices
from fedjax_dp.experiment.studies.measuring import measure

app = application()


@answering(app)
def command(
    out: Output,
    output: Annotated[
        pathlib.Path, typer.Option(metavar="FILE", help="The file to write or to continue.")
    ] = pathlib.Path("speeds.json"),
    again: Annotated[bool, typer.Option("--again", help="Measure anew what FILE has.")] = False,
) -> Answer:
    """Measure this GPU or TPU, for `execution.measured`: `fedjax-dp measure --output speeds.json`.

    Times a step of a small network by 1 to 1,024 clients side by side, with convolutions in each
    form, and with exact and split gradients of records. Most of the time is compiling.
    An interrupted call continues where it stopped. Choices on a CPU follow constants instead.
    """
    measured = measure(output, out.note, again=again)
    before, after = choices(facts()), choices(facts(), measured)
    lines = [
        (name, _text(old), _text(new))
        for name, old, new in zip(before._fields, before, after, strict=True)
        if old != new
    ]
    document = {
        "file": str(output),
        "device": measured.device,
        "choices": {name: {"before": old, "now": new} for name, old, new in lines},
    }

    def show(out: Output) -> None:
        out.say(f"speeds of {measured.device}: --execution.measured {output}")
        out.table(("automatic choice", "before", "now"), lines)

    return Answer(document, show, str(output))


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
