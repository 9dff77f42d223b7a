"""Runs whose gradients of records are split, on a device that is made to look like a GPU."""

import json

import pytest
from marks import later
from run_folders import execute, read_json

from fedjax_dp.core.backend import Facts
from fedjax_dp.engine import layout as layouts
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import execution_of

CARD = "NVIDIA H100 80GB HBM3"
PRIVATE = ("--data.num_clients=3", "--run.rounds=1", "--privacy.unit=record")
PRIVATE += ("--algorithm.name=fedavg", "--execution.devices=1", "--run.plots=false")


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(layouts, "facts", lambda: Facts("gpu", CARD, "9.0", 132))


def speeds(folder, split):
    """A file of the benchmark, for which split products have this speed, and exact ones 100."""
    path, steps = folder / "accelerator-gpu.json", {}
    for precision, rate in (("float32", 100.0), ("split", split)):
        row = {"form": "records", "precision": precision, "clients": 2, "seconds": 0.1}
        row |= {"clients_per_second": rate, "gflops": 1.0}
        steps[precision] = {"group": "layouts", "status": "done", "rows": [row]}
    path.write_text(json.dumps({"machine": {"device": CARD}, "steps": steps}))
    return f"--execution.measured={path}"


@pytest.mark.parametrize(
    ("split", "chosen"), later([(300.0, "split"), (101.0, "exact")], soon=[(300.0, "split")])
)
def test_a_run_computes_and_names_what_was_measured_as_faster(tmp_path, card, split, chosen):
    words = (*PRIVATE, "--execution.products=auto", speeds(tmp_path, split))
    folder = tmp_path / "run"
    status, text = execute(folder, *words)
    assert status == 0, text
    summary = read_json(folder, "summary.json")
    assert summary.get("products", "exact") == chosen
    # A resumed run computes in the same way.
    assert load_config(folder / "config.toml", []).execution.products == chosen
    assert summary["epsilon_record"] > 0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--execution.products=split", "products must be 'exact' or 'auto': a cpu has no units"),
        ("--execution.measured=no.json", "measured must be a file that .* wrote.*, got 'no"),
    ],
)
def test_what_is_missing_is_refused_before_data_are_read(word, message, monkeypatch):
    monkeypatch.setattr(layouts, "facts", lambda: Facts("cpu", "cpu"))
    section = load_config(None, [*PRIVATE, word])
    with pytest.raises(ValueError, match=message):
        execution_of(section.execution, section.run)
