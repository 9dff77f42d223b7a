"""The study of oblivious noise: its rounds against NumPy, its noise, its table and figures."""

import csv
import json

import dp_accounting
import numpy as np
import pytest
from drawn import flaws
from marks import slow, telling
from scipy import integrate
from scipy.special import expit

from experiments.secure_aggregation import adult, audited, colluders, costs, study
from fedjax_dp import engine
from fedjax_dp.io import plots
from fedjax_dp.server import secure


def two_copies():
    """A pool of 200 rows twice: any draw of 200 rows at one distance is all of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5))
    x /= np.linalg.norm(x, axis=1, keepdims=True) * (1 + 1e-6)
    y = (rng.uniform(size=200) < expit(4 * x[:, 0])).astype(np.int32)
    return np.tile(x, (2, 1)).astype(np.float32), np.tile(y, 2), x.astype(np.float32), y


def test_rounds_without_noise_are_those_of_numpy():
    split = two_copies()
    x, y = split[0][:200].astype(np.float64), split[1][:200]
    w, rate = np.zeros(5), 2 / (0.25 + 2e-3)
    scores = []
    for _ in range(adult.ROUNDS):
        for _ in range(50):
            w -= rate * ((expit(x @ w) - y) @ x / 200 + 1e-3 * w)
        said = x @ w > 0
        # All parties have the same model; MCC is the correlation of 0/1 variables.
        scores.append(np.corrcoef(y, said)[0, 1])
    sim = adult.federation_of(*split[:2], 3)
    found = adult.run(sim, 3, None, 0, split)
    # They are written with four digits.
    np.testing.assert_allclose(found["mcc"], scores, atol=5.1e-5)
    assert found["model_norm"] == pytest.approx(np.linalg.norm(w), rel=1e-4)
    noised = adult.run(sim, 3, ("corrected", 1.0), 0, split)
    assert noised["average_noise_stddev"] == pytest.approx(np.sqrt(2 / 3) * 10)
    assert noised["round_epsilon"] == pytest.approx(np.sqrt(5))
    assert noised["model_norm"] > found["model_norm"]


def test_the_printed_noise_is_worth_what_the_training_makes_of_it():
    # 2/(n·k·ε) for n = 100, k = 200, ε = 1e-5; a sum moves by 2/(200·0.001) = 10.
    noise = adult.shares_of(100, 1e-5, "printed")
    assert noise.scale == pytest.approx(10.0)
    assert noise.coordinate_epsilon == pytest.approx(1.0)
    assert adult.shares_of(100, 2.0, "corrected").coordinate_epsilon == pytest.approx(2.0)


def test_the_error_of_a_sum_is_that_of_its_characteristic_function():
    """E|X| = (2/π) ∫ (1 − (1 + t²)⁻ⁿ)/t² dt over t > 0, of n Laplace numbers of scale 1."""
    for n in (1, 2, 7, 100):
        value, _ = integrate.quad(lambda t, n=n: (1 - (1 + t * t) ** -n) / t**2, 0, np.inf)
        assert costs.mean_error(n) == pytest.approx(2 * value / np.pi, rel=1e-6)
    assert costs.measured_error(5, 0) == pytest.approx(costs.mean_error(5), rel=0.06)


def test_seconds_of_a_run_add_up():
    parts = {"dh_setup": 200.0, "training": 7.0, "encryption": 3.0, "server": 20.0}
    # London is at 35 ms one way: keys of 200 ms, then 20 rounds of 10 ms of work and 20 ms of sum.
    by_hand = 3 * 0.035 + 0.2 + 20 * (2 * 0.035 + 0.01 + 0.02)
    assert costs.simulated_seconds(3, parts, ["London"]) == pytest.approx(by_hand)
    assert costs.printed()[200] == {
        "server": 20.3,
        "dh_setup": 193.0,
        "training": 7.5,
        "encryption": 2.9,
    }


def test_a_plan_that_leaves_colluders_out_is_not_stated():
    graph = secure.all_pairs(
        audited.CLIENTS, colluders=audited.COLLUDERS, dropouts=audited.DROPOUTS
    )
    good, bad = (audited.plan_of(1.5, counts_colluders=counts) for counts in (True, False))
    assert secure.masking_facts(graph, good)["colluders"] == 26
    with pytest.raises(ValueError, match=r"plan\.colluders must be at least the 26 of the graph"):
        secure.masking_facts(graph, bad)
    # Two shares stay of the 28 that `bad` counts on.
    assert (good.num_shares, bad.num_shares) == (2, 28)
    assert bad.share_stddev * bad.granularity == pytest.approx(1.5 / 28**0.5)


@telling
def test_masks_are_among_ordinary_and_planted_clients(monkeypatch):
    """A graph of more clients than the data have without canaries."""
    bound = []

    def unplayed(planted, key, *, wrapper, **counts):
        bound.append(engine.federation(planted.algorithm, planted.data, planted.participation))
        raise StopIteration

    monkeypatch.setattr(audited.audit, "run_audit", unplayed)
    with pytest.raises(StopIteration):
        audited.run(2.0, 1, 1, 0, counts_colluders=True)
    assert bound[0].population.num_clients == audited.CLIENTS


@pytest.mark.parametrize("cohorts", ["fixed", "poisson"])
def test_two_shares_stay_of_the_smallest_round_that_is_not_lost(cohorts):
    graph = audited.graph_of(cohorts)
    good, bad = (
        audited.plan_of(1.5, counts_colluders=counts, cohorts=cohorts) for counts in (True, False)
    )
    assert graph.num_clients - audited.DROPOUTS - graph.colluders == good.num_shares == 2
    assert bad.num_shares == 2 + graph.colluders == audited.CLIENTS - 4 - audited.SPARE[cohorts]


@slow
@pytest.mark.parametrize("cohorts", ["fixed", "poisson"])
def test_colluders_prove_more_than_is_claimed_if_the_noise_counts_their_shares(cohorts):
    """One claim, of two rounds of multiplier 2: it holds for what two clients' shares add up to."""
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(2.0), 2)
    for counts_colluders in (True, False):
        results = audited.run(2.0, 300, 2, 0, counts_colluders=counts_colluders, cohorts=cohorts)
        for one in results:
            assert one["form"] == "masked"
            expected = accountant.get_epsilon(one["dp_delta"])
            assert one["epsilon_claimed"] == pytest.approx(expected, rel=1e-3)
        found = {one["dp_delta"]: one for one in results if one["method"] == "threshold"}[0.1]
        assert (found["epsilon_proven"] > found["epsilon_claimed"]) is not counts_colluders
        assert any(one["is_violated"] for one in results) is not counts_colluders


def test_the_collusion_table_has_our_figures_beside_the_printed_ones(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.__setitem__(path.name, figure))
    study.main(["collusion", "--parties", "6", "--trials", "300", "--output", str(tmp_path)])
    text = (tmp_path / "collusion.md").read_text("utf-8")
    with colluders.PAPER.open(encoding="utf-8") as file:
        values = [r["value"] for r in csv.DictReader(file) if r["metric"] == "r2_of_attack"]
    assert values == ["0.894", "0.164"]
    assert "| 0.894 | 0.894 |" in text and "at most 0.164" in text
    assert not flaws(drawn["collusion.png"])


def test_curves_of_scores_can_be_read():
    one = {"mcc": list(np.linspace(0, 0.5, 20)), "num_parties": 50}
    kinds = [(None, None), ("printed", 1e-5), ("corrected", 1.0)]
    results = [
        {**one, "calibration": c, "epsilon": e, "num_parties": n} for c, e in kinds for n in (5, 50)
    ]
    assert not flaws(adult.draw(results))


@telling
def test_clients_without_a_server_do_better_than_alone_on_average(tmp_path):
    study.main(["serverless", "--iterations", "2", "--output", str(tmp_path)])
    result = json.loads((tmp_path / "serverless.json").read_text("utf-8"))
    for row in result["accuracy"]:
        assert row["federated"] > np.mean(row["personal"]) > 0.2
        assert row["messages"] == 6 and row["seconds"] == pytest.approx(6.0)
    for row in result["times"]:
        if row["paper"] == "dropped":
            assert row["ours"] is None and np.isnan(row["serverless"])
        else:
            assert 0 < float(row["paper"]) - row["ours"] < 0.0101
    text = (tmp_path / "serverless.md").read_text("utf-8")
    assert (
        "| 3 | Singapore | dropped |  |  |" in text
        and "| 3 | NYC | 0.709 | 0.700 | 0.200 |" in text
    )


def test_the_adult_table_has_the_thesis_figures_beside_ours():
    """1,000 parties: a relative loss of 0.0052/0.52 = 0.01 in MCC."""
    one = {"num_parties": 1000, "mcc": [0.5, 0.52]}
    one |= {"first_round_seconds": 1.0, "other_rounds_seconds": 2.0}
    one |= {"other_rounds_cpu_seconds": 1.5, "calibration": None, "epsilon": None}
    noised = {"calibration": "printed", "epsilon": 5e-4, "mcc": [0.5, 0.5148]}
    small = {"num_parties": 100, "calibration": "printed", "epsilon": 1e-5}
    text = adult.as_markdown([one, one | noised, one | small])
    assert "| 1000 | 0.0100 | 0.0018 |" in text
    assert "| 100 | 1e-05 | printed | 0.500 | 0.520 | 0.005 |" in text
