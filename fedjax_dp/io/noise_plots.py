"""Pictures of noise: multipliers by batch size, variance of updates, weights of clients."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike


def multipliers_by_batch_size(
    batch_sizes: Sequence[float],
    multipliers: Mapping[str, Sequence[float]],
    title: str,
    *,
    label: str = "batch size b",
) -> Figure:
    """Draws noise multipliers z against batch sizes.

    Args:
      batch_sizes: `[sizes]`, ascending.
      multipliers: for each setting, such as a budget or the batch size of other rounds, its z at
        each batch size.
      title: what is compared.
      label: the name of the horizontal axis.

    Returns:
      The figure; the batch sizes are spaced by powers of two.

    Source: Malekmohammadi and others 2024, figure 3.2.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in multipliers.items():
        axes.plot(batch_sizes, values, marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set(xlabel=label, ylabel="noise multiplier z", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def variance_by_setting(
    variance: ArrayLike,
    rows: Sequence[float],
    columns: Sequence[float],
    title: str,
    *,
    labels: tuple[str, str] = ("ε", "batch size b"),
) -> Figure:
    """Draws the noise variance of an update by two settings, on a logarithmic scale of colours.

    Args:
      variance: above 0, `[rows, columns]`.
      rows: the settings of the vertical axis, such as budgets or batch sizes of the first round.
      columns: the settings of the horizontal axis, such as batch sizes.
      title: what is shown.
      labels: names of the vertical and of the horizontal axis.

    Returns:
      The figure, with each value written in its field.

    Source: Malekmohammadi and others 2024, figure 3.3.
    """
    values = np.asarray(variance, float)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    norm = LogNorm(values.min(), max(values.max(), values.min() * (1 + 1e-9)))
    image = axes.imshow(values, norm=norm, cmap="viridis", aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        is_dark = norm(value) < 0.6
        colour = "white" if is_dark else "black"
        axes.text(j, i, f"{value:.2g}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(columns)), [f"{c:g}" for c in columns])
    axes.set_yticks(range(len(rows)), [f"{r:g}" for r in rows])
    axes.set(ylabel=labels[0], xlabel=labels[1], title=title)
    figure.colorbar(image, label="variance of the update")
    return figure


def weights_of_clients(
    weights: Mapping[str, Sequence[float]], title: str, *, order: ArrayLike | None = None
) -> Figure:
    """Draws the weight of every client under several methods.

    Args:
      weights: for each method the clients' weights, `[clients]`; those of 0 are left out.
      title: what is compared.
      order: the clients from left to right; by the weights of the first method where it is None.

    Returns:
      The figure, with a logarithmic scale of weights.

    Source: Malekmohammadi and others 2024, figure 3.7.
    """
    first = np.asarray(next(iter(weights.values())), float)
    order = np.argsort(-first) if order is None else np.asarray(order)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for marker, (name, values) in zip("o+x^vs*", weights.items(), strict=False):
        shown = np.asarray(values, float)[order]
        shown = np.where(shown > 0, shown, np.nan)
        axes.plot(range(len(order)), shown, marker, label=name, fillstyle="none")
    axes.set_yscale("log")
    axes.set_xticks(range(len(order)), [str(c) for c in order], fontsize=7)
    axes.set(xlabel="client", ylabel="weight", title=title)
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def precision_by_block_size(
    block_sizes: Sequence[int],
    means: Sequence[float],
    deviations: Sequence[float],
    title: str,
) -> Figure:
    """Draws how near weights come to the oracle's, by the parameters that are decomposed together.

    Args:
      block_sizes: p', `[sizes]`, ascending.
      means: precision at each of them over seeds, in [0, 1].
      deviations: its standard deviation over seeds, 0 where there is one seed.
      title: what ran.

    Returns:
      The figure, with a logarithmic scale of sizes.

    Source: Malekmohammadi and others 2024, figure 3.7.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(block_sizes, means, yerr=deviations, marker=".", capsize=3)
    axes.set_xscale("log")
    axes.set(xlabel="parameters decomposed together p'", ylabel="precision Σ min(w, w*)")
    axes.set_title(title)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25)
    return figure
