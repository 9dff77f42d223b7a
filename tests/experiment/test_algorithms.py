"""Every algorithm by name, with its default options, from configuration to run folder."""

import numpy as np
import pytest
from marks import later, telling
from run_folders import SMALL, execute, metrics, read_json, saved_arrays

from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble

# A unit of privacy for each: none where the algorithm offers that, else the first that it has.
UNITS = {name: e.units[0] for name, e in ALGORITHMS.items() if "none" not in e.units}
UNITS |= {"blur_lus": "client", "ae_dpfl": "client"}
_TWO = ("--algorithm.options.num_models=2",)
_VALIDATED = ("--data.client_validation_share=0.2",)
_HEAD = ("--algorithm.options.head=params/Dense_0/bias",)
NEEDED = {
    "ae_dpfl": ("--data.public_examples=60",),
    "f_cdpfl": _TWO,
    "ifca": _TWO,
    "km_cdpfl": _TWO,
    "o_dpcfl": ("--algorithm.options.clusters=[0, 1, 0]",),
    "rc_dpfl": _TWO,
    **{name: _VALIDATED for name in ("fed_ltn", "jump_start", "lottery_fl")},
    "fedper": _HEAD,
    "fedrep": _HEAD,
}
# Only what a client would use itself can be evaluated: there is no model of the whole.
WITHOUT_SERVER_MODEL = (
    *("f_cdpfl", "fedper", "fedrep", "ifca", "jump_start", "km_cdpfl", "local_only", "o_dpcfl"),
    *("r_dpcfl", "rc_dpfl"),
)

# The server has a model, and clients use others.
WITH_BOTH_MODELS = (
    *("ditto", "fed_ltn", "lottery_fl", "mr_mtl"),
    *("retrained_averaging", "warm_start_averaging"),
)

# One of each kind: who trains what, what is private, what is evaluated.
KINDS = ["fedavg", "centralized", "dp_fedavg", "dp_sgd", "ditto", "ifca", "fed_ltn", "robust_hdp"]

pytestmark = pytest.mark.usefixtures("no_pictures")


def words_of(name):
    unit = UNITS.get(name, "none")
    words = (*SMALL, f"--algorithm.name={name}", f"--privacy.unit={unit}", *NEEDED.get(name, ()))
    return (*words, "--training.learning_rate=0.5", "--execution.clients_per_chunk=1")


@pytest.mark.parametrize("name", later(ALGORITHMS, but=KINDS, mark=telling))
def test_an_algorithm_is_assembled_from_its_name_alone(name):
    """Its options, its unit, its budget, and what of it can be evaluated."""
    experiment = assemble(load_config(None, words_of(name)))
    algorithm, unit = experiment.simulation.algorithm, UNITS.get(name, "none")
    assert algorithm.name == name
    assert list(experiment.budget) == ([] if unit == "none" else [unit])
    assert experiment.population.train.num_clients == (1 if name == "centralized" else 3)
    assert (experiment.evaluator.whole is None) == (name in WITHOUT_SERVER_MODEL)
    assert (experiment.evaluator.clients is None) == (name == "centralized")
    of_their_own = (*WITHOUT_SERVER_MODEL, *WITH_BOTH_MODELS)
    assert experiment.evaluator.is_personal == (name in of_their_own)
    if unit == "record":
        # Every client has noise of its own budget: of unequal sizes, unequal noise.
        assert np.shape(algorithm.hyper.local.noise_multiplier) == (3,)
        assert np.all(np.asarray(algorithm.hyper.local.noise_multiplier) > 0)
    if unit == "client":
        assert algorithm.claims.client is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_runs_from_its_name_alone(tmp_path, name):
    folder, unit = tmp_path / "run", UNITS.get(name, "none")
    status, text = execute(folder, *words_of(name))
    assert status == 0 and "2 rounds in" in text
    summary, rows = read_json(folder, "summary.json"), metrics(folder)
    assert summary["algorithm"] == name and summary["rounds"] == 2
    assert [row["round"] for row in rows] == [1, 2]
    assert all(row["num_non_finite"] == 0 for row in rows)
    assert all(np.isfinite(array).all() for array in saved_arrays(folder)[1].values())
    assert np.isfinite(summary["test_loss"])
    assert summary["num_clients"] == (1 if name == "centralized" else 3)
    # Of twenty-five rounds alone two are run.
    ends_early = [w for w in summary["warnings"] if "ends within its first stage" in w]
    assert len(ends_early) == (name == "jump_start")
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
    if name in WITH_BOTH_MODELS:
        assert summary["test_accuracy"] == summary["client_test_accuracy"]
        assert 0 <= summary["shared_test_accuracy"] <= 1
    assert ("shared_test_loss" in summary) == (name in WITH_BOTH_MODELS)
    if name == "centralized":
        assert "client_test_accuracy" not in summary
    else:
        assert summary["worst_client_accuracy"] <= summary["client_test_accuracy"]


@telling
@pytest.mark.parametrize(
    ("name", "unit", "said"),
    [
        ("ditto", "client", "no ε covers them"),
        ("ditto", "record", "which cover them"),
        ("dp_sgd", "record", None),
        ("r_dpcfl", "record", None),
    ],
)
def test_a_statement_names_what_covers_personal_models(tmp_path, name, unit, said):
    """A choice among the server's models is no personal model."""
    words = [word for word in words_of(name) if not word.startswith("--privacy.unit")]
    status, _ = execute(tmp_path / "run", *words, f"--privacy.unit={unit}")
    assert status == 0
    text = (tmp_path / "run" / "privacy.md").read_text(encoding="utf-8")
    assert ("Clients have personal models" in text) == (said is not None)
    assert said is None or said in text


@pytest.mark.slow
def test_a_run_without_held_out_data_of_clients_has_the_accuracy_of_the_whole(tmp_path):
    folder = tmp_path / "run"
    words = ("--privacy.unit=none", "--algorithm.name=fedavg", "--data.client_test_share=0")
    status, _ = execute(folder, *SMALL, *words, "--execution.clients_per_chunk=1")
    summary = read_json(folder, "summary.json")
    assert status == 0 and 0 < summary["test_accuracy"] <= 1
    assert "worst_client_accuracy" not in summary


@pytest.mark.slow
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
