"""Pictures and tables of sweeps under user-level privacy show the runs that they are given."""

import json
import math
import sys

import numpy as np
import pytest
from drawn import flaws

from experiments.user_level_dp import figures
from fedjax_dp.io import plots

CONFIG = '[privacy]\nunit = "{unit}"\n[privacy.client]\nclip_norm = 0.5\n'

TABLE = """method,lambda,metric,mean,std,seeds,published
FedAvg not private,0,test_accuracy,90,,1,
DP-FedAvg+BLUR,0,test_accuracy,71,1.4,2,
DP-FedAvg+BLUR,0.4,test_accuracy,75,,1,
DP-FedAvg+BLUR,0.4,client_test_accuracy,50,,1,
"""


@pytest.fixture
def sweep(tmp_path):
    """Two strengths of BLUR, two seeds, three rounds, of which the last two were evaluated."""
    rows = []
    for strength in ("0", "0.4"):
        for seed in ("0", "1"):
            values = {"method": "DP-FedAvg+BLUR", "lambda": strength, "seed": seed}
            folder = tmp_path / ",".join(f"{axis}={value}" for axis, value in values.items())
            folder.mkdir()
            last = 0.7 + float(strength) / 10 + float(seed) / 50
            summary = {"epsilon": 6.0, "test_accuracy": last, "num_parameters": 400}
            summary |= {"noise_stddev": 0.1, "update_norm_median": 2.0 + float(seed)}
            (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
            (folder / "config.toml").write_text(CONFIG.format(unit="client"), "utf-8")
            rounds = [{"round": r, "update_norm_quantiles": [0, 1, 2 + r, 3, 9]} for r in (1, 2, 3)]
            rounds[1]["test_accuracy"], rounds[2]["test_accuracy"] = last - 0.1, last
            text = "".join(json.dumps(row) + "\n" for row in rounds)
            (folder / "metrics.jsonl").write_text(text, "utf-8")
            rows.append(summary | values)
    (tmp_path / "runs.json").write_text(json.dumps(rows), "utf-8")
    return tmp_path


def test_noise_is_measured_in_clip_norms(sweep):
    runs = figures.runs_of(sweep)
    assert [(run["lambda"], run["seed"]) for run in runs] == [
        ("0", "0"),
        ("0", "1"),
        ("0.4", "0"),
        ("0.4", "1"),
    ]
    assert all(run["noise_in_clip_norms"] == pytest.approx(0.1 * 20 / 0.5) for run in runs)
    head, _, first, second = figures.norms_table(runs).splitlines()
    heads = "λ | median norm before clipping | noise of a coordinate | norm of the noise / S"
    assert head == f"| method | {heads} |"
    assert first == "| DP-FedAvg+BLUR | 0 | 2.5 | 0.1 | 4 |"
    assert second == "| DP-FedAvg+BLUR | 0.4 | 2.5 | 0.1 | 4 |"
    (folder := runs[0]["folder"] / "config.toml").write_text(CONFIG.format(unit="none"), "utf-8")
    assert folder.is_file() and figures.runs_of(sweep)[0]["noise_in_clip_norms"] is None


def test_accuracy_by_round_is_averaged_over_seeds(sweep):
    lines = figures.rounds_table(figures.runs_of(sweep)).splitlines()
    spread = 2 / math.sqrt(2)
    assert lines == [
        "method,lambda,round,mean,std",
        f"DP-FedAvg+BLUR,0,2,61,{spread:.6g}",
        f"DP-FedAvg+BLUR,0,3,71,{spread:.6g}",
        f"DP-FedAvg+BLUR,0.4,2,65,{spread:.6g}",
        f"DP-FedAvg+BLUR,0.4,3,75,{spread:.6g}",
    ]


def test_each_seed_has_its_accuracy_halfway_and_at_the_end(sweep):
    head, *lines = figures.seeds_table(figures.runs_of(sweep)).splitlines()
    assert head == "method,lambda,seed,half,last,norm,clipped"
    # Three rounds, of which the first was not evaluated; no share of clipped clients was logged.
    assert lines == [
        "DP-FedAvg+BLUR,0,0,60,70,2,",
        "DP-FedAvg+BLUR,0,1,62,72,3,",
        "DP-FedAvg+BLUR,0.4,0,64,74,2,",
        "DP-FedAvg+BLUR,0.4,1,66,76,3,",
    ]


def test_figures_of_a_sweep_over_strengths(sweep, monkeypatch, tmp_path):
    shown = {}
    monkeypatch.setattr(plots, "save", lambda figure, path: shown.__setitem__(path.name, figure))
    (sweep / "table.csv").write_text(TABLE, "utf-8")
    monkeypatch.setattr(sys, "argv", ["figures", str(sweep), "--output", str(tmp_path)])
    figures.main()
    assert set(shown) == {"accuracy_by_lambda.png", "accuracy_by_round.png", "norms_by_round.png"}
    curves = {
        name: {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
        for name, figure in shown.items()
    }
    by_strength = curves["accuracy_by_lambda.png"]["DP-FedAvg+BLUR"]
    assert by_strength == [[0, 71], [0.4, 75]]
    np.testing.assert_array_equal(curves["accuracy_by_lambda.png"]["FedAvg not private"][0][1], 90)
    norms = curves["norms_by_round.png"]["λ = 0.4"]
    assert norms == [[1, 3], [2, 4], [3, 5]]
    assert all(flaws(figure) == [] for figure in shown.values())
