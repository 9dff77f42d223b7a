"""The page about a run in a real browser: it fits small and large screens, without complaints.

Skipped where no Chromium or Chrome is installed.
"""

import re
import shutil
import subprocess

import pytest
from marks import telling
from test_report import HOSTILE, ROWS, SUMMARY, write

from fedjax_dp.experiment import report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
# Frames a page in a given width, opens all that is folded, and writes what it measures.
FRAME = """<!DOCTYPE html><html><body><p id="found">nothing</p>
<iframe id="page" src="{page}" style="border:0;width:{width}px;height:900px"></iframe>
<script>
window.onload = () => {{
  const inside = document.getElementById("page").contentDocument, seen = inside.documentElement;
  inside.querySelectorAll("details").forEach(each => each.open = true);
  const charts = [...inside.querySelectorAll("svg[role=img]")].map(each => each.clientWidth);
  const sizes = [...inside.querySelectorAll("svg[role=img] text")].map(
    each => parseFloat(getComputedStyle(each).fontSize) * each.getCTM().d || 99);
  document.getElementById("found").textContent = [
    seen.scrollWidth, seen.clientWidth, Math.max(0, ...charts).toFixed(),
    inside.querySelectorAll("svg[role=img]").length, inside.querySelector("h1").textContent.length,
    Math.min(...sizes).toFixed(1)
  ].join(" ");
}};
</script></body></html>"""


def measured(folder, page, width):
    """Width of content and screen, widest chart, charts, letters of the title, least text size."""
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
    return [float(number) for number in found.split()], said


@telling
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_fits_the_screen_without_complaints(tmp_path, width):
    rows = [{**row, "a_metric_with_a_long_name_" * 6: "a_long_value_" * 30} for row in ROWS]
    warnings = ["a warning of many words " * 40, "w" * 400, HOSTILE]
    summary = SUMMARY | {"warnings": warnings, "covered_models": "a_model_" * 60}
    statement = (
        f"## Files\n\n{'u' * 400}\n\n| {'file ' * 9}| b |\n|---|---|\n| `{'f' * 300}` | c |\n"
    )
    made = {"rows": rows, "summary": summary, "statement": statement}
    found = report(write(tmp_path / "run", **made))
    numbers, said = measured(tmp_path, found.file, width)
    content, screen, chart, num_charts, letters, size = numbers
    assert not said and letters == len("wards: fedprox") and num_charts == 9
    assert screen == width and content <= screen
    assert chart <= 640 and size >= 9


@telling
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_overflow_and_complaints_would_be_seen(tmp_path):
    page = tmp_path / "page.html"
    body = "<h1>x</h1><svg role='img'><text>y</text></svg><pre>" + "w" * 3000 + "</pre>"
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
    page.write_text(f"<!DOCTYPE html>{policy}{body}<script>1</script>", "utf-8")
    (content, screen, *_), said = measured(tmp_path, page, 400)
    assert content > screen == 400 and "Content Security Policy" in " ".join(said)
