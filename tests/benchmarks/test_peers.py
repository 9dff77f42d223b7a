"""What is around the comparison with peers: arithmetic, plans, files; needs none of them."""

import json
import pathlib
import subprocess
import sys

import compare
import install
import numpy as np
import prepare
import problem
import pytest
import reference
import report
from book import Book
from compare import LINEUP, hardware_class

from fedjax_dp.experiment.studies.workloads import WORKLOADS

ROOT = pathlib.Path(__file__).resolve().parents[2]


def small(**changes):
    rng = np.random.default_rng(0)
    fields = {
        "name": "small",
        "model": "logistic_regression",
        "unit": "none",
        "num_classes": 3,
        "learning_rate": 0.5,
        "clip_norm": None,
        "noise_multiplier": 0.0,
        "x": rng.normal(size=(2, 5, 4)).astype(np.float32),
        "y": rng.integers(0, 3, (2, 5)).astype(np.int32),
        "batches": prepare.draw_batches(2, 5, 3, 2),
        "params": {
            "Dense_0/kernel": rng.normal(size=(4, 3)).astype(np.float32),
            "Dense_0/bias": np.zeros(3, np.float32),
        },
    }
    return problem.Problem(**fields | changes)


def row(**changes):
    fields = {
        "workload": "W1",
        "implementation": "ours",
        "clients": 50,
        "whole_cohort": 50,
        "steps": 5,
        "repeats": 3,
        "seconds": 2.0,
        "seconds_min": 1.5,
        "seconds_max": 2.5,
        "ms_per_client": 40.0,
        "ours_over_this": None,
        "gflops": 80.0,
        "gemm_peak_gflops": 160.0,
        "first_round_seconds": 4.0,
        "peak_rss_mb": 500.0,
        "step_difference": 1e-6,
        "round_difference": 2e-5,
        "double_difference": None,
        "verdict": "same",
        "date": "2000-01-01",
        "hardware": "2 CPU cores, AVX-512",
        "versions": "jax 1",
    }
    return report.Row(**fields | changes)


@pytest.mark.parametrize("clip_norm", [None, 0.25])
def test_problems_survive_the_disk(tmp_path, clip_norm):
    original = small(clip_norm=clip_norm)
    original.save(tmp_path / "small.npz")
    read = problem.load(tmp_path / "small.npz")
    for name in problem.Problem._fields:
        if name != "params":
            np.testing.assert_array_equal(getattr(read, name), getattr(original, name))
    assert read.params.keys() == original.params.keys()
    for name, value in original.params.items():
        np.testing.assert_array_equal(read.params[name], value)
    first = problem.load(tmp_path / "small.npz", 1)
    np.testing.assert_array_equal(first.x, original.x[:1])
    assert (first.num_clients, first.num_steps, first.batch_size) == (1, 3, 2)


def test_rows_lie_in_the_order_in_which_they_are_read():
    one = small()
    x, y = one.in_order()
    for client in range(2):
        for step in range(3):
            for i, index in enumerate(one.batches[client, step]):
                np.testing.assert_array_equal(x[client, step, i], one.x[client, index])
                assert y[client, step, i] == one.y[client, index]
    whole = small(batches=prepare.draw_batches(2, 5, 1, 5))
    np.testing.assert_array_equal(whole.in_order()[0][:, 0], whole.x)


def test_a_pass_reads_every_example_once():
    batches = prepare.draw_batches(3, 20, 8, 5)
    for client in batches.reshape(3, 2, 20):
        for one_pass in client:
            assert sorted(one_pass) == list(range(20))
    assert not np.array_equal(batches[0], batches[1])
    assert prepare.draw_batches(2, 10, 4, 4).shape == (2, 4, 4)


def test_a_prepared_workload_has_its_shapes():
    workload = WORKLOADS["W4dp"]._replace(num_clients=3)
    built = prepare.build("W4dp", workload)
    assert built.x.shape == (3, 20, 784)
    assert built.batches.shape == (3, 1, 20)
    assert {k: v.shape for k, v in built.params.items()} == {
        "Dense_0/kernel": (784, 10),
        "Dense_0/bias": (10,),
    }
    assert (built.unit, built.clip_norm, built.noise_multiplier) == ("client", 0.1, 1.0)


def test_difference_is_relative_to_the_whole_reference():
    expected = {"a": np.array([3.0, 0.0]), "b": np.array([4.0])}
    assert problem.difference(expected, expected) == 0.0
    moved = {"a": np.array([3.0, 0.5]), "b": np.array([4.0])}
    assert problem.difference(moved, expected) == pytest.approx(0.1)
    assert problem.difference({"a": expected["a"]}, expected) == float("inf")
    broken = {"a": np.array([np.nan, 0.0]), "b": np.array([4.0])}
    assert problem.difference(broken, expected) == float("inf")


@pytest.mark.parametrize("unit", ["none", "client", "record"])
def test_the_reference_is_a_step_loop(unit):
    """Softmax regression has its gradient in closed form: x (softmax - one hot)."""
    one = small(unit=unit, clip_norm=None if unit == "none" else 0.3)
    expected = {1: 0.0, 3: 0.0}
    for client in range(2):
        weights, bias = (one.params[k].astype(np.float64) for k in one.params)
        for step in range(3):
            rows = one.batches[client, step]
            x, y = one.x[client, rows].astype(np.float64), one.y[client, rows]
            raw = np.exp(x @ weights + bias)
            error = raw / raw.sum(axis=1, keepdims=True) - np.eye(3)[y]
            each = np.concatenate([x[:, :, None] * error[:, None], error[:, None]], axis=1)
            if unit == "record":
                norms = np.sqrt((each**2).sum(axis=(1, 2), keepdims=True))
                each = each * np.minimum(1.0, 0.3 / norms)
            moved = 0.5 * each.mean(axis=0)
            weights, bias = weights - moved[:-1], bias - moved[-1]
            if step + 1 in expected:
                delta = np.concatenate([weights, bias[None]])
                delta = delta - np.concatenate([one.params[k].reshape(-1, 3) for k in one.params])
                if unit == "client":
                    delta = delta * min(1.0, 0.3 / np.sqrt((delta**2).sum()))
                expected[step + 1] = expected[step + 1] + delta / 2
    found = reference.deltas(one)
    for steps, value in expected.items():
        stacked = np.concatenate([found[steps][k].reshape(-1, 3) for k in one.params])
        np.testing.assert_allclose(stacked, value, rtol=2e-5, atol=1e-6)


def test_verdicts():
    assert report.verdict(1e-6, 5e-5) == "same"
    assert report.verdict(1e-6, 3e-4) == "same step, rounding parts the round"
    assert report.verdict(2e-4, 2e-4) == "DIFFERS"
    assert report.verdict(float("inf"), 0.0) == "DIFFERS"
    assert report.verdict(float("nan"), 0.0) == "DIFFERS"
    assert report.verdict(2e-4, 2e-4, 1e-9) == "same in float64, rounding parts the step"
    assert report.verdict(2e-4, 2e-4, 2e-6) == "DIFFERS"
    assert report.verdict(1e-6, float("inf")) == "same step, rounding parts the round"


def test_ratios_compare_time_per_client_within_a_workload():
    rows = [
        row(),
        row(implementation="pfl", clients=10, ms_per_client=80.0),
        row(workload="W2", implementation="pfl", ms_per_client=1.0),
    ]
    assert [r.ours_over_this for r in report.with_ratios(rows)] == [1.0, 0.5, None]


def test_a_workload_that_is_measured_anew_replaces_all_of_its_rows():
    kept = [row(implementation="pfl"), row(workload="W2")]
    fresh = [row(date="2001-01-01")]
    assert report.merge(kept, fresh) == [fresh[0], kept[1]]
    assert report.merge(kept, []) == sorted(kept)


def test_results_survive_the_disk(tmp_path):
    rows = [row(), row(implementation="pfl", ours_over_this=0.5, round_difference=float("inf"))]
    report.write_csv(tmp_path / "peers.csv", rows)
    assert report.read_csv(tmp_path / "peers.csv") == rows
    assert report.read_csv(tmp_path / "none.csv") == []


def test_the_table_marks_cuts_and_names_what_did_not_run(tmp_path):
    rows = report.with_ratios([row(), row(implementation="drjax", clients=10, ms_per_client=80.0)])
    text = report.markdown(rows, ["W1, flower: not installed"])
    assert "| W1 | drjax | 10* |" in text
    assert "| W1 | ours | 50 |" in text
    assert "0.50" in text
    assert "- W1, flower: not installed" in text
    report.plot(tmp_path / "peers.png", rows)
    assert (tmp_path / "peers.png").stat().st_size > 0


def test_every_workload_of_the_line_up_exists_and_has_us_in_it():
    for name, entries in LINEUP.items():
        assert entries[0].peer == "ours"
        most = WORKLOADS[name].num_clients
        assert all(entry.clients is None or entry.clients <= most for entry in entries)


def test_hardware_is_named_by_class():
    assert hardware_class(2, "flags : fpu avx2 avx512f") == "2 CPU cores, AVX-512"
    assert hardware_class(4, "flags : fpu avx2") == "4 CPU cores, AVX2"


def test_without_arguments_all_ten_workloads_and_all_peers_are_compared():
    options = compare._options([])
    assert len(options.workloads) == 10
    assert set(options.workloads) == set(LINEUP) == set(prepare.NAMES)
    peers = compare.peers_of(options.workloads, options.peers)
    assert set(peers) == set(install.PEERS)
    assert compare.peers_of(["W5", "W3nodp"], None) == ["opacus", "jax_privacy", "pfl", "fedjax"]
    assert compare.peers_of(["W5", "W3nodp"], ["ours", "pfl"]) == ["pfl"]
    for name in install.PEERS:
        assert (compare.HERE / f"run_{name}.py").exists()
        lines = (compare.HERE / "requirements" / f"{name}.txt").read_text("utf-8").split()
        assert all("==" in line for line in lines)


@pytest.mark.parametrize(
    ("argument", "message"), [("W9", "workload 'W9'"), ("--peers=tff", "peer 'tff'")]
)
def test_unknown_names_are_refused(argument, message, capsys):
    with pytest.raises(SystemExit):
        compare._options([argument])
    assert message in capsys.readouterr().err


def test_the_command_is_a_module():
    command = [sys.executable, "-m", "benchmarks.peers.compare", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--repeats" in shown


class Commands:
    """Stands for `subprocess.run`: makes what `venv` makes, and fails where it is told to."""

    def __init__(self, failing=None, messages=""):
        self.failing, self.messages, self.called = failing, messages, []

    def __call__(self, command, **_):
        self.called.append(command[2])
        if "venv" in command:
            python = pathlib.Path(command[-1], "bin", "python")
            python.parent.mkdir(parents=True)
            python.touch()
        code = int(self.failing in command)
        return subprocess.CompletedProcess(command, code, "", self.messages if code else "")


def test_an_environment_is_made_once_for_its_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(install.subprocess, "run", commands := Commands())
    assert compare.environments(["pfl", "drjax"], tmp_path) == {}
    assert commands.called == ["venv", "pip"] * 2
    assert compare.environments(["pfl", "drjax"], tmp_path) == {}
    assert len(commands.called) == 4
    (tmp_path / "pfl" / "installed.txt").write_text("pfl==0.1\n")
    assert not install.is_installed("pfl", tmp_path)
    assert install.is_installed("drjax", tmp_path)


def test_an_environment_that_cannot_be_made_is_named_with_the_last_error(tmp_path, monkeypatch):
    messages = "ERROR: first\nERROR: No matching distribution found for torch\nnotice: a new pip\n"
    for failing in ("pip", "venv"):
        folder = tmp_path / failing
        monkeypatch.setattr(install.subprocess, "run", Commands(failing, messages))
        reasons = compare.environments(["pfl"], folder)
        assert reasons["pfl"].endswith("made: ERROR: No matching distribution found for torch")
        assert not install.is_installed("pfl", folder)
    assert compare.environments(["pfl"], folder, make=False) == {"pfl": "not installed"}
    assert install.last_line("a\n b \n\n") == "b"
    assert install.last_line("") == "no reason given"


def book_of(folder, workloads, **changes):
    again = changes.pop("again", False)
    return Book(folder, workloads, {"repeats": 3, **changes}, again=again)


def test_a_stopped_run_is_continued_by_the_same_run_alone(tmp_path):
    names = ["W1", "W2", "W3"]
    book = book_of(tmp_path, names)
    book.put("W1", [row()], ["flower: not installed"])
    assert "left: W2, W3." in (tmp_path / "peers.md").read_text()
    assert book_of(tmp_path, names).left == ["W2", "W3"]
    for other in (
        book_of(tmp_path, ["W1", "W2"]),
        book_of(tmp_path, names, repeats=5),
        book_of(tmp_path, names, again=True),
    ):
        assert "W1" in other.left
    book = book_of(tmp_path, names)
    for name in book.left:
        book.put(name, [row(workload=name)], [])
    assert "left:" not in (tmp_path / "peers.md").read_text()
    assert "- W1, flower: not installed" in (tmp_path / "peers.md").read_text()
    # A run that came to its end is not continued.
    assert book_of(tmp_path, names).left == names


def test_the_files_of_results_agree(tmp_path):
    book = book_of(tmp_path, ["W1"])
    rows = [row(), row(implementation="pfl", ms_per_client=80.0, step_difference=float("inf"))]
    rows[0] = rows[0]._replace(seconds=2.000000004, gflops=1e12)
    book.put("W1", report.with_ratios(rows), [])
    rows[0] = rows[0]._replace(seconds=2.0)
    assert book_of(tmp_path, ["W1"]).rows == book.rows == report.read_csv(tmp_path / "peers.csv")
    assert book.rows == report.with_ratios(rows)
    stored = (tmp_path / "peers.json").read_text()
    json.loads(stored, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (tmp_path / "peers.md").read_text() == report.markdown(book.rows)
    assert (tmp_path / "peers.pdf").stat().st_size > 0
    # Rows outlive a run in which nothing ran.
    book_of(tmp_path, ["W1"]).put("W1", [], ["ours: killed"])
    again = book_of(tmp_path, ["W1"])
    assert (again.rows, again.notes) == (book.rows, ["W1, ours: killed"])


def test_results_in_the_repository_are_those_of_their_table():
    folder = ROOT / "benchmarks" / "results"
    book = Book(folder, [], {})
    assert [r.workload for r in book.rows] == sorted(r.workload for r in book.rows)
    assert book.rows == report.read_csv(folder / "peers.csv")
    assert (folder / "peers.md").read_text("utf-8") == report.markdown(book.rows, book.notes)


def test_a_comparison_notes_what_fails_and_continues_after_a_stop(tmp_path, monkeypatch, capsys):
    arguments = ["W4", "W1", "W2", "--results", str(tmp_path), "--venvs", str(tmp_path / "venvs")]
    options = compare._options(arguments)
    options.hardware = "2 CPU cores"
    monkeypatch.setattr(compare.install, "install", lambda peer, venvs: f"ERROR: no {peer}")
    played, stops = [], [KeyboardInterrupt]

    def run_workload(name, options, missing):
        played.append(name)
        assert missing["flower"] == "its environment could not be made: ERROR: no flower"
        if name == "W1":
            raise subprocess.CalledProcessError(1, "reference.py")
        if name == "W2" and stops:
            raise stops.pop()
        return [row(workload=name)], [f"flower: {missing['flower']}"]

    monkeypatch.setattr(compare, "run_workload", run_workload)
    with pytest.raises(KeyboardInterrupt):
        compare.compare(options)
    notes = compare.compare(options)
    assert played == ["W4", "W1", "W2", "W2"]
    assert [note.partition(":")[0] for note in notes] == [
        "W1, the whole workload",
        "W2, flower",
        "W4, flower",
    ]
    assert "continues a run that was stopped; left: W2" in capsys.readouterr().out
    assert [r.workload for r in report.read_csv(tmp_path / "peers.csv")] == ["W2", "W4"]


def test_a_peer_of_this_environment_needs_no_other(tmp_path, monkeypatch):
    arguments = ["W5", "--peers", "opacus", "jax_privacy", "--here", "opacus", "--installed"]
    arguments += ["--results", str(tmp_path), "--venvs", str(tmp_path / "venvs")]
    options = compare._options(arguments)
    options.hardware = "2 CPU cores"
    found = []
    monkeypatch.setattr(
        compare, "run_workload", lambda name, options, missing: found.append(missing) or ([], [])
    )
    compare.compare(options)
    assert found == [{"jax_privacy": "not installed"}]
    assert compare._python_of("opacus", options) == pathlib.Path(sys.executable)
    assert compare._python_of("jax_privacy", options) == tmp_path / "venvs/jax_privacy/bin/python"
    with pytest.raises(SystemExit):
        compare._options(["W5", "--here", "tensorflow"])
