"""A figure is a PNG and a PDF with TrueType fonts, of the same bytes whenever it is drawn."""

import os
import re
import subprocess
import sys
import zlib

import pytest
from marks import telling

from fedjax_dp.io import drawing

DRAW = """
import pathlib, sys
from fedjax_dp.io import drawing
figure = drawing.new_figure(2.0, 3.0)
axes = figure.subplots()
drawing.draw_curve(axes, 0, [1, 2, 3], [1, 3, 2], "ε of a client")
drawing.set_title(axes, "title")
drawing.save(figure, pathlib.Path(sys.argv[1]) / "a b" / "ε = 0.5.png")
"""
FILES = ("a b/ε = 0.5.png", "a b/ε = 0.5.pdf")


def drawn(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["", str(folder)])
        exec(DRAW, {})
    return [(folder / name).read_bytes() for name in FILES]


def test_a_pdf_with_truetype_fonts_and_without_a_date_is_beside_the_png(tmp_path, monkeypatch):
    png, pdf = drawn(tmp_path, monkeypatch)
    assert png.startswith(b"\x89PNG") and pdf.startswith(b"%PDF")
    assert b"Date" not in pdf
    kinds = set(re.findall(rb"/Subtype /(Type3|TrueType|CIDFontType2)\b", pdf))
    assert b"Type3" not in kinds and kinds
    names = set(re.findall(rb"/FontName /[A-Z]{6}\+(\S+)", pdf))
    assert names == {b"DejaVuSans"}
    assert drawn(tmp_path / "again", monkeypatch) == [png, pdf]


def test_characters_beyond_the_small_font_are_in_the_pdf(tmp_path):
    figure = drawing.new_figure(1.0, 1.0)
    figure.text(0.5, 0.5, "Жε")
    drawing.save(figure, tmp_path / "picture.pdf")
    data = (tmp_path / "picture.pdf").read_bytes()
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, re.DOTALL)
    written = b"".join(zlib.decompress(s) for s in streams if s.startswith(b"x"))
    assert f"<{ord('Ж'):04x}>".encode() in written and f"<{ord('ε'):04x}>".encode() in written


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in \.png or \.pdf"):
        drawing.save(drawing.new_figure(), tmp_path / "picture.jpg")
    assert not list(tmp_path.iterdir())


@telling
def test_other_processes_draw_the_same_bytes(tmp_path, monkeypatch):
    here = drawn(tmp_path, monkeypatch)
    environment = os.environ | {"PYTHONHASHSEED": "7", "MPLCONFIGDIR": str(tmp_path / "cache")}
    there = tmp_path / "there"
    subprocess.run([sys.executable, "-c", DRAW, str(there)], check=True, env=environment)
    assert [(there / name).read_bytes() for name in FILES] == here
