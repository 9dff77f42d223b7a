"""The studies of personalisation: every point is a configuration, and finds the paper's number."""

import pytest
from drawn import flaws

from experiments.personalization import tables
from experiments.personalization.study import STUDIES
from fedjax_dp.experiment import grid_points, load_config
from fedjax_dp.io import plots


@pytest.mark.parametrize("name", STUDIES)
def test_every_point_of_a_study_is_a_configuration(name):
    study = STUDIES[name]
    for point in grid_points(study, {"seed": ["0"]}, []):
        config = load_config(study.file, point.words)
        assert config.participation.cohort_size == 5
        assert config.run.seed == 0


def test_points_find_the_papers_numbers():
    of = {
        name: study.published("worst_client_accuracy", {"method": method, "data": data})
        for name, study, method, data in (
            ("4.1", STUDIES["table_4_1"], "FedLTN(0.9)", "CIFAR-10"),
            ("tiny", STUDIES["table_4_1"], "FedLTN(0.9;jumpstart)", "TinyImageNet"),
            ("4.3", STUDIES["many"], "LotteryFL(0.1)", "CIFAR-10"),
            ("0.5", STUDIES["mixtures"], "FedLTN(0.9)", "CIFAR-10 α=0.5"),
            ("0.7", STUDIES["table_4_4"], "FedLTN(0.9)", "CIFAR-10 α=0.7"),
            ("none", STUDIES["two_classes"], "Ditto", "CIFAR-10"),
        )
    }
    expected = {"4.1": 63.0, "tiny": 61.8, "4.3": 47.5, "0.5": 40.0, "0.7": 36.0, "none": None}
    assert of == expected


def run(seed, accuracies):
    """One whose clients send a megabyte a round, and that is evaluated in every second one."""
    rows = [{"round": r, "bytes_up": 1e6} for r in range(1, 2 * len(accuracies) + 1)]
    for row, accuracy in zip(rows[1::2], accuracies, strict=True):
        row["mean_client_accuracy"] = accuracy
        row["mean_client_accuracy_after_local"] = 1 - accuracy
    last, after = accuracies[-1], 1 - accuracies[-1]
    return {
        "values": {"method": "-", "data": "CIFAR-10", "seed": str(seed)},
        "metrics": rows,
        "communication": {"up": {"by_encoding": {"values": 4e6, "smallest": 4e6}}},
        **{f"{name}_client_accuracy": last for name in ("mean", "worst")},
        **{f"{name}_client_accuracy_after_local": after for name in ("mean", "worst")},
        "std_client_accuracy": 0.1,
        "std_client_accuracy_after_local": 0.05,
    }


def test_bytes_are_counted_until_fedavg_is_reached():
    runs = {
        "FedAvg": [run(0, [0.1, 0.2, 0.3, 0.3]), run(1, [0.1, 0.1, 0.1, 0.2])],
        "Ditto": [run(0, [0.1, 0.4, 0.4, 0.4]), run(1, [0.5, 0.1, 0.1, 0.1])],
        "MR-MTL": [run(0, [0.4, 0.1, 0.4, 0.4]), run(1, [0.1, 0.1, 0.1, 0.1])],
    }
    # Four megabytes in place of six, two in place of eight: 1.5 and 4 times fewer.
    assert tables.until_fedavg(runs, "Ditto") == (3e6, 2.75)
    assert tables.until_fedavg(runs, "FedAvg") == (7e6, 1.0)
    assert tables.until_fedavg(runs, "Ditto", tables.AFTER) == (3e6, 0.75)
    assert tables.until_fedavg(runs, "MR-MTL") is None, "one seed never comes so far"
    assert tables.until_fedavg({"Ditto": runs["Ditto"]}, "Ditto") is None


def test_a_table_retains_rows_of_methods_that_were_not_rerun():
    study = STUDIES["two_classes"]
    new = tables.as_markdown(study, {"Ditto": [run(0, [0.4])]})
    earlier = "| method | seeds |\n|---|---|\n| FedAvg | 3 |\n| Ditto | 1 |\n"
    lines = tables.merged(study, earlier, new).splitlines()
    assert [tables._cells(line)[0] for line in lines[2:]] == ["FedAvg", "Ditto"]
    assert tables._cells(lines[2]) == ["FedAvg", *["–"] * 13, "3"]
    assert tables._cells(lines[3])[:7] == ["Ditto", *["40.0", "60.0"] * 2, "10.0", "5.0"]
    assert lines[3] == new.splitlines()[2]
    lines = tables.merged(study, f"{earlier}| MR-MTL † | 2 |\n\n† Older.\n", new).splitlines()
    assert lines[4].startswith("| MR-MTL † | –") and lines[5:] == ["", "† Older."]


def test_what_methods_sent_and_reached_is_drawn(monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "save", lambda figure, path: shown.append(figure))
    runs = {
        "FedAvg": [run(0, [0.2, 0.5]), run(1, [0.4, 0.7])],
        "FedLTN(0.9)": [run(0, [0.4, 0.4, 0.4, 0.6])],
    }
    for row in runs["FedLTN(0.9)"][0]["metrics"]:
        row["pruned_share"] = 0.1
    tables.draw(tables.curves(runs), "picture.png")
    assert flaws(shown[0]) == []
    pruned, received, after = (
        {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
        for axes in shown[0].axes
    )
    assert pruned == {"FedLTN 0.9": [[3, 10], [7, 10]]}
    assert received["FedLTN 0.9"] == [[2, 40], [4, 40], [6, 40], [8, 60]]
    assert received["FedAvg"] == [[2, 30], [4, 60]]
    assert after["FedLTN 0.9"] == [[2, 60], [4, 60], [6, 60], [8, 40]]
    assert after["FedAvg"] == [[2, 70], [4, 40]]
    bands = [len(axes.collections) for axes in shown[0].axes]
    assert bands == [1, 2, 2] and "1 to 2 seeds" in shown[0].axes[2].get_xlabel()
    (shape,) = shown[0].axes[1].collections[0].get_paths()
    # Ten points on both sides of 30 and 60, times the square root of two.
    assert shape.vertices[:, 1].max() == pytest.approx(60 + 200**0.5)


def test_rounds_of_runs_that_were_not_repeated_are_kept():
    study = STUDIES["two_classes"]
    old = tables.curves({"Ditto": [run(0, [0.4])], "FedAvg": [run(0, [0.1]), run(1, [0.2])]})
    new = tables.curves({"FedAvg": [run(1, [0.3])]})
    rows = tables.merged_curves(study, old, new)
    evaluated = [(r["method"], r["seed"], r["bytes up"], r["mean"]) for r in rows if r["mean"]]
    assert evaluated == [
        ("FedAvg", "0", "2000000", "0.1000"),
        ("FedAvg", "1", "2000000", "0.3000"),
        ("Ditto", "0", "2000000", "0.4000"),
    ]
    assert len(rows) == 6 and rows[0]["round"] == "1" and rows[0]["pruned"] == ""
    # A file from before a column was added gets it.
    rows = tables.merged_curves(study, [{k: r[k] for k in tables.CURVES[:7]} for r in old], new)
    assert {tuple(row) for row in rows} == {tables.CURVES}


def test_a_study_writes_its_table_rounds_and_times(monkeypatch, tmp_path):
    study, drawn, results = STUDIES["two_classes"], [], tmp_path / "results"
    monkeypatch.setattr(tables, "HERE", tmp_path)
    monkeypatch.setattr(tables, "draw", lambda rows, file: drawn.append(file.name))
    first = run(0, [0.4]) | {"rounds": 2, "seconds": 7.4, "seconds_compiling": 3.0, "sweep": 1}
    second = first | run(0, [0.1, 0.2])
    together = first | run(1, [0.1, 0.2]) | {"sweep": 3}
    for runs in ({"Ditto": [first]}, {"FedAvg": [second, together]}):
        monkeypatch.setattr(tables, "runs_of", lambda study, folder, runs=runs: runs)
        tables.write(study, tmp_path)
    assert drawn == ["two_classes.png"] * 2
    assert len(tables._read(results / "two_classes.csv")) == 10
    found = [tuple(row.values()) for row in tables._read(results / "seconds.csv")]
    wanted = [("two_classes", method, "0", "2", "7", "3") for method in ("Ditto", "FedAvg")]
    assert found == wanted
    assert (results / "two_classes.md").read_text("utf-8").count("\n") == 4
    (results / "two_classes.csv").unlink()
    tables.write(study, tmp_path)
    assert len(drawn) == 2, "a figure without the rounds of all methods is not drawn"
