"""`fedjax-dp audit` on small experiments."""

import json
from types import SimpleNamespace

import pytest
from run_folders import NOT_PRIVATE
from typer.testing import CliRunner

from fedjax_dp.audit.membership import MembershipResult
from fedjax_dp.audit.noise import StepCheck
from fedjax_dp.audit.runs import AuditResult
from fedjax_dp.cli import audit
from fedjax_dp.experiment import Config
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.schema.config import PrivacySection
from fedjax_dp.experiment.studies import audits
from fedjax_dp.experiment.studies.audits import AuditReport
from fedjax_dp.privacy import mechanisms

FAST = ("--training.num_steps=1", "--execution.clients_per_chunk=1")
CLIENTS = (
    "--privacy.unit=client",
    "--algorithm.name=dp_fedavg",
    "--privacy.client.noise_multiplier=1.0",
    "--privacy.client.epsilon=none",
    "--no-membership",
)


def invoke(*words, rounds=2):
    small = ("--data.num_clients=3", f"--run.rounds={rounds}")
    return CliRunner().invoke(audit.app, [*small, *FAST, *words], catch_exceptions=False)


def reported(monkeypatch, *, measured):
    """Lets the command find this, in place of attacks."""
    asked = []

    def found(experiment, **options):
        asked.append(options)
        bound = AuditResult("record", "one_run", 1e-5, 0.25, 8.0, 0.95, 1, 20)
        step = StepCheck("gradient of a record alone", measured, 1.0)
        attack = MembershipResult(0.5, (0.4, 0.6), 0.5, 0.01, 100)
        return AuditReport([bound], {"record": [step]}, attack, (), "there is one client")

    monkeypatch.setattr(audit, "assemble", lambda config: None)
    monkeypatch.setattr(audit, "large_deltas", lambda experiment: ["δ is too large"])
    monkeypatch.setattr(audit, "audit_experiment", found)
    return asked


@pytest.mark.parametrize(("measured", "status"), [(0.5, 0), (2.0, 1), (float("inf"), 1)])
def test_what_was_found_is_printed_and_decides_over_the_status(monkeypatch, measured, status):
    asked = reported(monkeypatch, measured=measured)
    result = invoke("--canaries=20", "--rounds=3", "--no-membership")
    assert result.exit_code == status
    assert ("VIOLATED" in result.stdout) == ("violated: a proven bound" in result.stdout)
    assert ("VIOLATED" in result.stdout) == (status == 1)
    assert "membership attack on outputs: accuracy 0.500" in result.stdout
    assert "collusion of clients was not tried: there is one client" in result.stdout
    assert "warning: δ is too large" in result.stderr
    report = json.loads(invoke("--json").stdout)
    assert report["is_violated"] == report["steps"][0]["is_violated"] == (status == 1)
    assert report["steps"][0]["measured"] == ("inf" if measured == float("inf") else measured)
    assert report["bounds"][0]["epsilon_claimed"] == 8.0 and not report["bounds"][0]["is_violated"]
    assert report["membership"]["num_examples"] == 100
    assert report["collusion"] == [] and report["no_collusion"] == "there is one client"
    options = {"num_canaries": 20, "num_runs": 1, "num_rounds": 3, "confidence": 0.95}
    options |= {"records": "made", "noise_share": 1.0}
    assert asked[0] == options | {"has_membership": False} and asked[1]["has_membership"]


@pytest.mark.slow
def test_half_the_noise_on_mislabelled_records_ends_with_status_1():
    words = (
        *("--records=mislabelled", "--canaries=1", "--runs=400", "--rounds=3"),
        *("--training.sampler=full_batch", "--training.learning_rate=0.2"),
        *("--privacy.record.noise_multiplier=2.0", "--privacy.record.clip_norm=0.3"),
        *("--privacy.accountant=pld", "--no-membership", "--json"),
    )
    result = invoke(*words, "--noise-share=0.5")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["is_violated"] and not report["steps"]
    assert invoke(*words).exit_code == 0


def test_attacks_that_there_are_not_are_refused():
    assert invoke("--records=real").exit_code == 2
    with pytest.raises(ValueError, match="--noise-share must be"):
        invoke("--noise-share=0")


@pytest.mark.slow
def test_a_private_experiment_passes_with_claims_beside_bounds():
    result = invoke("--json", "--canaries=20")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and not report["is_violated"]
    [bound] = report["bounds"]
    assert (bound["unit"], bound["method"], bound["num_canaries"]) == ("record", "one_run", 20)
    assert 0 <= bound["epsilon_lower"] <= bound["epsilon_claimed"]
    names = [step["name"] for step in report["steps"]]
    assert "gradient of a record alone" in names and "what a client sends, part 0" in names
    assert {step["unit"] for step in report["steps"]} == {"record"}
    assert report["membership"]["num_examples"] > 10


FROZEN = (
    "--model.name=mlp",
    "--model.options.hidden_sizes=[8]",
    "--model.frozen=['params/Dense_0']",
)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--no-membership",), CLIENTS], ids=["records", "clients"])
def test_what_is_trained_behind_a_frozen_base_is_audited(words):
    result = invoke("--json", "--canaries=20", *FROZEN, *words)
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and not report["is_violated"]
    assert report["bounds"][0]["num_canaries"] == 20 and report["steps"]


@pytest.mark.slow
def test_clients_with_their_own_delta_are_audited_where_most_can_be_proven():
    words = ("--privacy.record.dp_delta=[1e-6, 1e-3, 1e-5]", "--no-membership")
    result = invoke("--json", "--canaries=20", *words)
    [bound] = json.loads(result.stdout)["bounds"]
    assert result.exit_code == 0 and bound["dp_delta"] == 1e-3


def half_the_noise(clip_norm, noise_multiplier, **options):
    quiet = make_gaussian(clip_norm, noise_multiplier / 2, **options)
    return make_gaussian(clip_norm, noise_multiplier, **options)._replace(add_noise=quiet.add_noise)


make_gaussian = mechanisms.gaussian


@pytest.mark.slow
def test_half_the_noise_ends_in_status_one_and_in_words(monkeypatch):
    monkeypatch.setattr(mechanisms, "gaussian", half_the_noise)
    result = invoke(*CLIENTS, "--canaries=1", "--runs=600", "--rounds=1")
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if "VIOLATED" in line]
    assert any("gaussian" in line for line in lines)
    assert any("round with and without a client" in line for line in lines)
    assert any("noise of a round" in line for line in lines)
    assert "violated: a proven bound" in result.stdout


@pytest.mark.slow
def test_nothing_is_held_against_an_experiment_that_claims_nothing():
    result = invoke(*NOT_PRIVATE)
    assert result.exit_code == 0
    assert "no privacy is claimed" in result.stdout
    assert "membership attack on outputs: accuracy" in result.stdout


@pytest.mark.slow
def test_work_on_the_host_and_kinds_of_round_are_audited_too():
    result = invoke(
        "--json",
        "--canaries=10",
        "--runs=2",
        "--algorithm.name=r_dpcfl",
        "--algorithm.options.num_models=2",
        "--algorithm.options.num_selections=1",
        rounds=4,
    )
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and not report["is_violated"]
    [bound] = report["bounds"]
    # All of the budget, that of the first round on whole batches and of the choice among it.
    assert bound["epsilon_claimed"] == pytest.approx(8, rel=0.05)
    assert "choice with a record exchanged or left out" in {s["name"] for s in report["steps"]}
    # Every client has a model of its cluster: these are what is attacked.
    assert report["membership"]["num_examples"] > 10


@pytest.mark.slow
def test_records_behind_votes_are_attacked_through_the_votes():
    result = invoke(
        "--json",
        "--canaries=5",
        "--no-membership",
        "--algorithm.name=ae_dpfl",
        "--data.public_examples=20",
    )
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and not report["is_violated"]
    [bound] = report["bounds"]
    assert bound["method"] == "one_run"
    # Both rounds are charged whatever the votes are about: the whole budget is claimed.
    assert bound["epsilon_claimed"] == pytest.approx(8, rel=0.05)
    names = {step["name"] for step in report["steps"]}
    assert "gradient of a record alone" in names
    # Of what leaves a client, only its weight is compared: votes have no distance.
    assert sum(name.startswith("what a client sends") for name in names) == 1


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("--canaries=0", "--canaries must be an integer of at least 1"),
        ("--canaries=100000", "num_canaries must be at most 650, the number of parameters"),
        ("--confidence=1", "--confidence must be in"),
        ("--run.round=3", "did you mean 'run.rounds'"),
    ],
)
def test_mistakes_are_named(word, match):
    with pytest.raises(ValueError, match=match):
        invoke(word)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"confidence": 1.0}, r"confidence must be in \(0, 1\)"),
        ({"num_runs": 0}, "num_runs must be an integer of at least 1"),
        ({"num_rounds": 2.5}, "num_rounds must be an integer of at least 1"),
    ],
)
def test_numbers_of_an_audit_are_checked_before_any_run(options, rule):
    nothing = Experiment(*[None] * 9)
    with pytest.raises(ValueError, match=rule):
        audits.audit_experiment(nothing, **options)


def test_canaries_of_all_units_are_planted_before_the_first_run(monkeypatch):
    def plant(experiment, unit, *rest):
        if unit == "record":
            raise ValueError("records have no canaries")

    for name in ("_check_steps", "run_audit"):
        monkeypatch.setattr(audits, name, None)
    monkeypatch.setattr(audits, "check_norms", lambda seed: [])
    monkeypatch.setattr(audits, "_plant", plant)
    layout = SimpleNamespace(arithmetic=SimpleNamespace(products="exact"))
    config = Config(privacy=PrivacySection(unit="both"))
    both = Experiment(config, *[None] * 8)._replace(
        simulation=SimpleNamespace(layout=layout), num_parameters=9
    )
    with pytest.raises(ValueError, match="records have no canaries"):
        audits.audit_experiment(both)
