"""The fingerprint of a run's data: any change that it covers is named, and a copy is the same."""

import json

import numpy as np
import pytest

from fedjax_dp.data.federated import FederatedData
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.experiment.running import run_folder as saved
from fedjax_dp.experiment.running.run_folder import require_same_data, write_fingerprint


def data(sizes=(2, 3), change=0.0, row=4, dtype=np.float32, names=("a", "b")):
    x = np.arange(sum(sizes) * 2, dtype=dtype).reshape(-1, 2)
    x[row] += dtype(change)
    return FederatedData({"x": x, "y": np.arange(len(x))}, np.cumsum([0, *sizes]), names)


def population(train, **parts):
    return Population(
        *(train, parts.get("client_test"), parts.get("test"), parts.get("public_x")),
        *(2, True, parts.get("validation")),
        is_elsewhere=parts.get("is_elsewhere", False),
    )


CHANGES = {
    "the number of clients of the training data must .*started, 2, .*got 3": {"sizes": (2, 3, 1)},
    "the number of examples of the training data must .*started, 5, .*got 6": {"sizes": (3, 3)},
    "the examples by client of the training data": {"sizes": (3, 2)},
    "the names of clients of the training data": {"names": ("a", "c")},
    r"the type of x of the training data must .*float32 \[2\]": {"dtype": np.float64},
    "the values of x of the training data must .*SHA-256": {"change": 1.0},
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "data.json"


@pytest.mark.parametrize("message", CHANGES)
def test_a_change_is_named(file, message):
    write_fingerprint(population(data()), file)
    require_same_data(population(data()), file)
    changes = {"names": ("a", "b", "c")} if len(CHANGES[message].get("sizes", "")) == 3 else {}
    with pytest.raises(ValueError, match=message) as error:
        require_same_data(population(data(**CHANGES[message] | changes)), file)
    assert f"or {file} be removed if they are the same" in str(error.value)


@pytest.mark.parametrize("part", ["client_test", "test", "validation", "public_x"])
def test_every_part_is_compared(file, part):
    first, other = (
        data(change=c).examples["x"] if part == "public_x" else data(change=c) for c in (0.0, 1.0)
    )
    write_fingerprint(population(data(), **{part: first}), file)
    require_same_data(population(data(), **{part: first}), file)
    for changed in ({part: other}, {}):
        with pytest.raises(ValueError, match="must be as when the run started"):
            require_same_data(population(data(), **changed), file)


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_of_large_data_some_rows_are_read(file, tmp_path, monkeypatch, is_on_disk):
    monkeypatch.setattr(saved, "_SAMPLED_ROWS", 3)
    if not is_on_disk:
        monkeypatch.setattr(saved, "_WHOLE_BYTES", 10)

    def stored(name, **change):
        made = data(**change)
        if not is_on_disk:
            return made
        made.save(tmp_path / name)
        return FederatedData.open(tmp_path / name)

    write_fingerprint(population(stored("first")), file)
    # The first, the middle and the last of five rows.
    require_same_data(population(stored("unread", row=1, change=1.0)), file)
    for row in (0, 2, 4):
        with pytest.raises(ValueError, match="the values of x"):
            require_same_data(population(stored(f"row{row}", row=row, change=1.0)), file)


def test_records_on_other_machines_are_not_compared(file):
    write_fingerprint(population(data(), is_elsewhere=True), file)
    assert not file.exists()
    write_fingerprint(population(data()), file)
    require_same_data(population(data(change=1.0), is_elsewhere=True), file)


def test_the_file_has_no_record(file):
    secret = 0.7251
    write_fingerprint(population(data(change=secret), test=data()), file)
    text = file.read_text(encoding="utf-8")
    assert str(secret) not in text
    found = json.loads(text)
    assert found.keys() == {"training", "test"}
    for part in found.values():
        for fact, value in part.items():
            is_public = "number" in fact or "type" in fact
            assert is_public or value.startswith("SHA-256 "), fact


@pytest.mark.parametrize("text", ["", "[]", "{", '{"training": 1}'])
def test_a_damaged_file_is_named(file, text):
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.json"):
        require_same_data(population(data()), file)
