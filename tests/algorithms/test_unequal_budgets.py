"""Clients with unequal budgets, by configuration: what is spent, declared and found."""

import functools

import jax
import numpy as np
import pytest
from marks import later, telling

from fedjax_dp.engine import PrivacyAccounting, as_metrics
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.privacy.accounting import budgets

METHODS = ("record_dp_fedavg", "minimum_epsilon", "weiavg", "pfa", "robust_hdp", "noise_oracle")
ROUNDS, DELTA = 2, 1e-4
DIGITS = (
    *("--data.partition=iid", "--data.num_clients=20", f"--run.rounds={ROUNDS}"),
    *(f"--privacy.record.dp_delta={DELTA}", "--privacy.record.epsilon=Dist2"),
    *("--training.batch_size=heterogeneous", "--training.learning_rate=0.05"),
)
EPSILON = budgets.published_budgets("Dist2", 20)


class Run:
    """Two rounds of a method: the experiment, the rounds' info, and ε by client."""

    def __init__(self, *words):
        config = load_config(None, (*DIGITS, *words))
        self.experiment = assemble(config)
        simulation, key = self.experiment.simulation, jax.random.key(config.run.seed)
        state = simulation.init(key)
        accounting = PrivacyAccounting(simulation)
        state, record, info = simulation.run(state, key, ROUNDS)
        self.info = as_metrics(record, info)
        accounting.charge(record)
        accountant = config.privacy.accountant
        self.epsilon = accounting.epsilon({"record": DELTA}, accountant)["record"]
        self.config = simulation.hyper.local
        self.model = np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.server)])


@functools.cache
def run(*words):
    return Run(*words)


@pytest.mark.parametrize("method", later(METHODS, mark=telling))
def test_every_method_of_a_comparison_spends_the_same(method):
    spent = run(f"--algorithm.name={method}").epsilon
    expected = np.full(20, EPSILON.min()) if method == "minimum_epsilon" else EPSILON
    assert np.all(spent <= expected * (1 + 1e-9))
    np.testing.assert_allclose(spent, expected, rtol=1e-5)


@telling
def test_recipe_of_the_authors_spends_the_same_by_its_own_count():
    ours = run("--algorithm.name=weiavg", "--privacy.accountant=rdp-classic-64")
    np.testing.assert_allclose(ours.epsilon, EPSILON, rtol=1e-5)
    assert np.all(ours.epsilon <= EPSILON * (1 + 1e-9))
    # The looser recipe asks for more noise than the default.
    default = run("--algorithm.name=weiavg").config.noise_multiplier
    assert np.all(ours.config.noise_multiplier > default)


def sizes_of(experiment):
    return experiment.population.train.sizes


def update_variance(sizes, config, clip_norm):
    """(3.5) of the source on (3.3), up to a factor: steps of an epoch times the noise of one."""
    batch = np.asarray(config.batch_size, float)
    return np.ceil(sizes / batch) * (clip_norm * config.noise_multiplier / batch) ** 2


@telling
def test_weights_are_those_of_the_methods():
    experiment = run("--algorithm.name=weiavg").experiment
    sizes, config = sizes_of(experiment), experiment.simulation.hyper.local
    precision = 1 / update_variance(sizes, config, clip_norm=1.0)
    expected = {
        "record_dp_fedavg": sizes / sizes.sum(),
        "minimum_epsilon": sizes / sizes.sum(),
        "weiavg": EPSILON / EPSILON.sum(),
        "pfa": EPSILON / EPSILON.sum(),
        "noise_oracle": precision / precision.sum(),
    }
    for method, weights in expected.items():
        found = run(f"--algorithm.name={method}").info["weights"]
        assert found.shape == (ROUNDS, 20)
        np.testing.assert_allclose(found, np.tile(weights, (ROUNDS, 1)), rtol=1e-4, err_msg=method)


@pytest.mark.slow
def test_with_equal_budgets_and_batches_all_rules_are_alike():
    same = ("--privacy.record.epsilon=3", "--training.batch_size=16", "--data.client_test_share=0")
    same = (*same, "--data.num_clients=7")  # 1,437 examples: clients of 205 or 206.
    for method in METHODS:
        found = run(f"--algorithm.name={method}", *same).info["weights"]
        tolerance = 0.25 if method == "robust_hdp" else 0.01
        np.testing.assert_allclose(found, 1 / 7, rtol=tolerance, err_msg=method)
        if method == "pfa":
            combination = run(f"--algorithm.name={method}", *same).info["combination"]
            np.testing.assert_allclose(combination, found, rtol=1e-5)


@pytest.mark.parametrize("method", later(["weiavg", "pfa"], mark=telling))
def test_a_falsified_budget_changes_the_weight_by_the_closed_form(method):
    declared = EPSILON.copy()
    declared[12] *= 10
    words = f"--algorithm.options.declared_epsilon={declared.tolist()}"
    honest, falsified = run(f"--algorithm.name={method}"), run(f"--algorithm.name={method}", words)
    before, after = honest.info["weights"][0], falsified.info["weights"][0]
    e, total = EPSILON[12], EPSILON.sum()
    assert before[12] == pytest.approx(e / total, rel=1e-5)
    assert after[12] == pytest.approx(10 * e / (total + 9 * e), rel=1e-5)
    others = np.arange(20) != 12
    np.testing.assert_allclose(after[others] / before[others], total / (total + 9 * e), rtol=1e-5)
    assert np.abs(falsified.model - honest.model).max() > 1e-4
    # What is declared moves weights and never the noise or the account.
    np.testing.assert_array_equal(falsified.config.noise_multiplier, honest.config.noise_multiplier)
    np.testing.assert_array_equal(falsified.epsilon, honest.epsilon)


@telling
def test_robust_hdp_reads_no_declaration():
    with pytest.raises(
        ValueError, match=r"no option algorithm\.options\.declared_epsilon of robust_hdp"
    ):
        assemble(
            load_config(
                None,
                (
                    *DIGITS,
                    "--algorithm.name=robust_hdp",
                    f"--algorithm.options.declared_epsilon={EPSILON.tolist()}",
                ),
            )
        )
    honest = run("--algorithm.name=robust_hdp")
    noise = honest.config.noise_multiplier.tolist()
    # The same noise under other claims: not a bit of the model changes.
    claims = EPSILON.copy()
    claims[12] *= 10
    words = (
        f"--privacy.record.noise_multiplier={noise}",
        f"--privacy.record.epsilon={claims.tolist()}",
    )
    falsified = run("--algorithm.name=robust_hdp", *words)
    np.testing.assert_array_equal(falsified.info["weights"], honest.info["weights"])
    np.testing.assert_array_equal(falsified.model, honest.model)


@telling
def test_robust_hdp_reports_what_it_found():
    info = run("--algorithm.name=robust_hdp").info
    assert info["weights"].shape == info["noise_levels"].shape == (ROUNDS, 20)
    np.testing.assert_allclose(info["weights"].sum(axis=1), 1, rtol=1e-5)
    assert info["rpca_iterations"][0] > 0 and info["rpca_iterations"][1] == 0
    assert 0 < info["rpca_residual"][0] <= 1e-6 and info["rpca_rank"][0] >= 1
    np.testing.assert_array_equal(info["noise_levels"][0], info["noise_levels"][1])


def mistakes():
    def given(*words):
        return lambda: assemble(load_config(None, (*DIGITS, *words)))

    one = "--algorithm.options.declared_epsilon=[1.0]"
    return [
        (given("--data.num_clients=21"), "data.num_clients must be one of 20, 40, 60"),
        (given("--privacy.record.epsilon=Dist0"), '"Dist1" to "Dist9"'),
        (given("--training.batch_size=uneven"), "training.batch_size must be .*'heterogeneous'"),
        (
            given("--algorithm.name=weiavg", one),
            "declared_epsilon must have one number for each",
        ),
        (given("--algorithm.name=pfa", "--algorithm.options.split=gmm"), "split must be one of"),
        (
            given("--algorithm.name=minimum_epsilon", "--privacy.record.noise_multiplier=1"),
            "privacy.record.noise_multiplier must be none for minimum_epsilon",
        ),
        (
            given("--algorithm.name=weiavg", "--privacy.unit=none"),
            "privacy.unit must be record for the algorithm weiavg",
        ),
        (
            given("--algorithm.name=robust_hdp", "--algorithm.options.num_blocks=5"),
            "num_blocks must be at most 1",
        ),
    ]


@pytest.mark.parametrize("call, message", mistakes())
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_named_lists_stay_names_in_a_run_folder():
    config = load_config(None, DIGITS)
    assert 'epsilon = "Dist2"' in config_files.to_toml(config)
    with pytest.raises(ConfigError):
        load_config(None, ("--privacy.record.epsilon=Dist",))


# On real data: the paper's network, budgets and batch sizes; one round of the run of 200.

PAPER = (
    *("--data.name=mnist", "--data.partition=iid", "--data.num_clients=20"),
    *("--model.name=thesis_cnn", "--run.rounds=200", "--privacy.record.epsilon=Dist2"),
    *("--privacy.record.dp_delta=1e-4", "--privacy.record.clip_norm=3"),
    *("--privacy.accountant=rdp-classic-64", "--training.batch_size=heterogeneous"),
    "--algorithm.name=robust_hdp",
)
# That of the experiments.
LEARNING_RATE = 0.01


@functools.cache
def paper_round(data_dir):
    words = (f"--data.data_dir={data_dir}", f"--training.learning_rate={LEARNING_RATE}")
    experiment = assemble(load_config(None, (*PAPER, *words)))
    simulation, key = experiment.simulation, jax.random.key(0)
    _, record, info = simulation.run(simulation.init(key), key, 1)
    return experiment, {name: value[0] for name, value in as_metrics(record, info).items()}


@pytest.mark.slow
@pytest.mark.needs_data("mnist")
def test_weights_of_robust_hdp_are_those_of_the_oracle(data_dir):
    """Dist2, 20 clients: every weight within a tenth of the optimum of (3.5)."""
    experiment, info = paper_round(data_dir)
    config = experiment.simulation.hyper.local
    assert np.all(sizes_of(experiment) == 2400) and experiment.num_parameters == 28_938
    variance = update_variance(2400, config, clip_norm=3.0)
    least = 1 / np.sum(1 / variance)
    np.testing.assert_allclose(info["weights"], least / variance, rtol=0.1)
    assert 1 <= np.sum(info["weights"] ** 2 * variance) / least < 1.01


@pytest.mark.slow
@pytest.mark.needs_data("mnist")
def test_clients_of_unequal_batches_share_a_round_with_little_padding(data_dir):
    experiment, info = paper_round(data_dir)
    assert experiment.simulation.layout.chunk == 1
    assert info["num_examples"] == pytest.approx(48_000, rel=0.02)
    assert info["padding_share"] < 0.15


def test_micro_batches_follow_the_batch_sizes():
    """Batches of 64 pay little for 16 at once; those of 16 need 8, and 128 may have 32."""
    from fedjax_dp.clients.sgd import _widest_micro_batch

    assert [_widest_micro_batch(b) for b in (4, 16, 64, 128, 1000)] == [8, 8, 16, 32, 32]
    assert _widest_micro_batch(budgets.published_batch_sizes(20)) == 8


def test_configurations_are_not_changed_by_naming_no_list():
    from fedjax_dp.experiment.components.numbers_by_client import with_named_lists

    config = load_config(None)
    assert with_named_lists(config) is config
    named = with_named_lists(load_config(None, DIGITS))
    assert named.privacy.record.epsilon == EPSILON.tolist()
    assert named.training.batch_size == budgets.published_batch_sizes(20).tolist()
    assert named.run == load_config(None, DIGITS).run
