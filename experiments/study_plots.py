"""Plots of several runs: accuracy by budget or round, noise, weights of clients, mixtures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from numpy.typing import ArrayLike

from fedjax_dp.io import drawing


def accuracy_by_epsilon(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]],
    title: str,
    seeds: Iterable[int] = (),
) -> Figure:
    """Draws accuracy in percent by ε: `{method: (budgets, means, deviations over seeds)}`."""
    return accuracy_by_number(curves, title, "ε", seeds)


def accuracy_by_number(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]],
    title: str,
    label: str,
    seeds: Iterable[int] = (),
    *,
    levels: Mapping[str, float] = {},
) -> Figure:
    """Draws accuracy in percent by a number: `{method: (numbers, means, deviations)}`.

    `levels` are accuracies that do not depend on the number, by method.
    """
    # Source: Malekmohammadi and others 2024, figure 3.6.
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (numbers, means, deviations)) in enumerate(curves.items()):
        line = drawing.draw_curve(axes, i, numbers, means, name, markevery=1)
        if any(deviations):
            axes.errorbar(
                numbers, means, yerr=deviations, fmt="none", ecolor=line.get_color(), capsize=3
            )
    _draw_levels(axes, levels)
    axes.set_ylabel("test accuracy, %")
    drawing.set_lines_below(axes, label, drawing.words_of_spread(seeds, "bars"))
    drawing.tick_numbers(axes, [float(x) for numbers, _, _ in curves.values() for x in numbers])
    drawing.set_title(axes, title)
    axes.grid(alpha=0.25)
    drawing.legend_above(axes)
    return figure


def _draw_levels(axes: Axes, levels: Mapping[str, float]) -> None:
    """Draws numbers that are the same everywhere as dotted lines."""
    for name, level in levels.items():
        axes.axhline(level, color=drawing.GREY, linestyle=":", linewidth=1.8, label=name)


def accuracy_by_round(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]],
    title: str,
    seeds: Iterable[int] = (),
    *,
    label: str = "test accuracy, %",
    levels: Mapping[str, float] = {},
) -> Figure:
    """Draws accuracy in percent, or another number, by round: `{name: (rounds, means, …)}`.

    `levels` are numbers that do not depend on the round, by name.
    """
    # Source: Malekmohammadi and others 2024, figure 3.5.
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (rounds, means, deviations)) in enumerate(curves.items()):
        drawing.draw_band(axes, drawing.draw_curve(axes, i, rounds, means, name), deviations)
    _draw_levels(axes, levels)
    axes.set_ylabel(label)
    drawing.set_lines_below(axes, "round", drawing.words_of_spread(seeds, "band"))
    drawing.set_title(axes, title)
    drawing.integer_ticks(axes)
    axes.grid(alpha=0.25)
    drawing.legend_above(axes)
    return figure


def updates_and_mixture(
    features: np.ndarray,
    clusters: np.ndarray,
    means: np.ndarray,
    radii: np.ndarray,
    title: str,
) -> Figure:
    """Draws two components of the updates by true cluster, and circles of 1, 2 and 3 radii."""
    figure = drawing.new_figure(4.6)
    axes = figure.subplots()
    for i, cluster in enumerate(np.unique(clusters)):
        of_it = clusters == cluster
        axes.scatter(
            features[of_it, 0],
            features[of_it, 1],
            s=28,
            alpha=0.8,
            color=drawing.COLOURS[i % len(drawing.COLOURS)],
            marker=drawing.MARKERS[i % len(drawing.MARKERS)],
            label=f"cluster {cluster}",
        )
    for mean, radius in zip(means, radii, strict=True):
        for times in (1, 2, 3):
            edge = Circle(
                (mean[0], mean[1]), times * radius, fill=False, color="black", alpha=0.9 / times
            )
            axes.add_patch(edge)
    if len(means):
        edge.set_label("1, 2 and 3 radii")
    axes.set(xlabel="first principal component", ylabel="second principal component")
    axes.set_aspect("equal", adjustable="datalim")
    drawing.set_title(axes, title)
    drawing.legend_above(axes)
    return figure


def multipliers_by_batch_size(
    batch_sizes: Sequence[float],
    multipliers: Mapping[str, Sequence[float]],
    title: str,
    *,
    label: str = "batch size $b$",
) -> Figure:
    """Draws noise multipliers by batch size, for each setting."""
    # Source: Malekmohammadi and others 2024, figure 3.2.
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, values) in enumerate(multipliers.items()):
        drawing.draw_curve(axes, i, batch_sizes, values, name, markevery=1)
    axes.set_xscale("log", base=2)
    axes.set(xlabel=label, ylabel="noise multiplier $z$")
    everything = np.concatenate([np.asarray(v, float) for v in multipliers.values()])
    if not drawing.log_where_wide(axes, "y", everything):
        axes.set_ylim(bottom=0)
    drawing.set_title(axes, title)
    axes.grid(alpha=0.25)
    drawing.legend_above(axes)
    return figure


def variance_by_setting(
    variance: ArrayLike,
    rows: Sequence[float],
    columns: Sequence[float],
    title: str,
    *notes: str,
    labels: tuple[str, str] = ("ε", "batch size $b$"),
) -> Figure:
    """Draws the noise variance of an update, `[rows, columns]`, as a table of colours."""
    # Source: Malekmohammadi and others 2024, figure 3.3.
    values = np.asarray(variance, float)
    figure = drawing.new_figure(
        max(3.2, 1.4 + 0.28 * len(rows)), max(drawing.COLUMN, 1.6 + 0.45 * len(columns))
    )
    axes = figure.subplots()
    norm = LogNorm(values.min(), max(values.max(), values.min() * (1 + 1e-9)))
    image = axes.imshow(values, norm=norm, cmap="viridis", aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        # White and black have the same contrast on a luminance of 0.18.
        levels = np.asarray(image.cmap(norm(value))[:3]) ** 2.2
        colour = "white" if levels @ (0.2126, 0.7152, 0.0722) < 0.18 else "black"
        form = ".0f" if 100 <= value < 1e5 else ".2g" if 1e-3 <= value < 100 else ".1e"
        shown = drawing.with_powers(f"{value:{form}}")
        axes.text(j, i, shown, ha="center", va="center", color=colour, fontsize=7.5)
    axes.set_xticks(range(len(columns)), [f"{c:g}" for c in columns])
    axes.set_yticks(range(len(rows)), [f"{r:g}" for r in rows])
    axes.set_ylabel(labels[0])
    # What is equal stays in one line.
    kept = (note.replace(" = ", "\u00a0=\u00a0") for note in notes)
    drawing.set_lines_below(axes, labels[1], *kept)
    drawing.set_title(axes, title)
    figure.colorbar(image, label="variance of the update")
    return figure


def weights_of_clients(
    weights: Mapping[str, Sequence[float]],
    title: str,
    *,
    order: ArrayLike | None = None,
    names: Sequence[str] = (),
) -> Figure:
    """Draws client weights, ordered by the first method; a weight of 0 is only counted."""
    # Source: Malekmohammadi and others 2024, figure 3.7.
    first = np.asarray(next(iter(weights.values())), float)
    order = np.argsort(-first) if order is None else np.asarray(order)
    called = [names[c] if len(names) else str(c) for c in order]
    figure = drawing.new_figure(width=drawing.PAGE)
    axes = figure.subplots()
    for i, (name, values) in enumerate(weights.items()):
        shown = np.asarray(values, float)[order]
        num_zero = int(np.sum(shown <= 0))
        shown = np.where(shown > 0, shown, np.nan)
        label = name + (f" ({num_zero} of weight 0)" if num_zero else "")
        drawing.draw_curve(axes, i, np.arange(len(order)), shown, label, **_marks(i, len(order)))
    axes.set_yscale("log")
    step = drawing.name_places(axes, called)
    axes.set(xlabel="client" + (f" (1 in {step} named)" if step > 1 else ""))
    axes.set_ylabel("weight")
    drawing.set_title(axes, title)
    axes.grid(alpha=0.25)
    drawing.legend_above(axes)
    return figure


def _marks(index: int, num_clients: int) -> dict[str, Any]:
    """Nests marks that coincide, the largest below; more clients than fit are curves."""
    if num_clients > 60:
        return {}
    size, style = max(2.0, 9.0 - 2.0 * index), "none" if index == 0 else "full"
    return {"linestyle": "none", "markersize": size, "markevery": 1, "fillstyle": style}


def precision_by_block_size(
    block_sizes: Sequence[int],
    means: Sequence[float],
    deviations: Sequence[float],
    title: str,
    seeds: Iterable[int] = (),
) -> Figure:
    """Draws the precision of weights by the number of parameters decomposed together."""
    # Source: Malekmohammadi and others 2024, figure 3.7.
    figure = drawing.new_figure()
    axes = figure.subplots()
    bars = {"marker": "o", "markersize": 3, "capsize": 3, "color": drawing.BLUE}
    axes.errorbar(block_sizes, means, yerr=deviations, **bars)
    axes.set_xscale("log")
    axes.set_ylabel("precision, Σ min(w, w*)")
    label = "parameters decomposed together, $p'$"
    drawing.set_lines_below(axes, label, drawing.words_of_spread(seeds, "bars"))
    drawing.set_title(axes, title)
    least = float(np.min(np.subtract(means, deviations)))
    axes.set_ylim(max(0.0, np.floor(10 * least) / 10), 1.005)
    axes.grid(alpha=0.25)
    return figure
