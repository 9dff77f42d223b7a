"""`fedjax-dp conformance` on a file of subjects."""

import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from fedjax_dp.cli import conformance

SUBJECTS = """
import numpy as np
from fedjax_dp.audit.conformance import Accounting, FixedSize, Release, Training
from fedjax_dp.privacy import epsilon_of_poisson

print("what a library prints")
claim = Training(Release(1.0, 4.0, 10.0), FixedSize(10, 10), 5)
right = Accounting("right", lambda t, d: epsilon_of_poisson(4.0, 1.0, t, d), claim)
again = right
wrong = Accounting("wrong", lambda t, d: print("and what a subject does") or 0.1, claim)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "subjects.py"
    path.write_text(SUBJECTS, "utf-8")
    return path


def invoke(*words):
    return CliRunner().invoke(conformance.app, list(map(str, words)), catch_exceptions=False)


def test_a_failure_is_the_exit_status_and_in_every_file(file, tmp_path):
    result = invoke(file, "--output", tmp_path / "report", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == answer["status"] == 1 and answer["is_failed"]
    verdicts = {(f["subject"], f["verdict"]) for f in answer["findings"]}
    assert verdicts == {("right", "passed"), ("wrong", "failed")}
    written = json.loads((tmp_path / "report" / "conformance.json").read_text("utf-8"))
    assert written["findings"] == answer["findings"]
    assert "wrong" in (tmp_path / "report" / "conformance.md").read_text("utf-8")
    suite = ElementTree.parse(tmp_path / "report" / "conformance.xml").getroot()
    assert suite.get("failures") == "4" and suite.get("tests") == "8"


def test_one_subject_that_passes_is_status_0(file):
    result = invoke(file, "--only", "right")
    assert not result.exit_code and "\taccounting: delta\tpassed\t" in result.stdout
    assert "nothing failed, which does not prove privacy" in result.stdout
    assert "checking right" in result.stderr and "wrong" not in result.stdout


def test_what_a_file_prints_is_said_and_what_its_functions_print_is_not(file):
    result = invoke(file)
    assert result.stderr.count("what a library prints") == 1
    assert "what a subject does" not in result.output


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (SUBJECTS, ("--only", "rihgt"), "--only must be one of .*did you mean 'right'"),
        (SUBJECTS, ("--checks", "noise"), "checks must concern a subject: Accounting 'right'"),
        (SUBJECTS, ("--confidence", "1"), r"confidence must be in \(0, 1\)"),
        ("x = 1", (), "SUBJECT.py must define a value of Aggregation, "),
        ("x = 1 / 0", (), "line 1: ZeroDivisionError"),
        ("raise SystemExit(0)", (), "line 1: SystemExit: 0"),
        ("x = (", (), "can be imported; SyntaxError: .*line 1"),
        (SUBJECTS.replace("4.0, 10.0", "-4.0, 10.0"), (), "line 7: ValueError: noise_stddev must"),
        (None, (), "does not exist"),
    ],
)
def test_what_cannot_be_checked_is_refused(tmp_path, text, words, said):
    file = tmp_path / f"{abs(hash((text, words)))}.py"
    if text is not None:
        file.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=said):
        invoke(file, *words)
