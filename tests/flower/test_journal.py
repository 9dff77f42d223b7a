"""The journal: what was sent is on the disk before it is sent, and counted after a crash."""

import json

import numpy as np
import pytest

from fedjax_dp.engine import Fate
from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.io import JournalFile


def record(clients):
    return RoundRecord(
        clients=np.array([clients], np.int32),
        fate=np.full((1, len(clients)), Fate.CONTRIBUTED, np.int8),
        overflow=np.zeros(1, np.int32),
        stage=np.zeros(1, np.int32),
        is_released=np.ones(1, bool),
        digest=np.array([[2**32 - 1, 7]], np.uint32),
    )


def test_records_come_back_as_they_were(tmp_path):
    journal = JournalFile(tmp_path / "sent.jsonl")
    journal.append(0, record([3, 1, 2]))
    journal.append(1, record([0]))
    found = JournalFile(tmp_path / "sent.jsonl").records()
    assert [each.clients.tolist() for each in found] == [[[3, 1, 2]], [[0]]]
    for name, value in record([0])._asdict().items():
        np.testing.assert_array_equal(getattr(found[1], name), value)
        assert getattr(found[1], name).dtype == value.dtype
    assert (tmp_path / "sent.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("cut", [1, 50, -1])
def test_a_last_line_that_was_cut_off_is_no_round_and_is_replaced(tmp_path, cut):
    path = tmp_path / "sent.jsonl"
    JournalFile(path).append(0, record([3]))
    whole = path.read_text()
    path.write_text(whole + whole[:cut])
    journal = JournalFile(path)
    assert len(journal.records()) == 1
    journal.append(1, record([2]))
    assert [each.clients.tolist() for each in JournalFile(path).records()] == [[[3]], [[2]]]


@pytest.mark.parametrize("damaged", ["{}", "[1]", '{"round": 0', "\xff"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_damaged_line_is_an_error_since_its_round_was_sent(tmp_path, place, damaged):
    journal = JournalFile(path := tmp_path / "sent.jsonl")
    for number in (0, 1):
        journal.append(number, record([3]))
    lines = path.read_text().splitlines()
    lines[place] = damaged
    path.write_text("\n".join([*lines, ""]))
    with pytest.raises(ValueError, match=f"must be intact in line {place + 1}, to charge"):
        JournalFile(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("round", value) for value in (1.5, -1, True, "0", 2**31)),
        *(("clients", value) for value in ([[0.5]], [[2**40]], [[True]], [["3"]], [[1], [2, 3]])),
        *(("stage", value) for value in ([0.5], [True], [None])),
    ],
)
def test_a_line_whose_numbers_are_not_whole_is_damaged(tmp_path, name, value):
    JournalFile(path := tmp_path / "sent.jsonl").append(0, record([3]))
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}) + "\n")
    with pytest.raises(ValueError, match="must be intact in line 1, to charge"):
        JournalFile(path)


def test_a_journal_without_the_rounds_of_a_checkpoint_is_an_error(tmp_path):
    journal = JournalFile(tmp_path / "sent.jsonl")
    with pytest.raises(ValueError, match=r"sent\.jsonl must hold all 0 rounds.*got None"):
        journal.require(0)
    journal.make()
    assert journal.records() == [] and (tmp_path / "sent.jsonl").stat().st_mode & 0o077 == 0
    journal.require(0)
    for number in (0, 2):
        journal.append(number, record([3]))
    journal.require(1)
    with pytest.raises(ValueError, match=r"must hold all 3 rounds.*got \[0, 2\]"):
        JournalFile(tmp_path / "sent.jsonl").require(3)


def test_attempts_whose_aggregate_was_sent_are_told_from_those_that_ended(tmp_path):
    journal = JournalFile(tmp_path / "sent.jsonl")
    # Rounds 0 and 1, a crash in round 1 before its aggregate left, round 1 again, then 2.
    for number in (0, 1, 1, 2):
        journal.append(number, record([1]))
    assert [journal.num_released(number) for number in range(4)] == [1, 1, 0, 0]
    # An older checkpoint: round 1 is played once more, and its earlier aggregate had left.
    journal.append(1, record([1]))
    assert journal.num_released(1) == 1
    assert [journal.num_attempts(number) for number in range(4)] == [1, 3, 1, 0]
