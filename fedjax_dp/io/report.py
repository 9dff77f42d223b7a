"""The report of a run as one HTML page: state, curves, privacy, configuration."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple, TypeGuard

from fedjax_dp.core.decimals import in_bytes, shown, unit_of_bytes
from fedjax_dp.core.files import entry_of
from fedjax_dp.core.titles import title_of
from fedjax_dp.io import page
from fedjax_dp.io.page import Axis, Point, line_chart
from fedjax_dp.io.statement import MARK_WORDS

_CONFIG, _ENVIRONMENT, _SUMMARY = "config.toml", "environment.json", "summary.json"
_METRICS, _STATEMENT, _SCORES = "metrics.jsonl", "privacy.md", "scores.jsonl"
# From the mark of what may be published to that of what must be kept most secret.
_STRICTNESS = ("public", "covered", "named", "exact", "secret")
# Values beyond this are not drawn.
_LARGEST = 1e100
_ROUND, _SHARE = Axis("round", is_whole=True), Axis("accuracy", 0.0, 1.0)
# Figures of the accuracies of clients.
_BY_CLIENT = {
    "best client": "best_client_accuracy",
    "mean": "mean_client_accuracy",
    "median": "client_accuracy_q50",
    "worst tenth": "worst_tenth_accuracy",
    "worst client": "worst_client_accuracy",
    "best minus worst": "accuracy_disparity",
    "standard deviation": "std_client_accuracy",
    "largest loss": "worst_client_loss",
}
# By what was evaluated on whose data: beginnings and ends of the names of these figures.
_KINDS = {
    "as received": ("", ""),
    "after local training": ("", "_after_local"),
    "never took part": ("unseen_", ""),
}
_DRAWN_BY_CLIENT = ("best client", "mean", "worst tenth", "worst client")
# By the meter; and of a deployed run those of the arrays that nodes sent and received.
_BYTES = {
    "up": "bytes_up",
    "down": "bytes_down",
    "up from nodes": "wire_bytes_up",
    "down to nodes": "wire_bytes_down",
}
# Names of scores that a page shows.
_MOST_SCORES = 8


class RunFiles(NamedTuple):
    """What a report shows of a run folder; texts and tables are empty for missing files."""

    # One word, such as "running", and the same in a sentence.
    state: str
    detail: str
    # Completed rounds; None if unknown.
    rounds: int | None
    config: str
    environment: Mapping[str, Any]
    # Summary and statement are written when a run ends.
    summary: Mapping[str, Any]
    statement: str
    # As `read_metrics` returns them.
    rows: Sequence[Mapping[str, Any]]
    # The mark of each file: public, covered, named, exact or secret.
    marks: Mapping[str, str]
    # The path of the folder; "" if it must not be shown.
    location: str = ""
    # Of participants: "round", the rounds done before, and "scores", numbers by name.
    scores: Sequence[Mapping[str, Any]] = ()

    @property
    def tables(self) -> dict[str, Any]:
        """The configuration."""
        return tomllib.loads(self.config)

    def latest(self, name: str) -> Any:
        """Returns a figure of the summary, or else of the newest round that has it."""
        values = (row[name] for row in self.rows[::-1] if row.get(name) is not None)
        return self.summary.get(name) if self.summary else next(values, None)

    def curve(self, name: str, scale: float = 1.0, by: str = "round") -> list[Point]:
        """Lists the rounds in which a metric is a number, as points against another metric."""
        return [
            (float(row[by]), scale * float(row[name]))
            for row in self.rows
            if _is_number(row.get(name)) and _is_number(row.get(by))
        ]


class _Section(NamedTuple):
    """A part of a page: made of some files, left out if it has no content."""

    anchor: str
    title: str
    files: tuple[str, ...]
    content: Callable[[RunFiles], str]


def report_page(run: RunFiles, refresh: float | None = None) -> tuple[str, str]:
    """Returns a page, read again after `refresh` seconds, and the strictest mark of its files."""
    title = _title(run)
    parts = [(each, each.content(run)) for each in _SECTIONS]
    filled = [(each, text) for each, text in parts if text]
    files = [name for each, _ in filled for name in each.files]
    body = f"<header><h1>{escape(title)}</h1>\n"
    body += page.paragraph(run.detail, f"state {run.state}")
    body += page.paragraph(run.location) if run.location else ""
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
    """Returns the strictest mark of those of some files that the page shows anything of."""
    content = {_SUMMARY: run.summary, _METRICS: run.rows, _STATEMENT: run.statement}
    marks = (run.marks.get(name, "exact") for name in files if content.get(name, True))
    return max(marks, key=_STRICTNESS.index, default="public")


def _mark(run: RunFiles, files: Sequence[str], what: str, kind: str = "") -> str:
    """Says whether something may be published, by the files that it shows."""
    mark = _strictest(run, files)
    answer, _, reason = MARK_WORDS[mark].partition(": ")
    text = f"{what} may be published: <b>{answer}</b>; {escape(reason)}."
    return f'<p class="{kind}mark {mark}">{text}</p>\n'


def _title(run: RunFiles) -> str:
    tables, summary = run.tables, run.summary
    # A name of one's own stays as it is.
    own = entry_of(tables, "run", "name")
    keys = (
        None if own else summary.get("name") or entry_of(tables, "data", "name"),
        summary.get("algorithm") or entry_of(tables, "algorithm", "name"),
    )
    return ": ".join(map(str, filter(None, [own, *(title_of(str(key)) for key in keys if key)])))


def _overview(run: RunFiles) -> str:
    tables, rows = run.tables, []

    def add(label: str, value: Any, unit: str = "") -> None:
        if value is not None:
            rows.append((label, _text(label, value) + unit))

    add("rounds", run.rounds, f" of {entry_of(tables, 'run', 'rounds')}")
    add("data", entry_of(tables, "data", "name"))
    add("clients", run.summary.get("num_clients"))
    add("parameters", run.summary.get("num_parameters"))
    whose = run.summary.get("test_accuracy_of")
    label = f"test accuracy of {whose}" if whose else "test accuracy"
    add(label, run.latest("test_accuracy"))
    add("test accuracy of the shared model", run.latest("shared_test_accuracy"))
    add("accuracy at clients that never took part", run.latest("unseen_accuracy"))
    for unit in _units(tables):
        spent = run.latest(f"epsilon_{unit}")
        if _is_epsilon(spent):
            limit = _budget_in_words(_budgets(tables, unit))
            rows.append((f"ε of one {unit}", f"{shown('epsilon', spent)}{limit}"))
    if not _units(tables):
        add("privacy", "none is claimed")
    add("δ", run.summary.get("dp_delta"))
    add("what ε covers", run.summary.get("covered_models"))
    add("NOT covered by any ε", run.summary.get("not_covered"))
    whole = run.summary.get("epsilon_of_shared_record")
    if _is_epsilon(whole):
        rows.append(("ε of a record that several clients hold", shown("epsilon", whole)))
    add("simulated time", run.latest("simulated_seconds"), " s")
    seconds = run.summary.get("seconds")
    add("time", f"{seconds:.3g} s" if _is_number(seconds) else None)
    return page.table(("figure", "value"), rows)


def _budget_in_words(budgets: Sequence[float]) -> str:
    if not budgets:
        return ""
    low, high = (shown("budget", end, 6) for end in (budgets[0], budgets[-1]))
    return f" of {high}" if low == high else f" of {low} to {high}, by client"


def _warnings(run: RunFiles) -> str:
    warnings = run.summary.get("warnings")
    return page.items(map(str, warnings)) if warnings else ""


def _hints(run: RunFiles) -> str:
    hints = run.summary.get("hints")
    return page.items(map(str, hints)) if hints else ""


def _beside(*parts: str) -> str:
    """Puts charts and tables side by side; "" if all are empty."""
    content = "".join(parts)
    return f'<div class="charts">{content}</div>\n' if content else ""


def _by_round(
    run: RunFiles, title: str, axis: Axis, metrics: Mapping[str, str], *, scale: float = 1.0
) -> str:
    """Draws metrics by label over rounds."""
    curves = {label: run.curve(name, scale) for label, name in metrics.items()}
    return line_chart(title, curves, _ROUND, axis)


def _test_set(run: RunFiles) -> str:
    """Names what the test metrics are of, besides those of the shared model."""
    return "personal models" if run.curve("shared_test_accuracy") else "test set"


def _learning(run: RunFiles) -> str:
    accuracies = {_test_set(run): "test_accuracy", "shared model": "shared_test_accuracy"}
    accuracies |= {"unseen clients": "unseen_accuracy"}
    losses = {"training": "train_loss", _test_set(run): "test_loss"}
    losses |= {"unseen clients": "unseen_loss"}
    return _beside(
        _by_round(
            run, "Accuracy by round", _SHARE, accuracies | {"training set": "training_set_accuracy"}
        ),
        _by_round(
            run, "Loss by round", Axis("loss"), losses | {"shared model": "shared_test_loss"}
        ),
    )


def _spent(run: RunFiles) -> str:
    """Shows the spent ε by round against the budget, by unit of privacy."""
    charts = []
    for unit in _units(run.tables):
        smallest = run.curve(f"epsilon_{unit}_smallest")
        label = "largest" if smallest else "spent"
        curves = {label: run.curve(f"epsilon_{unit}"), "smallest": smallest}
        budgets = _budgets(run.tables, unit)
        limits = {"budget": budgets[0]} if len(budgets) == 1 else {}
        if len(budgets) > 1:
            limits = {"largest budget": budgets[-1], "smallest budget": budgets[0]}
        title = f"ε of one {unit} by round"
        charts.append(line_chart(title, curves, _ROUND, Axis("ε", 0.0), limits))
    return _beside(*charts)


def _participation(run: RunFiles) -> str:
    """Shows what became of the drawn clients, by round and in total."""
    rows = [row for row in run.rows if _is_number(row.get("num_participants"))]
    if not rows:
        return ""

    def column(name: str) -> list[float]:
        return [row[name] if _is_number(row.get(name)) else 0 for row in rows]

    drawn, dropped, broken = map(column, ("num_participants", "num_dropped", "num_non_finite"))
    counts = {
        "drawn": drawn,
        "contributed": [n - a - b for n, a, b in zip(drawn, dropped, broken, strict=True)],
        "dropped out or late": dropped,
        "update not finite": broken,
        "without a slot": column("num_overflow"),
    }
    rounds = column("round")
    curves = {
        label: list(zip(rounds, values, strict=True))
        for label, values in counts.items()
        if any(values) or label == "contributed"
    }
    sums = [(label, f"{sum(c):.6g}", f"{sum(c) / len(c):.4g}") for label, c in counts.items()]
    chart = line_chart("Clients by round", curves, _ROUND, Axis("clients", 0.0))
    return _beside(chart, page.table(("clients", "in all rounds", "in a round"), sums))


def _communication(run: RunFiles) -> str:
    curves = {way: [sent for _, sent in run.curve(name)] for way, name in _BYTES.items()}
    sums = {way: (sum(sent), len(sent)) for way, sent in curves.items() if sent}
    if not sums:
        return ""
    rows = [(way, in_bytes(total, 4), in_bytes(total / n, 4)) for way, (total, n) in sums.items()]
    size, unit = unit_of_bytes(max(map(max, filter(None, curves.values()))))
    chart = _by_round(run, "Traffic by round", Axis(unit, 0.0), _BYTES, scale=1 / size)
    return _beside(chart, page.table(("direction", "in all", "in a round"), rows))


def _clients(run: RunFiles) -> str:
    """Shows the spread of accuracy over clients, by round and at the end."""
    charts, columns = [], {}
    for kind, (start, end) in _KINDS.items():
        names = {label: f"{start}{name}{end}" for label, name in _BY_CLIENT.items()}
        column = [run.latest(name) for name in names.values()]
        if any(map(_is_number, column)):
            columns[kind] = column
            metrics = {label: names[label] for label in _DRAWN_BY_CLIENT}
            charts.append(_by_round(run, f"Accuracy over clients, {kind}", _SHARE, metrics))
    if not columns:
        return ""
    rows = [
        (label, *(_text(label, v) if _is_number(v) else "" for v in values))
        for label, *values in zip(_BY_CLIENT, *columns.values(), strict=True)
        if any(map(_is_number, values))
    ]
    return _beside(*charts, page.table(("over clients", *columns), rows))


def _scores(run: RunFiles) -> str:
    """Shows the scores that participants reported: means by round, and their spread."""
    curves, rows = {}, []
    for name in sorted({name for each in run.scores for name in each["scores"]})[:_MOST_SCORES]:
        by_round: dict[int, list[float]] = {}
        for each in run.scores:
            if _is_number(each["scores"].get(name)):
                by_round.setdefault(each["round"] + 1, []).append(each["scores"][name])
        if values := [value for scores in by_round.values() for value in scores]:
            curves[name] = [(float(r), sum(v) / len(v)) for r, v in sorted(by_round.items())]
            ends = _text(name, min(values)), _text(name, max(values))
            rows.append((name, str(len(values)), *ends))
    if not rows:
        return ""
    chart = line_chart("Mean score by round", curves, _ROUND, Axis("score"))
    return _beside(chart, page.table(("score", "reports", "smallest", "largest"), rows))


def _time(run: RunFiles) -> str:
    """Shows accuracy by simulated time, seconds of a round, and staleness."""
    by = "simulated_seconds"
    if not run.curve(by):
        return ""
    accuracies = {
        _test_set(run): run.curve("test_accuracy", by=by),
        "shared model": run.curve("shared_test_accuracy", by=by),
    }
    seconds = {"round": "round_seconds"}
    staleness = {"mean staleness": "staleness_mean", "largest staleness": "staleness_max"}
    return _beside(
        line_chart("Accuracy by simulated time", accuracies, Axis("simulated seconds"), _SHARE),
        _by_round(run, "Simulated seconds of a round", Axis("seconds", 0.0), seconds),
        _by_round(run, "Staleness by round", Axis("rounds", 0.0), staleness),
    )


def _newest(run: RunFiles) -> str:
    if not run.rows:
        return ""
    row = run.rows[-1]
    figures = [(name, _text(name, value)) for name, value in row.items()]
    table = page.table(("metric", "value"), figures)
    return page.folded(table, f"All metrics of round {row['round']}")


def _privacy(run: RunFiles) -> str:
    if not run.statement:
        return page.paragraph("The statement is written when the run ends.")
    return page.markdown(run.statement.removeprefix("# Privacy\n"))


def _environment(run: RunFiles) -> str:
    rows = [(k, _text(k, v)) for k, v in run.environment.items() if not isinstance(v, Mapping)]
    libraries = run.environment.get("libraries")
    table = page.table(("what", "value"), rows) if rows else ""
    if not isinstance(libraries, Mapping):
        return table
    return table + page.folded(page.table(("library", "version"), libraries.items()), "Libraries")


_SECTIONS = (
    _Section("overview", "Overview", (_SUMMARY, _METRICS), _overview),
    _Section("warnings", "Warnings", (_SUMMARY,), _warnings),
    _Section("hints", "Hints", (_SUMMARY,), _hints),
    _Section("learning", "Accuracy and loss", (_METRICS,), _learning),
    _Section("budget", "Privacy budget", (_METRICS,), _spent),
    _Section("participation", "Participation", (_METRICS,), _participation),
    _Section("communication", "Communication", (_METRICS,), _communication),
    _Section("clients", "Clients", (_METRICS, _SUMMARY), _clients),
    _Section("scores", "Scores of participants", (_SCORES,), _scores),
    _Section("time", "Simulated time", (_METRICS,), _time),
    _Section("metrics", "Newest metrics", (_METRICS,), _newest),
    _Section("privacy", "Privacy statement", (_STATEMENT,), _privacy),
    _Section(
        "configuration", "Configuration", (_CONFIG,), lambda run: page.code(run.config, _CONFIG)
    ),
    _Section("environment", "Environment", (_ENVIRONMENT,), _environment),
)


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that can be drawn."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= _LARGEST


def _is_epsilon(value: Any) -> TypeGuard[float | str]:
    """Whether a value is an ε, which may be "inf"."""
    return _is_number(value) or value == "inf"


def _text(name: str, value: Any) -> str:
    """Writes a figure in at most six digits, counts in full."""
    if isinstance(value, list):
        return ", ".join(_text(name, each) for each in value)
    return shown(name, value, 6) if isinstance(value, float) else str(value)


def _units(tables: Any) -> list[str]:
    """Lists the units of privacy of a configuration."""
    unit = str(entry_of(tables, "privacy", "unit") or "none")
    return {"both": ["client", "record"], "none": []}.get(unit, [unit])


def _budgets(tables: Any, unit: str) -> list[float]:
    """Lists the distinct budgets of a unit in order; none if ε has no limit."""
    budget = entry_of(tables, "privacy", unit, "epsilon")
    values: Any = budget.values() if isinstance(budget, Mapping) else budget
    values = values if isinstance(budget, Mapping | list) else [budget]
    return sorted({float(value) for value in values if _is_number(value)})
