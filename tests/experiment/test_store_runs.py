"""Configurations on stores and on the published populations, read once from TOML."""

import numpy as np
import pytest
from marks import slow, telling
from published_files import write_flair_files, write_stackoverflow
from run_folders import NOT_PRIVATE, execute, read_json

from fedjax_dp.data import FederatedData
from fedjax_dp.data.disk_arrays import DiskArray, is_on_disk
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.population import build_population

pytestmark = pytest.mark.usefixtures("no_pictures")
FORMATS = {"npy": FederatedData.save, "zarr": FederatedData.save_zarr}
_MODEL = """
from fedjax_dp.models import Model
import flax.linen as nn

class Network(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(x[:, ::64, ::64].reshape(len(x), -1) / 255)

def network(example_x, num_classes):
    return Model.from_flax(Network(num_classes), example_x, loss="sigmoid_binary_cross_entropy")
"""


def write_store(folder, form):
    """Clients in an order that sorting does not keep; the class is the sign of the first column."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3)).astype(np.float32)
    made = FederatedData(
        {"x": x, "y": (x[:, 0] > 0).astype(np.int32)},
        np.concatenate([[0], np.cumsum(np.tile([10, 20, 30, 20], 3))]),
        tuple(f"ward {12 - i}" for i in range(12)),
    )
    FORMATS[form](made, folder)
    return made


def config_of(file, lines, *words):
    file.write_text("[data]\n" + "\n".join(lines))
    return load_config(file, words).data


@pytest.mark.parametrize("form", FORMATS)
def test_a_population_stays_in_its_store(tmp_path, form, monkeypatch):
    made = write_store(tmp_path / "mine", form)
    lines = ['name = "store"', 'partition = "natural"', f'options.path = "{tmp_path / "mine"}"']
    lines += ["options.num_classes = 2", "options.max_clients = 8", "client_test_share = 0.25"]
    read = []
    whole = DiskArray.__array__
    monkeypatch.setattr(
        DiskArray,
        "__array__",
        lambda self, *a, **k: read.append(self.shape) or whole(self, *a, **k),
    )
    few = ("--data.public_examples=5", "--data.max_examples=150")
    section = config_of(tmp_path / "a.toml", lines, *few)
    found = build_population(section, 0)
    assert not read, "no array is read at once"
    assert found.train.client_names == made.client_names[:8]
    parts = (found.train, found.client_test)
    assert all(is_on_disk(array) for part in parts for array in part.examples.values())
    rows = [np.concatenate([part.client(i)["x"] for part in parts]) for i in range(8)]
    assert sum(map(len, rows)) + len(found.public_x) == 150 < made.offsets[8]
    for i, own in enumerate(rows):
        known = made.client(i)["x"]
        assert all((known == row).all(1).any() for row in own)
    with pytest.raises(ValueError, match="number of training examples"):
        build_population(config_of(tmp_path / "a.toml", [*lines, "public_examples = 160"]), 0)


def test_published_populations_from_toml(tmp_path):
    write_stackoverflow(tmp_path / "stackoverflow")
    write_flair_files(tmp_path / "flair")
    for name, option, clients in (
        ("stackoverflow", "vocabulary_size = 3", ("10", "800", "9")),
        ("flair", "max_images = 5", ("a@N01", "b@N00")),
    ):
        lines = [f'name = "{name}"', f'data_dir = "{tmp_path}"', 'partition = "natural"']
        lines += ["client_test_share = 0.0", f"options.{option}"]
        found = build_population(config_of(tmp_path / "a.toml", lines), 0)
        assert found.train.client_names == clients and found.test is not None
        assert all(isinstance(array, np.memmap) for array in found.train.examples.values())


def test_a_data_set_is_stored_by_command(fedjax_dp, tmp_path):
    write_flair_files(tmp_path / "flair")
    words = ("data", "store", "flair", tmp_path / "mine", f"--data.data_dir={tmp_path}")
    status, output, error = fedjax_dp(*words, "--format", "zarr", "--data.options.max_images=1")
    assert status == 0, error
    assert f"wrote {tmp_path / 'mine'}: 2 examples of 2 clients, 1 for testing" in output
    lines = ['name = "store"', f'options.path = "{tmp_path / "mine"}"', 'partition = "natural"']
    found = build_population(config_of(tmp_path / "a.toml", lines), 0)
    assert found.train.client_names == ("a@N01", "b@N00") and found.num_classes == 3
    for words, message in (
        (("flair", tmp_path / "no", "--format", "hdf5"), "--format must be one of"),
        (("falir", tmp_path / "no"), "did you mean 'flair'"),
    ):
        status, _, error = fedjax_dp("data", "store", *words)
        assert status == 2 and message in error and not (tmp_path / "no").exists()


@telling
def test_training_from_stores_equals_that_from_memory(tmp_path):
    write_store(tmp_path / "npy", "npy")
    write_store(tmp_path / "zarr", "zarr")
    accuracies = []
    words = ["--data.name=store", "--data.partition=natural", "--data.options.num_classes=2"]
    words += [*NOT_PRIVATE, "--training.learning_rate=1", "--run.rounds=3", "--execution.devices=1"]
    for name, placement in (("zarr", "auto"), ("npy", "device")):
        own = (f"--data.options.path={tmp_path / name}", f"--execution.placement={placement}")
        folder = tmp_path / f"run {len(accuracies)}"
        status, text = execute(folder, *words, *own)
        assert status == 0, text
        accuracies.append(read_json(folder, "summary.json")["test_accuracy"])
    assert accuracies[0] > 0.8 and len(set(accuracies)) == 1


@slow
@pytest.mark.parametrize("name", ["stackoverflow", "flair"])
def test_runs_of_published_populations(tmp_path, name):
    write_stackoverflow(tmp_path / "stackoverflow")
    write_flair_files(tmp_path / "flair")
    (tmp_path / "own.py").write_text(_MODEL)
    words = {
        "stackoverflow": [
            "--data.options.vocabulary_size=3",
            "--model.name=char_lstm",
            "--model.options.num_units=4",
        ],
        "flair": [f"--model.name={tmp_path / 'own.py'}:network"],
    }[name]
    words += [f"--data.name={name}", f"--data.data_dir={tmp_path}", "--data.partition=natural"]
    words += ["--data.client_test_share=0", "--run.rounds=2", *NOT_PRIVATE]
    status, text = execute(tmp_path / "run", *words, "--execution.devices=1")
    assert status == 0, text
    assert 0 <= read_json(tmp_path / "run", "summary.json")["test_accuracy"] <= 1
