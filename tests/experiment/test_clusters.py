"""Hidden clusters from a configuration: their data, one budget for all rounds, a resumed run."""

import jax
import numpy as np
import pytest
from run_folders import execute, read_json

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble, population_of
from fedjax_dp.io.checkpoint import Checkpoints

CLUSTERS = (
    "--data.partition=shifted_clusters",
    "--data.partition_options.cluster_sizes=[1, 2, 2]",
    "--data.partition_options.samples_per_client=60",
    "--data.partition_options.test_samples_per_client=40",
    "--training.learning_rate=0.5",
    "--training.batch_size=20",
    "--run.rounds=4",
    "--run.checkpoint_every=2",
    "--execution.clients_per_chunk=1",
)
R_DPCFL = ("--algorithm.name=r_dpcfl", "--algorithm.options.num_selections=1")

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize("shift", ["rotation", "label"])
def test_clusters_are_named_by_a_configuration(shift):
    words = (*CLUSTERS, f"--data.partition_options.shift={shift}")
    population = population_of(load_config(None, words))
    assert population.train.sizes.tolist() == [60] * 5
    assert population.client_test.sizes.tolist() == [40] * 5
    plain = population_of(load_config(None, ("--data.partition=iid",)))
    known = {
        np.round(x, 3).tobytes(): int(y)
        for part in (plain.train, plain.client_test)
        for x, y in zip(part.examples["x"], part.examples["y"], strict=True)
    }
    for client, cluster in enumerate([0, 1, 1, 2, 2]):
        mine = population.train.client(client)
        turned = np.rot90(mine["x"], -cluster, axes=(1, 2)) if shift == "rotation" else mine["x"]
        back = mine["y"] if shift == "rotation" else (mine["y"] - cluster) % 10
        found = [known.get(np.round(np.ascontiguousarray(x), 3).tobytes()) for x in turned]
        np.testing.assert_array_equal(found, back)
    drawn = [{x.tobytes() for x in population.train.client(i)["x"]} for i in (1, 2)]
    assert drawn[0] != drawn[1], "clients of a cluster draw on their own"


@pytest.mark.slow
def test_a_budget_covers_every_kind_of_round(tmp_path):
    status, text = execute(tmp_path / "run", *CLUSTERS, *R_DPCFL)
    summary = read_json(tmp_path / "run", "summary.json")
    assert status == 0 and "NOT covered" not in text
    assert 8 * (1 - 1e-4) < summary["epsilon"] <= 8 and summary["rounds"] == 4
    [claim] = read_json(tmp_path / "run", "privacy.json")["claims"]
    assert "private selection by the exponential mechanism" in claim["mechanisms"]
    # One whole batch, three rounds of three steps, one choice.
    assert set(claim["num_compositions"]) == {1 + 3 * 3 + 1}
    assert "not_covered" not in claim


@pytest.mark.slow
def test_exact_choices_are_not_called_private(tmp_path):
    words = ("--algorithm.name=rc_dpfl", "--algorithm.options.num_models=2")
    status, text = execute(tmp_path / "run", *CLUSTERS, *words)
    assert status == 0 and "NOT covered: which cluster a client chose" in text
    statement = (tmp_path / "run" / "privacy.md").read_text(encoding="utf-8")
    assert "As a whole the run is **not differentially private**" in statement
    assert "exact loss" in read_json(tmp_path / "run", "summary.json")["not_covered"]


@pytest.mark.slow
def test_a_run_that_was_cut_off_after_its_clustering_ends_with_the_same_bits(tmp_path):
    experiment = assemble(load_config(None, (*CLUSTERS, *R_DPCFL)))
    sim, key = experiment.simulation, jax.random.key(0)
    whole, *_ = sim.run(sim.init(key), key, 4)
    first, *_ = sim.run(sim.init(key), key, 1)
    assert int(first.server.soft_rounds) > 0, "the step on the host is behind this state"
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    checkpoints.save(sim.portable(first), sim.hyper, {})
    restored, *_ = checkpoints.restore(sim.portable(sim.init(key)), sim.hyper)
    checkpoints.close()
    resumed, *_ = sim.run(restored, key, 3)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert sim.num_traces() == 1
