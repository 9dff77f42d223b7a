"""The study of oblivious noise: its rounds against NumPy, its noise, its table and figures."""

import csv
import itertools
import json
import types

import dp_accounting
import numpy as np
import pytest
from drawn import flaws
from marks import later, slow, telling
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


LOSSES = {
    "published": lambda z, y: (y - expit(z)) ** 2 / 2,
    "regularized": lambda z, y: np.logaddexp(0, z) - y * z,
}


@pytest.mark.parametrize("objective", LOSSES)
def test_slopes_are_those_of_the_losses(objective):
    """By central differences."""
    for z, y in itertools.product(np.linspace(-4, 4, 9), (0.0, 1.0)):
        slope = (LOSSES[objective](z + 1e-5, y) - LOSSES[objective](z - 1e-5, y)) / 2e-5
        assert adult.OBJECTIVES[objective].slope(expit(z), y) == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("objective", later(LOSSES, soon=["published"]))
def test_rounds_without_noise_are_those_of_numpy(objective):
    parts = two_copies()
    x, y = parts[0][:200].astype(np.float64), parts[1][:200]
    rate, decay = {"published": (1.0, 0.0), "regularized": (2 / 0.502, 1e-3)}[objective]
    w, scores = np.zeros(5), []
    for _ in range(adult.ROUNDS):
        for _ in range(50):
            p = expit(x @ w)
            factor = p * (1 - p) if objective == "published" else 1.0
            w -= rate * ((factor * (p - y)) @ x / 200 + decay * w)
        said = x @ w > 0
        # All parties have the same model; MCC is the correlation of 0/1 variables.
        scores.append(np.corrcoef(y, said)[0, 1])
    sim = adult.federation_of(parts[0].shape, 3, objective)
    free = adult.run(sim, 3, adult.Setting(objective), 0, parts)
    # They are written with four digits.
    np.testing.assert_allclose(free["mcc"], scores, atol=5.1e-5)
    assert free["model_norm"] == pytest.approx(np.linalg.norm(w), rel=1e-4)
    assert free["weight_variance"] == pytest.approx(np.var(w), rel=1e-4)
    assert free["mse"] == pytest.approx(np.mean((expit(x @ w) - y) ** 2), rel=1e-4)
    calibration = "printed" if objective == "published" else "corrected"
    noised = adult.run(sim, 3, adult.Setting(objective, calibration, 0.01), 0, parts)
    # A Laplace of 2/(3·200·0.01), or of 2·√2/(200·0.001·0.01), and three of them over three.
    scale = {"published": 1 / 3, "regularized": np.sqrt(2) * 1000}[objective]
    assert noised["average_noise_stddev"] == pytest.approx(np.sqrt(2 / 3) * scale)
    assert noised["round_epsilon"] == pytest.approx(np.sqrt(5) * noised["coordinate_epsilon"])
    assert noised["model_norm"] > free["model_norm"]


def test_columns_are_over_their_maxima_and_rows_of_norm_one():
    x = np.array([[4.0, 0.0, 7.0], [2.0, -5.0, 7.0], [0.0, 5.0, 7.0]])
    found = adult.rows_of_norm_one(x)
    expected = [[1, 0, 1], [0.5 / np.sqrt(1.25), -1 / np.sqrt(1.25), 1], [0, 1, 1]]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-9)
    assert np.all(np.linalg.norm(found[:, :-1].astype(np.float64), axis=1) <= 1)


@pytest.mark.parametrize(
    ("data", "name", "first"),
    [("adult", "education-num", 13 / 16), ("credit_card_fraud", "Time", 0)],
)
def test_tables_are_loaded_as_the_thesis_has_them(data, name, first, monkeypatch):
    """A range from 1 begins at 0 again; the time of transactions is left out."""
    options = {}

    def load(which, **more):
        options.update(more, which=which)
        # The other column is 0 in the first row, which then is its share of the largest value.
        train = {"x": np.array([[0.8, 0.0], [1.0, 1.0]], np.float32), "y": np.array([0, 1])}
        test = {"x": np.array([[0.2, 0.5]], np.float32), "y": np.array([1])}
        return types.SimpleNamespace(train=train, test=test, feature_names=(name, "other"))

    monkeypatch.setattr(adult.datasets, "load", load)
    monkeypatch.setattr(adult, "rows_of_norm_one", lambda x: x / x.max(axis=0))
    x, y = adult.load(data)
    assert options.pop("which") == data and options.pop("scaling") == "range"
    assert options == ({"drop_missing": True} if data == "adult" else {})
    assert x.shape == ((3, 2) if data == "adult" else (3, 1)) and y.tolist() == [0, 1, 1]
    assert x[0, 0] == pytest.approx(first)


def trained(x, y):
    w = np.zeros(x.shape[1])
    for _ in range(50):
        p = expit(x @ w)
        w -= ((p - y) * p * (1 - p)) @ x / len(x)
    return w


def test_one_record_moves_a_model_by_no_more_than_its_bound():
    """The recursion of the bound with a curvature from differences; then real records."""
    z = np.linspace(-8, 8, 4001)
    bends = [
        np.gradient(np.gradient(LOSSES["published"](z, y), z), z)[2:-2].min() for y in (0.0, 1.0)
    ]
    slopes = [np.abs(np.gradient(LOSSES["published"](z, y), z)).max() for y in (0.0, 1.0)]
    bound = 0.0
    for _ in range(50):
        bound = bound * (1 - 2 * min(bends)) + 2 * np.sqrt(2) * max(slopes) / 200
    assert adult.sensitivity_of("published").l2 == pytest.approx(bound, rel=0.02)
    x, y, *_ = two_copies()
    x, y = np.concatenate([x[:200], np.ones((200, 1))], axis=1), y[:200]
    base, moves = trained(x, y), []
    for i in range(200):
        other = np.where(np.arange(200) == i, 1 - y, y)
        moves.append(trained(x, other) - base)
    assert np.max(np.linalg.norm(moves, axis=1)) < bound
    largest = adult.move_of_one_record(x, y, "published")
    assert largest == pytest.approx(np.max(np.abs(moves)), rel=1e-9)


def test_the_printed_noise_is_worth_what_the_training_makes_of_it():
    # 2/(n·k·ε) for n = 100, k = 200, ε = 1e-5.
    noise = adult.shares_of(100, adult.Setting("published", "printed", 1e-5))
    assert noise.scale == pytest.approx(10.0)
    assert noise.coordinate_epsilon == pytest.approx(adult.sensitivity_of("published").l2 / 10)
    # A sum moves by 2·√2/(200·0.001), the norm of a row being √2 with its intercept.
    corrected = adult.shares_of(100, adult.Setting("regularized", "corrected", 2.0))
    assert corrected.scale == pytest.approx(np.sqrt(2) * 10 / 2)
    assert corrected.coordinate_epsilon == pytest.approx(2.0)


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
    study.main(f"collusion --parties 6 --trials 300 --seeds 2 --output {tmp_path}".split())
    text = (tmp_path / "collusion.md").read_text("utf-8")
    with colluders.PAPER.open(encoding="utf-8") as file:
        values = [r["value"] for r in csv.DictReader(file) if r["metric"] == "r2_of_attack"]
    assert values == ["0.894", "0.164"]
    assert "| 0.894 | 0.894 |" in text and "at most 0.164" in text
    assert not any(map(flaws, drawn.values())) and len(drawn) == 3
    result = json.loads((tmp_path / "collusion.json").read_text("utf-8"))
    assert result["largest_error_of_masks"] < 1e-6
    assert [len(one["r2"]) for one in result["attacks"]] == [2] * 7


def test_estimates_are_drawn_around_values_in_order():
    rng = np.random.default_rng(0)
    samples = {name: rng.normal(size=40) for name in ("values", *colluders.DRAWN)}
    panels = colluders.draw_estimates(samples).axes
    assert [axes.get_title() for axes in panels] == [
        name.replace("_", "-") for name in colluders.DRAWN
    ]
    for axes, name in zip(panels, colluders.DRAWN, strict=True):
        estimates, actual = (line.get_ydata() for line in axes.lines)
        np.testing.assert_array_equal(actual, np.sort(samples["values"]))
        assert dict(zip(actual, estimates, strict=True)) == dict(
            zip(samples["values"], samples[name], strict=True)
        )


def made(n, calibration, epsilon, seed, last, mse=0.1):
    """A run as `adult.run` writes it."""
    one = {"objective": "published", "calibration": calibration, "epsilon": epsilon}
    one |= {"num_parties": n, "seed": seed, "mcc": [0.5, last], "mse": mse}
    return one | {"other_rounds_cpu_seconds": 1.5}


def test_curves_of_scores_can_be_read():
    kinds = [(None, None), ("printed", 5e-4), ("printed", 1e-5)]
    results = [
        made(n, *kind, seed, 0.4 + seed / 50) for kind in kinds for n in (5, 50) for seed in (0, 1)
    ]
    assert not flaws(adult.draw_levels(results))
    assert not flaws(adult.draw_rounds(results, (None, 5e-4, 1e-5)))


def test_runs_on_adult_are_not_repeated(tmp_path, monkeypatch):
    """An interrupted study goes on with what its file does not have."""
    ran = []

    def run(sim, n, setting, seed, parts):
        ran.append((n, setting, seed))
        return made(n, setting.calibration, setting.epsilon, seed, 0.3)

    monkeypatch.setattr(adult, "load", lambda data: two_copies()[:2])
    monkeypatch.setattr(adult, "federation_of", lambda *_: None)
    monkeypatch.setattr(adult, "run", run)
    monkeypatch.setattr(plots, "save", lambda figure, path: None)
    options = f"adult --parties 3 5 --corrected --output {tmp_path}"
    study.main([*options.split(), "--printed", "5e-4", "--seeds", "1"])
    assert len(ran) == 4
    study.main([*options.split(), "--printed", "5e-4", "1e-5", "--seeds", "2"])
    assert len(ran) == len(set(ran)) == 2 * 3 * 2
    written = json.loads((tmp_path / "adult.json").read_text("utf-8"))
    assert len(written["runs"]) == 12 and 0 < written["moves"]["published"] < 5.1


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
    """1,000 parties: relative losses of 0.0052/0.52 = 0.01 and 0.03/0.6 = 0.05 in MCC."""
    runs = [made(1000, None, None, 0, 0.52), made(1000, "printed", 5e-4, 0, 0.5148, 0.1001)]
    runs += [made(1000, None, None, 1, 0.6), made(1000, "printed", 5e-4, 1, 0.57, 0.1003)]
    runs.append(made(100, "printed", 1e-5, 0, 0.52))
    text = adult.as_markdown(runs)
    assert "| 1000 | 0.03 ± 0.028 | 0.0018 | 0.002 ± 0.0014 | 1.1e-6 |" in text
    assert "| published | 100 | 1e-05 | printed | 0.500 | 0.520 | 1 | 0.005 |" in text
    assert "| published | 1000 | none |  | 0.500 ± 0.000 | 0.560 ± 0.057 | 2 |  |" in text


def test_the_server_adds_up_what_arrives():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**64, (7, 105), np.uint64)
    total = costs._received([row.tobytes() for row in words])
    np.testing.assert_array_equal(total, words.sum(axis=0, dtype=np.uint64))
