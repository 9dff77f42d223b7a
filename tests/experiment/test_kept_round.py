"""The model of the best round: that of a run which ends there, also after an interruption."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from marks import later, telling
from run_folders import DRAWN, SMALL, die_and_resume, execute, metrics, read_json

from fedjax_dp.experiment.assembly.assemble import checked_config
from fedjax_dp.experiment.components.keeping import loss_of
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.running import keeping
from fedjax_dp.experiment.running.loading import evaluate_run, load_run
from fedjax_dp.experiment.running.run import run

LONG = (*DRAWN, "--data.client_test_share=0.3")
PLATEAU = "--schedules.training.learning_rate={curve = 'plateau'"
# A rate that makes training jump, so that the best round is none of the first and none of the last.
ROUGH = ("--training.learning_rate=3", "--run.seed=1")


FOLLOWED = ("test_accuracy", "test_loss", "worst_client_accuracy")


def arrays_of(folder):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_run(folder).params)]


@pytest.mark.usefixtures("shared_programs", "no_pictures")
@pytest.mark.parametrize("metric", later(FOLLOWED, soon=FOLLOWED[:1]))
def test_the_kept_model_is_that_of_a_run_that_ends_there(tmp_path, metric):
    words = (*LONG, *ROUGH, "--privacy.record.noise_multiplier=1", "--privacy.record.epsilon=none")
    words += ("--privacy.client.noise_multiplier=1", "--privacy.client.epsilon=none")
    keep = f"--run.keep=best:{metric}"
    assert execute(tmp_path / "kept", *words, keep)[0] == 0
    rows = [row for row in metrics(tmp_path / "kept") if metric in row]
    sign = 1 if metric.endswith("loss") else -1
    # The first of equal ones.
    best = min(rows, key=lambda row: sign * row[metric])
    summary = read_json(tmp_path / "kept", "summary.json")
    assert (summary["kept_round"], summary["rounds"]) == (best["round"], 8)
    shared = {k: v for k, v in best.items() if k in summary and "test" in k}
    assert len(shared) > 3 and {k: summary[k] for k in shared} == shared
    short = [w for w in words if "run.rounds" not in w]
    assert execute(tmp_path / "short", *short, f"--run.rounds={best['round']}")[0] == 0
    for one, two in zip(arrays_of(tmp_path / "kept"), arrays_of(tmp_path / "short"), strict=True):
        assert one.tobytes() == two.tobytes()
    assert evaluate_run(load_run(tmp_path / "kept"))[metric] == best[metric]
    # Every round ran, and is charged.
    assert execute(tmp_path / "last", *words)[0] == 0
    last = read_json(tmp_path / "last", "summary.json")
    assert summary["epsilon"] == last["epsilon"] and "kept_round" not in last
    stated = read_json(tmp_path / "kept", "privacy.json")["claims"]
    text = f"the choice of the round whose model was kept, by the exact {metric}"
    assert all(text in claim["not_private"] for claim in stated)
    # Dies after the best round, before and after a checkpoint that has it.
    for after in {best["round"] + 1, 8} - {9}:
        folder = tmp_path / f"resumed-{after}"
        die_and_resume(folder, after, *words, keep)
        assert metrics(folder) == metrics(tmp_path / "kept")
        assert read_json(folder, "summary.json")["kept_round"] == best["round"]
        pairs = zip(arrays_of(folder), arrays_of(tmp_path / "kept"), strict=True)
        assert all(one.tobytes() == two.tobytes() for one, two in pairs)


@telling
@pytest.mark.usefixtures("no_pictures")
def test_personal_models_are_those_of_the_best_round(tmp_path):
    words = (*SMALL[:1], "--run.rounds=5", "--privacy.unit=none", "--algorithm.name=local_only")
    words += ("--training.learning_rate=5", "--run.keep=best:mean_client_accuracy")
    assert execute(tmp_path / "kept", *words)[0] == 0
    summary = read_json(tmp_path / "kept", "summary.json")
    best, found = summary["kept_round"], load_run(tmp_path / "kept")
    assert execute(tmp_path / "short", *words[:-1], f"--run.rounds={best}")[0] == 0
    short = load_run(tmp_path / "short")
    for client in range(3):
        pairs = itertools.zip_longest(
            *(jax.tree.leaves(each.params_of(client)) for each in (found, short))
        )
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("test_loss", [3, np.nan, 1, 2, 1, np.inf], 3),
        ("test_auc", [0.5, 0.9, 0.9, np.nan, 0.6], 2),
    ],
)
def test_the_first_of_the_best_rounds_is_kept(metric, values, best, monkeypatch):
    config = load_config(None, (f"--run.keep=best:{metric}",))
    monkeypatch.setattr(keeping, "copied", lambda experiment, state: state)
    kept, experiment = None, SimpleNamespace(config=config)
    for i, value in enumerate(values):
        state = SimpleNamespace(round=i + 1)
        kept = keeping.better(experiment, kept, {metric: value}, state)
    assert (kept.round, kept.value, kept.state.round) == (best, values[best - 1], best)


def test_directions_are_those_of_the_names():
    larger = ("test_accuracy", "worst_tenth_accuracy", "client_accuracy_q10", "unseen_f1")
    larger += ("test_auc", "mean_client_r2")
    smaller = ("test_loss", "client_test_loss_after_local", "accuracy_disparity", "test_perplexity")
    smaller += ("worst_tenth_mae", "test_mse")
    assert all(loss_of(name, 0.25) == -0.25 for name in larger)
    assert all(loss_of(name, 0.25) == 0.25 for name in smaller)
    refused = ("std_client_accuracy", "unseen_std_client_accuracy", "epsilon_record", "mine")
    refused += ("clients_without_f1", "unseen_clients_without_auc", "test_confusion")
    for name in refused:
        config = load_config(None, (f"--run.keep=best:{name}",))
        with pytest.raises(ValueError, match=f"run.keep must name a metric .* got 'best:{name}'"):
            checked_config(config)


@telling
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--run.keep=best:train_loss",),
            "the metric of run.keep must be one of .*test_accuracy.* got 'train_loss'",
        ),
        (("--run.keep=best:unseen_accuracy",), "metric of run.keep must be one of .*did you mean"),
        (
            ("--run.callbacks.early_stopping.metric=tset_loss",),
            r"early_stopping\.metric must be one of .*num_participants.*did you mean 'test_loss'",
        ),
        (
            (f"{PLATEAU}, metric = 'update_norm_quantiles'}}",),
            r"schedules\.training\.learning_rate\.metric must be one of .*train_loss",
        ),
        (
            (
                *("--run.keep=best:test_accuracy", "--execution.placement=disk"),
                *("--algorithm.name=local_only", "--privacy.unit=none"),
            ),
            "run.keep must be 'last' for client states on disk",
        ),
        (
            ("--run.keep=best:test_accuracy", "--run.secret=true", "--run.release=private"),
            "run.keep must be 'last' if run.release is 'private'",
        ),
    ],
)
def test_refusals(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(load_config(None, (*SMALL, *words)), tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize("word", ["best", "best:", "first", "best:a b"])
def test_words_that_name_no_round_are_refused(word):
    with pytest.raises(ValueError, match=r"run\.keep must be a kept round, as"):
        load_config(None, (f"--run.keep={word}",))
