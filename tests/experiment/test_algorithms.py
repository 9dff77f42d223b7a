"""Every algorithm by name, with its default options, from configuration to run folder."""

import numpy as np
import pytest
from run_folders import SMALL, execute, metrics, read_json, saved_arrays

from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.io import plots

# A unit of privacy for each: none where the algorithm offers that, else the first that it has.
UNITS = {name: e.units[0] for name, e in ALGORITHMS.items() if "none" not in e.units}
UNITS |= {"blur_lus": "client", "ae_dpfl": "client"}
_TWO = ("--algorithm.options.num_models=2",)
NEEDED = {
    "ae_dpfl": ("--data.public_examples=60",),
    "f_cdpfl": _TWO,
    "ifca": _TWO,
    "km_cdpfl": _TWO,
    "o_dpcfl": ("--algorithm.options.clusters=[0, 1, 0]",),
    "rc_dpfl": _TWO,
}
# Only what a client would use itself can be evaluated: there is no model of the whole.
WITHOUT_SERVER_MODEL = (
    "f_cdpfl",
    "ifca",
    "km_cdpfl",
    "local_only",
    "o_dpcfl",
    "r_dpcfl",
    "rc_dpfl",
)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(plots, "save", lambda figure, path: None)


def test_all_algorithms_are_told_what_they_need():
    for name, entry in ALGORITHMS.items():
        assert UNITS.get(name, "none") in entry.units


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_runs_from_its_name_alone(tmp_path, name):
    folder, unit = tmp_path / "run", UNITS.get(name, "none")
    words = (f"--algorithm.name={name}", f"--privacy.unit={unit}", *NEEDED.get(name, ()))
    words = (*words, "--training.learning_rate=0.5", "--execution.clients_per_chunk=1")
    status, text = execute(folder, *SMALL, *words)
    assert status == 0 and "2 rounds in" in text
    summary, rows = read_json(folder, "summary.json"), metrics(folder)
    assert summary["algorithm"] == name and summary["rounds"] == 2
    assert [row["round"] for row in rows] == [1, 2]
    assert all(row["num_non_finite"] == 0 for row in rows)
    assert all(np.isfinite(array).all() for array in saved_arrays(folder)[1].values())
    assert np.isfinite(summary["test_loss"])
    assert summary["num_clients"] == (1 if name == "centralized" else 3)
    claims = read_json(folder, "privacy.json")["claims"]
    assert [claim["unit"] for claim in claims] == ([] if unit == "none" else [unit])
    if unit == "none":
        assert summary["epsilon"] is None and summary["dp_delta"] is None
        assert "no privacy is claimed" in text
        assert "claims no privacy" in (folder / "privacy.md").read_text(encoding="utf-8")
        assert rows[1]["train_loss"] < rows[0]["train_loss"], "without noise it learns"
    else:
        assert 0 < summary["epsilon"] <= 8
    if name in WITHOUT_SERVER_MODEL:
        assert summary["test_accuracy"] == summary["client_test_accuracy"]
        assert summary["test_loss"] == summary["client_test_loss"]
    if name == "centralized":
        assert "client_test_accuracy" not in summary
    else:
        assert summary["worst_client_accuracy"] <= summary["client_test_accuracy"]


@pytest.mark.slow
def test_a_run_without_held_out_data_of_clients_has_the_accuracy_of_the_whole(tmp_path):
    folder = tmp_path / "run"
    words = ("--privacy.unit=none", "--algorithm.name=fedavg", "--data.client_test_share=0")
    status, _ = execute(folder, *SMALL, *words, "--execution.clients_per_chunk=1")
    summary = read_json(folder, "summary.json")
    assert status == 0 and 0 < summary["test_accuracy"] <= 1
    assert "worst_client_accuracy" not in summary


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("yogi", marks=pytest.mark.slow)])
def test_local_optimisers_come_by_name(tmp_path, optimizer):
    folder = tmp_path / "run"
    words = ("--privacy.unit=none", "--algorithm.name=fedavg", f"--training.optimizer={optimizer}")
    words = (*words, "--training.learning_rate=[0.01, 0.02, 0.01]")
    status, _ = execute(folder, *SMALL, *words, "--execution.clients_per_chunk=1")
    assert status == 0 and read_json(folder, "summary.json")["test_accuracy"] > 0.3


def test_the_last_round_is_evaluated_whatever_the_interval(tmp_path):
    folder = tmp_path / "run"
    words = ("--privacy.unit=none", "--algorithm.name=fedavg", "--execution.clients_per_chunk=1")
    words = (*words, "--run.rounds=5", "--run.evaluate_every=3")
    assert execute(folder, *SMALL, *words)[0] == 0
    rows, summary = metrics(folder), read_json(folder, "summary.json")
    assert [row["round"] for row in rows if "test_accuracy" in row] == [3, 5]
    shared = set(rows[-1]) & set(summary)
    assert {"worst_client_accuracy", "accuracy_disparity", "client_accuracy_q50"} <= shared
    assert all(rows[-1][name] == summary[name] for name in shared - {"padding_share"})
    assert summary["accuracy_disparity"] == pytest.approx(
        summary["best_client_accuracy"] - summary["worst_client_accuracy"]
    )
