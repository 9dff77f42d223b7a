"""Plots of a run, of its clients, and of a sweep."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.decimals import unit_of_bytes
from fedjax_dp.core.packages import needed_for
from fedjax_dp.core.ranges import Count
from fedjax_dp.data.statistics import PartitionStatistics
from fedjax_dp.engine.wrappers.latencies import RoundTimes
from fedjax_dp.evaluation.evaluate import wilson_interval
from fedjax_dp.io import drawing
from fedjax_dp.io.drawing import save as save

with needed_for("drawing", "plots"):
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

# The suffix of a metric that is the least over clients or records.
_SMALLEST = "_smallest"
# Rounds, or other positions, and the values of a metric there.
_Points = list[tuple[float, float]]
# x, means, and standard deviations; a deviation of None is that of one seed.
Curve = tuple[Sequence[float], Sequence[float], Sequence[float | None]]


@checked
def accuracy_and_epsilon(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draws test accuracy and the ε spent by round.

    Args:
      rows: the metrics, as `read_metrics` returns them. With `shared_test_accuracy`, which makes
        `test_accuracy` that of personal models, both are drawn, and so is `unseen_accuracy`, of
        clients that never take part. Different budgets of clients
        give a band from `epsilon_UNIT_smallest` to `epsilon_UNIT`.
      title: the title.

    Returns:
      The figure; without ε if the run has none that is finite.
    """
    metrics = {name.removesuffix(_SMALLEST) for row in rows for name in row}
    curves = {name: _known(rows, name) for name in sorted(metrics) if name.startswith("epsilon_")}
    curves = {name: points for name, points in curves.items() if points}
    figure = drawing.new_figure(4.8 if curves else 3.2)
    parts = figure.subplots(1 + bool(curves), sharex=True, squeeze=False)[:, 0]
    top, bottom = parts[0], parts[-1]
    shared = _known(rows, "shared_test_accuracy")
    accuracies = {"personal models" if shared else "test accuracy": _known(rows, "test_accuracy")}
    accuracies |= {"shared model": shared, "unseen clients": _known(rows, "unseen_accuracy")}
    for i, (label, points) in enumerate(accuracies.items()):
        if points:
            drawing.draw_curve(top, i, *_columns(points), label)
    drawing.set_title(top, title)
    _accuracy_axis(top)
    if sum(map(bool, accuracies.values())) > 1:
        drawing.legend_above(top)
    for i, (name, points) in enumerate(curves.items()):
        _epsilon(bottom, i, name.removeprefix("epsilon_"), points, _known(rows, name + _SMALLEST))
    if curves:
        several = len(bottom.get_lines()) > 1
        bottom.set_ylabel("ε spent" if several else str(bottom.get_lines()[0].get_label()))
        bottom.set_ylim(bottom=0)
        if several:
            drawing.legend_above(bottom)
    _finish_rounds(parts)
    return figure


def _accuracy_axis(axes: Axes) -> None:
    axes.set(ylabel="test accuracy", ylim=(-0.02, 1.02))


def _finish_rounds(parts: np.ndarray) -> None:
    """Adds grids to all axes, and labels the lowest, which share their rounds."""
    for axes in parts:
        axes.grid(alpha=0.25)
    parts[-1].set_xlabel("round")
    drawing.integer_ticks(parts[-1])


def _columns(points: _Points) -> tuple[list[float], list[float]]:
    """Splits points into positions and values."""
    return [x for x, _ in points], [y for _, y in points]


def _epsilon(axes: Axes, index: int, unit: str, largest: _Points, smallest: _Points) -> None:
    """Draws ε of a unit of privacy: a curve, or a band if budgets differ."""
    whose = "of a client" if unit == "client" else f"of a {unit}"
    colour = drawing.COLOURS[1 + index]
    if not smallest:
        drawing.draw_curve(axes, index, *_columns(largest), f"ε {whose}", color=colour)
        return
    low, high = dict(smallest), dict(largest)
    rounds = [x for x in high if x in low]
    lows = [low[x] for x in rounds]
    drawing.draw_curve(axes, index, *_columns(largest), f"ε {whose}, largest", color=colour)
    line = drawing.draw_curve(axes, index + 1, rounds, lows, f"ε {whose}, smallest", color=colour)
    highs = [high[x] for x in rounds]
    axes.fill_between(rounds, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)


@checked
def accuracy_by_bytes(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draws test accuracy against the traffic so far.

    Args:
      rows: the metrics, as `read_metrics` returns them, with `bytes_up` and `bytes_down` in every
        row; else there is no curve.
      title: the title.

    Returns:
      The figure; a curve for the upload and one for both directions, in bytes, kB of 1,000, MB of
      10⁶ and so on, whichever suits the whole.
    """
    figure = drawing.new_figure()
    axes = figure.subplots()
    up = np.cumsum([row.get("bytes_up") or 0 for row in rows])
    both = up + np.cumsum([row.get("bytes_down") or 0 for row in rows])
    size, unit = unit_of_bytes(float(max(both, default=0)))
    measured = dict(_known(rows, "test_accuracy"))
    is_measured = np.array([row["round"] in measured for row in rows], bool)
    values = list(measured.values())
    if values and all("bytes_up" in row for row in rows):
        drawing.draw_curve(axes, 0, both[is_measured] / size, values, "up and down")
        drawing.draw_curve(axes, 1, up[is_measured] / size, values, "up")
    axes.set_xlabel(f"{unit} sent")
    axes.set_xlim(left=0)
    _accuracy_axis(axes)
    drawing.finish(axes, title)
    return figure


@checked
def accuracy_by_seconds(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draws test accuracy against simulated seconds.

    Args:
      rows: the metrics of a run with a clock, as `read_metrics` returns them; a row without
        `simulated_seconds` has no point.
      title: the title.

    Returns:
      The figure; a curve for `test_accuracy`, and one for the shared model if that is another.
    """
    figure = drawing.new_figure()
    axes = figure.subplots()
    is_personal = any("shared_test_accuracy" in row for row in rows)
    labels = {"test_accuracy": "personal models" if is_personal else "test accuracy"}
    for i, (name, label) in enumerate((labels | {"shared_test_accuracy": "shared model"}).items()):
        if points := _known(rows, name, by="simulated_seconds"):
            drawing.draw_curve(axes, i, *_columns(points), label)
    axes.set_xlabel("simulated seconds")
    _accuracy_axis(axes)
    drawing.finish(axes, title, has_legend=len(axes.get_lines()) > 1)
    return figure


def _known(rows: list[dict[str, Any]], name: str, by: str = "round") -> _Points:
    """Selects the rounds in which a metric is measured and finite, by another metric."""
    known = [row for row in rows if all(_is_finite(row.get(metric)) for metric in (by, name))]
    return [(row[by], row[name]) for row in known]


def _is_finite(value: Any) -> bool:
    return value is not None and bool(np.isfinite(value))


def update_norms(rows: list[dict[str, Any]], clip_norm: float | None, title: str) -> Figure:
    """Draws update norms before clipping, the share clipped, and the noise, by round."""
    measured = [row for row in rows if row.get("update_norm_quantiles") is not None]
    below = {
        "share clipped": _known(rows, "clipped_client_share"),
        "noise stddev\nby coordinate": _known(rows, "noise_stddev"),
    }
    below = {label: points for label, points in below.items() if points}
    figure = drawing.new_figure(3.4 + 1.2 * len(below))
    heights = (2.5, *[1] * len(below))
    parts = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _norms(parts[0], measured, _bounds(rows, measured, clip_norm))
    drawing.set_title(parts[0], title)
    drawing.legend_above(parts[0])
    for axes, (label, points) in zip(parts[1:], below.items(), strict=True):
        axes.plot(*_columns(points), color=drawing.BLUE if "share" in label else drawing.RED)
        axes.set_ylabel(label)
        axes.set_ylim(*((-0.05, 1.05) if "share" in label else (0, None)))
    _finish_rounds(parts)
    return figure


def _bounds(
    rows: list[dict[str, Any]], measured: list[dict[str, Any]], clip_norm: float | None
) -> _Points:
    """Returns the clip norm by round: from the rows, else one number for all."""
    bounds = _known(rows, "clip_norm")
    if not bounds and clip_norm is not None and measured:
        bounds = [(measured[0]["round"], clip_norm), (measured[-1]["round"], clip_norm)]
    return bounds


def _norms(axes: Axes, measured: list[dict[str, Any]], bounds: _Points) -> None:
    """Draws norms as bands, on a logarithmic scale if they spread widely."""
    axes.set_ylabel("L2 norm of an update")
    least = 0.0
    if measured:
        rounds = [row["round"] for row in measured]
        norms = np.array([row["update_norm_quantiles"] for row in measured], dtype=float).T
        # Updates may be 0: only values above 0 determine the scale.
        seen = np.concatenate([norms.ravel(), [value for _, value in bounds]])
        if drawing.log_where_wide(axes, "y", seen):
            least = float(np.min(seen[seen > 0])) / 1.5
            norms = np.maximum(norms, least)
        axes.fill_between(
            rounds, norms[0], norms[4], color=drawing.BLUE, alpha=0.15, label="least to largest"
        )
        axes.fill_between(
            rounds, norms[1], norms[3], color=drawing.BLUE, alpha=0.3, label="10 % to 90 %"
        )
        axes.plot(rounds, norms[2], color=drawing.BLUE, label="median")
    if bounds:
        axes.plot(*_columns(bounds), color=drawing.RED, linestyle="--", label="clip norm")
    axes.set_ylim(bottom=least)


def epsilon_curves(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], title: str
) -> Figure:
    """Draws ε over rounds for several settings: `{name: (rounds, epsilons)}`."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (rounds, spent)) in enumerate(curves.items()):
        drawing.draw_curve(axes, i, rounds, spent, name)
    axes.set(xlabel="round", ylabel="ε")
    if not drawing.log_where_wide(axes, "y", [s[-1] for _, s in curves.values() if len(s)]):
        axes.set_ylim(bottom=0)
    drawing.integer_ticks(axes)
    drawing.finish(axes, title)
    return figure


def accuracy_by(
    curves: Mapping[str, Curve], label: str, title: str, *, seeds: Iterable[int] = ()
) -> Figure:
    """Draws accuracy by the number `label`, with a band of one standard deviation over seeds."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (x, means, deviations)) in enumerate(curves.items()):
        line = drawing.draw_curve(axes, i, x, means, name)
        drawing.draw_band(axes, line, deviations)
    axes.set_ylabel("test accuracy")
    drawing.set_lines_below(axes, label, drawing.words_of_spread(seeds, "band"))
    drawing.tick_numbers(axes, [float(v) for x, _, _ in curves.values() for v in x])
    drawing.finish(axes, title)
    return figure


def accuracy_of(
    points: Mapping[str, tuple[float, float | None]], title: str, *, seeds: Iterable[int] = ()
) -> Figure:
    """Draws accuracies by name, `{name: (mean, standard deviation over seeds)}`, as points."""
    figure = drawing.new_figure(1.3 + 0.3 * len(points))
    axes = figure.subplots()
    means, deviations = zip(*points.values(), strict=True)
    drawing.draw_points(axes, list(points), means, deviations)
    drawing.set_lines_below(axes, "test accuracy", drawing.words_of_spread(seeds, "bars"))
    drawing.finish(axes, title, has_legend=False)
    return figure


# More clients than this are drawn as a curve with a band.
_MOST_MARKS = 60
# Parts of a round: neighbours differ in lightness, and the update has the colour of no other.
_PARTS = tuple(drawing.COLOURS[i] for i in (0, 4, 1, 5))
# More bars are not legible.
_MOST_BARS = 40


@checked
def client_accuracies(
    accuracies: np.ndarray,
    sizes: np.ndarray,
    test_sizes: np.ndarray,
    title: str,
    *,
    names: Sequence[str] = (),
) -> Figure:
    """Draws the accuracy of each client with its uncertainty, and how many examples it has.

    Bars are Wilson intervals at 95 %, as if test examples were independent draws. Clients without
    test examples are listed at the right. Sizes that differ by more than a factor of ten have a
    logarithmic scale.

    Args:
      accuracies: `[num_clients]`; NaN for a client without test examples.
      sizes: training examples of each client, `[num_clients]`.
      test_sizes: test examples of each client, `[num_clients]`.
      title: the title.
      names: the names of the clients; their numbers if empty.

    Returns:
      The figure, with accuracies above and sizes below.

    Raises:
      ValueError: if lengths differ.
    """
    is_paired = np.ndim(accuracies) == 1 and np.shape(accuracies) == np.shape(sizes)
    checks.require(is_paired, "accuracies", "have one value for each size", np.shape(accuracies))
    is_paired = np.shape(test_sizes) == np.shape(sizes)
    checks.require(is_paired, "test_sizes", "have one value for each size", np.shape(test_sizes))
    called = _called(names, len(sizes))
    is_known = np.isfinite(accuracies) & (test_sizes > 0)
    known, unknown = np.flatnonzero(is_known), np.flatnonzero(~is_known)
    known = known[np.argsort(accuracies[known], kind="stable")]
    order = np.concatenate([known, unknown])
    figure = drawing.new_figure(5.0, drawing.PAGE)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _accuracies(top, accuracies[known], test_sizes[known])
    if len(unknown):
        top.axvspan(len(known) - 0.5, len(order) - 0.5, color="0.9", label="no test data")
    top.set(ylim=(-0.02, 1.02), ylabel="test accuracy")
    drawing.set_title(top, title)
    drawing.legend_above(top)
    _sizes(bottom, {"training": sizes[order], "test": test_sizes[order]})
    step = drawing.name_places(bottom, [called[i] for i in order])
    top.tick_params(axis="x", labelbottom=False)
    label = "clients, from least to most accurate"
    label += f" (1 in {step} named)" if step > 1 else ""
    drawing.set_lines_below(bottom, label, *_missing("test data", [called[i] for i in unknown]))
    return figure


def _called(names: Sequence[str], num_clients: int) -> list[str]:
    """Returns the name of each client, or its number."""
    if not len(names):
        return [str(i) for i in range(num_clients)]
    checks.require(len(names) == num_clients, "names", f"be {num_clients} strings", len(names))
    return [str(name) for name in names]


def _missing(what: str, names: Sequence[str]) -> list[str]:
    """Lists the clients that lack something."""
    return [f"{len(names)} without {what}: {drawing.listed(names)}"] if names else []


def _accuracies(axes: Axes, accuracies: np.ndarray, test_sizes: np.ndarray) -> None:
    """Draws accuracies with their intervals at the places 0, 1, ..."""
    axes.grid(alpha=0.25, axis="y")
    if not len(accuracies):
        return
    low, high = wilson_interval(accuracies, test_sizes)
    places = np.arange(len(accuracies))
    if len(places) <= _MOST_MARKS:
        # Rounding may put an accuracy of 1 outside its interval.
        lengths = np.maximum([accuracies - low, high - accuracies], 0.0)
        axes.errorbar(
            places,
            accuracies,
            yerr=lengths,
            fmt="o",
            color=drawing.BLUE,
            ecolor=drawing.COLOURS[5],
            markersize=4,
            capsize=2,
            label="accuracy, 95 % interval",
        )
    else:
        axes.vlines(
            places,
            low,
            high,
            color=drawing.COLOURS[5],
            linewidth=0.6,
            alpha=0.6,
            label="95 % interval",
        )
        axes.plot(places, accuracies, ".", color=drawing.BLUE, markersize=3, label="accuracy")
    mean = float(np.mean(accuracies))
    axes.axhline(mean, color=drawing.RED, linewidth=1, label=f"mean of clients, {mean:.3f}")


def _sizes(axes: Axes, by_part: dict[str, np.ndarray]) -> None:
    """Draws numbers of examples side by side at the places 0, 1, ..."""
    everything = np.concatenate(list(by_part.values()))
    is_log = drawing.log_where_wide(axes, "y", everything)
    width = 0.9 / len(by_part)
    for i, (part, sizes) in enumerate(by_part.items()):
        places = np.arange(len(sizes)) + (i - (len(by_part) - 1) / 2) * width
        colour = (drawing.BLUE, drawing.COLOURS[4])[i]
        kept = sizes > 0
        # A bar needs a scale that begins at 0.
        if is_log or len(sizes) > 2 * _MOST_MARKS:
            size = 3 if len(sizes) > _MOST_MARKS else 4
            marks: dict[str, Any] = {"marker": drawing.MARKERS[i], "ms": size, "linestyle": ""}
            # The largest client would be cut in half by the frame.
            marks["clip_on"] = False
            axes.plot(places[kept], sizes[kept], color=colour, label=part, **marks)
        else:
            axes.bar(places[kept], sizes[kept], width, color=colour, label=part)
    if not is_log:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("examples")
    axes.grid(alpha=0.25, axis="y")
    if len(by_part) > 1:
        drawing.legend_above(axes)


@checked
def labels_by_client(
    statistics: PartitionStatistics, *, max_clients: Count = 60, title: str | None = None
) -> Figure:
    """Draws the size and the label shares of each client, and how many clients have which size.

    Label shares are relative to the size of each client. Sizes that differ by more than a factor
    of ten have a logarithmic scale.

    Args:
      statistics: the partition.
      max_clients: the most clients to draw; of more, evenly spaced ones in order of size.
      title: the title, or None.

    Returns:
      The figure of sizes, of label shares if there are labels, and with a histogram of sizes.
    """
    called = _called(statistics.client_names, statistics.num_clients)
    order = np.argsort(-statistics.sizes, kind="stable")
    if statistics.num_clients > max_clients:
        order = order[np.linspace(0, len(order) - 1, max_clients).round().astype(int)]
    counts = statistics.label_counts
    figure = drawing.new_figure(4.6 if counts is not None else 3.0, drawing.PAGE)
    grid = figure.add_gridspec(1 if counts is None else 2, 2, width_ratios=(3, 1))
    top = figure.add_subplot(grid[0, 0])
    _sizes(top, {"examples": statistics.sizes[order]})
    lowest = top
    if counts is not None:
        lowest = figure.add_subplot(grid[1, 0], sharex=top)
        _label_shares(lowest, counts[order], statistics.labels)
        top.tick_params(axis="x", labelbottom=False)
    step = drawing.name_places(lowest, [called[i] for i in order], most=36)
    shown = f"{len(order)} of " if len(order) < statistics.num_clients else ""
    label = f"{shown}{statistics.num_clients} clients, largest first"
    empty = np.flatnonzero(statistics.sizes == 0)
    label += f" (1 in {step} named)" if step > 1 else ""
    drawing.set_lines_below(lowest, label, *_missing("examples", [called[i] for i in empty]))
    _histogram(figure.add_subplot(grid[:, 1]), statistics.sizes)
    if title is not None:
        figure.suptitle(title)
    return figure


def _label_shares(axes: Axes, counts: np.ndarray, labels: Sequence[str]) -> None:
    """Stacks the shares of labels, `[clients, labels]`, to bars of height 1."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    bottoms = np.cumsum(shares, axis=1) - shares
    places = np.arange(len(counts))
    # Of more labels than colours, the later one is lighter.
    is_few = len(labels) <= len(drawing.AREAS)
    shades = colormaps["cividis"](np.linspace(0, 1, len(labels)))
    colours = ListedColormap(drawing.AREAS[: len(labels)] if is_few else shades)
    for j, name in enumerate(labels):
        label = drawing.shortened(name)
        axes.bar(places, shares[:, j], 0.9, bottoms[:, j], color=colours(j), label=label)
    axes.set(ylabel="share of the label", ylim=(0, 1))
    figure = axes.get_figure(root=True)
    if is_few:
        drawing.legend_beside(axes, "label")
    elif figure is not None:
        bar = ScalarMappable(BoundaryNorm(np.arange(len(labels) + 1) - 0.5, len(labels)), colours)
        ticks = np.linspace(0, len(labels) - 1, 8).round().astype(int)
        colorbar = figure.colorbar(bar, ax=axes, label="label", ticks=ticks)
        colorbar.ax.set_yticklabels([drawing.shortened(labels[j]) for j in ticks])
        colorbar.ax.minorticks_off()


def _histogram(axes: Axes, sizes: np.ndarray) -> None:
    """Counts clients by size; a logarithmic scale leaves out those without examples."""
    bins = min(30, max(5, len(sizes) // 2))
    known = sizes[sizes > 0]
    if drawing.log_where_wide(axes, "x", known):
        axes.tick_params(axis="x", rotation=90)
        edges = np.geomspace(known.min(), known.max(), bins + 1).tolist()
        axes.hist(known, edges, color=drawing.BLUE)
    else:
        axes.hist(sizes, bins, color=drawing.BLUE)
    axes.set(xlabel="examples", ylabel="clients")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


@checked
def round_chart(times: RoundTimes, names: Sequence[str], title: str) -> Figure:
    """Draws the times of one round as a Gantt chart: a line for each of the first 40 clients.

    Args:
      times: of the round, see `engine.round_times`.
      names: of the clients, `[num_clients]`.
      title: the title.

    Returns:
      The figure of the broadcast on its way, local work, the update on its way, and the next
      broadcast; late updates are hatched, and inactive clients have no bars.

    Raises:
      ValueError: for another number of names.
    """
    count = len(times.arrive)
    checks.require(len(names) == count, "names", f"name each of the {count} clients", len(names))
    shown = np.arange(min(count, _MOST_BARS))
    figure = drawing.new_figure(1.9 + 0.2 * len(shown))
    axes = figure.subplots()
    server = np.full(count, times.server)
    parts = {
        "broadcast": (np.zeros(count), times.begin),
        "local work": (times.begin, times.send),
        "update": (times.send, times.arrive),
        "next broadcast": (server, times.receive),
    }
    hatched: dict[str, Any] = {"hatch": "////", "edgecolor": "white"}
    for colour, (label, (start, end)) in zip(_PARTS, parts.items(), strict=True):
        active = shown[np.isfinite((end - start)[shown])]
        is_apart = np.asarray(times.is_late, bool)[active] & (label == "update")
        for name, bars in ((label, active[~is_apart]), ("late update", active[is_apart])):
            axes.barh(
                *(bars, (end - start)[bars]),
                left=start[bars],
                height=0.7,
                color=colour,
                label=name if len(bars) else None,
                **({} if name == label else hatched),
            )
    ends = ((times.closes, "sum closed", ":"), (times.server, "new model", "--"))
    for seconds, label, style in ends:
        axes.axvline(seconds, color="black", linestyle=style, linewidth=1, label=label)
    axes.set_yticks(shown, [drawing.shortened(n) for n in names[: len(shown)]], fontsize=7)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set(xlabel="simulated seconds from the start of the round", xlim=(0, None))
    drawing.set_title(axes, title)
    drawing.legend_above(axes)
    return figure
