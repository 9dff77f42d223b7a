"""The site builds without a warning, and its reference has every public name."""

import pathlib
import re
import subprocess
import sys

from marks import telling

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs" / "hooks"))
import reference  # noqa: E402
import repository  # noqa: E402


@telling
def test_the_site_builds_strictly_and_has_every_public_name(tmp_path):
    """A broken link, an anchor that is not there or a page outside the navigation is a warning."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert not built.returncode, built.stderr
    found = set()
    for page in (tmp_path / "reference" / "api").rglob("*.html"):
        found |= set(re.findall(r'id="(fedjax_dp[\w.]*)"', page.read_text("utf-8")))
    missing = {path for paths in reference.public_names() for path in paths} - found
    assert not missing


def test_links_into_the_repository_become_links_of_the_site_or_names():
    pages = {"how-to/data.md", "benchmarks/README.md", "experiments/lora/README.md"}

    def relinked(text, page):
        return repository.relinked(text, page, pages)

    inside = "[a](data.md#b) [c](https://x.org/d.md) ![e](../images/e.png)"
    assert relinked(inside, "how-to/models.md") == inside
    assert relinked("[a](../../benchmarks/README.md#b)", "how-to/data.md") == (
        "[a](../benchmarks/README.md#b)"
    )
    assert relinked("[a](../../docs/how-to/data.md)", "experiments/lora/README.md") == (
        "[a](../../how-to/data.md)"
    )
    assert relinked("[a](../../README.md)", "how-to/data.md") == "a (`README.md`)"
    # A link to nothing stays for the strict build to refuse.
    broken = "[a](../../benchmarks/none.md)"
    assert relinked(broken, "how-to/data.md") == broken
