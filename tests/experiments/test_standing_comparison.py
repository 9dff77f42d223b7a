"""The comparison runs what it says, chooses on trials alone, and its ranks are those of a book."""

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from marks import slow

from experiments.comparison import compare, gradients, ranks
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
SETTING = compare.as_text(compare.settings(PIECE)[0])
ROW = compare.Cell(
    *("digits", "record", 1.0, "dp_sgd", 0, SETTING, 0.5, 0.1, 0.2, 8, 8, 2.0, 1.0),
    *("the shared model", "the shared model", "0", ""),
)


def row(**values):
    made = ROW._replace(**values)
    piece = compare.Piece(made.task, made.unit, made.method)
    tried = {compare.as_text(setting): setting for setting in compare.settings(piece)}
    if made.setting not in tried:
        return made
    digest = compare.digest_of(piece, made.epsilon, tried[made.setting], made.seed)
    return made._replace(digest=digest)


def test_ranks_are_those_of_demsar():
    ranked = ranks.ranking(-np.array(RANKS.split(), float).reshape(14, 4))
    np.testing.assert_allclose(ranked.mean_ranks, [3.143, 2.000, 2.893, 1.964], atol=5e-4)
    # His χ² of 9.28 has a p-value of 0.026 and no correction for ties, which makes p smaller.
    assert 0.015 < ranked.p_value < 0.0258
    # His F of 3.69 has, at 3 and 39 degrees of freedom, a p-value of 0.0197.
    assert 0.010 < ranked.p_value_f < 0.0197
    assert ranked.difference == pytest.approx(1.25, abs=0.005)
    assert ranks.critical_difference(4, 14, 0.10) == pytest.approx(1.12, abs=0.005)
    # His q of 2.569 and 3.164 for 4 and 10 classifiers, table 5a.
    assert ranks.critical_difference(10, 55) == pytest.approx(3.164 / np.sqrt(3), abs=1e-3)
    # C4.5 differs from both that tune m by 1.14 to 1.18, which is below 1.25.
    assert ranked.num_different == 0


def test_pairs_beyond_the_difference_are_told_apart_if_any_are():
    ranked = ranks.ranking(np.tile([3.0, 2.0, 1.0], (30, 1)))
    assert ranked.num_different == 3
    assert ranked._replace(p_value_f=0.2).num_different == 0
    assert np.isnan(ranks.ranking(np.ones((1, 3))).p_value)
    assert ranks.ranking(np.ones((6, 3))).p_value == 1
    # One that diverged is last, and leaves the others' ranks as they are.
    assert ranks.ranking(np.array([[np.nan, 0.1, 0.2]])).mean_ranks.tolist() == [3, 2, 1]


def test_wins_are_corrected_over_tasks():
    seeds = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    # Student's t at 4 degrees: 2.776 has p = 0.05, 3.495 p = 0.025.
    error = np.sqrt(2.5 / 5)
    gains = np.stack([seeds + 3.6 * error, seeds - 3.0 * error, seeds, np.ones(5), np.zeros(5)])
    assert ranks.signs(gains[:2]) == [1, -1]
    assert ranks.signs(gains[[1, 2]]) == [0, 0]
    assert ranks.signs(gains[3:]) == [1, 0]


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
    assert piece.unit == "record" and len(tried) == 8
    assert {setting["algorithm.options.momentum"] for setting in tried} == {0.5, 0.9}
    validate(load_config(compare.task_file("digits"), compare.point(piece, 4, tried[0], 3).words))
    for name, text, message in (
        ("dp_sgd", "", r"dp_sgd is in methods\.toml"),
        ("broken", "def", r"broken\.py must be a method"),
        ("typo", "SETTINGS = {'value': {}}", "the settings of typo must have the keys"),
        ("units", "SETTINGS = {'units': ['clients']}", "units of record, client; got clients"),
    ):
        file = tmp_path / f"{name}.py"
        file.write_text(text, "utf-8")
        with pytest.raises(SystemExit, match=message):
            read()
        file.unlink()


def gains_of(gains, unit="record", **values):
    """Rows at ε = 4 of methods that gain so much over the baseline, by task and method."""
    base = compare.plan()["unit"][unit]["baseline"]
    return [
        row(
            **{"task": task, "unit": unit, "epsilon": 4.0, "method": method, "seed": seed},
            accuracy=0.5 + 0.1 * seed + gain * (1 + seed % 2),
            setting="",
            **values,
        )
        for task, of_task in gains.items()
        for method, gain in {base: 0.0, **of_task}.items()
        for seed in compare.plan()["seeds"]
    ]


def test_gains_are_over_the_same_seeds_and_tasks():
    cells = gains_of(
        {
            "digits": {"fedprox": 0.01, "robust_hdp": 0.01},
            "adult": {"fedprox": -0.01, "robust_hdp": 0.01},
            "cifar10": {},
        }
    )
    # The seeds' own differences cancel; gains of 1 and 2 points are left.
    (each,) = ranks.compared(cells)
    assert each.shown.tasks == ("digits", "adult")
    assert each.methods() == ["dp_sgd", "robust_hdp", "fedprox"]
    assert ranks.signs(each.shown.of("fedprox")) == [1, -1]
    assert ranks.interval(each.shown.of("robust_hdp").mean(axis=0)) == pytest.approx(
        ranks.interval([0.01, 0.02, 0.01, 0.02, 0.01])
    )
    assert ranks.interval(each.shown.of("fedprox").mean(axis=0))[0] == pytest.approx(0)


def test_most_results_in_common_decide_tasks_and_methods():
    six = {task: {"fedprox": 0.0, "scaffold": 0.0} for task in compare.tasks()}
    six["digits"] = {**six["digits"], "robust_hdp": 0.0, "ditto": 0.0}
    (each,) = ranks.compared(gains_of(six))
    # Of a method that was run on one task the others lose no task.
    assert len(each.shown.tasks) == 6 and len(each.shown.methods) == 3
    few = gains_of({"digits": {"fedprox": 0.0, "robust_hdp": 0.0}, "adult": {}})
    assert ranks.compared(few)[0].shown.tasks == ("digits",)
    assert ranks.compared([c for c in few if c.method != "dp_sgd"]) == []


def test_models_that_epsilon_does_not_cover_are_in_no_ranks(monkeypatch):
    own = gains_of({"digits": {"ditto": 0.3}, "adult": {"ditto": 0.3}}, "client")
    text = "the shared model, and not the clients' own models"
    own = [c._replace(covered=text) if c.method == "ditto" else c for c in own]
    cells = own + gains_of({"digits": {"fedprox": 0.1}, "adult": {"fedprox": 0.1}}, "client")
    monkeypatch.setattr(ranks, "read_cells", lambda: cells)
    (each,) = ranks.compared(cells)
    assert each.methods() == ["dp_fedavg", "fedprox"] and each.methods(True) == ["ditto"]
    assert "ditto" not in ranks.which() and "ditto" not in ranks.tests()
    assert "`ditto` *" in ranks.gains_table() and "`ditto` *" in ranks.task_tables()


def test_a_source_is_contradicted_by_what_tests_its_claim_alone(monkeypatch):
    lost = {"digits": {"blur_lus": -0.1, "fedsplit": -0.1}}
    cells = [*gains_of(lost, "client"), *gains_of(lost)]
    monkeypatch.setattr(ranks, "read_cells", lambda: cells)
    rows = [line for line in ranks.sources_table().splitlines() if "README" in line]
    assert len(rows) == 4 and sum("contradicted" in line for line in rows) == 1
    assert "blur_lus" in next(line for line in rows if "contradicted" in line)


def test_settings_are_chosen_on_trials_alone():
    texts = [compare.as_text(setting) for setting in compare.settings(PIECE)]
    trials = [
        row(epsilon=4.0, seed=100, setting=text, accuracy=accuracy)
        for text, accuracy in zip(texts, [0.1, 0.4, 0.4, np.nan, 0.2, 0, 0, 0], strict=True)
    ]
    others = [row(epsilon=4.0, setting=texts[1], accuracy=0.9), row(epsilon=2.0, seed=100)]
    best = compare.chosen(PIECE, trials + others, 4.0)
    assert compare.as_text(best) == texts[1]
    assert compare.chosen(PIECE, trials[1:] + others, 4.0) is None
    left = compare.missing(PIECE, trials + others, [4.0])
    assert left == ([], [(4.0, seed) for seed in (1, 2, 3, 4)])
    # A cell of a setting that is no longer the best is run again.
    worse = [row(epsilon=4.0, setting=texts[0], seed=1)]
    assert compare.missing(PIECE, trials + others + worse, [4.0]) == left
    assert ranks.reported(trials + others) == others[:1]


def test_rows_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "cells.csv"
    texts = [compare.as_text(setting) for setting in compare.settings(PIECE)]
    rows = [row(epsilon=8.0, seed=1), row(epsilon=2.0, seed=100, setting=texts[1]), row()]
    compare.add_cells(rows, file)
    assert compare.read_cells(file) == [rows[2], rows[1], rows[0]]
    # A row replaces that of its run.
    compare.add_cells([row(accuracy=0.9)], file)
    assert [cell.accuracy for cell in compare.read_cells(file)] == [0.9, 0.5, 0.5]
    with file.open("a") as lines:
        lines.write("digits,record,1\n")
    with pytest.raises(SystemExit, match=r"cells\.csv, line 5 must have task, unit, epsilon"):
        compare.read_cells(file)


def test_a_row_of_another_configuration_does_not_count(tmp_path, monkeypatch):
    file, planned = tmp_path / "cells.csv", compare.plan()
    compare.write_cells([row(), row(epsilon=1000.0), row(epsilon=3.0)], file)
    assert [cell.epsilon for cell in compare.read_cells(file)] == [1.0, 1000.0]
    changed = planned["method"] | {"dp_sgd": {"set": {"training.num_steps": 3}}}
    monkeypatch.setattr(compare, "plan", lambda: planned | {"method": changed})
    monkeypatch.setattr(compare, "_digests", compare._digests.__wrapped__)
    assert compare.read_cells(file) == []
    del changed["dp_sgd"]
    assert compare.read_cells(file) == []


def test_two_calls_lose_no_row_and_take_other_pieces(tmp_path, monkeypatch):
    file, taken = tmp_path / "cells.csv", []
    monkeypatch.setattr(compare, "run_piece", lambda piece, *rest: taken.append(piece))
    words = ["--cells", str(file), "--output", str(tmp_path), "--only", "task=digits,unit=record"]
    with compare._locked(tmp_path / "digits-record-dp_sgd.lock"):
        compare.main(words)
    others = [piece for piece in compare.pieces(["digits"]) if piece.unit == "record"]
    assert taken == [piece for piece in others if piece != PIECE]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: compare.add_cells([row(seed=seed)], file), range(5)))
    assert [cell.seed for cell in compare.read_cells(file)] == [0, 1, 2, 3, 4]


def test_features_are_orientations_and_colours_of_an_image_alone():
    ramp = np.broadcast_to(np.linspace(0, 1, 32, dtype=np.float32), (32, 32))
    images = np.stack([np.stack([x] * 3, -1) for x in (ramp, ramp.T, (ramp + ramp.T) / 2)])
    cells = np.asarray(gradients.features(images)).reshape(3, 16, gradients.BINS + 3)
    # Brightness grows to the right, downwards, and along the diagonal: 0, 90 and 45 degrees.
    inner = (cells[:, [5, 6, 9, 10], : gradients.BINS] ** 2).sum(axis=1)
    shares = inner / inner.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, np.eye(gradients.BINS)[[0, 4, 2]], atol=1e-4)
    # Colours are means of cells in [-1, 1]; the first of four columns is that of pixels 0 to 7.
    np.testing.assert_allclose(cells[0, :4, -1], 2 * (3.5 + 8 * np.arange(4)) / 31 - 1, atol=1e-5)
    alone = np.asarray(gradients.features(images[1:2])).reshape(16, -1)
    np.testing.assert_array_equal(alone, cells[1])


def test_hours_left_count_trials_and_cells_at_measured_seconds():
    texts = [compare.as_text(setting) for setting in compare.settings(PIECE)]
    done = [row(seed=seed, seconds=36.0) for seed in compare.plan()["seeds"]]
    done += [row(seed=100, setting=text, seconds=36.0) for text in texts]
    [(_, count, hours)] = compare.left_hours(done, [PIECE], [1.0, 2.0])
    assert (count, hours) == (5, pytest.approx((8 + 5) * 36 / 3600))


def test_an_unknown_selection_is_refused_by_name():
    assert compare.selection(["task=digits,unit=record", "epsilon=4.0"]) == {
        "task": ["digits"],
        "unit": ["record"],
        "epsilon": ["4"],
    }
    with pytest.raises(SystemExit, match="method=dp_sg"):
        compare.selection(["method=dp_sg"])
    for words in (["--only", "unit=client,method=dp_sgd"], ["--minutes", "-1"]):
        with pytest.raises(SystemExit) as refused:
            compare.main([*words, "--plan"])
        assert refused.value.code == 2


@slow
def test_a_piece_is_tuned_run_and_continued(tmp_path, monkeypatch, capsys):
    small = {"seeds": [0, 1], "epsilons": [8], "trials": 2}
    planned = compare.plan() | small
    grid = {"times": {"training.learning_rate": [0.001, 1]}}
    planned |= {"method": {"dp_sgd": grid, "dp_fedavg": {"units": ["client"], **grid}}}
    digits = {k: v for k, v in planned["task"]["digits"].items() if k != "more_epsilons"}
    planned |= {"task": {"digits": digits}}
    monkeypatch.setattr(compare, "plan", lambda: planned)
    monkeypatch.setattr(compare, "_digests", functools.cache(compare._digests.__wrapped__))
    file, runs = tmp_path / "cells.csv", tmp_path / "runs"
    words = ["--cells", str(file), "--output", str(runs), "--only", "task=digits"]
    compare.main([*words, "--minutes", "0"])
    assert not file.exists()
    compare.main([*words, "--only", "method=dp_sgd"])
    cells = compare.read_cells(file)
    assert [cell.seed for cell in cells] == [0, 1, 100, 100]
    # A thousandth of the rate learns nothing, so that the other was chosen.
    assert {cell.setting for cell in cells[:2]} == {"training.learning_rate=0.5"}
    assert all(7 < cell.spent <= 8 and cell.accuracy > 0.3 for cell in cells[:2])
    assert all(path.suffix == ".lock" for path in runs.iterdir())
    compare.main(words)
    again = compare.read_cells(file)
    assert again[:4] == cells and {cell.unit for cell in again[4:]} == {"client"}
    capsys.readouterr()
    compare.main([*words, "--plan"])
    assert capsys.readouterr().out == "all: 0 cells, 0.0 h\n"
