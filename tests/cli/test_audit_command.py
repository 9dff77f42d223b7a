"""`fedjax-dp audit` on small experiments."""

import json

import pytest
import typer
from run_folders import NOT_PRIVATE, SMALL
from typer.testing import CliRunner

from fedjax_dp.cli import audit
from fedjax_dp.privacy import mechanisms

app = typer.Typer()
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    audit.command
)

FAST = (*SMALL, "--training.num_steps=1", "--execution.clients_per_chunk=1")
CLIENTS = (
    "--privacy.unit=client",
    "--algorithm.name=dp_fedavg",
    "--privacy.client.noise_multiplier=1.0",
    "--privacy.client.epsilon=none",
    "--no-membership",
)


def invoke(*words):
    return CliRunner().invoke(app, [*FAST, *words], catch_exceptions=False)


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


def half_the_noise(clip_norm, noise_multiplier, **options):
    quiet = make_gaussian(clip_norm, noise_multiplier / 2, **options)
    return make_gaussian(clip_norm, noise_multiplier, **options)._replace(add_noise=quiet.add_noise)


make_gaussian = mechanisms.gaussian


def test_half_the_noise_ends_in_status_one_and_in_words(monkeypatch):
    monkeypatch.setattr(mechanisms, "gaussian", half_the_noise)
    monkeypatch.setenv("COLUMNS", "200")
    result = invoke(*CLIENTS, "--canaries=1", "--runs=600", "--rounds=1")
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if "VIOLATED" in line]
    assert any("gaussian" in line for line in lines)
    assert any("round with and without a client" in line for line in lines)
    assert any("noise of a round" in line for line in lines)
    assert "more was proven than claimed" in result.stdout


def test_nothing_is_held_against_an_experiment_that_claims_nothing():
    result = invoke(*NOT_PRIVATE)
    assert result.exit_code == 0
    assert "no privacy is claimed" in result.stdout
    assert "membership attack on outputs: accuracy" in result.stdout


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("--canaries=0", "--canaries must be an integer of at least 1"),
        ("--confidence=1", "--confidence must lie in"),
        ("--run.round=3", "did you mean 'run.rounds'"),
    ],
)
def test_mistakes_are_named(word, match):
    with pytest.raises(ValueError, match=match):
        invoke(word)
