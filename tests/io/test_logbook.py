"""Metrics by round: what is written is read back, and what is run again is not there twice."""

import gc
import json
import math
import os
import struct
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.io import Logbook, digests, logbook, read_metrics, write_json


def write_rows(folder, rounds, **options):
    book = Logbook(folder, **options)
    for i in rounds:
        book.write({"round": i, "loss": 1.0 / i, "norms": np.array([i, 0.5])})
    book.close()


def test_rows_are_read_back(tmp_path):
    write_rows(tmp_path, (1, 2, 3))
    rows = read_metrics(tmp_path)
    assert rows == [{"round": i, "loss": 1.0 / i, "norms": [i, 0.5]} for i in (1, 2, 3)]


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    book = Logbook(tmp_path)
    book.write({"round": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"round": 1}\n'
    book.close()


def test_rows_behind_the_start_are_dropped_and_the_others_kept_as_they_are(tmp_path):
    write_rows(tmp_path, range(1, 8))
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    write_rows(tmp_path, (), from_round=5)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:5]
    write_rows(tmp_path, (6, 7), from_round=5)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before
    write_rows(tmp_path, (1,))
    assert [row["round"] for row in read_metrics(tmp_path)] == [1]


def test_a_last_line_that_was_cut_off_is_left_out_and_written_over(tmp_path):
    write_rows(tmp_path, (1, 2, 3))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    for cut in range(2, len(whole.splitlines()[-1])):
        path.write_text(whole[:-cut])
        assert [row["round"] for row in read_metrics(tmp_path)] == [1, 2]
    write_rows(tmp_path, (3,), from_round=2)
    assert path.read_text() == whole


def test_a_line_of_brackets_is_damage_as_any_other(tmp_path):
    write_rows(tmp_path, (1,))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    said = []
    assert [row["round"] for row in read_metrics(tmp_path, said.append)] == [1]
    assert "without its lines 2" in said[0]


def test_there_may_be_no_metrics(tmp_path):
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (math.nan, None),
        (math.inf, None),
        (np.float32(-np.inf), None),
        (np.array([1.0, np.nan]), [1.0, None]),
        (jnp.array([[1, 2]]), [[1, 2]]),
        (jnp.bfloat16(0.5), 0.5),
        (np.bool_(True), True),
        (np.int64(2**53 + 1), 2**53 + 1),
        ({1: (np.float64(0.1), "text", None)}, {"1": [0.1, "text", None]}),
        ([], []),
    ],
)
def test_numbers_become_what_json_can_hold(value, plain):
    found = logbook.to_json(value)
    assert found == plain and type(found) is type(plain)
    assert json.loads(json.dumps(found, allow_nan=False)) == plain


def test_json_files_are_replaced_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"accuracy": math.nan, "text": "ε"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"accuracy": None, "text": "ε"}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]

    def power_cut(*_args):
        raise OSError("no power")

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(OSError, match="no power"):
        write_json(path, {"accuracy": 1.0})
    assert json.loads(path.read_text(encoding="utf-8"))["accuracy"] is None


def scalars_of(folder):
    """Reads event files as the format defines records: length, check sum, event, check sum."""
    from tensorboardX.proto import event_pb2

    found = {}
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_gets_the_numbers_and_nothing_else(tmp_path):
    pytest.importorskip("tensorboardX")
    book = Logbook(tmp_path)
    book.write({"round": 1, "loss": 0.5, "norms": np.ones(3), "accuracy": math.nan, "count": 3})
    book.write({"round": 2, "loss": 0.25})
    book.close()
    assert scalars_of(tmp_path / "tensorboard") == {
        "loss": [(1, 0.5), (2, 0.25)],
        "count": [(1, 3.0)],
    }


def test_without_the_extra_there_are_no_events(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    write_rows(tmp_path, (1,))
    assert not (tmp_path / "tensorboard").exists()
    assert len(read_metrics(tmp_path)) == 1


def test_events_that_cannot_be_written_end_no_run(tmp_path):
    """No file of the process may grow beyond 2,000 bytes, which rows of metrics do not reach."""
    pytest.importorskip("tensorboardX")
    resource = pytest.importorskip("resource")
    before, warned = resource.getrlimit(resource.RLIMIT_FSIZE), []
    book = Logbook(tmp_path, warn=warned.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        for i in range(1, 91):
            # Each round takes more bytes there than here.
            book.write({"round": i, "x": 1})
        book.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (text,) = warned
    del book
    # Its writer leaves a file open, which would be named in a later test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    assert "tracker tensorboard failed" in text and "the run continues" in text
    assert len(read_metrics(tmp_path)) == 90


@pytest.mark.parametrize("how", ["removed", "replaced", "changed"])
def test_metrics_that_another_program_takes_away_are_written_again(tmp_path, how):
    warned, path = [], tmp_path / "metrics.jsonl"
    book = Logbook(tmp_path, warn=warned.append)
    for i in (1, 2):
        book.write({"round": i})
    assert book.check().bytes == path.stat().st_size and not warned
    if how == "changed":
        path.write_text("x" * path.stat().st_size)
    else:
        path.unlink()
        if how == "replaced":
            path.write_text("{}\n")
    book.write({"round": 3})
    book.check()
    book.write({"round": 4})
    book.close()
    assert len(warned) == 1 and "metrics.jsonl was removed or changed while the run" in warned[0]
    assert [row["round"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0].replace(b"1.0", b"7.0"), *lines[1:]],
        lambda lines: [lines[0], lines[1].replace(b"round", b"rounc"), lines[2]],
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[1], lines[0], lines[2]],
        lambda lines: [*lines[:2], lines[2][:-4]],
        lambda lines: [],
        lambda lines: [lines[0], b"\xff" + lines[1], lines[2]],
        lambda lines: None,
    ],
    ids=["digit", "key", "line", "order", "cut", "empty", "bytes", "file"],
)
def test_metrics_that_are_not_as_they_were_written_are_named(tmp_path, change):
    book, path, warned = Logbook(tmp_path), tmp_path / "metrics.jsonl", []
    for i in (1, 2, 3):
        book.write({"round": i, "loss": 1.0 / i})
    digests.seal(tmp_path, [], {path.name: book.check()})
    book.close()
    assert len(read_metrics(tmp_path, warned.append)) == 3 and not warned
    lines = change(path.read_bytes().splitlines(keepends=True))
    path.unlink()
    if lines is not None:
        path.write_bytes(b"".join(lines))
    left = read_metrics(tmp_path, warned.append)
    assert len(warned) == 1 and str(path) in warned[0] and len(left) <= 3
    # Those that run again are not missed; a resumed run says which others are lost.
    Logbook(tmp_path, from_round=3, warn=warned.append).close()
    assert len(warned) == 2 and str(path) in warned[1]
    copies = [p.name for p in tmp_path.iterdir() if "damaged" in p.name]
    assert copies == (["metrics.damaged.jsonl"] if lines is not None else [])
