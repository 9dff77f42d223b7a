"""Runs on texts with class labels, and the vocabulary that their model needs."""

import csv

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from marks import telling
from run_folders import execute, read_json

from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import parts_of
from fedjax_dp.experiment.assembly.own_data import own_population

WORDS = {"praise": ["good", "great", "fine", "lovely"], "blame": ["bad", "poor", "awful", "dull"]}


@pytest.fixture
def table(tmp_path):
    """Texts of three words each, at four clients; returns the words of a configuration."""
    rng, rows = np.random.default_rng(0), {"who": [], "said": [], "verdict": []}
    for i in range(600):
        verdict = ("praise", "blame")[int(rng.integers(2))]
        rows["who"].append(f"client {i % 4}")
        rows["said"].append(" ".join(rng.choice(WORDS[verdict], 3)))
        rows["verdict"].append(verdict)
    pq.write_table(pa.table(rows), tmp_path / "said.parquet")
    return [
        *("--data.name=parquet", f"--data.data_dir={tmp_path}", "--data.partition=natural"),
        *("--data.options.path=said.parquet", "--data.options.client=who"),
        *('--data.options.x=["said"]', "--data.options.y=verdict", "--data.options.text=bytes"),
        '--data.options.classes=["blame", "praise"]',
        *("--data.options.sequence_length=24", "--model.name=bag_of_tokens"),
    ]


def test_tokens_beyond_the_vocabulary_are_refused_on_a_node_too(table, tmp_path):
    # The last letter of the alphabet in the texts.
    largest = ord("y")
    rule = f"the tokens of the data must be below {largest}, the option vocabulary_size of bag_of"
    table += ["--data.client_test_share=0", "--data.num_clients=4"]
    config, fits = (
        load_config(None, [*table, f"--model.options.vocabulary_size={size}"])
        for size in (largest, largest + 1)
    )
    node = str(tmp_path / "said.parquet")
    for read in (parts_of, lambda config: own_population(config, node)):
        with pytest.raises(GuardedError, match=f"{rule}.*, got {largest}$") as raised:
            read(config)
        assert "got" not in raised.value.public
        read(fits)


@telling
@pytest.mark.usefixtures("no_pictures")
def test_a_private_run_learns_and_predictions_name_the_classes(table, tmp_path, fedjax_dp):
    folder = tmp_path / "run"
    words = ["--data.client_test_share=0.2", "--privacy.unit=record", "--privacy.record.epsilon=8"]
    words += ["--training.learning_rate=2", "--training.batch_size=60", "--run.rounds=8"]
    status, text = execute(folder, *table, *words, "--execution.devices=1")
    assert status == 0, text
    summary = read_json(folder, "summary.json")
    # Half of all texts are of each class.
    assert summary["test_accuracy"] > 0.85
    words = ["--part", "client_test", "--output", tmp_path / "said.csv"]
    status, _, error = fedjax_dp("predict", folder, *words)
    assert status == 0, error
    with (tmp_path / "said.csv").open() as file:
        rows = list(csv.DictReader(file))
    right = [row["prediction"] == row["label"] for row in rows]
    assert {row["label"] for row in rows} == set(WORDS) == {row["prediction"] for row in rows}
    assert np.mean(right) == pytest.approx(summary["test_accuracy"], abs=1e-6)
