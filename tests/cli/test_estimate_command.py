"""`fedjax-dp estimate`: answers and refusals; compiling itself needs packages of other devices."""

import importlib.util
import json
import sys

import pytest
from marks import slow

from fedjax_dp.core import targets
from fedjax_dp.core.packages import installing
from fedjax_dp.engine.execution import elsewhere
from fedjax_dp.experiment.studies import estimate as estimates
from fedjax_dp.experiment.studies.estimate import Estimate, Part

FOUND = Estimate(
    *("v5e:2x2", 4, False, 2.5e9, 2e10, 1.7e10, 64, 3.0, 40.0, 0.25, 3e9, 1234.0),
    {"all-gather": 7e6},
    [Part("round/local_step", "fusion of convolution", 0.75, 0.1875)],
)
SMALL = ("--run.rounds=1", "--data.num_clients=3")


def test_what_a_compiler_says_is_a_table_a_document_and_a_number(fedjax_dp, monkeypatch):
    monkeypatch.setattr("fedjax_dp.cli.estimate.estimate", lambda *words: FOUND)
    status, output, _ = fedjax_dp("estimate", "--device", "v5e:2x2")
    assert status == 0
    advice = "fits\tNO; use a smaller execution.clients_per_chunk"
    for words in (advice, "exchanged by all-gather\t7 MB", "round/local step\tfusion of conv"):
        assert words in output
    alone = FOUND._replace(clients_per_chunk=1)
    monkeypatch.setattr("fedjax_dp.cli.estimate.estimate", lambda *words: alone)
    assert "fits\tNO; use a smaller model or batch" in fedjax_dp("estimate")[1]
    _, output, _ = fedjax_dp("estimate", "--json")
    document = json.loads(output)
    assert document["fits"] is False and document["parts"][0]["share"] == 0.75
    assert fedjax_dp("estimate", "--quiet")[1] == "0.25\n"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--device", "h101"), "device must be a device (a100"),
        (("--device", "v5e", "--training.learning_rate=-1"), "training.learning_rate"),
        (("nothing.toml",), "nothing.toml"),
    ],
)
def test_bad_words_are_refused_before_a_compiler_is_asked(fedjax_dp, monkeypatch, words, rule):
    monkeypatch.setattr(estimates.subprocess, "run", None)
    status, _, errors = fedjax_dp("estimate", *words)
    assert status == 2 and rule in errors


def test_a_compiler_that_ends_its_process_is_reported_with_its_last_words(monkeypatch):
    words = [
        sys.executable,
        "-c",
        "import sys; print('no such chip', file=sys.stderr); sys.exit(6)",
    ]
    run = estimates.subprocess.run
    monkeypatch.setattr(estimates.subprocess, "run", lambda asked, **rest: run(words, **rest))
    monkeypatch.setattr(targets, "_is_installed", lambda module: True)
    with pytest.raises(RuntimeError, match="v5e ended with status 6: no such chip"):
        estimates.estimate(None, SMALL, "v5e")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("v5e", f"compiler for TPUs is not installed; run `{installing('tpu')}`"),
        ("H100", f"compiler for NVIDIA GPUs is not installed; run `{installing('cuda')}`"),
    ],
)
def test_a_missing_compiler_is_named_before_a_process_starts(fedjax_dp, monkeypatch, device, words):
    monkeypatch.setattr(targets, "_is_installed", lambda module: False)
    monkeypatch.setattr(estimates.subprocess, "run", None)
    status, _, errors = fedjax_dp("estimate", *SMALL, "--device", device)
    assert status == 2 and words in errors and f"device '{device}'" in errors


def test_what_does_not_fit_is_an_error_with_what_to_do(monkeypatch, tmp_path):
    def refused(*words):
        raise RuntimeError("RESOURCE_EXHAUSTED: needs 27G\nand more")

    monkeypatch.setattr(estimates, "_here", refused)
    monkeypatch.setattr(sys, "argv", ["estimate", str(tmp_path / "found"), "v5e", ""])
    estimates.main()
    error = json.loads((tmp_path / "found").read_text(encoding="utf-8"))["error"]
    assert "do not fit in the memory of v5e; use a smaller" in error
    assert error.endswith("needs 27G")


def test_choices_are_checked_for_the_device_and_not_for_this_machine(monkeypatch):
    asked = []
    monkeypatch.setattr(elsewhere, "compiled_for", lambda *words: asked.append(words) or 1 / 0)
    words = (*SMALL, "--execution.products=split")
    with pytest.raises(ZeroDivisionError):
        estimates._here(None, words, "h100")
    ((wanted, _, execution),) = asked
    assert (wanted.kind, execution.products) == ("h100", "split")


@pytest.mark.parametrize(("key", "value"), [("clients_per_chunk", "tuned"), ("placement", "host")])
def test_what_needs_the_device_is_refused_before_data_are_read(monkeypatch, key, value):
    monkeypatch.setattr(estimates, "population_of", None)
    with pytest.raises(ValueError, match=rf"^{key} must be .* not here.*, got '{value}'"):
        estimates._here(None, (*SMALL, f"--execution.{key}={value}"), "v5e")


@slow
@pytest.mark.parametrize("device", ["v5e", "v5e:2x2", "h100", "h100x8"])
def test_rounds_are_compiled_for_devices_that_are_not_here(device):
    package = "libtpu" if device.startswith("v") else "jax_plugins"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found = estimates.estimate(None, (*SMALL, "--data.num_clients=16"), device)
    assert found.fits and 0 < found.temporary_bytes < 1e9
    # A round of a small model takes between a microsecond and a second.
    assert 1e-6 < found.round_seconds < 1 and found.round_operations > 10
    assert bool(found.exchanged_bytes) == (found.devices > 1)
    assert 0.5 < sum(part.share for part in found.parts) <= 1.0 + 1e-6
