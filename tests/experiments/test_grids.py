"""Every point of every study is a valid configuration; nothing is run."""

import pathlib

import pytest
from marks import telling

from experiments.clustered_dp import grid as clustered
from experiments.generalization import fairness, masking
from experiments.heterogeneous_dp import sweep as heterogeneous
from experiments.splitting import cnn
from experiments.user_level_dp import figures, mnist_by_writer
from experiments.user_level_dp import grids as user_level
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.components.numbers_by_client import with_named_lists
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.validate import validate
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.experiment.studies import sweep

HERE = pathlib.Path(__file__).parents[2] / "experiments"
# Claims of the sources and methods of the comparison have readers of their own.
CONFIGURATIONS = sorted(
    path for path in HERE.glob("*/*.toml") if path.stem not in ("claims", "methods")
)
CLUSTERED = [path for path in CONFIGURATIONS if path.parent.name == "clustered_dp"]
STUDIES = {
    **{f"heterogeneous {name}": study for name, study in heterogeneous.STUDIES.items()},
    **{f"user-level {name}": study for name, study in user_level.tables(True).items()},
    **{
        f"user-level {name} on {file.stem}": study
        for file in CONFIGURATIONS
        if file.parent.name == "user_level_dp"
        for name, study in user_level.sweeps(file).items()
    },
    **{f"generalization {name}": study for name, study in masking.STUDIES.items()},
    "generalization fairness": fairness.STUDY,
    **{f"splitting {name}": study for name, study in cnn.STUDIES.items()},
    "user-level tune": mnist_by_writer.TUNE,
    "user-level compare": mnist_by_writer.COMPARE,
}


def checked(config):
    validate(with_named_lists(config))
    # What is written down at the start of a run is read again when it is resumed.
    assert config_files.to_toml(config)
    return config


@pytest.mark.parametrize("name", STUDIES)
def test_every_point_of_a_sweep_is_valid(name):
    study = STUDIES[name]
    # Seeds are numbers like any other: one of them is read.
    seeds = study.axes.get("seed", {})
    names = {" ".join(words).replace(f"seed={seed}", "seed") for seed, words in seeds.items()}
    assert len(names) <= 1
    grid = sweep.grid_points(study, {"seed": [*seeds][:1]} if seeds else {}, ())
    assert len({point.name for point in grid}) == len(grid) > 0
    assert {study.rows, study.columns} <= set(study.axes)
    found = [checked(load_config(study.file, point.words)) for point in grid]
    # Points that ran the same would fill the table with one number under two names.
    if "falsified" not in name and "tune" not in name:
        assert len({config_files.to_toml(config) for config in found}) == len(found)


@telling
@pytest.mark.parametrize("file", CLUSTERED, ids=lambda p: p.stem)
def test_every_point_of_the_clustered_grid_is_valid(file):
    grid = clustered.points(file, list(clustered.METHODS), clustered.PAPER_EPSILONS, [0, 1, 2])
    assert len({point.name for point in grid}) == len(grid) == len(clustered.METHODS) * 5 * 3
    texts = {config_files.to_toml(checked(point.config)) for point in grid}
    assert len(texts) == len(grid)


@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_configuration_is_valid_as_it_stands(file, tmp_path, monkeypatch):
    # A folder of the reader's.
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    checked(load_config(file))


def test_a_word_that_no_configuration_has_would_be_found():
    study = heterogeneous.STUDIES["mnist"]
    [point] = sweep.grid_points(
        study,
        {"distribution": ["Dist1"], "algorithm": ["PFA"], "seed": ["0"]},
        ("--training.learning_rat=1",),
    )
    with pytest.raises(ConfigError, match="learning_rat"):
        load_config(study.file, point.words)
    with pytest.raises(ValueError, match=r"model\.name must be one of"):
        checked(load_config(study.file, ("--model.name=thesis_cn",)))


def test_pictures_name_runs_in_words():
    assert figures.title_of("method=DP-FedAvg,budget=4,seed=0") == "DP-FedAvg, ε = 4, seed 0"
    assert figures.title_of("method=A,cohort=9") == "A, cohort 9"
