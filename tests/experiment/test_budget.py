"""Budgets, units of privacy and samplers of clients, as the command line runs them."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from marks import telling
from run_folders import SMALL, assert_same_run, die_and_resume, execute, metrics, read_json
from typer.testing import CliRunner

from fedjax_dp.cli import privacy
from fedjax_dp.experiment.assembly.assemble import population_of
from fedjax_dp.experiment.reading.config_files import load_config

SEQUENTIAL = "--execution.clients_per_chunk=1"
DP_FEDAVG = ("--privacy.unit=client", "--algorithm.name=dp_fedavg", SEQUENTIAL)

pytestmark = pytest.mark.usefixtures("no_pictures")


def gaussian(noise_multiplier):
    return dp_accounting.GaussianDpEvent(noise_multiplier)


def poisson(rate, noise_multiplier):
    return dp_accounting.PoissonSampledDpEvent(rate, gaussian(noise_multiplier))


def epsilon_of(event, count, dp_delta=1e-5, accountant=rdp.RdpAccountant):
    composed = accountant()
    composed.compose(event, int(count))
    return composed.get_epsilon(dp_delta)


@telling
def test_a_run_stops_before_its_budget_is_exceeded(tmp_path):
    """The noise is given and too small for 20 rounds: as many run as dp-accounting allows."""
    folder, noise, budget = tmp_path / "run", 3.0, 1.5
    words = (f"--privacy.record.noise_multiplier={noise}", f"--privacy.record.epsilon={budget}")
    status, text = execute(
        folder, *SMALL, "--run.rounds=20", "--run.evaluate_every=4", SEQUENTIAL, *words
    )
    config = load_config(folder / "config.toml")
    sizes = population_of(config).train.sizes
    steps, rates = np.ceil(sizes / 64), np.minimum(1.0, 64 / sizes)

    def spent(rounds):
        return max(
            epsilon_of(poisson(q, noise), rounds * n) for q, n in zip(rates, steps, strict=True)
        )

    allowed = max(r for r in range(21) if r == 0 or spent(r) <= budget)
    assert 1 <= allowed < 20
    assert status == 0
    assert f"stopped after round {allowed}: one more would exceed the budget" in text
    summary, rows = read_json(folder, "summary.json"), metrics(folder)
    assert summary["rounds"] == len(rows) == allowed and summary["ended"] == "budget"
    assert summary["epsilon"] == pytest.approx(spent(allowed), rel=1e-6)
    assert summary["epsilon"] <= budget < spent(allowed + 1)
    assert rows[-1]["test_accuracy"] == summary["test_accuracy"]
    again, _ = execute(folder, resume=True)
    assert again == 0 and read_json(folder, "summary.json")["rounds"] == allowed


@pytest.mark.slow
def test_clients_choose_their_own_delta(tmp_path):
    """Clients 0 and 2 differ from 1 in δ; each has the noise of its budget, and keeps it."""
    deltas = [1e-3, 1e-7, 1e-5]
    words = (f"--privacy.record.dp_delta={deltas}", "--privacy.record.epsilon=4")
    words = (*words, "--training.batch_size=1000000", "--training.num_steps=1")
    words = (*words, "--run.checkpoint_every=1")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    status, text = execute(whole, *SMALL, SEQUENTIAL, *words)
    assert status == 0 and "ε = 4 at δ = 1e-07 to 0.001" in text
    claim = read_json(whole, "privacy.json")["claims"][0]
    noise = claim["noise_multiplier_per_unit"]
    # All clients release the same, whole batches: what remains between them is δ.
    for z, delta, epsilon in zip(noise, deltas, claim["epsilon_per_unit"], strict=True):
        assert epsilon == pytest.approx(epsilon_of(gaussian(z), 2, delta), rel=1e-6)
        assert epsilon <= 4 and epsilon == pytest.approx(4, rel=1e-5)
    assert noise[0] < noise[2] < noise[1]
    assert claim["dp_delta_per_unit"] == deltas and claim["dp_delta"] == max(deltas)
    summary = read_json(whole, "summary.json")
    assert (summary["dp_delta_smallest"], summary["dp_delta"]) == (1e-7, 1e-3)
    report = CliRunner().invoke(privacy.app, ["report", str(whole)], catch_exceptions=False)
    assert "Every unit chose its own δ, from 1e-07 to 0.001" in report.stdout
    assert "| 1 | 4 | 2 | 1e-07 |" in report.stdout

    die_and_resume(broken, 2, *SMALL, SEQUENTIAL, *words)
    assert_same_run(broken, whole)


def ran(folder, *words):
    """Runs three clients; gives the claim of one unit, the clients' sizes and what was printed."""
    status, text = execute(folder, *SMALL, SEQUENTIAL, *words)
    assert status == 0
    sizes = population_of(load_config(folder / "config.toml")).train.sizes
    return read_json(folder, "privacy.json")["claims"][0], sizes, text


def by_client(claim, sizes):
    """Size, releases, noise and ε of each client."""
    return zip(
        sizes,
        claim["num_compositions"],
        claim["noise_multiplier_per_unit"],
        claim["epsilon_per_unit"],
        strict=True,
    )


@pytest.mark.slow
def test_a_client_does_not_pay_for_rounds_that_it_sat_out(tmp_path):
    """The run continues until one more round might exceed the budget of one of its clients."""
    folder, noise, budget = tmp_path / "run", 3.0, 1.5
    words = (f"--privacy.record.noise_multiplier={noise}", f"--privacy.record.epsilon={budget}")
    words = (*words, "--participation.sampler=poisson", "--participation.cohort_size=1.5")
    claim, sizes, text = ran(folder, "--run.rounds=50", *words)
    assert "one more would exceed the budget" in text
    steps, rates = np.ceil(sizes / 64), np.minimum(1.0, 64 / sizes)
    taken_part = np.array(claim["num_compositions"]) / steps
    after = [
        epsilon_of(poisson(q, noise), n * (r + 1))
        for q, n, r in zip(rates, steps, taken_part, strict=True)
    ]
    assert claim["epsilon"] <= budget < max(after)
    one_after_another = min(
        next(r for r in range(50) if epsilon_of(poisson(q, noise), n * (r + 1)) > budget)
        for q, n in zip(rates, steps, strict=True)
    )
    assert read_json(folder, "summary.json")["rounds"] > one_after_another


@pytest.mark.slow
def test_both_units_are_protected_and_accounted_at_once(tmp_path):
    """Poisson cohorts amplify for clients, and never for records."""
    folder = tmp_path / "run"
    words = (
        *("--run.rounds=4", "--privacy.unit=both", "--algorithm.name=dp_sgd"),
        *("--participation.sampler=poisson", "--participation.cohort_size=1.5"),
        *("--privacy.record.epsilon=6", "--privacy.client.epsilon=3"),
        "--privacy.client.dp_delta=1e-4",
    )
    _, sizes, text = ran(folder, *words)
    assert "(record)" in text and "(client)" in text
    claims = {c["unit"]: c for c in read_json(folder, "privacy.json")["claims"]}
    assert sorted(claims) == ["client", "record"]
    client, record = claims["client"], claims["record"]
    summary, rows = read_json(folder, "summary.json"), metrics(folder)
    assert summary["rounds"] == 4
    assert summary["epsilon"] == max(summary["epsilon_record"], summary["epsilon_client"])
    expected = epsilon_of(poisson(1.5 / 3, client["noise_multiplier"][0]), 4, 1e-4)
    assert client["epsilon"] == pytest.approx(expected, rel=1e-6)
    assert client["epsilon"] <= 3 and client["epsilon"] == pytest.approx(3, rel=1e-5)
    assert client["dp_delta"] == 1e-4 and client["num_compositions"] == [4]
    assert client["trusted"] == "server" and client["clip_norm"] == 1.0
    for size, n, z, e in by_client(record, sizes):
        # All four rounds, drawn or not: that amplifies the privacy of clients.
        assert n == 4 * np.ceil(size / 64)
        assert e == pytest.approx(epsilon_of(poisson(min(1.0, 64 / size), z), n), rel=1e-6)
    assert record["epsilon"] <= 6 and record["trusted"] == "client"
    assert len({row["num_participants"] for row in rows}) > 1


def truncated(z):
    return dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
        dataset_size=3, sampling_probability=1 / 3, truncated_batch_size=2, noise_multiplier=z
    )


@pytest.mark.slow
def test_truncated_cohorts_are_charged_with_amplification(tmp_path):
    words = [f"--participation.{w}" for w in ("sampler=poisson", "cohort_size=1", "capacity=2")]
    claim, *_ = ran(tmp_path / "run", *words, *DP_FEDAVG[:2], "--privacy.accountant=pld")
    event = truncated(claim["noise_multiplier"][0])
    expected = epsilon_of(event, 2, accountant=pld.PLDAccountant)
    # Lattices of different widths agree to what either may add.
    assert claim["epsilon"] == pytest.approx(expected, rel=1e-4)
    assert claim["epsilon"] <= 8 and claim["epsilon"] == pytest.approx(8, rel=1e-4)
    assert claim["samplers"] == ["Poisson sampling truncated to a capacity"]


@pytest.mark.slow
def test_correlated_noise_uses_its_budget_and_no_more(tmp_path):
    words = ("--privacy.client.mechanism=correlated_gaussian", "--privacy.client.bands=2")
    turns = ("sampler=min_separated", "separation=2", "cohort_size=1")
    words = (*words, *(f"--participation.{word}" for word in turns))
    claim, _, text = ran(tmp_path / "run", "--run.rounds=4", *DP_FEDAVG[:2], *words)
    summary = read_json(tmp_path / "run", "summary.json")
    assert "exceed the budget" not in text and summary["rounds"] == 4
    assert claim["epsilon"] <= 8 and claim["epsilon"] == pytest.approx(8, rel=1e-4)
    assert claim["trusted"] == "server"


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["poisson", "fixed_size"])
def test_replacing_a_record_is_accounted_by_dp_accounting(tmp_path, sampler):
    is_fixed = sampler == "fixed_size"
    words = ("--privacy.relation=replace_one", f"--training.sampler={sampler}")
    words = (*words, f"--privacy.accountant={'rdp' if is_fixed else 'pld'}")
    claim, sizes, _ = ran(tmp_path / "run", *words)
    assert claim["relation"] == "replace_one" and claim["epsilon"] <= 8
    named = {"poisson": "Poisson sampling", "fixed_size": "fixed-size sampling without replacement"}
    assert claim["samplers"] == [named[sampler]]
    of_one = dp_accounting.NeighboringRelation.REPLACE_ONE
    # Distributions take long, and are composed for one client.
    for size, n, z, e in list(by_client(claim, sizes))[: None if is_fixed else 1]:
        account = (rdp.RdpAccountant if is_fixed else pld.PLDAccountant)(
            neighboring_relation=of_one
        )
        # Replacing moves a sum by twice the bound, to which z is relative.
        event = poisson(min(1.0, 64 / size), z)
        if is_fixed:
            event = dp_accounting.SampledWithoutReplacementDpEvent(int(size), 64, gaussian(z / 2))
        account.compose(event, n)
        # Lattices of different widths agree to what either may add.
        assert e == pytest.approx(account.get_epsilon(1e-5), rel=1e-6 if is_fixed else 1e-4)
        assert not is_fixed or (e <= 8 and e == pytest.approx(8, rel=1e-5))


@pytest.mark.slow
def test_no_noise_is_no_privacy_and_said_so(tmp_path):
    folder = tmp_path / "run"
    words = ("--privacy.record.noise_multiplier=0", "--privacy.record.epsilon=none")
    status, text = execute(folder, *SMALL, SEQUENTIAL, *words)
    assert status == 0 and "ε = inf" in text
    assert read_json(folder, "summary.json")["epsilon"] == "inf"
    assert read_json(folder, "privacy.json")["claims"][0]["epsilon"] == "inf"
    assert "not differentially private" in (folder / "privacy.md").read_text(encoding="utf-8")
