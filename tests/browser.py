"""Opens pages in a real browser, and reads what it shows.

Tests that need it are skipped where no Chromium or Chrome is installed.
"""

import html
import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
# Frames a page in a given width, opens all that is folded, and writes what it measures.
FRAME = """<!DOCTYPE html><html><body><p id="found">nothing</p><pre id="text"></pre>
<iframe id="page" src="{page}" style="border:0;width:{width}px;height:900px"></iframe>
<script>
window.onload = () => {{
  const inside = document.getElementById("page").contentDocument, seen = inside.documentElement;
  inside.querySelectorAll("details").forEach(each => each.open = true);
  const charts = [...inside.querySelectorAll("svg[role=img]")].map(each => each.clientWidth);
  const sizes = [...inside.querySelectorAll("svg[role=img] text")].map(
    each => parseFloat(getComputedStyle(each).fontSize) * each.getCTM().d || 99);
  document.getElementById("text").textContent = inside.body.innerText;
  document.getElementById("found").textContent = [
    seen.scrollWidth, seen.clientWidth, Math.max(0, ...charts).toFixed(),
    inside.querySelectorAll("svg[role=img]").length, inside.querySelector("h1").textContent.length,
    Math.min(...sizes).toFixed(1)
  ].join(" ");
}};
</script></body></html>"""


class Seen(NamedTuple):
    """What a browser shows: widths, the widest chart, least size of letters, complaints, text."""

    content: float
    screen: float
    chart: float
    num_charts: float
    letters_of_title: float
    size: float
    said: list[str]
    text: str


def shown(folder, page, width) -> Seen:
    """Opens a page on a screen of this width."""
    frame = folder / f"frame-{width}.html"
    frame.write_text(FRAME.format(page=page.resolve().as_uri(), width=width), "utf-8")
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += ["--enable-logging=stderr", "--allow-file-access-from-files"]
    words += [f"--user-data-dir={folder / 'profile'}"]
    words += [f"--window-size={width + 100},1000", "--virtual-time-budget=3000", "--dump-dom"]
    ended = subprocess.run([*words, frame.as_uri()], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<p id="found">([^<]*)</p>', ended.stdout)[1]
    assert found != "nothing", ended.stderr
    text = re.search(r'<pre id="text">([^<]*)</pre>', ended.stdout)[1]
    return Seen(*map(float, found.split()), said, " ".join(html.unescape(text).split()))
