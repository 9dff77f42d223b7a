"""Metrics reach each experiment tracker once, without a network, and a resumed run continues."""

import json
import os
import sqlite3
import sys
import threading
import time
import types
import warnings

import numpy as np
import pytest
from marks import slow, telling

from fedjax_dp.core.packages import MissingPackageError
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.components import trackers
from fedjax_dp.experiment.components.callbacks import callbacks_of
from fedjax_dp.experiment.components.experiment import Progress
from fedjax_dp.io.logbook import FAILED

ROWS = [
    {"round": i, "test_accuracy": i / 8, "test_loss": np.nan, "sizes": [1, 2], "done": True}
    for i in range(1, 5)
]


def played(callback, folder, *ends, secret=False, warn=warnings.warn):
    """Calls a callback as a run of four rounds does that evaluates after these."""
    config = load_config(None, ["--run.rounds=4", f"--run.secret={str(secret).lower()}"])
    for end in ends:
        progress = Progress(ROWS[:end], None, types.SimpleNamespace(config=config), folder, warn)
        assert callback.call(progress) is None


@pytest.fixture
def at_exit(monkeypatch):
    """What is registered for the end of the process."""
    registered = []
    stand_in = types.SimpleNamespace(register=registered.append, unregister=lambda one: None)
    monkeypatch.setattr(trackers, "atexit", stand_in)
    return registered


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run-001").mkdir()
    return tmp_path / "run-001"


@slow
def test_mlflow_has_each_round_once_and_one_run_for_a_resumed_one(folder, at_exit):
    MlflowClient = pytest.importorskip("mlflow.tracking").MlflowClient

    address = f"sqlite:///{folder.parent / 'mlflow.db'}"
    made = {"mlflow": {"experiment": "mine", "tracking_uri": address}}
    played(callbacks_of(made)["mlflow"], folder, 1, 2)
    client = MlflowClient(address)
    place = client.get_experiment_by_name("mine").experiment_id
    (run,) = client.search_runs([place])
    assert run.info.status == "RUNNING" and run.info.run_name == "run-001"
    at_exit.pop()()
    assert client.get_run(run.info.run_id).info.status == "FINISHED"
    played(callbacks_of(made)["mlflow"], folder, 3, 4)
    (run,) = client.search_runs([place])
    assert run.info.status == "FINISHED"
    found = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "test_accuracy")}
    assert found == {1: 0.125, 2: 0.25, 3: 0.375, 4: 0.5}
    assert run.data.metrics.keys() == {"test_accuracy"}
    assert run.data.params["run.rounds"] == "4" and "run.seed" not in run.data.params


@telling
def test_wandb_writes_files_for_a_later_sync(folder, monkeypatch, at_exit):
    monkeypatch.setenv("WANDB_DIR", str(folder.parent))
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"wandb": {"project": "mine", "mode": "offline"}}
    played(callbacks_of(options)["wandb"], folder, 2, 4)
    identity = json.loads((folder / trackers.TRACKERS_FILE).read_text())["wandb"]
    (file,) = folder.parent.glob("wandb/offline-run-*/*.wandb")
    # Its service, a process of its own, writes the file.
    ends = time.monotonic() + 20
    while file.read_bytes().count(b"test_accuracy") < 4 and time.monotonic() < ends:
        time.sleep(0.1)
    assert file.stem == f"run-{identity}" and file.read_bytes().count(b"test_accuracy") >= 4


@telling
def test_trackio_stores_each_round_on_this_machine(folder, monkeypatch, at_exit):
    monkeypatch.setenv("TRACKIO_DIR", str(folder.parent / "trackio"))
    pytest.importorskip("trackio")
    played(callbacks_of({"trackio": {"project": "mine"}})["trackio"], folder, 2, 4)
    (database,) = (folder.parent / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(text)["test_accuracy"]) for step, text in rows] == [
        (i, i / 8) for i in range(1, 5)
    ]


def test_a_tracker_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    rule = r'the callback mlflow needs the package mlflow, .* install "fedjax-dp\[mlflow\]"$'
    with pytest.raises(MissingPackageError, match=rule):
        callbacks_of({"mlflow": {}})


@pytest.mark.parametrize("ends", [(2,), (1, 3), (3,)])
def test_a_resumed_run_sends_no_round_again_and_leaves_none_out(folder, at_exit, ends):
    sent = {"one": [], "other": []}

    def tracker(name):
        def log(values, number):
            sent[name].append(number)

        return trackers._tracking(name, lambda *_: trackers._Tracked(log, lambda: None))

    played(tracker("one"), folder, *ends)
    # Killed after its last checkpoint, of round 2 or none: rounds from there are run again.
    played(tracker("one"), folder, 2, 4)
    played(tracker("other"), folder, 4)
    assert sent == {"one": [1, 2, 3, 4], "other": [1, 2, 3, 4]}


@pytest.mark.parametrize("part", ["start", "log", "finish"])
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_tracker_that_fails_ends_no_run_and_is_left_alone(
    folder, at_exit, monkeypatch, part, how
):
    """What it lacks it gets from a resumed run."""
    monkeypatch.setattr(trackers, "_PATIENCE", 0.05)
    calls, is_over, ended, sent, warned = [], threading.Event(), threading.Event(), [], []

    class Watched(threading.Event):
        def set(self):
            super().set()
            if is_over.is_set():
                ended.set()

    def fails(name):
        calls.append(name)
        if is_over.is_set() or name != part or (name == "log" and calls.count("log") < 2):
            return
        if how == "hangs":
            assert is_over.wait(60)
        else:
            raise ConnectionError("no route")

    def log(values, number):
        fails("log")
        sent.append(number)

    def start(*_):
        fails("start")
        return trackers._Tracked(log, lambda: fails("finish"))

    with monkeypatch.context() as patched:
        patched.setattr(trackers.threading, "Event", Watched)
        callback = trackers._tracking("mine", start)
    played(callback, folder, 1, 2, 4, warn=warned.append)
    reason = "no answer within 0.05 seconds" if how == "hangs" else "ConnectionError: no route"
    assert warned == [f"the tracker mine {FAILED}: {reason}"]
    assert sent == {"start": [], "log": [1], "finish": [1, 2, 3, 4]}[part]
    is_over.set()
    if how == "hangs":
        # It returns late, and ends what it had begun.
        assert ended.wait(60)
    again = trackers._Tracked(lambda values, number: sent.append(number), lambda: None)
    played(trackers._tracking("mine", lambda *_: again), folder, 4)
    assert [*dict.fromkeys(sent)] == [1, 2, 3, 4]


def test_settings_hold_the_seed_only_where_the_noise_does_not_follow_from_it(folder):
    seen = []

    def start(name, identity, config):
        seen.append((name, config))
        return trackers._Tracked(lambda values, number: None, lambda: None)

    for secret in (False, True):
        played(trackers._tracking("some", start), folder, 4, secret=secret)
    assert [("run.seed" in config, config["run.rounds"]) for _, config in seen] == [
        (False, 4),
        (True, 4),
    ]
    assert os.listdir(folder) == [trackers.TRACKERS_FILE]
