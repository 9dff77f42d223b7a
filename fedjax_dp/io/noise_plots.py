"""Pictures of noise: multipliers by batch size, variance of updates, weights of clients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.core.packages import needed_for
from fedjax_dp.io import drawing

with needed_for("drawing", "plots"):
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure


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
      The figure; the batch sizes are spaced by powers of two, and so are multipliers that differ
      by more than a factor of ten.

    Source: Malekmohammadi and others 2024, figure 3.2.
    """
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
    """Draws the weight of every client under several methods.

    Args:
      weights: for each method the clients' weights, `[clients]`; those of 0 have no place on the
        scale, and are counted in the legend.
      title: what is compared.
      order: the clients from left to right; by the weights of the first method where it is None.
      names: the name of each client; their numbers where empty.

    Returns:
      The figure, with a logarithmic scale of weights.

    Source: Malekmohammadi and others 2024, figure 3.7.
    """
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
    figure = drawing.new_figure()
    axes = figure.subplots()
    axes.errorbar(block_sizes, means, yerr=deviations, marker=".", capsize=3, color=drawing.BLUE)
    axes.set_xscale("log")
    axes.set(xlabel="parameters decomposed together p'", ylabel="precision Σ min(w, w*)")
    drawing.set_title(axes, title)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25)
    return figure
