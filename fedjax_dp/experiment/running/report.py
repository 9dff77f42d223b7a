"""Writes the report of a run folder, also while the run is under way."""

import pathlib
import shlex
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.files import entry_of, write_text
from fedjax_dp.core.ranges import Positive
from fedjax_dp.experiment.running.release import (
    MAY_BE_PUBLISHED,
    marks_now,
    public_summary,
    publishable_files,
)
from fedjax_dp.experiment.running.run_folder import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    RELEASE_FOLDER,
    REPORT_FILE,
    SCORES_FILE,
    SUMMARY_FILE,
    ended_summary,
    is_deployed,
    is_in_use,
    require_run,
)
from fedjax_dp.io.digests import read_sealed, read_sealed_object
from fedjax_dp.io.logbook import read_metrics
from fedjax_dp.io.report import RunFiles, report_page

_STATEMENT_FILE = "privacy.md"


class Report(NamedTuple):
    """A report that was written.

    Attributes:
      file: the page.
      state: "running", or how the run ended: "finished", "interrupted", "budget" or "callback";
        "released" for a release.
      rounds: completed rounds; None if that is not public.
      mark: "public" or "covered" if the page may be published, else "exact" or "secret".
    """

    file: pathlib.Path
    state: str
    rounds: int | None
    mark: str


@checked
def report(
    folder: str | pathlib.Path,
    output: str | pathlib.Path | None = None,
    *,
    every: Positive | None = None,
    progress: Callable[[Report], None] = lambda written: None,
) -> Report:
    """Writes a page about a run, finished or not: state, curves, privacy, configuration.

    The page is one HTML file that loads nothing. That of a run folder has exact figures, which no ε
    covers, and the seed of the run; that of its folder `release` has nothing but what the marks of
    that folder say may be published, and names no folder.

    Args:
      folder: a run folder, or the folder `release` in one.
      output: the page, a file that ends in ".html" and is replaced if it exists; None for
        `report.html` in the folder.
      every: seconds between updates of the page while the run is in progress; a browser then reads
        it again too. None writes it once.
      progress: receives each report that was written.

    Returns:
      The last report that was written.

    Raises:
      ValueError: if the folder holds no run, a file in it is damaged, or the page would be in a
        folder for publication and may not be published.
    """
    place = files.expanded(folder)
    require_run(place)
    page = place / REPORT_FILE if output is None else pathlib.Path(output)
    checks.require(page.suffix == ".html", "output", "end in .html", str(page))
    try:
        while True:
            written = _write(place, page, every)
            progress(written)
            if every is None or written.state != "running":
                return written
            time.sleep(every)
    except KeyboardInterrupt:
        # A page that is no longer renewed must not be read again and again.
        _write(place, page, None)
        raise


def _write(folder: pathlib.Path, page: pathlib.Path, every: float | None) -> Report:
    run = _read(folder)
    html, mark = report_page(run, every if run.state == "running" else None)
    above = page.resolve().parents
    is_apart = mark in MAY_BE_PUBLISHED or not any(map(publishable_files, above))
    rule = f"not be in a folder {RELEASE_FOLDER}: the report of the whole run may not be published"
    checks.require(is_apart, "output", rule, str(page))
    above[0].mkdir(parents=True, exist_ok=True)
    write_text(page, html)
    return Report(page, run.state, run.rounds, mark)


def _read(folder: pathlib.Path) -> RunFiles:
    """Reads what a report shows; of a release, only files that are marked as publishable."""
    if marks := publishable_files(folder):
        return _of_release(folder, marks)
    # Asked first: what is read of a run that has ended is final.
    is_running = is_in_use(folder)
    config, rows = read_sealed(folder, CONFIG_FILE), read_metrics(folder)
    tables = files.parse_toml(config, folder / CONFIG_FILE)
    summary = {} if is_running else ended_summary(folder, rows)
    done = summary["rounds"] if "rounds" in summary else rows[-1]["round"] if rows else 0
    state, detail = _state(folder, tables, summary, done, is_running=is_running)
    return RunFiles(
        *(state, detail, done, config, read_sealed_object(folder, ENVIRONMENT_FILE), summary),
        read_sealed(folder, _STATEMENT_FILE) if summary else "",
        rows,
        marks_now(folder, tables),
        location=f"Run folder: {folder}",
        scores=_reports(folder / SCORES_FILE),
    )


def _of_release(folder: pathlib.Path, marks: dict[str, str]) -> RunFiles:
    summary = public_summary(read_sealed_object(folder, SUMMARY_FILE))
    config = read_sealed(folder, CONFIG_FILE)
    files.parse_toml(config, folder / CONFIG_FILE)
    return RunFiles(
        "released",
        "Released: this page has only what may be published.",
        summary.get("rounds"),
        config,
        read_sealed_object(folder, ENVIRONMENT_FILE) if ENVIRONMENT_FILE in marks else {},
        summary,
        read_sealed(folder, _STATEMENT_FILE) if _STATEMENT_FILE in marks else "",
        [],
        marks,
    )


def _state(
    folder: pathlib.Path,
    tables: dict[str, Any],
    summary: dict[str, Any],
    done: int,
    *,
    is_running: bool,
) -> tuple[str, str]:
    """Returns the state of a run in a word and in a sentence."""
    planned = entry_of(tables, "run", "rounds")
    at = f"round {done} of {planned}"
    if is_running:
        return "running", f"Under way: {at}."
    command = f"fedjax-dp run --resume {shlex.quote(str(folder))}"
    if is_deployed(folder):
        command = f"flwr run with the output {folder}"
    sentences = {
        "interrupted": f"Interrupted after {at}; {command} resumes it.",
        "callback": f"Stopped after {at} by the callback {summary.get('stopped_by')}.",
        "budget": f"Stopped after {at}: one more would exceed the privacy budget.",
        "finished": f"Finished: {at}.",
    }
    ended = summary.get("ended")
    # A finished run may have been resumed with more rounds, of which none is done.
    if ended not in sentences or (ended == "finished" and done != planned):
        ended = "interrupted"
    return ended, sentences[ended]


def _reports(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the scores that participants reported; a last line that is being written is left."""
    text = _text(path)
    whole = text[: text.rfind("\n") + 1]
    return [files.parse_json(line, path) for _, line in files.lines(whole)]


def _text(path: pathlib.Path) -> str:
    return files.read_text(path) if path.is_file() else ""
