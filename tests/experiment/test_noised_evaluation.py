"""The accuracy that evaluations release with noise: its noise, its price, and what follows it."""

from types import SimpleNamespace

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting import rdp
from marks import slow, telling
from run_folders import SMALL, die_and_resume, execute, metrics, read_json
from scipy import stats

import fedjax_dp as fdp
from fedjax_dp.data import FederatedData
from fedjax_dp.evaluation.evaluate import shared_evaluator
from fedjax_dp.evaluation.noised import METRIC, NoisedAccuracy, by_rows
from fedjax_dp.experiment import load_config, load_run
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.components.callbacks import early_stopping
from fedjax_dp.experiment.components.mechanism import Setting, client_aggregator
from fedjax_dp.experiment.components.noised import check_evaluated
from fedjax_dp.experiment.reading.validate import validate
from fedjax_dp.experiment.schema.config import GaussianLevel
from fedjax_dp.flower.export import require_server
from fedjax_dp.models import registry as models
from fedjax_dp.privacy.accounting.renyi import orders_of

NOISE = "--evaluation.noise_multiplier=2"
CLIENT = ("--privacy.unit=client", "--algorithm.name=dp_fedavg")
RATE = "training.learning_rate"


def test_a_client_moves_the_sum_by_at_most_one_whatever_its_accuracy():
    exact, key = NoisedAccuracy(0.0, 1), jax.random.key(0)
    hostile = [np.nan, np.inf, -np.inf, -7.0, 1e300, -0.0, 1.0, 1 / 3, np.nextafter(1.0, 2)]
    others = [0.5, np.nan, 0.1]
    # With four clients the division is exact.
    sums = [4 * exact.release(key, [*others, value]) for value in hostile]
    assert max(sums) - min(sums) == 1.0
    assert exact.release(key, [0.5, np.nan, 4.0, 0.25]) == (0.5 + 0 + 1 + 0.25) / 4
    many = np.full(10**6, 1 / 3)
    one_less = np.append(many[:-1], 0.0)
    assert 0 < (exact.release(key, many) - exact.release(key, one_less)) * 10**6 <= 1
    assert exact.release(key, many) == pytest.approx(1 / 3, abs=exact.unit / 2)


def test_the_noise_is_that_of_the_multiplier():
    clients = np.array([0.5, 0.25, 1.0, 0.0])

    def is_noise_of(multiplier, released):
        # A variance of 64 normal numbers, two-sided at one in a million.
        drawn = (np.array(released) * 4 - 1.75) / multiplier
        low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(drawn))
        return low < np.sum(drawn**2) < high and abs(np.mean(drawn)) < 5 / np.sqrt(len(drawn))

    keys = jax.random.split(jax.random.key(7), 64)
    found = [NoisedAccuracy(3.0, 1).release(key, clients) for key in keys]
    assert is_noise_of(3.0, found)
    assert not is_noise_of(6.0, found) and not is_noise_of(1.5, found)
    assert len(set(found)) == 64


@pytest.mark.parametrize("multiplier", [1e-9, 0.3, 3.0, 1000.0, 1e9])
def test_no_digit_of_a_sum_shows_without_noise(multiplier):
    """Sums and noise are multiples of one unit, which float32 noise has finer digits than."""
    noised = NoisedAccuracy(multiplier, 1)
    accuracies = np.array([1 / 3, 1 / 7, 1 / 11, 1e-6])
    keys = jax.random.split(jax.random.key(3), 16)
    drawn = [float(noised.mechanism.add_noise(key, np.zeros(()))) for key in keys]
    assert np.spacing(np.float32(np.max(np.abs(drawn)))) <= noised.unit
    for key in keys:
        in_units = 4 * noised.release(key, accuracies) / noised.unit
        assert in_units == round(in_units)


# The largest multiplier that is charged to a client: of all rounds, or of one round in four.
@pytest.mark.parametrize("sampler", [fdp.full_participation, fdp.cyclic])
def test_planned_releases_are_calibrated_with_the_rounds(sampler):
    options = {} if sampler is fdp.full_participation else {"cohort_size": 2}
    cohorts = fdp.participation(sampler(), 8, **options)
    promise = {"accountant": "rdp", "relation": "zero_out"}
    structure = {"w": np.zeros(3, np.float32)}
    setting = Setting(cohorts, structure, 8, promise, evaluations=NoisedAccuracy(4.0, 3))
    mean = client_aggregator(GaussianLevel(epsilon=3.0), setting)
    account = rdp.RdpAccountant()
    rounds = 8 if sampler is fdp.full_participation else 2
    noise = float(mean.numbers["noise_multiplier"])
    account.compose(dp_accounting.GaussianDpEvent(noise), rounds)
    # After rounds 3 and 6, of all clients.
    account.compose(dp_accounting.GaussianDpEvent(4.0), 2)
    assert 3.0 * (1 - 1e-4) < account.get_epsilon(1e-5) <= 3.0
    costly = setting._replace(evaluations=NoisedAccuracy(0.5, 3))
    with pytest.raises(ValueError, match=r"evaluation\.noise_multiplier must leave a part of"):
        client_aggregator(GaussianLevel(epsilon=3.0), costly)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((NOISE, "--privacy.unit=both"), "be none without privacy.unit = 'client', got 2"),
        (
            (NOISE, "--privacy.unit=none", "--algorithm.name=fedavg"),
            "be none without privacy.unit = 'client'",
        ),
        *(
            ((NOISE, f"--privacy.client.mechanism={name}"), "of a server that sees updates")
            for name in ("discrete_gaussian", "correlated_gaussian", "oblivious")
        ),
        (
            (
                *(NOISE, "--privacy.client.denominator=realised", "--privacy.client.epsilon=none"),
                "--privacy.client.noise_multiplier=1",
            ),
            "of a server that sees updates",
        ),
        ((NOISE, "--execution.coordinator=auto"), "be none with several processes"),
        ((NOISE, "--run.evaluate_every=31"), "with run.evaluate_every above run.rounds"),
        (("--evaluation.noise_multiplier=0",), "evaluation.noise_multiplier must be above 0"),
        (("--evaluation.noise_multiplier=nan",), "evaluation.noise_multiplier must be .*nan"),
        ((f"--run.keep=best:{METRIC}",), "run.keep must be an exact metric without evaluation"),
        (
            (f"--schedules.{RATE}={{curve = 'plateau', metric = '{METRIC}'}}",),
            f"schedules.{RATE}.metric must be an exact metric without evaluation.noise_multiplier",
        ),
        (
            ("--run.callbacks.early_stopping.metric=noised_unclipped_share",),
            "early_stopping.metric must be an exact metric without privacy.client.adaptive",
        ),
    ],
)
def test_refusals(words, message):
    with pytest.raises(ValueError, match=message):
        validate(load_config(None, (*CLIENT, *words)))


def test_refusals_of_models_deployments_and_selections():
    config = load_config(None, (*CLIENT, NOISE))
    model = SimpleNamespace(correct_fn=len, mixes_examples=True, buffer_keys=("mean",))
    evaluator = SimpleNamespace(clients=len, is_personal=False)
    check_evaluated(config, model, evaluator)
    with pytest.raises(ValueError, match="be none where clients have no test data, got 2"):
        check_evaluated(config, model, SimpleNamespace(clients=None, is_personal=False))
    with pytest.raises(ValueError, match="be none where clients choose or have models"):
        check_evaluated(config, model, SimpleNamespace(clients=len, is_personal=True))
    with pytest.raises(ValueError, match="be none for a model without accuracy"):
        check_evaluated(config, SimpleNamespace(**vars(model) | {"correct_fn": None}), evaluator)
    with pytest.raises(ValueError, match="be none for a model that mixes rows"):
        check_evaluated(config, SimpleNamespace(**vars(model) | {"buffer_keys": ()}), evaluator)
    with pytest.raises(ValueError, match=r"noise_multiplier must be none in a deployment, got 2"):
        require_server(config, "parity")


# It mixes rows, and says nothing of it.
MIXING = """
from fedjax_dp.models import Model, logistic_regression

def net(example_x, num_classes):
    plain = logistic_regression(example_x, num_classes)
    def apply(params, x):
        return plain.apply(params, x - x.mean(axis=0))[0]
    return Model.from_functions(plain.init, apply, loss="softmax_cross_entropy")
"""


def test_no_row_changes_the_accuracy_of_another(tmp_path):
    (tmp_path / "net.py").write_text(MIXING, encoding="utf-8")
    model = models.build(f"{tmp_path / 'net.py'}:net", {"x": jax.ShapeDtypeStruct((4,), float)}, 3)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: rng.normal(size=p.shape), model.init(jax.random.key(0)))

    def accuracies(model, shift):
        x = np.random.default_rng(1).normal(size=(60, 4)).astype(np.float32)
        x[40:] += shift
        data = FederatedData({"x": x, "y": np.arange(60, dtype=np.int32) % 3}, [0, 20, 40, 60])
        return shared_evaluator(model, data)(params).client_accuracy[:2].tolist()

    assert accuracies(model, 0.0) != accuracies(model, 50.0)
    apart = by_rows(model)
    assert accuracies(apart, 0.0) == accuracies(apart, 50.0)
    usual = models.build("logistic_regression", {"x": jax.ShapeDtypeStruct((4,), float)}, 3)
    assert accuracies(by_rows(usual), 1.0) == accuracies(usual, 1.0)


@slow
def test_a_run_releases_accuracies_of_rows_by_themselves(tmp_path):
    (tmp_path / "net.py").write_text(MIXING, encoding="utf-8")
    words = (*SMALL, *CLIENT, NOISE, f"--model.name={tmp_path / 'net.py'}:net")
    made = assemble(load_config(None, words))
    state = made.simulation.init(jax.random.key(3))
    found = made.evaluator.clients(state).client_accuracy
    params, data = made.simulation.federation.shared(state), made.population.client_test
    wanted = shared_evaluator(by_rows(made.model), data)(params).client_accuracy
    assert found.tolist() == wanted.tolist()
    assert found.tolist() != shared_evaluator(made.model, data)(params).client_accuracy.tolist()


def test_callbacks_by_released_metrics_are_private():
    assert early_stopping(metric=METRIC, goal="larger").is_private
    assert not early_stopping().is_private


RUN = (
    *(*SMALL[:1], "--run.rounds=7", "--run.evaluate_every=2", "--run.checkpoint_every=3", *CLIENT),
    *("--participation.sampler=poisson", "--participation.cohort_size=2", "--run.plots=false"),
    *("--execution.clients_per_chunk=1", "--execution.devices=1", "--data.client_test_share=0.3"),
    *(NOISE, f"--run.keep=best:{METRIC}", "--run.secret=true", "--run.release=private"),
)


def epsilon_of(noise, rounds, releases):
    """ε of Poisson rounds of two of three clients, and of releases of all, by dp-accounting."""
    account = rdp.RdpAccountant(orders_of("rdp"))
    one = dp_accounting.PoissonSampledDpEvent(2 / 3, dp_accounting.GaussianDpEvent(noise))
    account.compose(one, rounds)
    if releases:
        account.compose(dp_accounting.GaussianDpEvent(2.0), releases)
    return account.get_epsilon(1e-5)


@telling
@pytest.mark.usefixtures("shared_programs", "no_pictures")
def test_a_run_follows_the_released_values_and_pays_for_them(tmp_path):
    words = ("--privacy.client.noise_multiplier=1.5", "--privacy.client.epsilon=none")
    assert execute(tmp_path / "run", *RUN, *words)[0] == 0
    rows = metrics(tmp_path / "run")
    assert [row["round"] for row in rows if METRIC in row] == [2, 4, 6]
    for row in rows:
        spent = epsilon_of(1.5, row["round"], row["round"] // 2)
        assert row["epsilon_client"] == pytest.approx(spent, rel=1e-9)
    released = {row["round"]: row[METRIC] for row in rows if METRIC in row}
    summary = read_json(tmp_path / "run", "summary.json")
    assert summary["kept_round"] == max(released, key=released.get)
    assert summary[METRIC] == released[summary["kept_round"]]
    exact = [row["mean_client_accuracy"] for row in rows if METRIC in row]
    assert np.all(np.abs(np.subtract(list(released.values()), exact)) > 1e-3)
    (claim,) = read_json(tmp_path / "run", "privacy.json")["claims"]
    assert not any("the round whose model" in text for text in claim["not_private"])
    text = (tmp_path / "run" / "privacy.md").read_text(encoding="utf-8")
    assert "`noised_client_accuracy` is released" in text and "noise of 2 times the most" in text
    public = read_json(tmp_path / "run" / "release", "summary.json")
    assert public[METRIC] == summary[METRIC] and "test_accuracy" not in public
    assert any("standard deviation of 0.67" in hint for hint in summary["hints"])


@telling
@pytest.mark.usefixtures("shared_programs", "no_pictures")
def test_a_resumed_run_has_the_same_releases_and_pays_once(tmp_path):
    words = [word for word in RUN if "secret" not in word and "release=" not in word]
    words += ["--privacy.client.epsilon=12"]
    assert execute(tmp_path / "run", *words)[0] == 0
    whole = read_json(tmp_path / "run", "summary.json")
    # The budget is for 7 rounds and 3 releases.
    assert 12 * (1 - 1e-3) < whole["epsilon"] <= 12 * (1 + 1e-9) and whole["rounds"] == 7
    # Round 4 was released after the checkpoint of round 3.
    die_and_resume(tmp_path / "resumed", 5, *words)
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "run")
    resumed = read_json(tmp_path / "resumed", "summary.json")
    assert (resumed["epsilon"], resumed["kept_round"]) == (whole["epsilon"], whole["kept_round"])
    claims = [read_json(tmp_path / name, "privacy.json")["claims"] for name in ("run", "resumed")]
    assert claims[0][0]["histories"] == claims[1][0]["histories"]
    # Without a key that follows the metric, a hint says so.
    assert not any("no key follows" in hint for hint in whole["hints"])


@telling
@pytest.mark.usefixtures("shared_programs", "no_pictures")
def test_a_run_that_stops_by_released_values_pays_for_all_planned_ones(tmp_path):
    words = ("--privacy.client.noise_multiplier=1.5", "--privacy.client.epsilon=none")
    words += (f"--run.callbacks.early_stopping.metric={METRIC}", "--run.keep=last")
    # No value is better than the first.
    words += ("--run.callbacks.early_stopping.patience=1",)
    words += ("--run.callbacks.early_stopping.min_change=1e6",)
    assert execute(tmp_path / "run", *RUN, *words)[0] == 0
    summary = read_json(tmp_path / "run", "summary.json")
    assert (summary["ended"], summary["rounds"]) == ("callback", 4)
    assert summary["epsilon"] == pytest.approx(epsilon_of(1.5, 7, 3), rel=1e-9)
    text = (tmp_path / "run" / "privacy.md").read_text(encoding="utf-8")
    assert "Any of its 7 planned rounds could have been the last" in text
    loaded = load_run(tmp_path / "run").accounting
    assert loaded.epsilon(1e-5) == pytest.approx(summary["epsilon"], rel=1e-9)
