"""Plots of several runs: accuracy by budget or round, noise, weights of clients, mixtures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import NullLocator
from numpy.typing import ArrayLike

from fedjax_dp.io import drawing


def accuracy_by_epsilon(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]], title: str
) -> Figure:
    """Draws accuracy by ε: `{method: (budgets, means, deviations over seeds)}`."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (budgets, means, deviations)) in enumerate(curves.items()):
        line = drawing.draw_curve(axes, i, budgets, means, name, markevery=1)
        axes.errorbar(
            budgets, means, yerr=deviations, fmt="none", ecolor=line.get_color(), capsize=3
        )
    everything = [float(b) for budgets, _, _ in curves.values() for b in budgets]
    axes.set(xlabel="ε", ylabel="accuracy")
    _budget_ticks(axes, everything)
    drawing.set_title(axes, title)
    axes.grid(alpha=0.25)
    drawing.legend_beside(axes)
    return figure


def _budget_ticks(axes: Axes, budgets: Sequence[float]) -> None:
    """Writes the budgets themselves under the axis where they spread widely and are few."""
    few = sorted(set(budgets))
    if drawing.log_where_wide(axes, "x", budgets) and len(few) <= 10:
        axes.set_xticks(few, [f"{b:g}" for b in few])
        axes.xaxis.set_minor_locator(NullLocator())


def accuracy_by_round(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]], title: str
) -> Figure:
    """Draws accuracy in percent by round: `{method: (rounds, means, deviations)}`."""
    # Source: Malekmohammadi and others 2024, figure 3.5.
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, (rounds, means, deviations)) in enumerate(curves.items()):
        mean, deviation = np.asarray(means), np.asarray(deviations)
        line = drawing.draw_curve(axes, i, rounds, mean, name)
        axes.fill_between(
            rounds,
            mean - deviation,
            mean + deviation,
            color=line.get_color(),
            alpha=0.12,
            linewidth=0,
        )
    axes.set(xlabel="round", ylabel="test accuracy in percent")
    drawing.set_title(axes, title)
    drawing.whole_ticks(axes)
    axes.grid(alpha=0.25)
    drawing.legend_beside(axes)
    return figure


def updates_and_mixture(
    features: np.ndarray,
    clusters: np.ndarray,
    means: np.ndarray,
    radii: np.ndarray,
    title: str,
) -> Figure:
    """Draws two components of the updates by true cluster, and circles of 1, 2 and 3 radii."""
    figure = drawing.new_figure(height=5.0, width=6.5)
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
    axes.set(xlabel="first principal component", ylabel="second principal component")
    axes.set_aspect("equal")
    drawing.set_title(axes, title)
    drawing.legend_beside(axes)
    return figure


def multipliers_by_batch_size(
    batch_sizes: Sequence[float],
    multipliers: Mapping[str, Sequence[float]],
    title: str,
    *,
    label: str = "batch size b",
) -> Figure:
    """Draws noise multipliers by batch size, for each setting."""
    # Source: Malekmohammadi and others 2024, figure 3.2.
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, values) in enumerate(multipliers.items()):
        drawing.draw_curve(axes, i, batch_sizes, values, name, markevery=1)
    axes.set_xscale("log", base=2)
    axes.set(xlabel=label, ylabel="noise multiplier z")
    everything = np.concatenate([np.asarray(v, float) for v in multipliers.values()])
    if not drawing.log_where_wide(axes, "y", everything):
        axes.set_ylim(bottom=0)
    drawing.set_title(axes, title)
    axes.grid(alpha=0.25)
    drawing.legend_beside(axes)
    return figure


def variance_by_setting(
    variance: ArrayLike,
    rows: Sequence[float],
    columns: Sequence[float],
    title: str,
    *,
    labels: tuple[str, str] = ("ε", "batch size b"),
) -> Figure:
    """Draws the noise variance of an update, `[rows, columns]`, as a table of colours."""
    # Source: Malekmohammadi and others 2024, figure 3.3.
    values = np.asarray(variance, float)
    figure = drawing.new_figure(
        height=max(4.5, 1.5 + 0.3 * len(rows)), width=max(7.0, 2.0 + 0.45 * len(columns))
    )
    axes = figure.subplots()
    norm = LogNorm(values.min(), max(values.max(), values.min() * (1 + 1e-9)))
    image = axes.imshow(values, norm=norm, cmap="viridis", aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        is_dark = norm(value) < 0.6
        colour = "white" if is_dark else "black"
        axes.text(j, i, f"{value:.2g}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(columns)), [f"{c:g}" for c in columns])
    axes.set_yticks(range(len(rows)), [f"{r:g}" for r in rows])
    axes.set(ylabel=labels[0], xlabel=labels[1])
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
    figure = drawing.new_figure()
    axes = figure.subplots()
    for i, (name, values) in enumerate(weights.items()):
        shown = np.asarray(values, float)[order]
        num_zero = int(np.sum(shown <= 0))
        shown = np.where(shown > 0, shown, np.nan)
        label = name + (f" ({num_zero} of weight 0)" if num_zero else "")
        drawing.draw_curve(axes, i, np.arange(len(order)), shown, label, **_marks(i, len(order)))
    axes.set_yscale("log")
    step = drawing.name_places(axes, called)
    axes.set(xlabel="client" + (f" (every {step}th is named)" if step > 1 else ""))
    axes.set_ylabel("weight")
    drawing.set_title(axes, title)
    axes.grid(alpha=0.25)
    drawing.legend_beside(axes)
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
) -> Figure:
    """Draws the precision of weights by the number of parameters decomposed together."""
    # Source: Malekmohammadi and others 2024, figure 3.7.
    figure = drawing.new_figure()
    axes = figure.subplots()
    axes.errorbar(block_sizes, means, yerr=deviations, marker=".", capsize=3, color=drawing.BLUE)
    axes.set_xscale("log")
    axes.set(xlabel="parameters decomposed together p'", ylabel="precision Σ min(w, w*)")
    drawing.set_title(axes, title)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25)
    return figure
