"""`fedjax-dp conformance`: checks whether code of any framework does what it claims."""

import contextlib
import json
import os
import pathlib
import sys
from typing import Annotated

import typer

from fedjax_dp.audit.conformance import Report, check, subjects_of
from fedjax_dp.audit.conformance.findings import CHECKS
from fedjax_dp.audit.conformance.report import HEADS
from fedjax_dp.cli.output import Answer, Output, answering, application, plain, shown_path
from fedjax_dp.core import checks as rules

app = application()


@answering(app)
def command(
    out: Output,
    file: Annotated[
        str, typer.Argument(metavar="SUBJECT.py", help="A Python file that defines subjects.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Check this subject; may be repeated. All by default."),
    ] = None,
    checks: Annotated[
        str, typer.Option(metavar="C1,C2", help=f"Groups of checks: {', '.join(CHECKS)}.")
    ] = ",".join(CHECKS),
    confidence: Annotated[
        float, typer.Option(help="Probability that nothing fails if all claims hold, at least.")
    ] = 0.99,
    draws: Annotated[int, typer.Option(help="Seeds of a test of noise.")] = 256,
    budget: Annotated[
        float, typer.Option(help="Seconds after which no further check is begun.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of all inputs and seeds.")] = 0,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FOLDER", help="Write conformance.md, .json and .xml (JUnit) there."),
    ] = None,
) -> Answer:
    """Check whether code keeps its privacy claims: `fedjax-dp conformance SUBJECT.py`.

    SUBJECT.py is run, and may use any framework. The exit status is 1 if a check failed.
    """
    output = output and output.resolve()
    # What a file prints is no part of the answer, nor what each of many calls prints.
    with contextlib.redirect_stdout(sys.stderr):
        subjects = subjects_of(file)
    names = [subject.name for subject in subjects]
    for name in only or names:
        rules.one_of("--only", name, names)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    chosen = [subject for subject in subjects if not only or subject.name in only]
    out.note(f"checking {', '.join(subject.name for subject in chosen)}")
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        report = check(
            *chosen,
            checks=[group.strip() for group in checks.split(",")],
            confidence=confidence,
            draws=draws,
            budget=budget,
            seed=seed,
        )
    document = report.to_dict()
    if output is not None:
        texts = {
            "md": report.to_markdown(),
            "json": json.dumps(plain(document), allow_nan=False, indent=1) + "\n",
            "xml": report.to_junit(),
        }
        for ending, text in texts.items():
            (output / f"conformance.{ending}").write_text(text, encoding="utf-8")
    verdict = "failed" if report.is_failed else "nothing failed"
    status = 1 if report.is_failed else 0
    return Answer(document, lambda out: _show(out, report, output), verdict, status)


def _show(out: Output, report: Report, output: pathlib.Path | None) -> None:
    out.table(HEADS, report.rows())
    out.say(report.to_text())
    if not report.is_failed:
        out.say("nothing failed, which does not prove privacy")
    if output is not None:
        out.say(f"written: {shown_path(output / 'conformance.md')}, .json, .xml")
