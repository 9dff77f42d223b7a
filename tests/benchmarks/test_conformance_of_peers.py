"""The page of conformance results: passes first, each failure with its cause; environments."""

import ast
import importlib
import re
import tomllib
from types import SimpleNamespace

import pytest

from benchmarks.conformance import page
from benchmarks.conformance.__main__ import OURS, PEERS, RESULTS, SUBJECTS, merged, plain, read
from benchmarks.peers import install

READING = {
    "subjects": ["* step"],
    "checks": ["noise"],
    "says": ["twice"],
    "file": "package/noise.py",
    "text": "noise += noise",
    "why": "It is added twice.",
    "documented": "Not documented.",
    "line": 7,
}


def finding(subject, check, verdict, sentence="says"):
    return {
        "subject": subject,
        "check": check,
        "verdict": verdict,
        "sentence": sentence,
        "example": "rows = 1" if verdict == "failed" else "",
        "draws": 64,
    }


def result(findings, readings=()):
    return {
        "date": "2026-11-29",
        "versions": ["flwr 1"],
        "confidence": 0.999,
        "findings": findings,
        "readings": list(readings),
    }


def test_the_page_has_passes_first_and_the_cause_of_each_failure():
    findings = [
        finding("a step", "noise: law", "failed", "noise is there twice") | {"kit": "abc"},
        finding("a step", "noise: seeds", "failed", "seeds are ignored"),
        finding("a draw", "sampling: pairs", "passed"),
    ]
    text = "\n".join(page.lines({"flower": result(findings, [READING]), "ours": result([])}))
    first, second = (
        "| a draw | 64 | older | *sampling* pairs |",
        "| a step | 64 | abc |  | *noise* law",
    )
    assert text.index(first) < text.index(second)
    assert text.count("Cause 1.") == 1, "the other sentence has no reading"
    assert "    rows = 1" in text and "`package/noise.py`, line 7, `noise += noise`" in text
    assert text.index("## Flower") < text.index("## fedjax_dp")
    (missing,) = [line for line in text.splitlines() if line.startswith("Not checked yet")]
    assert "Opacus" in missing and "Flower" not in missing and "fedjax_dp" not in missing


def test_a_subject_that_is_checked_again_replaces_what_was_found():
    before = result([finding("a", "x", "failed"), finding("b", "x", "passed")])
    after = merged(before, result([finding("a", "x", "passed")]))
    assert [(f["subject"], f["verdict"]) for f in after["findings"]] == [
        ("b", "passed"),
        ("a", "passed"),
    ]
    assert merged({**before, "versions": ["flwr 2"]}, after) == after, "of another version"
    assert merged(None, after) == after and plain(float("nan")) == "nan" and plain(1.5) == 1.5


@pytest.mark.parametrize("peer", [p for p in PEERS if p != OURS])
def test_an_environment_has_pins_and_the_newest_has_none(peer):
    pinned, newest = (install.requirements_of(peer + end) for end in ("", install.NEWEST))
    assert all("==" in line for line in pinned.split()) and "==" not in newest
    assert [line.split("==")[0] for line in pinned.split()] == newest.split()


@pytest.mark.parametrize("peer", [p for p in PEERS if p != OURS])
def test_subjects_call_functions_that_their_file_has(peer):
    called = []

    def function(name):
        called.append(name)
        return lambda *arguments: 1.0

    module = importlib.import_module(f"{SUBJECTS}.{peer}")
    names = [subject.name for subject in module.subjects(SimpleNamespace(function=function))]
    tree = ast.parse((page.HERE / "served" / f"of_{peer}.py").read_text("utf-8"))
    assert set(called) <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert len(set(names)) == len(names) and set(getattr(module, "DRAWS", {})) <= set(names)


def test_readings_are_of_packages_with_subjects():
    readings = tomllib.loads((page.HERE / "readings.toml").read_text("utf-8"))
    assert set(readings.pop("notes")) | set(readings) < set(PEERS) == set(page.TITLES)
    for reading in (r for each in readings.values() for r in each):
        assert set(reading) - {"says"} == set(READING) - {"says", "line"}, reading["file"]


def test_lines_are_looked_up_in_the_environment(tmp_path):
    source = tmp_path / "lib/python3.11/site-packages/flwr/supercore/differential_privacy.py"
    source.parent.mkdir(parents=True)
    source.write_text("\n\nscaling_factor = min(1, clipping_norm / input_norm)\n")
    found = page.readings("flower", tmp_path / "bin" / "python", [])
    lines = {r["line"] for r in found if r["file"] == "flwr/supercore/differential_privacy.py"}
    assert lines == {3, None}
    assert page.readings("flower", tmp_path / "none" / "python", found) == found


def committed():
    """What the committed results found, with the readings that are committed beside them."""
    for environment, found in read().items():
        reads = page.readings(environment.removesuffix(install.NEWEST), RESULTS, found["readings"])
        yield environment, found, reads


def test_each_failure_has_one_cause():
    several = {
        (environment, f["subject"], f["check"]): page.causes(f, reads)
        for environment, found, reads in committed()
        for f in found["findings"]
        if f["verdict"] == "failed" and len(page.causes(f, reads)) != 1
    }
    assert not several


def test_the_page_has_the_readings_of_now():
    assert all(found["readings"] == reads for _, found, reads in committed())
    assert all(reading["line"] for _, _, reads in committed() for reading in reads)


def test_sentences_of_the_page_are_short():
    every = tomllib.loads((page.HERE / "readings.toml").read_text("utf-8"))
    texts = [page.INTRODUCTION, *every.pop("notes").values()]
    texts += [r[part] for each in every.values() for r in each for part in ("why", "documented")]
    sentences = [s for text in texts for s in re.split(r"[.:!?]\s|\n\n", text)]
    assert max(len(sentence.split()) for sentence in sentences) <= 30
