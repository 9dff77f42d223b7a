"""From measured rounds and deltas to verdicts, a table, a CSV file and a plot. Pure functions."""

import csv
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

TOLERANCE = 1e-4
"""Largest difference of two deltas, relative to the norm of the reference, that counts as none."""


class Row(NamedTuple):
    """One implementation on one workload.

    Attributes:
      workload: its name.
      implementation: "ours" or a peer, with its variant.
      clients: of a timed round.
      whole_cohort: clients of the workload; more than `clients` where the cohort was cut.
      steps: local steps of a timed round.
      repeats: timed rounds.
      seconds: median of a round.
      seconds_min: the fastest.
      seconds_max: the slowest.
      ms_per_client: `seconds` by client, by which implementations are compared.
      ours_over_this: our time per client over this one's, medians of the same run; below 1 where
        ours is faster.
      gflops: operations of the training over `seconds`.
      gemm_peak_gflops: median of the matrix product measured between the rounds.
      first_round_seconds: with compilation.
      peak_rss_mb: of the runner, without the workers that it starts.
      step_difference: of the mean delta after one step to float64, relative.
      round_difference: the same after all steps.
      double_difference: of one step computed in float64, where float32 was not within tolerance.
      verdict: what the differences say.
      date: of the run.
      hardware: its class.
      versions: of what ran.
    """

    workload: str
    implementation: str
    clients: int
    whole_cohort: int
    steps: int
    repeats: int
    seconds: float
    seconds_min: float
    seconds_max: float
    ms_per_client: float
    ours_over_this: float | None
    gflops: float
    gemm_peak_gflops: float
    first_round_seconds: float
    peak_rss_mb: float
    step_difference: float
    round_difference: float
    double_difference: float | None
    verdict: str
    date: str
    hardware: str
    versions: str


def verdict(
    step_difference: float,
    round_difference: float,
    double_difference: float | None = None,
    tolerance: float = TOLERANCE,
) -> str:
    """Says whether an implementation computes what it should.

    One step is one gradient (the clipped sum, under record-level privacy), and shows a difference
    in what is computed. After many steps float32 trajectories part where an example lies on the
    edge of a ReLU or of a pooling window, although every step is right. In a deep network that
    happens within a step; whether it is no more than that shows where the same program runs in
    float64.

    Args:
      step_difference: of the mean delta after one step to the reference, relative.
      round_difference: the same after all steps.
      double_difference: after one step computed in float64, or None where that was not tried.
      tolerance: the largest that counts as equal; a hundredth of it in float64.

    Returns:
      "same", "same step, rounding parts the round", "same in float64, rounding parts the step" or
      "DIFFERS".
    """
    if not step_difference <= tolerance:
        is_rounding = double_difference is not None and double_difference <= tolerance / 100
        return "same in float64, rounding parts the step" if is_rounding else "DIFFERS"
    return "same" if round_difference <= tolerance else "same step, rounding parts the round"


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Adds to every row our time per client over its own, where ours ran on the same workload."""
    ours = {row.workload: row.ms_per_client for row in rows if row.implementation == "ours"}
    return [
        row._replace(
            ours_over_this=ours[row.workload] / row.ms_per_client if row.workload in ours else None
        )
        for row in rows
    ]


def summary(times: Sequence[float]) -> dict[str, float]:
    """Condenses repeated seconds into median, fastest and slowest."""
    return {
        "seconds": statistics.median(times),
        "seconds_min": min(times),
        "seconds_max": max(times),
    }


def merge(kept: Sequence[Row], fresh: Sequence[Row]) -> list[Row]:
    """Replaces the workloads that were measured anew, so that ratios stay within one run."""
    measured = {row.workload for row in fresh}
    rows = [row for row in kept if row.workload not in measured] + list(fresh)
    return sorted(rows, key=lambda row: (row.workload, row.ms_per_client))


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        for row in rows:
            writer.writerow([_text(value) for value in row])


def read_csv(path: pathlib.Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**{k: _value(k, v) for k, v in line.items()}) for line in csv.DictReader(file)]


def markdown(rows: Sequence[Row], notes: Sequence[str] = (), left: Sequence[str] = ()) -> str:
    """Writes the table for people, what did not run, and what is still to be measured."""
    lines = [
        "# Peers on the same data, weights and batches",
        "",
        "Milliseconds per client are medians of rounds that alternate between the implementations;",
        "compare within one workload only. *ours / this* below 1 means that ours is faster. A star",
        "marks a cohort that was cut because the whole one takes too long. Differences are those",
        "of the mean delta to a float64 step loop, relative, after one step and after all.",
        "",
        "| workload | implementation | clients | s/round | ms/client | ours / this | GFLOP/s "
        "| GEMM peak | first round s | step diff. | round diff. | verdict |",
        "|---" * 12 + "|",
    ]
    for row in rows:
        star = "*" if row.clients < row.whole_cohort else ""
        ratio = "" if row.ours_over_this is None else f"{row.ours_over_this:.2f}"
        spread = f"{row.seconds:.3g} ({row.seconds_min:.3g}-{row.seconds_max:.3g})"
        lines.append(
            f"| {row.workload} | {row.implementation} | {row.clients:,}{star} | {spread} "
            f"| {row.ms_per_client:.3g} | {ratio} | {row.gflops:.0f} | {row.gemm_peak_gflops:.0f} "
            f"| {row.first_round_seconds:.1f} | {row.step_difference:.1e} "
            f"| {row.round_difference:.1e} | {row.verdict} |"
        )
    lines += ["", "Runs:", ""]
    by_date: dict[tuple[str, str], dict[str, set[str]]] = {}
    for row in rows:
        facts = by_date.setdefault((row.date, row.hardware), {})
        facts.setdefault(row.versions, set()).add(row.workload)
    for (date, hardware), versions in by_date.items():
        lines.append(f"- {date}, {hardware}")
        lines += [f"  - {text}: {', '.join(sorted(names))}" for text, names in versions.items()]
    if notes:
        lines += ["", "What did not run:", "", *[f"- {note}" for note in notes]]
    if left:
        lines += ["", f"This run is unfinished; left: {', '.join(left)}."]
    return "\n".join(lines) + "\n"


def plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Draws the time per client of every implementation over ours, by workload, with its range."""
    from fedjax_dp.io import drawing, plots

    workloads = list(dict.fromkeys(r.workload for r in rows if r.ours_over_this is not None))
    if not workloads:
        return
    groups = {w: [r for r in rows if r.workload == w] for w in workloads}
    height = sum(len(group) + 1 for group in groups.values())
    figure = drawing.new_figure(0.19 * height + 0.8, drawing.PAGE)
    axes = figure.subplots()
    labels: list[str] = []
    for workload, group in groups.items():
        labels.append(WORKLOADS.get(workload, workload))
        for row in group:
            relative = 1 / row.ours_over_this
            ends = [relative * end / row.seconds for end in (row.seconds_min, row.seconds_max)]
            is_ours = row.implementation == "ours"
            colour, mark = (drawing.BLUE, "o") if is_ours else (drawing.RED, "s")
            y = len(labels)
            axes.plot(ends, [y, y], color=colour, linewidth=1.2)
            axes.plot(relative, y, mark, color=colour, markersize=4)
            axes.text(1.1 * ends[1], y, _time(row.ms_per_client), va="center", fontsize=7)
            labels.append(PACKAGES.get(row.implementation, row.implementation))
    axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
    for label in axes.get_yticklabels():
        is_heading = label.get_text() not in PACKAGES.values()
        label.set_fontweight("bold" if is_heading else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.5, -0.7)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axvline(1.0, color=drawing.BLUE, linewidth=0.8)
    axes.grid(alpha=0.25, axis="x")
    words = (
        "time per client over that of fedjax_dp: less is faster",
        "lines: fastest to slowest round",
    )
    drawing.set_lines_below(axes, *words)
    axes.margins(x=0.15)
    plots.save(figure, path)


# Headings of a plot, and the packages below them.
WORKLOADS = {
    "W1": "W1: CNN, EMNIST's shape",
    "W1dp": "W1dp: the same, client-level privacy",
    "W2": "W2: CNN, CIFAR's shape",
    "W2dp": "W2dp: the same, client-level privacy",
    "W3": "W3: CNN of 5 × 5 kernels, record-level privacy",
    "W3nodp": "W3nodp: CNN of 5 × 5 kernels",
    "W4": "W4: logistic regression",
    "W4dp": "W4dp: the same, client-level privacy",
    "W5": "W5: ResNet-18, record-level privacy",
    "W5nodp": "W5nodp: ResNet-18",
}
PACKAGES = {
    "ours": "fedjax_dp",
    "pfl": "pfl-research",
    "flower": "Flower",
    "fedjax": "FedJAX",
    "drjax": "DrJAX",
    "opacus hooks": "Opacus, hooks",
    "opacus ghost": "Opacus, ghost clipping",
    "opacus plain": "PyTorch",
    "jax_privacy": "JAX Privacy",
    "jax_privacy 1": "JAX Privacy, micro-batches of 1",
}


def _time(ms: float) -> str:
    """Writes milliseconds in the unit that suits them."""
    size, unit = (1e3, "s") if ms >= 1e3 else (1.0, "ms") if ms >= 1 else (1e-3, "µs")
    return f"{ms / size:.3g} {unit}"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> Any:
    kind = Row.__annotations__[name]
    if kind is str:
        return text
    if text == "":
        return None
    return int(text) if kind is int else float(text)
