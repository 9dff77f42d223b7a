"""Figures as files: a PNG for pages, and beside it a PDF for papers."""

import functools
import os
import pathlib

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.packages import needed_for

with needed_for("drawing", "plots"):
    import matplotlib
    from fontTools import subset
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.text import Text
    from PIL import Image

_DOTS_PER_INCH = 200
_FONT = "DejaVu Sans"
# Latin and Greek, punctuation and superscripts, arrows and operators.
_CHARACTERS = frozenset(
    map(chr, (*range(0x20, 0x250), *range(0x370, 0x400), *range(0x2010, 0x2300)))
)


def save(figure: Figure, path: str | pathlib.Path) -> None:
    """Saves a figure as PNG and as PDF with TrueType fonts; equal figures give equal bytes."""
    path = pathlib.Path(path)
    checks.require(path.suffix in (".png", ".pdf"), "path", "end in .png or .pdf", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.dpi = _DOTS_PER_INCH
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    # A palette takes a third of the bytes, and less time.
    image = image.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    image.putpalette([255 if level == 254 else level for level in image.getpalette() or ()])
    image.save(path.with_suffix(".png"), dpi=(_DOTS_PER_INCH, _DOTS_PER_INCH))
    # The layout of the PNG serves the PDF too.
    figure.set_layout_engine("none")
    _use_small_font(figure)
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        FigureCanvasPdf(figure).print_pdf(path.with_suffix(".pdf"), metadata={"CreationDate": None})


def _use_small_font(figure: Figure) -> None:
    """Sets texts in the small font where it has their characters."""
    usual = FontProperties()
    if findfont(usual) != findfont(_FONT):
        return
    for text in figure.findobj(Text):
        font, shown = text.get_fontproperties(), text.get_text()
        if shown and _kind(font) == _kind(usual) and _CHARACTERS.issuperset(shown):
            font.set_file(_small_font())


def _kind(font: FontProperties) -> tuple[object, ...]:
    """Returns what a font is besides its size; `findfont` takes a millisecond for each size."""
    return font.get_family(), font.get_style(), font.get_weight(), font.get_file()


@functools.cache
def _small_font() -> str:
    """Writes a font of the usual characters; embedding the whole one takes 0.1 s a figure."""
    path = pathlib.Path(matplotlib.get_cachedir(), f"fedjax_dp-{matplotlib.__version__}.ttf")
    if not path.is_file():
        options = subset.Options(layout_features=["kern"], glyph_names=True)
        options.drop_tables += ["FFTM"]
        font = subset.load_font(findfont(_FONT), options)
        subsetter = subset.Subsetter(options)
        subsetter.populate(text="".join(sorted(_CHARACTERS)))
        subsetter.subset(font)
        # Other processes may write it at the same time.
        own = path.with_suffix(f".{os.getpid()}")
        font.save(own)
        own.replace(path)
    return str(path)
