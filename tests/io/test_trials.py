"""Times of layouts are kept by machine and version; what is damaged is ignored, and said."""

import json

import jax
import pytest
from marks import telling

from fedjax_dp.engine import Trial
from fedjax_dp.io import TrialFiles, trials

WORK = {"algorithm": "fedavg", "cohort": "50.0"}
TIMED = (Trial(8, 0.25, 3.0), Trial(1, 0.5, 2.0))


@pytest.fixture
def kept(tmp_path):
    found = TrialFiles(tmp_path / "new" / "layouts")
    assert found.read(WORK, [1, 8]) is None
    found.write(WORK, TIMED)
    return found


def file_of(folder):
    (path,) = (folder / "new" / "layouts").iterdir()
    return path


def test_trials_are_read_back_for_the_same_work_alone(kept, tmp_path):
    assert TrialFiles(tmp_path / "new" / "layouts").read(WORK, [1, 8]) == TIMED
    assert kept.read(WORK | {"cohort": "51.0"}, [1, 8]) is None
    assert kept.read(WORK, [1, 8, 64]) is None
    shown = json.loads(file_of(tmp_path).read_text())["of"]
    assert shown["backend"] == jax.default_backend() and shown["cohort"] == "50.0"
    assert shown["jaxlib"] and shown["cores"] and shown["processor"]


@pytest.mark.parametrize("fact", ["device", "processor", "cores", "fedjax-dp", "jaxlib"])
def test_another_machine_or_version_times_anew(kept, monkeypatch, fact):
    here = trials._machine()
    assert here[fact] is not None
    monkeypatch.setattr(trials, "_machine", lambda: here | {fact: "another"})
    assert kept.read(WORK, [1, 8]) is None


def _with(change):
    def changed(text):
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return changed


@telling
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "",
        lambda text: "[]",
        _with(lambda content: content["trials"].pop()),
        _with(lambda content: content["trials"][0].pop("seconds")),
        _with(lambda content: content["trials"][0].update(seconds="fast")),
        _with(lambda content: content["trials"][0].update(seconds=float("nan"))),
        _with(lambda content: content["trials"][0].update(clients_per_chunk=7)),
        _with(lambda content: content["trials"][0].update(clients_per_chunk=True)),
        _with(lambda content: content["of"].update(cohort="51.0")),
    ],
)
def test_a_damaged_file_is_ignored_with_one_line_and_replaced(kept, tmp_path, caplog, damage):
    path = file_of(tmp_path)
    path.write_text(damage(path.read_text()))
    assert kept.read(WORK, [1, 8]) is None
    (line,) = (record.getMessage() for record in caplog.records)
    assert str(path) in line and "is ignored, and layouts are timed again" in line
    assert "\n" not in line
    kept.write(WORK, TIMED)
    assert kept.read(WORK, [1, 8]) == TIMED


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    kept = TrialFiles(tmp_path / "file")
    kept.write(WORK, TIMED)
    assert kept.read(WORK, [1, 8]) is None
    assert "times of layouts are not kept" in caplog.messages[0]
