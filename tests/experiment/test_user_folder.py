"""The user's folder is written as "~" in every path: keys, options, arguments, the environment."""

import pathlib

import pytest

from fedjax_dp.core import registry
from fedjax_dp.data import datasets
from fedjax_dp.data.datasets.catalog import resolve_data_dir
from fedjax_dp.experiment import load_config, load_run, report, resume, run
from fedjax_dp.experiment.assembly.assemble import checked_config
from fedjax_dp.experiment.reading.keys import describe
from fedjax_dp.experiment.schema.config import Config, ModelSection

CSV = "x,y\n0.5,a\n0.25,b\n0.75,a\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(folder))
    # A "~" that is not replaced would be a folder here.
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("key", [key for key, rule, *_ in describe() if rule.startswith("a path")])
def test_every_key_of_a_path_knows_the_users_folder(home, key):
    section, _, name = key.partition(".")
    config = load_config(None, [f"--{key}=~/in it"])
    assert getattr(getattr(config, section), name) == str(home / "in it")


def test_a_key_in_python_a_file_and_its_tables_know_the_users_folder(home):
    path = pathlib.Path("~/m.npz")
    assert Config(model=ModelSection(pretrained=path)).model.pretrained == str(home / "m.npz")
    (home / "numbers.csv").write_text("client,training.learning_rate\na,0.5\nb,0.25\n")
    (home / "run.toml").write_text("[data]\nclient_numbers = '~/numbers.csv'\nnum_clients = 2\n")
    assert checked_config(load_config("~/run.toml")).training.learning_rate == {"a": 0.5, "b": 0.25}
    with pytest.raises(ValueError, match=r"pretrained must be a file .* got '\S+home/m.npz' \(no"):
        checked_config(load_config(None, ["--model.pretrained=~/m.npz"]))


def test_paths_of_tables_and_of_own_parts_know_the_users_folder(home):
    (home / "rows.csv").write_text(CSV)
    for path in ("~/rows.csv", "~/row*.csv"):
        assert len(datasets.load("table", path=path, label="y").train["y"]) == 3
    with pytest.raises(
        ValueError, match=r"path must be the folder of a store; there is none at \S+home"
    ):
        datasets.load("store", path="~/nothing")
    (home / "own.py").write_text("part = 3\n")
    assert registry.imported("~/own.py:part") == 3


def test_run_folders_know_the_users_folder(home):
    (home / "taken").mkdir()
    (home / "taken" / "file").touch()
    with pytest.raises(ValueError, match="must be a new or an empty folder"):
        run(Config(), "~/taken")
    for read in (load_run, resume, report):
        with pytest.raises((ValueError, OSError)) as error:
            read("~/taken")
        assert str(home / "taken") in str(error.value)


def test_the_variable_of_the_data_folder_is_a_folder(home, monkeypatch):
    usual = home / ".cache" / "fedjax_dp"
    for value, found in (("~/data", home / "data"), ("", usual), ("data", pathlib.Path("data"))):
        monkeypatch.setenv("FEDJAX_DP_DATA", value)
        assert resolve_data_dir() == found
    (home / "file").touch()
    monkeypatch.setenv("FEDJAX_DP_DATA", "~/file")
    with pytest.raises(ValueError, match=r"variable FEDJAX_DP_DATA must be a folder, .*\(a file\)"):
        resolve_data_dir()
