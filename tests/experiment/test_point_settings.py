"""Settings of points that depend on several axes, from a CSV file."""

import pytest

from fedjax_dp.experiment import Study, grid_points
from fedjax_dp.experiment.studies.point_settings import with_settings
from fedjax_dp.experiment.studies.sweep import loaded

STUDY = Study(
    name="rates",
    file=None,
    axes={
        "method": {"avg": ["--algorithm.name=fedavg"], "prox": ["--algorithm.name=fedprox"]},
        "steps": {"1": ["--training.num_steps=1"], "4": ["--training.num_steps=4"]},
        "seed": {"0": ["--run.seed=0"], "1": ["--run.seed=1"]},
    },
    rows="method",
    columns="steps",
    metrics={},
)
KEY = "training.learning_rate"
LINES = ("avg,1,0.5", "prox,1,0.25", "avg,4,0.125", "prox,4,")


def written(tmp_path, *lines):
    file = tmp_path / "settings.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_a_point_has_the_numbers_of_its_line(tmp_path):
    grid = grid_points(STUDY, words=["--training.learning_rate=9"])
    file = written(tmp_path, f"method,steps,{KEY}", *LINES, "other,1,3")
    points, keys = with_settings(grid, file)
    assert keys == [KEY] and [p.values for p in points] == [p.values for p in grid]
    rates = {
        (point.values["method"], point.values["steps"]): loaded(STUDY, point).training.learning_rate
        for point in points
    }
    # An empty cell leaves the rate that all points have.
    assert rates == {("avg", "1"): 0.5, ("prox", "1"): 0.25, ("avg", "4"): 0.125, ("prox", "4"): 9}
    assert [p.folder for p in points] == [p.folder for p in grid]


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        (
            (),
            r"settings\.csv must hold a line of column names and one for each point, got '1 lines'",
        ),
        ((f"method,steps,{KEY}", *LINES[:3]), r"have a line for method=prox, steps=4"),
        ((f"method,steps,{KEY}", *LINES, "avg,1,0.1"), r"line 6 must be the only line of its"),
        ((f"method,steps,{KEY}", "avg,1"), r"line 2 must have 3 cells, got 2"),
        (("method,method", "avg,avg"), r"line 1 must name each column once"),
        (("method,steps", "avg,1"), r"line 1 must name an axis, .*, and a key of the config"),
        ((KEY, "0.1"), r"line 1 must name an axis"),
        (("method,training.learning_rat", "avg,1"), r"learning_rat"),
    ],
)
def test_a_file_that_does_not_say_what_each_point_has_is_refused(tmp_path, lines, rule):
    file = written(tmp_path, *(lines or ("method",)))
    with pytest.raises(ValueError, match=rule):
        with_settings(grid_points(STUDY), file)
    with pytest.raises(ValueError, match=r"--settings must be a file that can be read"):
        with_settings(grid_points(STUDY), tmp_path / "none.csv")
