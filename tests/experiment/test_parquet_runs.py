"""A run from a configuration on Parquet files by client."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from marks import telling
from run_folders import NOT_PRIVATE, execute, read_json

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.population import build_population

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def words(tmp_path):
    """Clients of unequal sizes in random order; the class is the sign of the first column."""
    rng = np.random.default_rng(0)
    ages = rng.normal(size=(200, 2)).astype(np.float32)
    columns = {
        "user": [f"user {i}" for i in rng.integers(0, 8, 200)],
        "age": ages[:, 0],
        "pressure": ages[:, 1],
        "ill": (ages[:, 0] > 0).astype(np.int64),
        "trust": rng.integers(0, 3, 200),
    }
    for name in ("train", "test"):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet", row_group_size=30)
    file = tmp_path / "config.toml"
    file.write_text(
        f"""
[data]
name = "parquet"
data_dir = "{tmp_path}"
partition = "natural"
client_test_share = 0.0
options.path = "train.parquet"
options.test_path = "test.parquet"
options.client = "user"
options.x = ["age", "pressure"]
options.y = "ill"
options.num_classes = 2
"""
    )
    return file


def test_the_population_stays_on_disk_with_its_weights(words, tmp_path):
    config = load_config(words, ["--data.options.weight=trust"])
    made = build_population(config.data, 0)
    table = pq.read_table(tmp_path / "train.parquet").to_pydict()
    weights = dict(zip(np.float32(table["age"]), table["trust"], strict=True))
    wanted = [weights[age] for age in made.train.examples["x"][:, 0]]
    np.testing.assert_array_equal(made.train.examples["example_weight"], wanted)
    assert isinstance(made.train.examples["x"], np.memmap) and made.train.num_clients == 8
    assert made.train.client_names == tuple(f"user {i}" for i in range(8))
    assert made.test is not None and made.test.num_examples == made.train.num_examples == 200


@telling
def test_a_run_from_toml(words, tmp_path):
    given = load_config(words).data.options
    options = [f"--data.options.{key}={value!r}".replace("'", '"') for key, value in given.items()]
    status, text = execute(
        tmp_path / "run",
        "--data.name=parquet",
        f"--data.data_dir={tmp_path}",
        "--data.partition=natural",
        "--data.client_test_share=0",
        *options,
        *NOT_PRIVATE,
        "--training.learning_rate=1",
        "--run.rounds=10",
        "--execution.devices=1",
    )
    assert status == 0, text
    assert read_json(tmp_path / "run", "summary.json")["test_accuracy"] > 0.8
