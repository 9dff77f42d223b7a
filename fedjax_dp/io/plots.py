"""Pictures of a run: accuracy and ε by round, accuracy by client."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from fedjax_dp.core import checks
from fedjax_dp.core.signatures import checked

_BLUE, _RED = "#2463a8", "#b3402e"


@checked
def accuracy_and_epsilon(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draws test accuracy and ε spent by round.

    Args:
      rows: the run's metrics, as `read_metrics` gives them.
      title: what the run is.

    Returns:
      The figure; without ε where the run claims none, or none that is finite.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    measured = _known(rows, "test_accuracy")
    if measured:
        left.plot(*zip(*measured, strict=True), color=_BLUE, marker=".", label="test accuracy")
    left.set(xlabel="round", ylabel="test accuracy", ylim=(0, 1), title=title)
    left.yaxis.label.set_color(_BLUE)
    left.grid(alpha=0.25)
    names = sorted({name for row in rows for name in row if name.startswith("epsilon_")})
    curves = {name: spent for name in names if (spent := _known(rows, name))}
    if curves:
        right = left.twinx()
        for (name, spent), style in zip(curves.items(), ("-", "--"), strict=False):
            unit = name.removeprefix("epsilon_")
            label = f"largest ε over {unit}s" if unit == "record" else "ε of a client"
            right.plot(*zip(*spent, strict=True), color=_RED, linestyle=style, label=label)
        right.set_ylabel("ε spent", color=_RED)
        right.set_ylim(bottom=0)
        right.legend(loc="lower right")
    return figure


@checked
def accuracy_by_megabytes(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draws test accuracy against what was sent up to then.

    Args:
      rows: the run's metrics, as `read_metrics` gives them, with `bytes_up` and `bytes_down`; where
        some rounds were not counted there is no curve.
      title: what the run is.

    Returns:
      The figure; one curve for what clients sent, one for both directions, in MB of 10⁶ bytes.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    up = np.cumsum([row.get("bytes_up") or 0 for row in rows]) / 1e6
    both = up + np.cumsum([row.get("bytes_down") or 0 for row in rows]) / 1e6
    measured = dict(_known(rows, "test_accuracy"))
    is_measured = np.array([row["round"] in measured for row in rows], bool)
    values = list(measured.values())
    if values and all("bytes_up" in row for row in rows):
        axes.plot(both[is_measured], values, color=_BLUE, marker=".", label="up and down")
        axes.plot(up[is_measured], values, color=_RED, marker=".", linestyle="--", label="up")
        axes.legend(loc="lower right")
    axes.set(xlabel="MB sent", ylabel="test accuracy", ylim=(0, 1), title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    return figure


def _known(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Picks the rounds in which a metric was measured and is finite."""
    return [
        (row["round"], row[name])
        for row in rows
        if row.get(name) is not None and np.isfinite(row[name])
    ]


@checked
def client_accuracies(accuracies: np.ndarray, sizes: np.ndarray, title: str) -> Figure:
    """Draws the accuracy of each client, sorted, with its number of examples.

    Args:
      accuracies: `[num_clients]`; NaN for a client without held-out examples.
      sizes: training examples of each client, `[num_clients]`.
      title: what the run is.

    Returns:
      The figure.
    """
    is_paired = np.ndim(accuracies) == 1 and np.shape(accuracies) == np.shape(sizes)
    checks.require(is_paired, "accuracies", "be one for each of sizes", np.shape(accuracies))
    known = np.flatnonzero(np.isfinite(accuracies))
    order = known[np.argsort(accuracies[known])]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    positions = np.arange(len(order))
    axes.bar(positions, accuracies[order], color=_BLUE)
    if len(order):
        axes.axhline(float(np.mean(accuracies[order])), color=_RED, linewidth=1, label="mean")
        axes.legend()
    axes.set(ylim=(0, 1), ylabel="held-out accuracy", title=title)
    if len(order) <= 40:
        axes.set_xticks(positions, [f"{i}\n{sizes[i]}" for i in order], fontsize=7)
        axes.set_xlabel("client, and its number of training examples")
    else:
        axes.set_xlabel("clients, from worst to best")
    return figure


def update_norms(rows: list[dict[str, Any]], clip_norm: float | None, title: str) -> Figure:
    """Draws the norms of updates before clipping, who was clipped, and the noise, by round.

    Args:
      rows: the run's metrics, as `read_metrics` gives them, with `update_norm_quantiles` (least,
        10 %, median, 90 %, largest) and, where there are, `clip_norm`, `clipped_client_share` and
        `noise_stddev`.
      clip_norm: the bound on an update, where it is one number; rows that bring theirs come first.
      title: what the run is.

    Returns:
      The figure; it has a lower part where something was clipped or noised.
    """
    clipped, noise = _known(rows, "clipped_client_share"), _known(rows, "noise_stddev")
    has_more = bool(clipped or noise)
    figure = Figure(figsize=(7, 5 if has_more else 3.5), layout="constrained")
    parts = figure.subplots(
        1 + has_more, sharex=True, squeeze=False, height_ratios=(2, 1)[: 1 + has_more]
    )
    top, bottom = parts[0, 0], parts[-1, 0]
    measured = [row for row in rows if row.get("update_norm_quantiles") is not None]
    if measured:
        rounds = [row["round"] for row in measured]
        norms = np.array([row["update_norm_quantiles"] for row in measured], dtype=float).T
        top.fill_between(rounds, norms[0], norms[4], color=_BLUE, alpha=0.15, label="all")
        top.fill_between(rounds, norms[1], norms[3], color=_BLUE, alpha=0.3, label="10 % to 90 %")
        top.plot(rounds, norms[2], color=_BLUE, label="median")
    bounds = _known(rows, "clip_norm")
    if not bounds and clip_norm is not None and measured:
        bounds = [(measured[0]["round"], clip_norm), (measured[-1]["round"], clip_norm)]
    if bounds:
        top.plot(*zip(*bounds, strict=True), color=_RED, linestyle="--", label="clip norm")
    top.set(ylabel="norm of an update", title=title)
    top.set_ylim(bottom=0)
    top.grid(alpha=0.25)
    if measured:
        top.legend(fontsize=8)
    bottom.set(xlabel="round")
    bottom.grid(alpha=0.25)
    if clipped:
        bottom.set(ylabel="share clipped", ylim=(-0.05, 1.05))
        bottom.plot(*zip(*clipped, strict=True), color=_BLUE)
    if noise:
        right = bottom.twinx() if clipped else bottom
        right.plot(*zip(*noise, strict=True), color=_RED, linestyle=":")
        right.set_ylabel("noise of a coordinate", color=_RED)
        right.set_ylim(bottom=0)
    return figure


def accuracy_by_epsilon(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]], title: str
) -> Figure:
    """Draws accuracy against the budget for several methods.

    Args:
      curves: for each method its values of ε, the mean accuracies, and their standard deviations
        over seeds, 0 where there is one seed.
      title: what is compared.

    Returns:
      The figure.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, (budgets, means, deviations) in curves.items():
        axes.errorbar(budgets, means, yerr=deviations, marker=".", capsize=3, label=name)
    axes.set(xlabel="ε", ylabel="accuracy", title=title)
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def accuracy_by_round(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]], title: str
) -> Figure:
    """Draws test accuracy over rounds for several methods.

    Args:
      curves: for each method its rounds, the mean accuracies in percent, and their standard
        deviations over seeds, 0 where there is one seed.
      title: what is compared.

    Returns:
      The figure, with a band of one standard deviation about each curve.

    Source: Malekmohammadi and others 2024, figure 3.5.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, (rounds, means, deviations) in curves.items():
        mean, deviation = np.asarray(means), np.asarray(deviations)
        (line,) = axes.plot(rounds, mean, marker=".", label=name)
        axes.fill_between(
            rounds, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.15
        )
    axes.set(xlabel="round", ylabel="test accuracy in percent", title=title)
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def epsilon_curves(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], title: str
) -> Figure:
    """Draws ε over rounds for several settings.

    Args:
      curves: for each setting its rounds and the ε spent after each.
      title: what is compared.

    Returns:
      The figure.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, (rounds, spent) in curves.items():
        axes.plot(rounds, spent, label=name)
    axes.set(xlabel="round", ylabel="ε", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def updates_and_mixture(
    features: np.ndarray,
    clusters: np.ndarray,
    means: np.ndarray,
    radii: np.ndarray,
    title: str,
) -> Figure:
    """Draws clients' updates in two principal components with the mixture fitted to them.

    Args:
      features: `[num_clients, 2 or more]`; the first two are drawn.
      clusters: the true cluster of each client, `[num_clients]`.
      means: of the mixture's components, `[clusters, 2 or more]`.
      radii: standard deviation of each component, `[clusters]`; circles are drawn at one, two and
        three of them.
      title: what the run is.

    Returns:
      The figure.
    """
    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    for cluster in np.unique(clusters):
        of_it = clusters == cluster
        axes.scatter(features[of_it, 0], features[of_it, 1], s=22, label=f"cluster {cluster}")
    for mean, radius in zip(means, radii, strict=True):
        for times in (1, 2, 3):
            edge = Circle(
                (mean[0], mean[1]), times * radius, fill=False, color=_RED, alpha=0.9 / times
            )
            axes.add_patch(edge)
    axes.set(xlabel="first principal component", ylabel="second principal component", title=title)
    axes.set_aspect("equal")
    axes.legend(fontsize=8)
    return figure


def save(figure: Figure, path: str | pathlib.Path) -> None:
    """Writes a figure as PNG.

    Args:
      figure: the figure.
      path: the file; its folder is made where it is missing.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
