"""`fedjax-dp pack`: packs a run folder into one file."""

import pathlib
import shlex
from typing import Annotated

import typer

from fedjax_dp.cli.output import Answer, Output, answering, application
from fedjax_dp.experiment.running.pack import pack
from fedjax_dp.experiment.running.run_folder import SUMMARY_FILE

app = application()


@answering(app)
def command(
    out: Output,
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A run folder.")],
    output: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="The new .tar file; by default beside DIR, with its name, and -release if only "
            "that is packed."
        ),
    ] = None,
    release: Annotated[
        bool, typer.Option("--release", help="Pack only what may be published.")
    ] = False,
) -> Answer:
    """Pack a run folder into one file: `fedjax-dp pack DIR [--release]`.

    The same files give the same archive, byte for byte; `tar -xf FILE.tar` unpacks it. The whole
    folder has the root of the noise. With `--release` the archive has the folder `release`, or else
    the files that may be published by their marks; the answer says why others are left out.
    """
    packed = pack(folder, output, release=release)
    if release and SUMMARY_FILE not in packed.files:
        out.warn(
            "this run has released neither a summary nor a model; if its noise has a secret root, "
            f"fedjax-dp run --resume {shlex.quote(str(folder))} --run.release=private releases them"
        )

    def show(out: Output) -> None:
        all_of = "" if release else ", not to be published: --release packs what may be"
        out.say(f"wrote {packed.file}: {len(packed.files)} files{all_of}")
        if packed.left_out:
            out.table(("left out", "because"), packed.left_out.items())

    left_out = [{"file": name, "reason": why} for name, why in packed.left_out.items()]
    document = packed._asdict() | {"file": str(packed.file), "left_out": left_out}
    return Answer(document, show, str(packed.file))
