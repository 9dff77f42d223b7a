"""The page about a run in a real browser: it fits small and large screens, without complaints.

Skipped where no Chromium or Chrome is installed.
"""

import pytest
from browser import needs_browser, shown
from marks import telling
from test_report import HOSTILE, ROWS, SUMMARY, write

from fedjax_dp.experiment import report

pytestmark = [telling, needs_browser]


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
    seen = shown(tmp_path, found.file, width)
    assert not seen.said and seen.letters_of_title == len("wards: fedprox")
    assert seen.screen == width and seen.content <= seen.screen
    assert seen.num_charts == 9 and seen.chart <= 640 and seen.size >= 9


def test_overflow_and_complaints_would_be_seen(tmp_path):
    page = tmp_path / "page.html"
    body = "<h1>x</h1><svg role='img'><text>y</text></svg><pre>" + "w" * 3000 + "</pre>"
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
    page.write_text(f"<!DOCTYPE html>{policy}{body}<script>1</script>", "utf-8")
    seen = shown(tmp_path, page, 400)
    assert seen.content > seen.screen == 400
    assert "Content Security Policy" in " ".join(seen.said)
