"""`fedjax-dp estimate`: estimates rounds on devices that are not here."""

from typing import Annotated

import typer

from fedjax_dp.cli.output import Answer, ConfigFile, Configured, Output, answering, application
from fedjax_dp.core.decimals import in_bytes
from fedjax_dp.experiment.studies.estimate import Estimate, estimate

app = application()


@answering(app, cls=Configured)
def command(
    context: typer.Context,
    out: Output,
    file: ConfigFile = None,
    device: Annotated[
        str,
        typer.Option(
            help="h100, h200, a100 or several (h100x8); v4, v5e, v5p, v6e or a topology (v5e:4x4)."
        ),
    ] = "h100",
) -> Answer:
    """Estimate rounds on devices that are not here: `fedjax-dp estimate FILE.toml --device v5e`.

    Compiles the rounds of an experiment with the device's own compiler, on this machine: does it
    fit, how long does it compile, about how long is a round, and what takes the time. The seconds
    are the compiler's estimates; nothing is run or measured. Needs the extra `tpu` for TPUs
    and `cuda` for GPUs.
    """
    out.note(f"compiling for {device}")
    estimated = estimate(file, context.args, device)
    smaller = "execution.clients_per_chunk" if estimated.clients_per_chunk > 1 else "model or batch"
    lines = [
        ("devices", str(estimated.devices)),
        ("fits", "yes" if estimated.fits else f"NO; use a smaller {smaller}"),
        ("memory of a device", in_bytes(estimated.memory_bytes)),
        ("examples, states, parameters", in_bytes(estimated.argument_bytes)),
        ("temporaries", in_bytes(estimated.temporary_bytes)),
        ("clients side by side", str(estimated.clients_per_chunk)),
        ("seconds to compile, here", f"{estimated.trace_seconds + estimated.compile_seconds:.3g}"),
        ("seconds of a round, estimated", f"{estimated.round_seconds:.3g}"),
        ("read and written in a round", in_bytes(estimated.round_bytes)),
        ("operations of a round", f"{estimated.round_operations:,.0f}"),
        *((f"exchanged by {kind}", in_bytes(n)) for kind, n in estimated.exchanged_bytes.items()),
    ]
    parts = [
        (part.loops.replace("_", " "), part.kind, f"{part.share:.0%}", f"{part.seconds:.3g}")
        for part in estimated.parts
    ]

    def show(out: Output) -> None:
        out.table(("figure", estimated.device), lines)
        out.table(("in each", "operations", "share", "seconds a round"), parts)

    return Answer(_document(estimated), show, f"{estimated.round_seconds:.6g}")


def _document(found: Estimate) -> dict[str, object]:
    return found._asdict() | {"parts": [part._asdict() for part in found.parts]}
