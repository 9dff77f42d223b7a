"""Noise for as many rounds as clients are drawn in, and clients that are left out of others."""

import re

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from marks import telling
from run_folders import SMALL, assert_same_run, die_and_resume, execute, metrics, read_json
from scipy import stats

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import (
    checked_config,
    federation_of,
    parts_of,
    population_of,
)

pytestmark = pytest.mark.usefixtures("no_pictures")

KEY = "privacy.record.planned_participations"
DRAWN = ("--participation.sampler=poisson", "--participation.cohort_size=1.5")
TWELVE = (SMALL[0], "--run.rounds=12", "--execution.clients_per_chunk=1")
PLANNED = (*TWELVE, *DRAWN, f"--{KEY}=3")


def spent(size, noise, rounds, dp_delta=1e-5):
    accountant = rdp.RdpAccountant()
    steps, rate = int(np.ceil(size / 64)), min(1.0, 64 / size)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, int(rounds) * steps)
    return accountant.get_epsilon(dp_delta)


@pytest.mark.parametrize(
    ("value", "count"), [("3", 3), ("q0.9", stats.binom.ppf(0.9, 12, 0.5)), ("none", 12)]
)
def test_noise_is_calibrated_for_planned_participations(value, count):
    config = load_config(None, (*TWELVE, *DRAWN, f"--{KEY}={value}"))
    parts = parts_of(config)
    sizes, noise = parts.population.train.sizes, parts.algorithm.hyper.local.noise_multiplier
    for size, z in zip(sizes, noise, strict=True):
        assert spent(size, z, count) == pytest.approx(8.0, rel=2e-3)
    names = [wrapper.name for wrapper in federation_of(config, parts.population).wrappers]
    assert names == ([] if value == "none" else ["within_budgets"])


@telling
def test_a_run_leaves_out_clients_and_says_so(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = (*PLANNED, "--run.checkpoint_every=2")
    status, text = execute(whole, *words)
    assert status == 0
    sizes = population_of(load_config(whole / "config.toml")).train.sizes
    claim, rows = read_json(whole, "privacy.json")["claims"][0], metrics(whole)
    steps = np.ceil(sizes / 64)
    rounds = np.array(claim["num_compositions"]) / steps
    assert max(rounds) == 3 and claim["planned"] == {"count": 3, "share": None}
    for size, noise, count, epsilon in zip(
        sizes, claim["noise_multiplier_per_unit"], rounds, claim["epsilon_per_unit"], strict=True
    ):
        assert epsilon == pytest.approx(spent(size, noise, count), rel=2e-3)
        assert epsilon <= 8 * (1 + 1e-9)
    said = (whole / "privacy.md").read_text("utf-8")
    assert "The noise was calibrated for 3 rounds of a client. A client is left out of each" in said
    assert "as if every client took part" not in said
    assert "3$ rounds of a client" in (whole / "privacy.tex").read_text("utf-8")
    out = [row["num_out_of_budget"] for row in rows]
    assert out == sorted(out) and out[-1] == np.sum(rounds == 3)
    summary = read_json(whole, "summary.json")
    # No client has a round left before the last one: the run ends.
    assert out[-1] == 3 and summary["ended"] == "budget" and summary["rounds"] < 12
    assert "one more would exceed the budget" in text
    die_and_resume(broken, 3, *words)
    assert_same_run(broken, whole)


SEPARATED = ("--participation.sampler=min_separated", "--participation.separation=6")
MASKS = ("--participation.sampler=fixed_size", "--participation.cohort_size=2")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ((*DRAWN, f"--{KEY}=13"), "must be at most 12, the rounds of a client in run.rounds = 12"),
        ((*DRAWN, f"--{KEY}=0"), "must be an integer of at least 1"),
        ((*DRAWN, f"--{KEY}=q1"), 'a quantile between "q0" and "q1", such as "q0.95"'),
        ((*DRAWN, f"--{KEY}=0.5"), "must be an integer of at least 1"),
        (
            (*PLANNED, "--privacy.record.noise_multiplier=2"),
            "be left out with privacy.record.noise_multiplier, which leaves nothing to calibrate",
        ),
        (
            (*PLANNED, "--privacy.unit=both", "--algorithm.name=dp_fedavg"),
            "must be left out: its participation must charge those alone that are drawn",
        ),
        (
            (*PLANNED, "--privacy.unit=client", "--algorithm.name=dp_fedavg"),
            "must be left out, since privacy.unit = 'client' does not protect a record",
        ),
        ((*SEPARATED, f"--{KEY}=3"), "must be at most 2, the rounds of a client"),
        (
            (*MASKS, f"--{KEY}=3", "--secure_aggregation.form=masked"),
            "must be left out: its aggregator must have no masks",
        ),
        (
            (*MASKS, f"--{KEY}=3", "--asynchronous.concurrency=3"),
            "asynchronous.concurrency must be left out with privacy.record.planned_participations",
        ),
    ],
)
def test_what_has_no_effect_or_no_guarantee_is_refused(words, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        checked_config(load_config(None, tuple(dict.fromkeys((*TWELVE, *words)))))


def test_noise_that_changes_over_rounds_is_refused():
    config = load_config(None, (*PLANNED, "--schedules.privacy.record.noise_multiplier=cosine"))
    with pytest.raises(ValueError, match=f"{KEY} must be left out with schedules of local.noise"):
        parts_of(config)


def test_rounds_of_several_prices_are_refused():
    config = load_config(
        None, (*PLANNED, "--algorithm.name=f_cdpfl", "--algorithm.options.num_models=2")
    )
    with pytest.raises(ValueError, match=f"{KEY} must be left out: the algorithm must have rounds"):
        parts_of(config)
