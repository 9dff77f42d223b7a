"""Plots of simulated time: accuracy by seconds, and the times of one round."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.packages import needed_for
from fedjax_dp.engine.wrappers.latencies import RoundTimes
from fedjax_dp.io import drawing

with needed_for("drawing", "plots"):
    from matplotlib.figure import Figure

# Neighbours differ in lightness. The update has the colour of no other part.
_COLOURS = tuple(drawing.COLOURS[i] for i in (0, 4, 1, 5))
# More bars are not legible.
_MOST_CLIENTS = 40


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
    names = {"test_accuracy": "test accuracy", "shared_test_accuracy": "shared model"}
    if any("shared_test_accuracy" in row for row in rows):
        names["test_accuracy"] = "personal models"
    for i, (name, label) in enumerate(names.items()):
        known = [
            row for row in rows if all(_is_known(row.get(k)) for k in ("simulated_seconds", name))
        ]
        if known:
            seconds, values = ([row[k] for row in known] for k in ("simulated_seconds", name))
            drawing.draw_curve(axes, i, seconds, values, label)
    axes.set(xlabel="simulated seconds", ylabel="test accuracy", ylim=(-0.02, 1.02))
    drawing.set_title(axes, title)
    if len(axes.get_lines()) > 1:
        drawing.legend_above(axes)
    axes.grid(alpha=0.25)
    return figure


@checked
def round_chart(times: RoundTimes, names: Sequence[str], title: str) -> Figure:
    """Draws the times of one round as a Gantt chart: a line for each of the first 40 clients.

    Args:
      times: of the round, see `engine.round_times`.
      names: of the clients, `[num_clients]`.
      title: the title.

    Returns:
      The figure: the broadcast on its way, local work, the update on its way, and the next
      broadcast; late updates are hatched, and inactive clients have no bars.

    Raises:
      ValueError: for another number of names.
    """
    count = len(times.arrive)
    checks.require(len(names) == count, "names", f"name each of the {count} clients", len(names))
    shown = np.arange(min(count, _MOST_CLIENTS))
    figure = drawing.new_figure(1.9 + 0.2 * len(shown))
    axes = figure.subplots()
    server = np.full(count, times.server)
    bars = {
        "broadcast": (np.zeros(count), times.begin),
        "local work": (times.begin, times.send),
        "update": (times.send, times.arrive),
        "next broadcast": (server, times.receive),
    }
    is_late = np.asarray(times.is_late, bool)
    for i, (label, (start, end)) in enumerate(bars.items()):
        active = shown[np.isfinite((end - start)[shown])]
        colour, is_update = _COLOURS[i], label == "update"
        for part, of in (
            (active[~is_late[active]], label),
            (active[is_late[active]], "late update"),
        ):
            hatched: dict[str, Any] = (
                {"hatch": "////", "edgecolor": "white"} if of == "late update" and is_update else {}
            )
            axes.barh(
                *(part, (end - start)[part]),
                left=start[part],
                height=0.7,
                color=colour,
                label=of if len(part) and (of != "late update" or is_update) else None,
                **hatched,
            )
    for at, label, style in ((times.closes, "sum closed", ":"), (times.server, "new model", "--")):
        axes.axvline(at, color="black", linestyle=style, linewidth=1, label=label)
    axes.set_yticks(shown, [drawing.shortened(n) for n in names[: len(shown)]], fontsize=7)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set(xlabel="simulated seconds from the start of the round", xlim=(0, None))
    drawing.set_title(axes, title)
    drawing.legend_above(axes)
    return figure


def _is_known(value: Any) -> bool:
    """Whether a metric is measured and finite."""
    return value is not None and bool(np.isfinite(value))
