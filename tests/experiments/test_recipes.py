"""Recipes of other packages hold the numbers of their sources."""

import json
import pathlib

import numpy as np
import pytest
from marks import slow

from fedjax_dp.experiment import load_config, load_run

HERE = pathlib.Path(__file__).parents[2] / "experiments" / "recipes"
# As the files that `README.md` names set them.
NUMBERS = {
    "pfl_cifar10": {
        "clients": 1000, "cohort": 50, "rounds": 1500, "every": 10, "batch": 10, "epochs": 1,
        "rate": 0.1, "algorithm": "fedavg", "held_out": 0, "scaling": "standard",
    },
    "flower_quickstart": {
        "clients": 10, "cohort": None, "rounds": 3, "every": 1, "batch": 32, "epochs": 1,
        "rate": 0.1, "algorithm": "fedavg", "held_out": 0.2, "scaling": "symmetric",
    },
    "fedjax_emnist": {
        "clients": None, "cohort": 10, "rounds": 1500, "every": 5, "batch": 10, "epochs": 1,
        "rate": 0.001, "algorithm": "fedadam", "held_out": 0, "scaling": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_recipe_has_the_numbers_of_its_source(name):
    config = load_config(HERE / f"{name}.toml")
    data, training, run = config.data, config.training, config.run
    assert {
        "clients": data.num_clients if data.is_divided else None,
        "cohort": getattr(config.participation, "cohort_size", None),
        "rounds": run.rounds,
        "every": run.evaluate_every,
        "batch": training.batch_size,
        "epochs": training.num_epochs,
        "rate": training.learning_rate,
        "algorithm": config.algorithm.name,
        "held_out": data.client_test_share,
        "scaling": data.options.get("scaling"),
    } == NUMBERS[name]
    assert config.privacy.unit == "none" and not data.augmentation
    assert sorted(path.stem for path in HERE.glob("*.toml")) == sorted(NUMBERS)


@slow
def test_the_recipe_of_federated_emnist_runs_on_files_of_its_layout(tmp_path, fedjax_dp):
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(0)
    (tmp_path / "femnist").mkdir()
    for part, size in (("train", 12), ("test", 2)):
        with h5py.File(tmp_path / "femnist" / f"fed_emnist_{part}.h5", "w") as file:
            for writer in range(12):
                group = file.create_group(f"examples/f{writer:04}_00")
                group["pixels"] = rng.random((size, 28, 28), np.float32)
                group["label"] = rng.integers(0, 62, size, np.int32)
    words = ("--data.data_dir", tmp_path, "--run.rounds=1", "--output", tmp_path / "run")
    status, _, errors = fedjax_dp("run", HERE / "fedjax_emnist.toml", *words)
    assert status == 0, errors
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines())
    assert row["num_participants"] == 10
    assert load_run(tmp_path / "run").experiment.population.train.num_clients == 12
