"""Figures as files: a PNG for pages, and beside it a PDF for papers."""

import functools
import os
import pathlib

from fedjax_dp.core import checks
from fedjax_dp.core.packages import needed_for

with needed_for("drawing", "plots"):
    import matplotlib
    from fontTools import subset
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure
    from matplotlib.font_manager import findfont
    from matplotlib.text import Text

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
    FigureCanvasAgg(figure).print_png(path.with_suffix(".png"))
    # The layout of the PNG serves the PDF too.
    figure.set_layout_engine("none")
    _use_small_font(figure)
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        FigureCanvasPdf(figure).print_pdf(path.with_suffix(".pdf"), metadata={"CreationDate": None})


def _use_small_font(figure: Figure) -> None:
    """Sets texts in the small font where it has their characters."""
    whole = findfont(_FONT)
    for text in figure.findobj(Text):
        font = text.get_fontproperties()
        if findfont(font) == whole and _CHARACTERS.issuperset(text.get_text()):
            font.set_file(_small_font())


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
