"""The CIFAR-10 configurations, made for a GPU, at a size that two cores can run."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from experiments.clustered_dp import grid
from fedjax_dp.data import datasets
from fedjax_dp.engine import Fate, PrivacyAccounting
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble

EXPERIMENTS = pathlib.Path(grid.__file__).parents[1]
# Few images in few clusters; the model, the mechanism and the budgets stay.
CLUSTERS = (
    "--data.partition_options.cluster_sizes=[1, 2]",
    "--data.partition_options.samples_per_client=24",
    "--data.partition_options.test_samples_per_client=8",
    "--training.batch_size=8",
)
SMALL = {
    "clustered_dp/cifar10_labels.toml": CLUSTERS,
    "clustered_dp/cifar10_rotation.toml": CLUSTERS,
    "heterogeneous_dp/cifar10.toml": (f"--training.batch_size={[4.0, 8.0] * 10}",),
    "splitting/cifar10.toml": ("--training.batch_size=8",),
    "user_level_dp/cifar10.toml": (
        "--data.num_clients=20",
        "--participation.cohort_size=10",
        "--training.num_steps=2",
    ),
}
NUM_IMAGES = 400
COMMON = ("--run.rounds=2", "--execution.clients_per_chunk=1", "--training.micro_batch_size=8")
# ResNet-18 with group norm as the papers of Robust-HDP and R-DPCFL count it.
RESNET18 = 11_181_642


def test_every_cifar10_configuration_has_its_small_form():
    found = {str(p.relative_to(EXPERIMENTS)) for p in EXPERIMENTS.glob("*/cifar10*.toml")}
    assert found == set(SMALL)


@pytest.fixture
def few_images(monkeypatch):
    """The first images of each part alone."""
    load = datasets.load

    def few(*arguments, **choices):
        data = load(*arguments, **choices)
        parts = {
            part: {key: array[:NUM_IMAGES] for key, array in getattr(data, part).items()}
            for part in ("train", "test")
        }
        return dataclasses.replace(data, **parts)

    monkeypatch.setattr(datasets, "load", few)


def floats(tree):
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return [x for x in leaves if np.issubdtype(x.dtype, np.floating)]


@pytest.mark.slow
@pytest.mark.needs_data("cifar10")
@pytest.mark.parametrize("name", SMALL)
def test_a_cifar10_configuration_runs(name, data_dir, few_images):
    """Two rounds train the paper's model, in one trace and within the budget of every client."""
    file, words = EXPERIMENTS / name, (*SMALL[name], *COMMON, f"--data.data_dir={data_dir}")
    if name.startswith("clustered"):
        [point] = grid.points(file, ["R-DPCFL"], [], [0], words)
        config = point.config
    else:
        config = load_config(file, words)
    experiment = assemble(config)
    sim, key = experiment.simulation, jax.random.key(0)
    if name.startswith(("clustered", "heterogeneous")):
        assert experiment.num_parameters == RESNET18
    state = sim.init(key)
    before = floats(state.server)
    accounting = PrivacyAccounting(sim)
    state, record, info = sim.run(state, key, 2)
    accounting.charge(record)
    after = floats(state.server)
    assert all(np.all(np.isfinite(x)) for x in after)
    assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 0
    assert np.all(record.count(Fate.NOT_FINITE) == 0)
    assert np.all(np.isfinite(info.training.train_loss))
    assert sim.num_traces() == 1
    unit = config.privacy.unit
    if unit == "none":
        return
    spent = accounting.epsilon(experiment.dp_delta, config.privacy.accountant)[unit]
    assert np.all(spent > 0) and np.all(spent <= np.asarray(experiment.budget[unit]) * (1 + 1e-6))
