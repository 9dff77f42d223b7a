"""What a reader sees of a figure: texts on texts, legends on curves, curves behind curves."""

import itertools

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text


def pixels(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(int)


def _hidden_ticks(figure):
    """Labels of ticks that lie outside what an axis shows; they are made but not drawn."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    yield from (tick.label1, tick.label2)


def texts(figure):
    """The texts of a figure that was drawn, with their boxes in pixels."""
    hidden = {id(label) for label in _hidden_ticks(figure)}
    found = [
        t
        for t in figure.findobj(Text)
        if t.get_visible() and t.get_text().strip() and id(t) not in hidden
    ]
    boxes = [(t.get_text(), t.get_window_extent()) for t in found]
    return [(text, box) for text, box in boxes if box.width > 0]


def flaws(figure):
    """What cannot be read: texts on texts, texts beyond the figure, legends on curves and bars."""
    pixels(figure)
    shown = texts(figure)
    return [*_overlapping(shown), *_cut(shown, figure.bbox), *_under_legends(figure)]


def _overlapping(shown):
    """Pairs of texts whose boxes share more than half a pixel."""

    def share(a, b):
        width = min(a.x1, b.x1) - max(a.x0, b.x0)
        return width > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5

    pairs = itertools.combinations(shown, 2)
    return [f"{a!r} lies on {b!r}" for (a, one), (b, other) in pairs if share(one, other)]


def _cut(shown, edge):
    """Texts that reach beyond the figure."""
    return [
        f"{text!r} is cut"
        for text, b in shown
        if min(b.x0, b.y0) < -0.5 or b.x1 > edge.x1 + 0.5 or b.y1 > edge.y1 + 0.5
    ]


def _under_legends(figure):
    """Curves and bars, of any axes, that a legend lies on."""
    found = []
    for legend in filter(None, (axes.get_legend() for axes in figure.axes)):
        box = legend.get_window_extent()
        for axes in figure.axes:
            for line in axes.get_lines():
                at = line.get_transform().transform(np.asarray(line.get_xydata(), float))
                steps = np.linspace(0, 1, 50)[:, None, None]
                between = (at[:-1] + steps * (at[1:] - at[:-1])).reshape(-1, 2)
                x, y = np.concatenate([at, between]).T
                if np.any((x > box.x0) & (x < box.x1) & (y > box.y0) & (y < box.y1)):
                    found.append(f"a legend lies on {line.get_label()}")
            found += [
                f"a legend lies on bar {patch.get_label()}"
                for patch in axes.patches
                if box.overlaps(patch.get_window_extent())
            ]
    return found


def visible_share(figure, line):
    """Of the pixels that a curve would change alone, the share that it changes among the others."""
    axes = line.axes
    pixels(figure)
    figure.set_layout_engine("none")
    rest = [a for a in (*axes.get_lines(), *axes.collections) if a is not line]
    legend = axes.get_legend()
    if legend is not None:
        legend.set_visible(False)

    def changed():
        line.set_visible(True)
        shown = pixels(figure)
        line.set_visible(False)
        return int(np.sum(np.abs(shown - pixels(figure)).max(axis=-1) > 40))

    among = changed()
    for other in rest:
        other.set_visible(False)
    alone = changed()
    for artist in (line, *rest, *filter(None, [legend])):
        artist.set_visible(True)
    return among / max(alone, 1)
