"""Projected rounds: steps by device as packed, bytes as sent, apart from what is measured."""

import heapq
import json
import math

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from marks import telling
from small_problem import make_data, make_model

from fedjax_dp.algorithms import fedavg, scaffold
from fedjax_dp.cli import bench
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import full_participation, participation
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.experiment.studies import timing as module
from fedjax_dp.experiment.studies.timing import (
    Network,
    Rates,
    fixed_seconds,
    loads,
    on_devices,
    projected,
    rates_of,
)
from fedjax_dp.server import trimmed_mean

SIZES = (40, 3, 22, 8, 8, 1, 17, 30, 2, 2, 12, 5)
# Of the model.
NUM_PARAMS = 4


# Epochs of batches of two.
STEPS = [math.ceil(size / 2) for size in SIZES]


def made(algorithm_of=fedavg, chunk=1, splits=False, **more):
    data, model = make_data(SIZES), make_model()
    trainer = local_trainer(model, LocalConfig(0.1, 2, num_epochs=1))
    algorithm = algorithm_of(model, trainer, **more)
    joins = participation(full_participation(), len(SIZES), len(SIZES))
    execution = ExecutionConfig(clients_per_chunk=chunk, devices=1, split_clients=splits)
    return simulation(algorithm, data, joins, execution)


def longest_first(num_devices, clients=STEPS):
    """The steps of each device, by a heap."""
    heap = [0] * num_devices
    for steps in sorted(clients, reverse=True):
        heapq.heappush(heap, heapq.heappop(heap) + steps)
    return heap


@pytest.mark.parametrize(("chunk", "alone_above"), [(1, None), (2, None), (3, 4), (1, 0)])
def test_all_clients_of_a_chunk_take_the_steps_of_the_longest(chunk, alone_above):
    mesh = AbstractMesh((2,), ("clients",))
    layout = Layout(chunk, mesh, alone_above=alone_above)
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 9, 2 * 3 * chunk)
    expected = []
    for device in range(2):
        own, total = steps[device * 3 * chunk : (device + 1) * 3 * chunk], 0
        for c in range(3):
            part = own[c * chunk : (c + 1) * chunk]
            alone = [s for s in part if alone_above is not None and s > alone_above]
            others = [s for s in part if alone_above is None or s <= alone_above]
            total += sum(alone) + chunk * max(others, default=0)
        expected.append(total)
    np.testing.assert_array_equal(loads(layout, steps), expected)


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_a_projected_round_is_the_formula_on_the_packing_of_its_clients(num_devices):
    sim, network = made(), Network(bandwidth=1e6, latency=0.5)
    found = projected(sim, Rates(step=2.0, fixed=10.0), num_devices, network)
    load = longest_first(num_devices)
    assert found["training_seconds"] == pytest.approx(2.0 * max(load))
    assert found["balance"] == pytest.approx(np.mean(load) / max(load))
    # A sum in two parts of 4 bytes, for each parameter and for the weight.
    assert found["bytes_received"] == (num_devices - 1) * 8 * (NUM_PARAMS + 1)
    seconds = found["bytes_received"] / 1e6 + 0.5 * math.ceil(math.log2(num_devices))
    assert found["adding_seconds"] == pytest.approx(seconds)
    total = found["training_seconds"] + 10.0 + seconds
    assert found["seconds_per_round"] == pytest.approx(total)


def test_projected_devices_share_the_steps_of_clients_that_are_split():
    long = [steps for steps in STEPS if 8 * steps > sum(STEPS)]
    rest = longest_first(8, [steps for steps in STEPS if steps not in long])
    load = np.add(rest, sum(long) / 8)
    found = projected(made(splits=True), Rates(step=2.0, fixed=10.0), 8)
    assert len(long) == 3 and found["training_seconds"] == pytest.approx(2.0 * max(load))
    assert found["balance"] == pytest.approx(np.mean(load) / max(load))
    # Sums once, and those of each step that all take together.
    assert found["bytes_received"] == (1 + sum(long)) * 7 * 8 * (NUM_PARAMS + 1)


def test_bytes_are_those_of_sums_or_of_stacked_updates():
    def received(sim, num_devices=4):
        return projected(sim, Rates(1.0, 0.0), num_devices)["bytes_received"]

    # Deltas, control variates, and the weight.
    with_state = made(scaffold, num_clients=len(SIZES))
    assert received(with_state) == 3 * 8 * (2 * NUM_PARAMS + 1)
    # Updates in the slots of the three others.
    stacked = made(aggregator=trimmed_mean(0.2))
    slots = on_devices(stacked, 4).slots_per_device(stacked.participation)
    per_slot = received(stacked) / (3 * slots)
    assert slots >= 3 and per_slot >= 4 * NUM_PARAMS


def test_rates_are_measured_rounds_over_the_steps_they_took(monkeypatch):
    monkeypatch.setattr(module, "fixed_seconds", lambda simulation: 1.0)
    [total] = longest_first(1)
    rates = rates_of(made(), [1.0 + 0.1 * total, 1.0 + 0.5 * total, 1.0 + 0.2 * total], first=1)
    assert rates.step == pytest.approx(0.2) and rates.fixed == 1.0


@telling
def test_a_round_without_clients_is_measured_where_all_is_in_memory():
    assert fixed_seconds(made()) > 0
    sim = made()
    with pytest.raises(ValueError, match="a projected round must be with all in device memory"):
        fixed_seconds(sim._replace(program=None))


MODEL = {
    "kind": "model",
    "assumptions": {"bandwidth_bytes_per_second": 35e9},
    "rows": [{"devices": 8, "seconds_per_round": 0.125}],
}


def test_projected_figures_are_in_a_table_of_their_own(fedjax_dp, monkeypatch):
    asked = []
    timed = {"name": "W1", "about": "a thing", "seconds_per_round": 0.5, "model": MODEL}
    monkeypatch.setattr(bench, "measure", lambda *words, **changes: asked.append(words) or timed)
    words = ("bench", "W1", "--project=8,64", "--bandwidth=2", "--latency=3", "--devices=1")
    status, out, _ = fedjax_dp(*words)
    measured, _, model = out.partition("model, not measured")
    assert not status and "0.5" in measured and "0.125" not in measured
    assert "0.125" in model and "0.5" not in model
    [(_, _, _, projecting)] = asked
    assert projecting.devices == [8, 64]
    assert projecting.network == pytest.approx((2e9, 3e-6))
    for wrong in (("--project=8,0",), ("--project=8", "--bandwidth=0"), ("--run.rounds=3",)):
        status, _, errors = fedjax_dp("bench", "W1", *wrong)
        assert status == 2 and "must" in errors


@telling
def test_an_experiment_is_timed_and_projected(fedjax_dp, tmp_path):
    file = tmp_path / "small.toml"
    file.write_text("[data]\nnum_clients = 8\n[execution]\ndevices = 1\n", encoding="utf-8")
    words = ("--training.batch_size=4", "--rounds=2", "--project=1,4", "--json")
    status, out, _ = fedjax_dp("bench", str(file), *words)
    [found] = json.loads(out)["results"]
    assert status == 0 and found["rounds"] == 2 and found["model"]["kind"] == "model"
    one, four = found["model"]["rows"]
    # As measured, where nothing is sent; then a part of it.
    assert one["seconds_per_round"] == pytest.approx(found["seconds_per_round"], rel=0.5)
    assert one["bytes_received"] == 0 < four["bytes_received"]
    assert four["training_seconds"] < one["training_seconds"]
    assert fedjax_dp("bench", str(file), "--layout=vmap")[0] == 2
