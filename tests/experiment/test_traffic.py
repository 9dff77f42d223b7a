"""The bytes of a run: by round, in its summary, and on through a restart."""

import jax
import numpy as np
import pytest
from marks import telling
from run_folders import NOT_PRIVATE, SMALL, execute, metrics, read_json

from fedjax_dp.engine.accounts.communication import ByteTotals, communication
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.server.oblivious import noise_messages

# Logistic regression on digits: 64 features, 10 classes.
MODEL = 4 * (64 * 10 + 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traffic") / "run"
    assert execute(folder, *SMALL, *NOT_PRIVATE)[0] == 0
    return folder


@telling
def test_a_run_counts_the_model_down_and_up_again_with_its_weight(folder):
    rows = metrics(folder)
    assert [row["bytes_down"] for row in rows] == [3 * MODEL] * 2
    assert [row["bytes_up"] for row in rows] == [3 * (MODEL + 4)] * 2
    found = read_json(folder, "summary.json")["communication"]
    assert found["rounds"] == 2 and found["encoding"] == "smallest"
    assert found["up"]["bytes"] == 6 * (MODEL + 4) and found["down"]["bytes"] == 6 * MODEL
    assert found["both"]["bytes"] == 12 * MODEL + 24
    assert found["both"]["by_type"] == {"float32": 12 * MODEL + 24}
    assert set(found["up"]["by_encoding"].values()) == {6 * (MODEL + 4)}
    assert (folder / "plots" / "accuracy_bytes.png").is_file()


@telling
def test_a_resumed_run_continues_the_byte_count(folder):
    assert execute(folder, "--run.rounds=3", resume=True)[0] == 0
    rows = metrics(folder)
    assert [row["bytes_up"] for row in rows] == [3 * (MODEL + 4)] * 3
    found = read_json(folder, "summary.json")["communication"]
    assert found["rounds"] == 3 and found["up"]["bytes"] == 9 * (MODEL + 4)


@telling
def test_totals_are_those_of_all_rounds_whatever_was_kept_in_between():
    experiment = assemble(load_config(None, [*SMALL, *NOT_PRIVATE]))
    sim, key = experiment.simulation, jax.random.key(0)
    _, record, info = sim.run(sim.init(key), key, 4)
    # Keys before rounds 0 and 3: a block counts them where they were sent.
    exchange = noise_messages(3, 1, key_rounds=(0, 3))
    at_once, in_parts = (ByteTotals(sim.federation, "dense", exchange) for _ in range(2))
    rows = at_once.count(record, info)
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 2], (record, info)) for i in (0, 2)]
    some = in_parts.count(*parts[0])
    restored = ByteTotals(sim.federation, "dense", exchange)
    restored.restore(in_parts.to_json())
    assert some + restored.count(*parts[1]) == rows
    assert restored.summary() == at_once.summary()
    assert at_once.summary()["up"]["by_type"]["keys"] == 2 * 6 * 32
    found = communication(sim, record, info, exchange=exchange)
    assert [row["bytes_up"] for row in rows] == found.by_round("up").tolist()
    assert np.sum(found.by_round()) == at_once.summary()["both"]["bytes"]
