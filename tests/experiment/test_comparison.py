"""Changes between benchmarks are told from noise."""

import itertools
import json

import numpy as np
import pytest
from marks import slow

from fedjax_dp.experiment.studies.timing import _rank, compare, require_comparable


def result(seconds, peaks=None, name="W1", **facts):
    peaks = [100.0] * len(seconds) if peaks is None else peaks
    figures = {"backend": "cpu", "devices": 2, "compile_seconds": 4.0, "peak_device_mb": None}
    return {"name": name, "seconds": seconds, "gemm_gflops": peaks, **figures, **facts}


@pytest.mark.parametrize(
    ("first", "second", "critical"),
    # Of a two-sided test at 5 % (Mann and Whitney 1947); -1 where there is none.
    [(3, 3, -1), (4, 4, 0), (5, 5, 2), (5, 8, 6), (8, 8, 13), (10, 10, 23), (20, 20, 127)],
)
def test_an_interval_has_the_ranks_of_the_printed_table(first, second, critical):
    assert _rank(first, second, 0.95) == critical + 1


def test_ranks_are_those_of_all_orders():
    """Every order of 4 and 5 rounds is as likely as another where nothing changed."""
    orders = list(itertools.combinations(range(9), 4))
    statistics = [sum(order) - 6 for order in orders]
    for level in (0.5, 0.9, 0.95):
        shares = [np.mean([s <= most for s in statistics]) for most in range(20)]
        expected = sum(share <= (1 - level) / 2 for share in shares)
        assert _rank(4, 5, level) == expected


def test_a_change_is_one_of_the_work_and_not_of_the_machine():
    old = result([1.0, 1.1, 0.9, 1.05, 0.95])
    # Twice as slow on a machine that is half as fast.
    slow_machine = result([2.0, 2.2, 1.8, 2.1, 1.9], [50.0] * 5)
    (same,) = compare([old], [slow_machine])
    assert same.verdict == "within noise" and same.low <= 1 <= same.high
    faster = result([0.5, 0.55, 0.45, 0.525, 0.475], compile_seconds=8.0)
    (change,) = compare([old, result([1.0] * 5, name="W2")], [faster])
    assert change.verdict == "faster" and change.once == {"compile_seconds": 2.0}
    assert change.ratio == pytest.approx(0.5, rel=0.03) and change.low < 0.5 < change.high
    (back,) = compare([faster], [old])
    assert back.verdict == "slower"
    assert (back.low, back.high) == pytest.approx((1 / change.high, 1 / change.low))


@pytest.mark.parametrize(
    ("old", "rounds", "message"),
    [
        (result([1.0] * 5, name="W2"), 5, r"NAME must be one of .*W2.* got 'W1'"),
        (result([1.0] * 3), 3, r"results of W1 must have more rounds .* got \(3, 3\)"),
        ({"name": "W1", "seconds_per_round": 1.0}, 5, "the older results of W1 must have the sec"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_it_is_measured(old, rounds, message):
    with pytest.raises(ValueError, match=message):
        require_comparable([old], "W1", rounds)


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="devices of W1 must be 2, as in the older results, got 1"):
        compare([result([1.0] * 5)], [result([1.0] * 5, devices=1)])


@slow
def test_intervals_hold_the_ratio_as_often_as_they_say():
    rng = np.random.default_rng(3)
    inside = 0
    for old, new in np.exp(rng.laplace(scale=0.1, size=(2000, 2, 6))):
        (change,) = compare([result(old)], [result(1.3 * new)])
        inside += change.low <= 1.3 <= change.high
    # Exactly 95.9 % for six rounds each; five standard errors.
    assert abs(inside / 2000 - 0.959) < 0.022


def test_the_command_compares_with_its_own_output(fedjax_dp, tmp_path):
    file = tmp_path / "old.json"
    file.write_text("[]", encoding="utf-8")
    status, _, errors = fedjax_dp("bench", "W1", f"--compare={file}")
    assert status == 2 and "must be a file that `fedjax-dp bench NAME --json` wrote" in errors
    file.write_text(json.dumps({"results": [result([1.0] * 5, name="W2")]}), encoding="utf-8")
    status, _, errors = fedjax_dp("bench", "W1", f"--compare={file}")
    assert status == 2 and "NAME must be one of" in errors


@slow
def test_an_experiment_is_compared_with_itself(fedjax_dp, tmp_path):
    file, old = tmp_path / "small.toml", tmp_path / "old.json"
    file.write_text("[data]\nnum_clients = 8\n[execution]\ndevices = 1\n", encoding="utf-8")
    words = ("bench", str(file), "--training.batch_size=4", "--rounds=4")
    old.write_text(fedjax_dp(*words, "--json")[1], encoding="utf-8")
    [first] = json.loads(old.read_text(encoding="utf-8"))["results"]
    status, out, _ = fedjax_dp(*words, f"--compare={old}")
    assert status == 0 and f"{first['name']}: " in out and "95 % interval" in out
    [change] = json.loads(fedjax_dp(*words, f"--compare={old}", "--json")[1])["changes"]
    assert change["low"] <= change["ratio"] <= change["high"]
