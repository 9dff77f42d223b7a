"""Asynchronous rounds by configuration: what is refused, what a run writes, what noise costs."""

import pytest
from marks import telling
from run_folders import SMALL, execute, metrics, read_json

from fedjax_dp.experiment.assembly import population

FEDAVG = ("--privacy.unit=none", "--algorithm.name=fedavg")
CLOCK = (
    "--clock.places=['here']",
    "--clock.seconds=[[0.1]]",
    "--clock.server=here",
    "--clock.clients=['here']",
)
ON = ("--asynchronous.concurrency=2",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--asynchronous.discount=1",), "asynchronous.discount must be left out without an"),
        (ON, "asynchronous.concurrency must be left out without a clock"),
        ((*CLOCK, *ON, "--clock.deadline=2"), "clock.deadline must be left out with asynchronous"),
        (
            (*CLOCK, *ON, "--clock.dropout=0.1"),
            "clock.dropout must be left out with asynchronous rounds, for which it is not built",
        ),
        (
            (*CLOCK, *ON, "--participation.sampler=poisson"),
            "participation.sampler must be of fixed_size(), full_participation() or min_",
        ),
        (
            (*CLOCK, *ON, "--communication.servers=[0, 1]"),
            "asynchronous.concurrency must be left out with communication.servers",
        ),
        ((*CLOCK, "--asynchronous.concurrency=0"), "asynchronous.concurrency must be"),
    ],
)
def test_a_bad_section_is_refused_before_data_are_read(tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(population.datasets, "load", None)
    with pytest.raises(ValueError) as error:
        execute(tmp_path / "run", *SMALL, *FEDAVG, *words)
    assert message in str(error.value)


def test_privacy_of_clients_needs_cohorts_that_amplify_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(population.datasets, "load", None)
    private = ("--privacy.unit=client", "--algorithm.name=dp_fedavg")
    drawn = ("--participation.sampler=fixed_size", "--participation.cohort_size=2")
    relation = ("--privacy.relation=replace_one",)
    with pytest.raises(ValueError, match=r"participation\.sampler must be min_separated"):
        execute(tmp_path / "run", *SMALL, *private, *drawn, *relation, *CLOCK, *ON)


@telling
def test_a_budget_is_spent_by_the_updates_that_a_client_may_send(tmp_path):
    """Six rounds of one update each of three clients, who may send two."""
    words = (
        *("--data.num_clients=3", "--run.rounds=6", "--run.evaluate_every=3"),
        *("--privacy.unit=client", "--algorithm.name=dp_fedavg"),
        *("--participation.sampler=min_separated", "--participation.cohort_size=1"),
        *(*CLOCK, "--clock.per_step=0.1", "--clock.jitter=0.3", *ON),
        *("--asynchronous.max_participations=2", "--asynchronous.max_staleness=3"),
    )
    execute(tmp_path / "run", *words)
    summary = read_json(tmp_path / "run", "summary.json")
    assert summary["epsilon"] <= 8 and summary["epsilon"] == pytest.approx(8, rel=1e-2)
    rows = metrics(tmp_path / "run")
    seconds = [row["simulated_seconds"] for row in rows if "simulated_seconds" in row]
    assert seconds == sorted(seconds) and max(row["staleness_max"] for row in rows) > 0


@telling
def test_rates_may_change_over_asynchronous_rounds_and_numbers_of_steps_may_not(tmp_path):
    words = (*SMALL, *FEDAVG, *CLOCK, "--asynchronous.concurrency=3", "--clock.per_step=1")
    rate = "--schedules.training.learning_rate={curve = 'list', factors = [1, 0]}"
    assert not execute(tmp_path / "run", *words, rate, "--run.plots=false")[0]
    rows = metrics(tmp_path / "run")
    norms = [row["update_norm_quantiles"][-1] for row in rows]
    assert norms[0] > 0 == norms[1]
    steps = "--schedules.training.num_epochs={curve = 'list', factors = [1, 2]}"
    with pytest.raises(ValueError, match=r"in round 1, hyper\.local must"):
        execute(tmp_path / "steps", *words, steps)
