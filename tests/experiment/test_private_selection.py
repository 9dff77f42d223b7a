"""A private selection: random trials, the best of them, and ε that covers the choice."""

import json

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from marks import slow, telling
from run_folders import SMALL, dying_after, read_json

import fedjax_dp as fdp
from fedjax_dp.engine.cohorts import Cohorts
from fedjax_dp.engine.evaluation import Evaluator
from fedjax_dp.experiment import Study, assemble, grid_points, load_config
from fedjax_dp.experiment.studies.selection import (
    _differs,
    _require_selectable,
    select_privately,
)
from fedjax_dp.privacy.accounting.renyi import orders_of
from fedjax_dp.privacy.mechanisms.selection import Repetition, repetition

ROUNDS = 3
STATEMENT = {f"privacy.{kind}" for kind in ("json", "md", "tex", "bib")}
RELEASED = {"model.safetensors", "config.toml", "environment.json"}
WORDS = (
    *(SMALL[0], "--execution.devices=1", "--participation.sampler=poisson"),
    *("--participation.cohort_size=2", "--privacy.unit=client", "--algorithm.name=dp_fedavg"),
    *("--privacy.client.epsilon=none", "--privacy.client.noise_multiplier=1.5"),
    *(f"--run.rounds={ROUNDS}", "--run.secret=true", "--run.release=private"),
    "--data.client_test_share=0",
)
STUDY = Study(
    name="digits",
    file=None,
    axes={"rate": {rate: (f"--training.learning_rate={rate}",) for rate in ("1e-6", "0.5")}},
    rows="rate",
    columns="rate",
    metrics={"test_accuracy": 1.0},
)


class Three(Repetition):
    """Three trials, whatever is drawn."""

    def draw(self, uniform=None):
        return 3


def chosen(output, words=WORDS, trials=Three(3.0, 1.0), study=STUDY):
    return select_privately(study, grid_points(study, words=words), output, trials, lambda _: None)


@telling
def test_the_best_trial_is_released_with_the_cost_of_the_choice(tmp_path):
    choice = chosen(tmp_path)
    drawn = json.loads((tmp_path / "trials.json").read_text())
    assert (tmp_path / "trials.json").stat().st_mode & 0o777 == 0o600
    assert len(drawn["drawn"]) == 3
    scores = [read_json(tmp_path / f"trial-{i:04d}", "summary.json") for i in (1, 2, 3)]
    best = int(np.argmax([each["test_accuracy"] for each in scores]))
    assert choice.trial.name == f"trial-{best + 1:04d}"
    assert read_json(choice.folder, "setting.json") == choice.point.values
    held = {path.name for path in choice.folder.iterdir()}
    assert held == {"setting.json", *STATEMENT} | RELEASED
    # The list of files and the statement name those that are there.
    assert read_json(choice.folder, "privacy.json")["files"].keys() == held
    said = (choice.folder / "privacy.md").read_text("utf-8")
    assert "partition." not in said and "budget" not in said
    model = (choice.folder / "model.safetensors").read_bytes()
    assert model == (choice.trial / "release" / "model.safetensors").read_bytes()
    # By hand: cohorts of 2 of 3 clients, and a noise multiplier of 1.5.
    one = dpa.PoissonSampledDpEvent(2 / 3, dpa.GaussianDpEvent(1.5))
    account = RdpAccountant(orders_of("rdp"))
    account.compose(RepeatAndSelectDpEvent(dpa.SelfComposedDpEvent(one, ROUNDS), 3.0, 1.0))
    (claim,) = read_json(choice.folder, "privacy.json")["claims"]
    np.testing.assert_allclose(claim["epsilon"], account.get_epsilon(claim["dp_delta"]), rtol=1e-9)
    assert choice.epsilon == {"client": claim["epsilon"]}
    text = (choice.folder / "privacy.md").read_text()
    assert "the best by test_accuracy of a random number of runs" in text
    assert claim["trusted"] == "selection" and "those who run the trials are trusted" in text
    # Roots differ, so that two trials of one setting do.
    assert len({each["test_loss"] for each in scores}) == 3


@slow
def test_an_interrupted_selection_resumes_the_trials_that_it_drew(tmp_path):
    with dying_after(2):
        chosen(tmp_path)
    drawn = (tmp_path / "trials.json").read_text()
    assert chosen(tmp_path).trial.name.startswith("trial-")
    assert (tmp_path / "trials.json").read_text() == drawn
    with pytest.raises(ValueError, match="as when the selection began"):
        chosen(tmp_path, trials=repetition(7))


@telling
@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--run.release=none",), "must have run.release = 'private'"),
        (("--run.callbacks.early_stopping.patience=2",), "must have no callbacks"),
        (("--privacy.accountant=pld",), "privacy.accountant must be"),
        (
            ("--evaluation.noise_multiplier=2", "--data.client_test_share=0.2"),
            "evaluation.noise_multiplier must be none for a private selection",
        ),
        (
            ("--participation.sampler=min_separated", "--participation.cohort_size=1"),
            "must draw clients without chance, or charge all: .* got 'min_separated'",
        ),
    ],
)
def test_a_selection_without_an_analysis_is_refused_before_any_trial(tmp_path, words, rule):
    keys = {word.partition("=")[0] for word in words}
    kept = [word for word in WORDS if word.partition("=")[0] not in keys]
    with pytest.raises(ValueError, match=rule):
        chosen(tmp_path / "trials", (*kept, *words))
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize(
    ("sampler", "differs"),
    [(fdp.poisson(), False), (fdp.cyclic(), False), (fdp.min_separated(1), True)],
)
def test_a_root_decides_who_pays_where_those_drawn_at_random_pay_alone(sampler, differs):
    cohorts = Cohorts(fdp.participation(sampler, 4, cohort_size=2), None, None)
    assert _differs(cohorts) == differs
    # Of a wrapper's draw nothing is known.
    assert _differs(cohorts.given(lambda *given: None))


@telling
def test_models_without_a_common_test_set_have_no_score():
    experiment = assemble(load_config(None, WORDS))
    _require_selectable(experiment)
    for evaluator in (Evaluator(None, None), experiment.evaluator._replace(is_personal=True)):
        with pytest.raises(ValueError, match="test part, which clients do not hold"):
            _require_selectable(experiment._replace(evaluator=evaluator))
    exact = experiment.population._replace(exact_statistics=("means of columns",))
    with pytest.raises(ValueError, match="no ε covers means of columns"):
        _require_selectable(experiment._replace(population=exact))
    of_clients = experiment.population._replace(is_test_of_clients=True)
    with pytest.raises(ValueError, match="must protect records alone where"):
        _require_selectable(experiment._replace(population=of_clients))


@telling
def test_settings_of_other_costs_are_refused(tmp_path):
    axes = {"noise": {z: (f"--privacy.client.noise_multiplier={z}",) for z in ("1", "2")}}
    words = [w for w in WORDS if "noise_multiplier" not in w]
    with pytest.raises(ValueError, match="a trial of noise=2 must cost what noise=1 costs"):
        chosen(tmp_path, words, study=STUDY._replace(axes=axes, rows="noise", columns="noise"))
