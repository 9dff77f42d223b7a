"""Numbers over rounds in a configuration: what is read, refused, run and stated."""

import json

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting import rdp
from marks import slow, telling
from run_folders import NOT_PRIVATE, SMALL

import fedjax_dp as fdp
from fedjax_dp import experiment
from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.experiment import assemble, load_config
from fedjax_dp.experiment.components.catalogue import own_parts
from fedjax_dp.experiment.components.mechanism import Setting, client_aggregator
from fedjax_dp.experiment.components.schedules import (
    Plateau,
    _place_of,
    after_plateaus,
    described,
    ended_curves,
    exact_plateaus,
    over_rounds,
    tables_of,
    without_wrappers,
)
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.keys import describe, describe_choice
from fedjax_dp.experiment.reading.validate import validate
from fedjax_dp.experiment.running.watcher import Watcher
from fedjax_dp.experiment.schema.config import GaussianLevel
from fedjax_dp.experiment.studies.batched_runs import alike
from fedjax_dp.privacy.accounting.ledger import Ledger

RATE = "training.learning_rate"
OF_OPTIMIZER = "training.optimizer_options"
TRIPLED = "{curve = 'list', factors = [1, 3]}"
CLIENT = ("--privacy.unit=client", "--algorithm.name=dp_fedavg")


def read(*words):
    return load_config(None, words)


def of_key(config, key):
    tables = config.schedules
    for part in key.split("."):
        tables = tables[part]
    return tables


def test_a_name_becomes_a_table_with_the_rounds_of_the_run():
    config = read("--run.rounds=40", f"--schedules.{RATE}=cosine")
    assert of_key(config, RATE) == {"curve": "cosine", "rounds": 40}
    table = "{curve = 'linear', final = 0.5, warm_up = 10}"
    config = read("--run.rounds=40", f"--schedules.{RATE}={table}")
    wanted = {"curve": "linear", "warm_up": 10, "final": 0.5, "rounds": 30}
    assert of_key(config, RATE) == wanted
    again = config_files.from_toml(config_files.to_toml(config), "a file")
    assert again == config
    # The rounds of a curve do not grow with the run.
    longer = again.run.model_copy(update={"rounds": 60})
    assert of_key(again.model_copy(update={"run": longer}), RATE) == wanted


def test_a_key_in_quotes_is_read_back_equal_too():
    text = f"[schedules]\n'{RATE}' = 'cosine'\n"
    config = config_files.from_toml(text, "a file")
    assert config_files.from_toml(config_files.to_toml(config), "a file") == config
    assert tables_of(config.schedules, 30)["local.learning_rate"][0] == 1


def test_a_configuration_without_schedules_does_not_mention_them():
    assert "schedules" not in config_files.to_toml(read())


def test_factors_are_those_of_curves_by_the_names_of_numbers():
    config = read(
        *("--run.rounds=6", "--algorithm.name=fedprox", *NOT_PRIVATE[:1]),
        f"--schedules.{RATE}.warm_up=2",
        "--schedules.algorithm.options.mu={curve = 'steps', after = [2, 4], factor = 0.5}",
        "--schedules.training.optimizer_options.momentum={curve = 'list', factors = [1, 0.5]}",
    )
    tables = tables_of(config.schedules, 6)
    np.testing.assert_allclose(tables["local.learning_rate"], [1 / 3, 2 / 3, 1, 1, 1, 1])
    np.testing.assert_array_equal(tables["algorithm.mu"], [1, 1, 0.5, 0.5, 0.25, 0.25])
    np.testing.assert_array_equal(tables["local.optimizer.momentum"], [1] + 5 * [0.5])


def test_a_curve_of_ones_own_is_a_function_of_the_round(tmp_path):
    file = tmp_path / "curves.py"
    file.write_text(
        "def triangle(t, *, period: int = 4):\n"
        '    """Rises and falls.\n\n    Args:\n      period: rounds of one.\n    """\n'
        "    return 1 - abs(2 * (t % period) / period - 1)\n"
        "calls = []\n\ndef counting(t):\n    calls.append(t)\n    return len(calls)\n"
        "def inverse(t):\n    return 1 / t\n",
        encoding="utf-8",
    )
    table = f"{{curve = '{file}:triangle', period = 2}}"
    config = read("--run.rounds=4", f"--schedules.{RATE}={table}")
    found = tables_of(config.schedules, 4)["local.learning_rate"]
    np.testing.assert_array_equal(found, [0, 1, 0, 1])
    assert own_parts(config) == [f"{file}:triangle"]
    hyper = Hyper(LocalConfig(), factors={"local.learning_rate": found[1:]})
    assert described(config, hyper) == [f"{RATE} by factors of 0 to 1 (curves.py:triangle)"]
    for name, rule in (("counting", "have the same factors whenever"), ("inverse", "ZeroDivision")):
        with pytest.raises(ValueError, match=f"the curve of schedules.{RATE} must .*{rule}"):
            validate(read(f"--schedules.{RATE}={file}:{name}"))
    with pytest.raises(ValueError, match=r"there is no option .*perio of .*did you mean 'period'"):
        read(f"--schedules.{RATE}={{curve = '{file}:triangle', perio = 2}}")
    with pytest.raises(ValueError, match=r"curves\.py:triangel"):
        read(f"--schedules.{RATE}={file}:triangel")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["training.learning_rat=cosine"], "did you mean 'training.learning_rate'"),
        (["run.rounds=cosine"], "schedules must be of a number that can change"),
        ([f"{RATE}=cosin"], f"schedules.{RATE} must be one of .*did you mean 'cosine'"),
        ([f"{RATE}=3"], f"schedules.{RATE} must be the name of a curve, or a table"),
        ([f"{RATE}.final=3"], f"schedules.{RATE} must be the name of a curve, or a table"),
        ([f"{RATE}={{curve = 'cosine', end = 3}}"], "no option .*end of cosine"),
        ([f"{RATE}={{curve = 'cosine', final = -1}}"], f"{RATE}.final must be .*at least 0"),
        ([f"{RATE}=list"], "must hold 'factors'"),
        ([f"{RATE}.warm_up=30"], f"{RATE}.warm_up must be below run.rounds = 30"),
        ([f"{RATE}={{curve = 'plateau', warm_up = 3}}"], "no option .*warm_up of plateau"),
        (
            [f"{RATE}={{curve = 'plateau', metric = 'client_test_per_class_after_local'}}"],
            "metric that is one number, .* got 'client_test_per_class_after_local'",
        ),
    ],
)
def test_mistakes_are_refused_as_they_are_read(words, error):
    with pytest.raises(ValueError, match=error):
        read(*(f"--schedules.{word}" for word in words))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--schedules.privacy.client.clip_norm=cosine"],
            "since privacy.unit = 'record' does not protect a client",
        ),
        (
            ["--schedules.privacy.record.noise_multiplier={curve = 'list', factors = [1, 0]}"],
            r"schedules.privacy.record.noise_multiplier must have factors above 0, .*\[1.*, 0",
        ),
        (
            ["--schedules.training.batch_size={curve = 'linear', final = 2}"],
            "schedules.training.batch_size must have factors of at most 1",
        ),
        (
            [*CLIENT, "--schedules.algorithm.aggregator_options.noise_multiplier=linear"],
            "must be schedules.privacy.client.noise_multiplier, the number of the private mean",
        ),
        (["--schedules.training.num_steps=linear"], "be left out without training.num_steps"),
        (
            ["--schedules.privacy.record.clip_norm={curve = 'list', factors = [1, 0]}"],
            "schedules.privacy.record.clip_norm must have factors above 0",
        ),
        (
            ["--training.num_steps=3", "--schedules.training.num_epochs=linear"],
            "be left out with training.num_steps, which replaces epochs",
        ),
        (["--schedules.leaving.tolerance=linear"], "be left out without leaving.tolerance"),
        (
            [
                *("--algorithm.name=q_ffl", "--privacy.unit=none"),
                f"--schedules.{RATE}={{curve = 'list', factors = [1, 0]}}",
            ],
            f"schedules.{RATE} makes a rate that must be above 0, since q-FedAvg divides by it",
        ),
        (
            [
                *("--algorithm.name=splitting", "--privacy.unit=none"),
                *("--algorithm.options.solver=exact", f"--schedules.{RATE}=cosine"),
            ],
            "be left out for splitting with exact steps",
        ),
        (
            [
                *CLIENT,
                "--privacy.client.adaptive_clipping=true",
                "--schedules.privacy.client.clip_norm=linear",
            ],
            "be left out with privacy.client.adaptive_clipping",
        ),
        (
            [
                *CLIENT,
                "--privacy.client.mechanism=central_discrete_gaussian",
                "--schedules.privacy.client.noise_multiplier=linear",
            ],
            "be left out with central_discrete_gaussian noise, whose lattice is made for one",
        ),
        (
            ["--schedules.privacy.record.noise_multiplier=plateau"],
            "not be a plateau: the privacy of a run is planned before",
        ),
        (
            [f"--schedules.{RATE}={{curve = 'plateau', metric = 'noised_unclipped_share'}}"],
            "be an exact metric without privacy.client.adaptive_clipping",
        ),
        (
            [
                *("--run.release=private", "--run.secret=true"),
                f"--schedules.{RATE}=plateau",
            ],
            "be noised_unclipped_share or noised_client_accuracy if run.release is 'private'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_data_are_read(words, error):
    with pytest.raises(ValueError, match=error):
        validate(read(*words))


CURVE_OPTIONS = {
    "constant": "warm_up",
    "cosine": "rounds final warm_up",
    "plateau": "metric goal patience min_change factor least",
}


def test_the_list_of_keys_has_schedules_and_the_options_of_each_curve():
    (row,) = [row for row in describe() if row[0] == "schedules"]
    assert "curves over rounds" in row[3]
    for curve, options in CURVE_OPTIONS.items():
        rows = {row[0]: row for row in describe_choice(f"schedules.curve={curve}")}
        assert set(rows) == {f"schedules.KEY.{option}" for option in options.split()}
        assert all(row[3] for row in rows.values())


def test_points_of_a_sweep_whose_curves_alone_differ_may_share_a_program():
    words = [f"--schedules.{RATE}={curve}" for curve in ("cosine", "inverse", "plateau")]
    assert len({alike(read(word)) for word in words}) == 1
    assert alike(read()) != alike(read(words[0]))


def test_options_that_an_aggregator_has_are_found_there():
    own = Hyper(LocalConfig(), {"server_learning_rate": 1.0}, {"step_size": 0.3})
    of_part = own._replace(aggregator={"params": {"threshold": 0.4}, "control": {"divisor": 4}})
    assert _place_of(own, "algorithm.options.step_size") == "aggregator.step_size"
    key = "algorithm.options.server_learning_rate"
    assert _place_of(own, key) == "algorithm.server_learning_rate"
    key = "algorithm.aggregator_options.threshold"
    assert _place_of(of_part, key) == "aggregator.params.threshold"
    assert _place_of(own, key) == "aggregator.threshold"


def rows_of(values):
    return [{"round": i + 1, "test_loss": value} for i, value in enumerate(values)]


def test_an_audit_has_no_curves_of_wrappers_which_it_leaves_out():
    words = f"--schedules.{RATE}=cosine", "--schedules.acceleration.damping=cosine"
    config = without_wrappers(read("--acceleration.memory=2", *words))
    assert list(tables_of(config.schedules, 3)) == ["local.learning_rate"]


def test_a_plateau_multiplies_after_so_many_evaluations_without_a_better_value():
    rule = Plateau("test_loss", "smaller", 2, 0.1, 0.5, 0.2)
    # Better by more than 0.1 than the best so far: 3, 2; then none; then 1.
    losses = [3.0, 2.0, 1.95, None, 1.91, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    found = rule.after(rows_of(losses))
    assert found == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]
    assert rule.after(rows_of(losses[:6])) == found[:6]
    larger = rule._replace(goal="larger")
    assert larger.after(rows_of([1.0, 2.0, 3.0]))[-1] == 1
    assert larger.after(rows_of([3.0, 2.0, 1.0]))[-1] == 0.5
    with pytest.raises(ValueError, match=r"metric of plateau must be one of .*test_loss"):
        rule._replace(metric="los").after(rows_of([1.0]))


def test_a_plateau_decides_at_evaluations_alone_as_an_uninterrupted_run_does():
    hyper = Hyper(LocalConfig(2.0), factors={"local.learning_rate": np.ones(9, np.float32)})
    rule = {RATE: Plateau("update_norm", "smaller", 1, 0.0, 0.5, 0.01)}
    rows = [{"update_norm": norm} for norm in (3.0, 2.0, 2.0, 1.0, 5.0, 5.0)]
    found = [
        after_plateaus(hyper, rule, rows[:n], 3).factors["local.learning_rate"] for n in range(7)
    ]
    assert [float(table[-1]) for table in found] == [1, 1, 1, 0.5, 0.5, 0.5, 0.125]
    assert found[-1].tolist() == [1, 1, 1, 0.5, 0.5, 0.5, 0.125, 0.125, 0.125]
    # What a statement says of a bound is of the rounds that ran.
    assert over_rounds(after_plateaus(hyper, rule, rows[:3], 3), "local.learning_rate") == (1, 2)


def test_a_statement_names_what_changed_and_what_an_exact_metric_decided():
    config = read(
        *("--run.rounds=5", f"--schedules.{RATE}=plateau"),
        "--schedules.privacy.record.noise_multiplier={curve = 'linear', final = 2}",
    )
    local = LocalConfig(1.0, noise_multiplier=1.0)
    hyper = Hyper(local, factors=tables_of(config.schedules, 5))
    assert described(config, hyper) == [
        f"{RATE} by factors of at most 1 (plateau)",
        "privacy.record.noise_multiplier by factors of 1 to 1.8 (linear)",
    ]
    assert exact_plateaus(config) == [f"{RATE} in each round, which followed the exact test_loss"]
    private = read(
        *(*CLIENT, "--privacy.client.adaptive_clipping=true"),
        f"--schedules.{RATE}={{curve = 'plateau', metric = 'noised_unclipped_share'}}",
    )
    validate(private)
    assert exact_plateaus(private) == []


# The noise that a client's rounds have, where it takes part in all of them or in the noisiest.
@pytest.mark.parametrize("sampler", [fdp.full_participation, fdp.cyclic])
def test_noise_of_clients_is_calibrated_as_a_whole(sampler):
    rounds, factors = 8, np.linspace(2.0, 0.5, 8).astype(np.float32)
    options = {} if sampler is fdp.full_participation else {"cohort_size": 2}
    cohorts = fdp.participation(sampler(), 8, **options)
    setting = Setting(
        cohorts,
        {"w": np.zeros(3, np.float32)},
        rounds,
        {"accountant": "rdp", "relation": "zero_out"},
        factors={"aggregator.noise_multiplier": factors, "aggregator.clip_norm": factors},
    )
    mean = client_aggregator(GaussianLevel(epsilon=3.0), setting)
    noise = np.float32(mean.numbers["noise_multiplier"])
    # A client is in 2 of 8 rounds of cyclic cohorts: those with the least noise, at worst.
    charged = factors if sampler is fdp.full_participation else np.sort(factors)[:2]
    account = rdp.RdpAccountant()
    for factor in charged:
        account.compose(dp_accounting.GaussianDpEvent(float(noise * factor)))
    assert 3.0 * (1 - 1e-4) < account.get_epsilon(1e-5) <= 3.0
    ledger = Ledger("client", "zero_out")
    for factor in charged:
        ledger.charge(dp_accounting.GaussianDpEvent(float(noise * factor)))
    assert ledger.epsilon(1e-5)[0] <= 3.0 * (1 + 1e-9)


RUN = (
    *(*SMALL[:1], "--run.rounds=6", "--run.evaluate_every=2", "--run.checkpoint_every=3"),
    *("--run.plots=false", "--execution.devices=1", *CLIENT),
    f"--schedules.{RATE}=cosine",
    "--schedules.privacy.client.noise_multiplier={curve = 'linear', final = 0.5}",
    "--schedules.privacy.client.clip_norm={curve = 'steps', every = 3, factor = 0.5}",
)


@telling
def test_a_run_spends_its_budget_and_says_what_changed(tmp_path):
    outcome = experiment.run(read(*RUN, "--privacy.client.epsilon=4"), tmp_path / "run")
    assert outcome.ended == "finished" and 3.99 < outcome.summary["epsilon"] <= 4.0
    rows = [
        json.loads(line)
        for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    stddevs = np.array([row["noise_stddev"] for row in rows])
    factors = np.array([1 - 0.5 * t / 6 for t in range(6)]) * np.array([1, 1, 1, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(stddevs / stddevs[0], factors, rtol=1e-5)
    text = (tmp_path / "run/privacy.md").read_text(encoding="utf-8")
    assert "Numbers of the run changed over rounds: training.learning_rate by factors of" in text
    (claim,) = json.loads((tmp_path / "run/privacy.json").read_text(encoding="utf-8"))["claims"]
    assert claim["clip_norm"] == [0.5, 1.0]
    low, high = claim["noise_multiplier"]
    assert low / high == pytest.approx((1 - 0.5 * 5 / 6), rel=1e-5)


class Heard(Watcher):
    def __init__(self):
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)


def test_a_run_that_is_extended_beyond_its_curves_warns_once(tmp_path):
    words = (*NOT_PRIVATE, "--algorithm.name=fedavg", "--data.num_clients=3", "--run.plots=false")
    experiment.run(read(*words, "--run.rounds=2", f"--schedules.{RATE}=cosine"), tmp_path / "run")
    found = []
    for rounds in (2, 3, 3):
        heard = Heard()
        experiment.resume(tmp_path / "run", heard, words=[f"--run.rounds={rounds}"])
        found.append([text for text in heard.warnings if "schedules" in text])
    warning = (
        "schedules.training.learning_rate ends with round 2: each later round has its final "
        "factor, 0; for a curve over 3 rounds start a new run"
    )
    assert found == [[], [warning], []]


@pytest.mark.parametrize(
    ("curve", "end"),
    [
        ("{curve = 'linear', final = 0.5, warm_up = 2}", 5),
        ("{curve = 'linear', rounds = 4}", None),
        ("{curve = 'cosine', rounds = 8}", None),
        ("{curve = 'list', factors = [1, 0.5, 0.2, 0.1, 0.1]}", 5),
        ("{curve = 'list', factors = [1, 0.5]}", None),
        ("inverse", None),
        ("plateau", None),
    ],
)
def test_curves_that_lasted_as_long_as_the_planned_run_are_named(curve, end):
    config = read("--run.rounds=5", f"--schedules.{RATE}={curve}")
    longer = config.model_copy(update={"run": config.run.model_copy(update={"rounds": 8})})
    found = list(ended_curves(longer, 5))
    assert [f"ends with round {end}:" in text for text in found] == [True] * (end is not None)
    assert not list(ended_curves(config, 5))


@slow
def test_a_run_that_is_extended_has_the_bits_of_a_whole_one(tmp_path):
    words = (*RUN, "--privacy.client.epsilon=none", "--privacy.client.noise_multiplier=1")
    experiment.run(read(*words), tmp_path / "short")
    experiment.resume(tmp_path / "short", words=["--run.rounds=9"])
    table = "{curve = 'cosine', rounds = 6}"
    linear = "{curve = 'linear', final = 0.5, rounds = 6}"
    whole = (
        *(*words, "--run.rounds=9", f"--schedules.{RATE}={table}"),
        f"--schedules.privacy.client.noise_multiplier={linear}",
    )
    kept = [w for w in whole if w not in RUN[-3:-1]]
    experiment.run(read(*kept), tmp_path / "whole")
    short, long = (experiment.load_run(tmp_path / name) for name in ("short", "whole"))
    mine, others = jax.tree.leaves(short.params), jax.tree.leaves(long.params)
    assert len(mine) == len(others) > 0 and all(map(np.array_equal, mine, others))
    assert short.metrics[-1]["epsilon_client"] == long.metrics[-1]["epsilon_client"]


@slow
def test_a_plateau_changes_the_rate_that_follows_and_is_named(tmp_path):
    words = (
        *(*SMALL[:1], "--run.rounds=6", "--run.plots=false", "--execution.devices=1"),
        # No loss is ever better by so much.
        f"--schedules.{RATE}={{curve = 'plateau', patience = 1, min_change = 100, factor = 0.1}}",
    )
    experiment.run(read(*words), tmp_path / "run")
    run = experiment.load_run(tmp_path / "run")
    norms = [row["update_norm_quantiles"][2] for row in run.metrics]
    assert norms[-1] < norms[0] / 50
    text = (tmp_path / "run/privacy.md").read_text(encoding="utf-8")
    assert f"{RATE} in each round, which followed the exact test_loss" in text
    assert over_rounds(run.hyper, "local.learning_rate") == pytest.approx((2e-4, 2.0))


@slow
def test_a_run_with_too_little_noise_in_one_round_stops_at_its_budget(tmp_path):
    words = (*RUN, "--privacy.client.epsilon=4", "--privacy.client.noise_multiplier=2.5")
    outcome = experiment.run(read(*words), tmp_path / "run")
    assert outcome.ended == "budget" and outcome.summary["epsilon"] <= 4.0


MASKED = ("--algorithm.aggregator=gradient_mask", "--algorithm.aggregator_options.threshold=0.4")
OF_DITTO = "--schedules.algorithm.options.personal_epochs=plateau"
OF_MASK = "--schedules.algorithm.aggregator_options.threshold=linear"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--schedules.algorithm.options.noise_multiplier=linear"],
            "^schedules must be of a number that can change in this run",
        ),
        (
            [*NOT_PRIVATE, *MASKED, OF_MASK, "--schedules.algorithm.options.threshold=cosine"],
            r"threshold must be of another number than schedules\.algorithm\.\w+\.threshold",
        ),
        pytest.param(
            ["--algorithm.name=ditto", "--algorithm.options.personal_epochs=2", OF_DITTO],
            "personal_epochs must not be a plateau: the privacy of a run is planned before",
            marks=slow,
        ),
        (
            [f"--{OF_OPTIMIZER}.momentum=0.9", f"--schedules.{OF_OPTIMIZER}.momentum={TRIPLED}"],
            r"^schedules\.\S+\.momentum must keep .* in round 1, optimizer\.\w+ must be in",
        ),
        (
            [
                *("--training.optimizer=adam", f"--{OF_OPTIMIZER}.b1=0.9"),
                f"--schedules.{OF_OPTIMIZER}.b1={TRIPLED}",
            ],
            r"in round 1, optimizer\.b1 must be in \[0, 1\), got 2\.",
        ),
    ],
)
def test_numbers_that_a_run_lacks_or_has_by_another_key_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        assemble(read(*SMALL, *words))


@slow
def test_experiments_whose_curves_alone_differ_have_one_program():
    def digest_of(*words):
        config = read(*SMALL, "--execution.devices=1", *NOT_PRIVATE, *words)
        return assemble(config).simulation.program.digest

    curves = ("cosine", "{curve = 'inverse', power = 0.5}", "plateau")
    digests = {digest_of(f"--schedules.{RATE}={curve}") for curve in curves}
    assert len(digests) == 1 and digest_of() not in digests
