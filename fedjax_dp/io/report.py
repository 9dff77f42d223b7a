"""The report of a run as one HTML page: state, curves, privacy, configuration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fedjax_dp.core.decimals import shown
from fedjax_dp.io import page
from fedjax_dp.io import report_curves as curves
from fedjax_dp.io.run_files import (
    RunFiles,
    budgets_of,
    entry_of,
    is_epsilon,
    is_number,
    text_of,
    units_of,
)
from fedjax_dp.io.statement import MARK_WORDS

_CONFIG, _ENVIRONMENT, _SUMMARY = "config.toml", "environment.json", "summary.json"
_METRICS, _STATEMENT, _SCORES = "metrics.jsonl", "privacy.md", "scores.jsonl"
# From the mark of what may be published to that of what must be kept most secret.
_STRICTNESS = ("public", "covered", "named", "exact", "secret")


class _Section(NamedTuple):
    """A part of a page: made of some files, left out if it has no content."""

    anchor: str
    title: str
    files: tuple[str, ...]
    content: Callable[[RunFiles], str]


def report_page(run: RunFiles, refresh: float | None = None) -> tuple[str, str]:
    """Writes the report of a run as HTML without scripts, and its mark.

    Each part says whether it may be published, by the marks of the files that it shows, and the
    page as a whole by the strictest of them.
    """
    title = _title(run)
    parts = [(each, each.content(run)) for each in _SECTIONS]
    filled = [(each, text) for each, text in parts if text]
    files = [name for each, _ in filled for name in each.files]
    body = f"<header><h1>{escape(title)}</h1>\n"
    body += page.paragraph(run.detail, f"state {run.state}")
    body += page.paragraph(run.place) if run.place else ""
    body += _mark(run, files, "This page", "notice ")
    links = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s, _ in filled)
    body += f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>\n'
    for each, text in filled:
        body += f'<section aria-labelledby="{each.anchor}">\n'
        body += f'<h2 id="{each.anchor}">{escape(each.title)}</h2>\n'
        body += _mark(run, each.files, "This section") + text + "</section>\n"
    html = page.document(f"{title}: {run.state}", body + "</main>\n", refresh)
    return html, _strictest(run, files)


def _strictest(run: RunFiles, files: Iterable[str]) -> str:
    marks = [run.marks.get(name, "exact") for name in files if _is_there(run, name)]
    return max(marks, key=_STRICTNESS.index, default="public")


def _is_there(run: RunFiles, name: str) -> bool:
    """Whether the page shows anything of a file."""
    held = {_SUMMARY: run.summary, _METRICS: run.rows, _STATEMENT: run.statement}
    return bool(held.get(name, True))


def _mark(run: RunFiles, files: Sequence[str], what: str, kind: str = "") -> str:
    """Says whether something may be published, by the files that it shows."""
    mark = _strictest(run, files)
    answer, _, reason = MARK_WORDS[mark].partition(": ")
    text = f"{what} may be published: <b>{answer}</b>; {escape(reason)}."
    return f'<p class="{kind}mark {mark}">{text}</p>\n'


def _title(run: RunFiles) -> str:
    tables = run.tables
    name = (
        run.summary.get("name")
        or entry_of(tables, "run", "name")
        or entry_of(tables, "data", "name")
    )
    algorithm = run.summary.get("algorithm") or entry_of(tables, "algorithm", "name")
    return ": ".join(str(part) for part in (name, algorithm) if part)


def _overview(run: RunFiles) -> str:
    tables, rows = run.tables, []

    def add(label: str, value: Any, unit: str = "") -> None:
        if value is not None:
            rows.append((label, text_of(label, value) + unit))

    add("rounds", run.rounds, f" of {entry_of(tables, 'run', 'rounds')}")
    add("data", entry_of(tables, "data", "name"))
    add("clients", run.summary.get("num_clients"))
    add("parameters", run.summary.get("num_parameters"))
    whose = run.summary.get("test_accuracy_of")
    label = f"test accuracy of {whose}" if whose else "test accuracy"
    add(label, run.latest("test_accuracy"))
    add("test accuracy of the shared model", run.latest("shared_test_accuracy"))
    for unit in units_of(tables):
        spent = run.latest(f"epsilon_{unit}")
        if is_epsilon(spent):
            of = _budget_in_words(budgets_of(tables, unit))
            rows.append((f"ε of one {unit}", f"{shown('epsilon', spent)}{of}"))
    if not units_of(tables):
        add("privacy", "none is claimed")
    add("δ", run.summary.get("dp_delta"))
    add("what ε covers", run.summary.get("covered_models"))
    add("NOT covered by any ε", run.summary.get("not_covered"))
    whole = run.summary.get("epsilon_of_shared_record")
    if is_epsilon(whole):
        rows.append(("ε of a record that several clients hold", shown("epsilon", whole)))
    add("simulated time", run.latest("simulated_seconds"), " s")
    seconds = run.summary.get("seconds")
    add("time", f"{seconds:.3g} s" if is_number(seconds) else None)
    return page.table(("figure", "value"), rows)


def _budget_in_words(budgets: Sequence[float]) -> str:
    if not budgets:
        return ""
    low, high = (shown("budget", end, 6) for end in (budgets[0], budgets[-1]))
    return f" of {high}" if low == high else f" of {low} to {high}, by client"


def _warnings(run: RunFiles) -> str:
    found = run.summary.get("warnings")
    return page.items(map(str, found)) if found else ""


def _newest(run: RunFiles) -> str:
    if not run.rows:
        return ""
    row = run.rows[-1]
    figures = [(name, text_of(name, value)) for name, value in row.items()]
    table = page.table(("metric", "value"), figures)
    return page.folded(table, f"All metrics of round {row['round']}")


def _privacy(run: RunFiles) -> str:
    if not run.statement:
        return page.paragraph("The statement is written when the run ends.")
    return page.markdown(run.statement.removeprefix("# Privacy\n"))


def _environment(run: RunFiles) -> str:
    rows = [(k, text_of(k, v)) for k, v in run.environment.items() if not isinstance(v, Mapping)]
    found = run.environment.get("libraries")
    table = page.table(("what", "value"), rows) if rows else ""
    if not isinstance(found, Mapping):
        return table
    return table + page.folded(page.table(("library", "version"), found.items()), "Libraries")


_SECTIONS = (
    _Section("overview", "Overview", (_SUMMARY, _METRICS), _overview),
    _Section("warnings", "Warnings", (_SUMMARY,), _warnings),
    _Section("learning", "Accuracy and loss", (_METRICS,), curves.learning),
    _Section("budget", "Privacy budget", (_METRICS,), curves.spent),
    _Section("participation", "Participation", (_METRICS,), curves.participation),
    _Section("communication", "Communication", (_METRICS,), curves.communication),
    _Section("clients", "Clients", (_METRICS, _SUMMARY), curves.clients),
    _Section("scores", "Scores of participants", (_SCORES,), curves.scores),
    _Section("time", "Simulated time", (_METRICS,), curves.time),
    _Section("metrics", "Newest metrics", (_METRICS,), _newest),
    _Section("privacy", "Privacy statement", (_STATEMENT,), _privacy),
    _Section(
        "configuration", "Configuration", (_CONFIG,), lambda run: page.code(run.config, _CONFIG)
    ),
    _Section("environment", "Environment", (_ENVIRONMENT,), _environment),
)
