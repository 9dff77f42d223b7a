"""The comparison runs what it says, chooses on trials alone, and its ranks are those of a book."""

import numpy as np
import pytest
from marks import slow

from experiments.comparison import compare, ranks
from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.components.numbers_by_client import with_named_lists
from fedjax_dp.experiment.reading.validate import validate

# Demšar 2006, table 6: ranks of C4.5, with m, with cf, and with both tuned, on 14 data sets.
RANKS = """
4 3 2 1   1 2 3 4   4 1 2 3   4 1 3 2   4 2 3 1   1 2.5 4 2.5   3 2 4 1   2.5 2.5 4 1
4 3 2 1   2.5 2.5 2.5 2.5   4 2.5 1 2.5   3 2 4 1   4 1 2 3   3 1 4 2
"""
PIECE = compare.Piece("digits", "record", "dp_sgd")
ROW = compare.Cell(
    *("digits", "record", 1.0, "dp_sgd", 0, "", 0.5, 0.1, 0.2, 8, 2.0, 1.0, 1.0),
    *("the shared model", "the shared model", "0"),
)


def row(**values):
    return ROW._replace(**values)


def test_ranks_are_those_of_demsar():
    ranked = ranks.ranking("abcd", "t" * 14, -np.array(RANKS.split(), float).reshape(14, 4))
    np.testing.assert_allclose(ranked.mean_ranks, [3.143, 2.000, 2.893, 1.964], atol=5e-4)
    # His χ² of 9.28 has a p-value of 0.026 and no correction for ties, which makes p smaller.
    assert 0.015 < ranked.p_value < 0.0258
    assert ranked.difference == pytest.approx(1.25, abs=0.005)
    assert ranks.critical_difference(4, 14, 0.10) == pytest.approx(1.12, abs=0.005)
    # His q of 2.569 and 3.164 for 4 and 10 classifiers, table 5a.
    assert ranks.critical_difference(10, 55) == pytest.approx(3.164 / np.sqrt(3), abs=1e-3)
    # C4.5 differs from both that tune m by 1.14 to 1.18, which is below 1.25.
    assert (ranked.best, ranked.not_different) == (3, ["a", "b", "c"])


def test_methods_beyond_the_difference_are_different():
    scores = np.tile([3.0, 2.0, 1.0], (30, 1))
    ranked = ranks.ranking("abc", "t" * 30, scores)
    assert ranked.not_different == [] and ranked.best == 0
    # Below five per cent nothing may be called different, whatever the ranks.
    assert ranked._replace(p_value=0.2).not_different == ["b", "c"]
    assert np.isnan(ranks.ranking("abc", "t", scores[:1]).p_value)


def test_an_interval_is_students():
    # Student's t at 97.5 % and 4 degrees is 2.776.
    mean, half = ranks.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, half) == (3.0, pytest.approx(2.776 * np.sqrt(2.5 / 5), abs=1e-3))
    assert np.isnan(ranks.interval([1.0])[1])


def test_every_method_that_can_protect_is_compared_or_left_out_with_a_reason():
    planned = compare.plan()
    private = {n for n in ALGORITHMS if {*compare.UNITS} & {*ALGORITHMS[n].units}}
    run, left_out = set(planned["method"]), set(planned["left_out"])
    assert run | left_out == private and not run & left_out
    assert all(planned["left_out"].values())
    assert all(compare.units_of(method) for method in run)
    assert len(planned["task"]) == 6 and planned["tuning_seed"] not in planned["seeds"]


@pytest.mark.parametrize("task", [*compare.tasks(), *compare.larger()])
def test_every_point_of_the_comparison_is_valid(task):
    pieces = compare.pieces([task])
    # Tasks differ in data and model, methods in all else.
    for piece in pieces if task == "digits" else pieces[::9]:
        tried = compare.settings(piece)
        assert len({compare.as_text(setting) for setting in tried}) == compare.plan()["trials"]
        point = compare.point(piece, 4, tried[-1], 3)
        config = load_config(compare.task_file(task), point.words)
        validate(with_named_lists(config))
        assert config.privacy.unit == piece.unit and config.run.seed == 3
        assert getattr(config.privacy, piece.unit).epsilon == 4


def test_a_method_of_ones_own_is_one_file(tmp_path, monkeypatch):
    page = (compare.HERE / "README.md").read_text("utf-8")
    (tmp_path / "mine.py").write_text(page.partition("```py\n")[2].partition("```")[0], "utf-8")
    monkeypatch.setattr(compare, "OWN", tmp_path)
    read = compare.plan.__wrapped__
    planned = read()
    monkeypatch.setattr(compare, "plan", lambda: planned)
    (piece,) = [p for p in compare.pieces(["digits"]) if p.method == "mine"]
    tried = compare.settings(piece)
    assert piece.unit == "record" and len(tried) == 4
    assert {setting["algorithm.options.momentum"] for setting in tried} == {0.5, 0.9}
    validate(load_config(compare.task_file("digits"), compare.point(piece, 4, tried[0], 3).words))
    (tmp_path / "dp_sgd.py").touch()
    with pytest.raises(SystemExit, match=r"dp_sgd is in methods\.toml"):
        read()


def test_wins_and_losses_are_of_intervals_over_the_same_seeds():
    seeds = compare.plan()["seeds"]
    cells = [
        row(task=task, method=method, seed=seed, accuracy=0.5 + 0.1 * seed + gain * (1 + seed % 2))
        for task, gains in {"digits": 0.01, "adult": -0.01, "cifar10": 0.0}.items()
        for method, gain in {"dp_sgd": 0.0, "robust_hdp": gains}.items()
        for seed in seeds
        if (task, seed) != ("cifar10", 4) or method == "dp_sgd"
    ]
    (duel,) = ranks.duels(cells)
    assert (duel.method, duel.unit, duel.epsilon) == ("robust_hdp", "record", 1.0)
    # The seeds' own differences cancel; gains of 1 and 2 points are left.
    mean, half = ranks.interval([0.01, 0.02, 0.01, 0.02, 0.01])
    won, lost = duel.tasks_where(1), duel.tasks_where(-1)
    assert [*won] == ["digits"] and won["digits"] == pytest.approx((mean, half))
    assert [*lost] == ["adult"] and lost["adult"] == pytest.approx((-mean, half))
    # One seed of the third task is missing.
    assert not duel.tasks_where(0)
    tied = duel._replace(gains={"digits": (0.01, 0.01), "adult": (0.0, 0.0)})
    assert [*tied.tasks_where(0)] == ["digits", "adult"]


def test_settings_are_chosen_on_trials_alone():
    texts = [compare.as_text(setting) for setting in compare.settings(PIECE)]
    trials = [
        row(epsilon=4.0, seed=100, setting=text, accuracy=accuracy)
        for text, accuracy in zip(texts, [0.1, 0.4, 0.4, 0.2], strict=True)
    ]
    others = [row(epsilon=4.0, setting=texts[3], accuracy=0.9), row(epsilon=2.0, seed=100)]
    best = compare.chosen(PIECE, trials + others, 4.0)
    assert compare.as_text(best) == texts[1]
    assert compare.chosen(PIECE, trials[1:] + others, 4.0) is None
    left = compare.missing(PIECE, trials + others, [4.0])
    assert left == ([], [(4.0, seed) for seed in (1, 2, 3, 4)])
    assert ranks.reported(trials + others) == others[:1]


def test_rows_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "cells.csv"
    rows = [row(epsilon=8.0, seed=1), row(epsilon=2.0, seed=100, setting="a=1 b=0.3"), row()]
    compare.write_cells(rows, file)
    assert compare.read_cells(file) == [rows[2], rows[1], rows[0]]


def test_ranks_need_all_seeds_and_the_same_methods():
    seeds = compare.plan()["seeds"]
    cells = [
        row(task=task, method=method, seed=seed, accuracy=accuracy)
        for task, accuracy in (("digits", 0.5), ("adult", 0.7))
        for method in ("dp_sgd", "fedprox")
        for seed in seeds
        if (task, method, seed) != ("adult", "fedprox", 4)
    ]
    ranked = ranks.rank_complete(ranks.complete_means(cells, "record", 1.0))
    assert ranked.tasks == ("digits",) and ranked.methods == ("dp_sgd", "fedprox")
    assert ranked.mean_ranks.tolist() == [1.5, 1.5]
    assert ranks.rank_complete(ranks.complete_means(cells, "client", 1.0)) is None


def test_hours_left_count_trials_and_cells_at_measured_seconds():
    done = [row(epsilon=1.0, seed=seed, cpu_seconds=36.0) for seed in compare.plan()["seeds"]]
    [(_, count, hours)] = compare.left_hours(done, [PIECE], [1.0, 2.0])
    assert (count, hours) == (5, pytest.approx((4 + 5) * 36 / 3600))


def test_an_unknown_selection_is_refused_by_name():
    assert compare.selection(["task=digits,unit=record", "epsilon=4"]) == {
        "task": ["digits"],
        "unit": ["record"],
        "epsilon": ["4"],
    }
    with pytest.raises(SystemExit, match="method=dp_sg"):
        compare.selection(["method=dp_sg"])


@slow
def test_a_piece_is_tuned_run_and_continued(tmp_path, monkeypatch, capsys):
    small = {"seeds": [0, 1], "epsilons": [8], "trials": 2}
    planned = compare.plan() | small
    grid = {"times": {"training.learning_rate": [0.001, 1]}}
    planned |= {"method": {"dp_sgd": grid, "dp_fedavg": {"units": ["client"], **grid}}}
    monkeypatch.setattr(compare, "plan", lambda: planned)
    file, runs = tmp_path / "cells.csv", tmp_path / "runs"
    words = ["--cells", str(file), "--output", str(runs), "--only", "task=digits"]
    compare.main([*words, "--minutes", "0"])
    assert not file.exists()
    compare.main([*words, "--only", "method=dp_sgd"])
    cells = compare.read_cells(file)
    assert [cell.seed for cell in cells] == [0, 1, 100, 100]
    # A thousandth of the rate learns nothing, so that the other was chosen.
    assert {cell.setting for cell in cells[:2]} == {"training.learning_rate=1"}
    assert all(7 < cell.spent <= 8 and cell.accuracy > 0.3 for cell in cells[:2])
    assert not any(runs.iterdir())
    compare.main(words)
    again = compare.read_cells(file)
    assert again[:4] == cells and {cell.unit for cell in again[4:]} == {"client"}
    capsys.readouterr()
    compare.main([*words, "--plan"])
    assert capsys.readouterr().out == "all: 0 cells, 0.0 h\n"
