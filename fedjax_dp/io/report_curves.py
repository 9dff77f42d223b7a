"""The curves of a report: learning, privacy budget, participation, bytes, clients, time."""

from fedjax_dp.io import page
from fedjax_dp.io.charts import Axis, line_chart
from fedjax_dp.io.run_files import RunFiles, budgets_of, is_number, text_of, units_of

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
_DRAWN_BY_CLIENT = ("best client", "mean", "worst tenth", "worst client")
_AFTER = "_after_local"
# Names of scores that a page shows.
_MOST_SCORES = 8


def _beside(*parts: str) -> str:
    """Puts charts and tables side by side; "" if all are empty."""
    found = "".join(parts)
    return f'<div class="charts">{found}</div>\n' if found else ""


def learning(run: RunFiles) -> str:
    """Shows accuracy and loss by round, on training and test data; "" without metrics."""
    shared = run.curve("shared_test_accuracy")
    own = "personal models" if shared else "test set"
    losses = {"training": run.curve("train_loss"), own: run.curve("test_loss")}
    return _beside(
        line_chart(
            "Accuracy by round",
            {
                own: run.curve("test_accuracy"),
                "shared model": shared,
                "training set": run.curve("training_set_accuracy"),
            },
            _ROUND,
            _SHARE,
        ),
        line_chart(
            "Loss by round",
            losses | {"shared model": run.curve("shared_test_loss")},
            _ROUND,
            Axis("loss"),
        ),
    )


def spent(run: RunFiles) -> str:
    """Shows the spent ε by round against the budget, by unit of privacy; "" without metrics."""
    charts = []
    for unit in units_of(run.tables):
        low = run.curve(f"epsilon_{unit}_smallest")
        largest = "largest" if low else "spent"
        budgets = budgets_of(run.tables, unit)
        limits = {"budget": budgets[0]} if len(budgets) == 1 else {}
        if len(budgets) > 1:
            limits = {"largest budget": budgets[-1], "smallest budget": budgets[0]}
        curves = {largest: run.curve(f"epsilon_{unit}"), "smallest": low}
        title = f"ε of one {unit} by round"
        charts.append(line_chart(title, curves, _ROUND, Axis("ε", 0.0), limits))
    return _beside(*charts)


def participation(run: RunFiles) -> str:
    """Shows what became of the drawn clients, by round and in total; "" without metrics."""
    counted = [row for row in run.rows if is_number(row.get("num_participants"))]
    if not counted:
        return ""

    def column(name: str) -> list[float]:
        return [row[name] if is_number(row.get(name)) else 0 for row in counted]

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
    rows = [(label, f"{sum(c):.6g}", f"{sum(c) / len(c):.4g}") for label, c in counts.items()]
    chart = line_chart("Clients by round", curves, _ROUND, Axis("clients", 0.0))
    return _beside(chart, page.table(("clients", "in all rounds", "in a round"), rows))


def communication(run: RunFiles) -> str:
    """Shows bytes up and down, by round and in total; "" without metrics."""
    # By the meter; and of a deployed run those of the arrays that nodes sent and received.
    names = {"up": "bytes_up", "down": "bytes_down"}
    names |= {"up from nodes": "wire_bytes_up", "down to nodes": "wire_bytes_down"}
    curves = {way: run.curve(name, 1e-6) for way, name in names.items()}
    rows = []
    for way, points in curves.items():
        sums = [value for _, value in points]
        if sums:
            rows.append((way, f"{sum(sums):.4g}", f"{sum(sums) / len(sums):.4g}"))
    if not rows:
        return ""
    chart = line_chart("Megabytes by round", curves, _ROUND, Axis("MB", 0.0))
    return _beside(chart, page.table(("direction", "MB in all", "MB in a round"), rows))


def clients(run: RunFiles) -> str:
    """Shows the spread of accuracy over clients, by round and at the end; "" without metrics."""
    kinds = {"as received": "", "after local training": _AFTER}
    columns = {
        kind: [run.latest(name + end) for name in _BY_CLIENT.values()]
        for kind, end in kinds.items()
    }
    columns = {kind: c for kind, c in columns.items() if any(map(is_number, c))}
    if not columns:
        return ""
    found = zip(_BY_CLIENT, *columns.values(), strict=True)
    rows = [
        (label, *(text_of(label, v) if is_number(v) else "" for v in values))
        for label, *values in found
        if any(map(is_number, values))
    ]
    charts = [
        line_chart(
            f"Accuracy over clients, {kind}",
            {label: run.curve(_BY_CLIENT[label] + kinds[kind]) for label in _DRAWN_BY_CLIENT},
            _ROUND,
            _SHARE,
        )
        for kind in columns
    ]
    return _beside(*charts, page.table(("over clients", *columns), rows))


def scores(run: RunFiles) -> str:
    """Shows the scores that participants reported: means by round, and their spread; "" if none."""
    reports = [(each["round"] + 1, each["scores"]) for each in run.scores]
    names = sorted({name for _, found in reports for name in found})
    curves, rows = {}, []
    for name in names[:_MOST_SCORES]:
        by_round: dict[int, list[float]] = {}
        for round, found in reports:
            if is_number(found.get(name)):
                by_round.setdefault(round, []).append(found[name])
        every = [value for values in by_round.values() for value in values]
        if every:
            means = {round: sum(each) / len(each) for round, each in sorted(by_round.items())}
            curves[name] = [(float(round), mean) for round, mean in means.items()]
            rows.append(
                (name, str(len(every)), text_of(name, min(every)), text_of(name, max(every)))
            )
    if not rows:
        return ""
    chart = line_chart("Mean score by round", curves, _ROUND, Axis("score"))
    return _beside(chart, page.table(("score", "reports", "smallest", "largest"), rows))


def time(run: RunFiles) -> str:
    """Shows accuracy by simulated time, seconds of a round, and staleness; "" without metrics."""
    by = "simulated_seconds"
    if not run.curve(by):
        return ""
    accuracies = {
        "personal models" if run.curve("shared_test_accuracy") else "test set": run.curve(
            "test_accuracy", by=by
        ),
        "shared model": run.curve("shared_test_accuracy", by=by),
    }
    stale = {
        "mean staleness": run.curve("staleness_mean"),
        "largest staleness": run.curve("staleness_max"),
    }
    seconds = {"round": run.curve("round_seconds")}
    return _beside(
        line_chart("Accuracy by simulated time", accuracies, Axis("simulated seconds"), _SHARE),
        line_chart("Simulated seconds of a round", seconds, _ROUND, Axis("seconds", 0.0)),
        line_chart("Staleness by round", stale, _ROUND, Axis("rounds", 0.0)),
    )
