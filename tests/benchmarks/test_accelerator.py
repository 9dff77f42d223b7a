"""The measurement of an accelerator loses nothing when it stops, and says what it did not do."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from marks import telling

from benchmarks.accelerator import page as pages
from benchmarks.accelerator import rounding
from benchmarks.accelerator import steps as lists
from benchmarks.accelerator.__main__ import main
from benchmarks.accelerator.runner import ROOT, Book, Step, play_all
from fedjax_dp.core import products
from fedjax_dp.experiment.studies.workloads import WORKLOADS, synthetic_data

MACHINE = {"device": "card", "jax": "1"}
ROW = "import sys, os, time, json\nwrite = open(sys.argv[1], 'a', buffering=1).write\n"
ROW += "write(json.dumps({'name': 'x', 'clients_per_second': 2.0}) + '\\n')\n"


def made(name, code="", seconds=0.0, limit=30.0, missing=""):
    return Step(name, "workloads", ("-I", "-S", "-c", ROW + code), seconds, limit, missing)


def played(folder, steps, seconds=60.0, chosen=None, say=lambda text: None, **options):
    book = Book(folder / "a.json", options.pop("machine", MACHINE), pages.page, **options)
    return play_all(steps, steps if chosen is None else chosen, book, seconds, say)


def stored(folder):
    results = json.loads((folder / "a.json").read_text())
    return results, {name: found["status"] for name, found in results["steps"].items()}


def test_a_call_that_is_stopped_in_a_step_continues_with_that_step(tmp_path):
    stop = "import signal; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    once = tmp_path / "once"
    middle = f"if not os.path.exists({str(once)!r}):\n    open({str(once)!r}, 'w')\n    {stop}"
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('.')"
    steps = [made("first", count), made("second", middle), made("third")]
    # A shell in the background has its commands ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            played(tmp_path, steps)
    finally:
        signal.signal(signal.SIGINT, before)
    results, statuses = stored(tmp_path)
    assert statuses == {"first": "done"} and results["left"] == ["second", "third"]
    assert played(tmp_path, steps) == []
    assert stored(tmp_path)[1] == dict.fromkeys(("first", "second", "third"), "done")
    assert (tmp_path / "count").read_text() == "."
    # Only what is to be measured anew runs again.
    played(tmp_path, steps, chosen=steps[:1], forgotten=steps[:1])
    assert (tmp_path / "count").read_text() == ".."
    assert len(stored(tmp_path)[1]) == 3


def test_steps_that_fail_or_hang_cost_themselves_alone(tmp_path):
    pid = tmp_path / "pid"
    child = f"pid = os.fork()\nif pid: open({str(pid)!r}, 'w').write(str(pid))\ntime.sleep(60)"
    steps = [
        made("broken", "raise ValueError('out of memory')"),
        made("killed", "os.kill(os.getpid(), 9)"),
        made("hung", child, limit=1.0),
        made("absent", missing="not installed"),
        made("good"),
    ]
    assert played(tmp_path, steps) == []
    results, statuses = stored(tmp_path)
    assert list(statuses.values()) == ["failed", "failed", "failed", "skipped", "done"]
    errors = {name: found["error"] for name, found in results["steps"].items()}
    assert errors["broken"] == "ValueError: out of memory"
    assert "SIGKILL" in errors["killed"] and "no end within 1 s" in errors["hung"]
    assert all(len(results["steps"][name]["rows"]) == 1 for name in ("broken", "hung", "good"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    page = (tmp_path / "a.md").read_text()
    assert "broken: failed, ValueError: out of memory" in page and "Nothing." in page


def test_time_that_is_left_decides_what_starts_and_what_is_left(tmp_path):
    steps = [made("long", seconds=100), made("slow", "time.sleep(60)"), made("last")]
    heard = []
    assert played(tmp_path, steps, 0.7, say=heard.append) == ["long", "slow", "last"]
    assert heard[0].startswith("long: not started, needs 100 s") and "cut off" in heard[2]
    results, statuses = stored(tmp_path)
    assert statuses == {"slow": "cut off"} and results["left"] == ["long", "slow", "last"]
    assert "long, slow, last" in (tmp_path / "a.md").read_text()
    # The seconds that a step took here replace those that were expected.
    assert played(tmp_path, steps, 120, chosen=steps[:1]) == ["slow", "last"]
    started = time.monotonic()
    assert played(tmp_path, steps[:1], 30, forgotten=steps[:1]) == []
    assert time.monotonic() - started < 30


def test_results_of_two_machines_do_not_mix(tmp_path):
    steps = [made("a"), made("b")]
    played(tmp_path, steps, chosen=steps[:1])
    other = MACHINE | {"device": "other"}
    with pytest.raises(SystemExit, match=r"another machine \(other device\)"):
        played(tmp_path, steps, machine=other)
    assert played(tmp_path, steps, machine=other, forgotten=steps) == []
    assert stored(tmp_path)[0]["machine"] == other


def test_page_has_shares_of_the_peaks_and_a_command_for_each_row():
    def found(group, *rows):
        return {"group": group, "date": "2000-01-01", "status": "done", "rows": rows}

    layout = {"form": "native", "precision": "default", "clients": 4, "seconds": 0.5}
    layout |= {"gflops": 30.0, "gb_per_second": 50.0}
    peaks = [
        {"what": "product", "precision": "default", "gflops": 120.0},
        {"what": "copy", "precision": "float32", "gb_per_second": 200.0},
    ]
    steps = {"native default": found("layouts", layout)}
    without = pages.page({"machine": MACHINE, "steps": steps, "left": ["W1"]})
    assert "of peak" not in without and without.endswith("W1\n")
    steps["peaks"] = found("peaks", *peaks)
    page = pages.page({"machine": MACHINE, "steps": steps, "left": []})
    (line,) = (line for line in page.splitlines() if line.startswith("| native"))
    command = '`python -m benchmarks.accelerator --again --only "native default"`'
    assert line == f"| native | default | 4 | 0.5 | 0.25 | 0.25 | {command} |"


def test_lists_name_what_there_is():
    for steps in (lists.on_accelerator(), lists.on_cpu()):
        names = [step.name for step in steps]
        assert len(set(names)) == len(names) and "fedjax" in str(names)
        assert {step.group for step in steps} == set(pages._TABLES)
        for step in steps:
            asked = json.loads(step.command[-1])
            assert step.seconds < step.limit <= 300
            assert asked["do"] != "workload" or asked["name"] in WORKLOADS
            assert all((ROOT / file).exists() for file in asked.get("files", ()))
            for changes in asked.get("each", ()):
                assert set(changes) <= set(WORKLOADS["W4"]._fields)


def test_tokens_of_p2_are_followed_by_their_labels():
    data = synthetic_data(WORKLOADS["P2"]._replace(num_clients=2))
    x, y = data.examples["x"], data.examples["y"]
    assert x.shape == y.shape == (128, 20) and x.dtype == y.dtype == np.int32
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    assert x.min() >= 0 and 9000 < x.max() < 10_000


@telling
def test_the_command_measures_all_of_its_list_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.accelerator", "--minutes", "30"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # Kernels that are not optimised compile fastest.
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        timeout=1800,
    )
    assert done.returncode == 0 and done.stdout.endswith("nothing is left\n"), done.stdout
    path, steps = tmp_path / "accelerator-cpu.json", lists.on_cpu()
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "accelerator-cpu.md"}
    results = json.loads(path.read_text())
    assert results["left"] == [] and list(results["steps"]) == [step.name for step in steps]
    assert results["machine"]["backend"] == "cpu" and results["machine"]["cores"] > 0
    page = path.with_suffix(".md").read_text()
    for step in steps:
        found = results["steps"][step.name]
        assert found["group"] == step.group
        if step.missing:
            assert found["status"] == "skipped" and f"{step.name}: skipped" in done.stdout
            continue
        assert found["status"] == "done" and not found["error"], found
        lines = [line for line in page.splitlines() if f'--only "{step.name}"' in line]
        assert len(lines) == len(found["rows"]) > 0
        assert f"## {pages._TABLES[step.group][0]}" in page
    assert page.endswith("## Left\n\nNothing.\n")
    single, together = results["steps"]["F4"]["rows"]
    assert single["rounds_per_call"] == 1 and together["rounds_per_call"] == 2
    rate = 4 / together["seconds_per_round"]
    assert together["clients_per_second"] == pytest.approx(rate)
    peaks = results["steps"]["peaks"]["rows"]
    assert {row["what"] for row in peaks} == {"product", "copy"}
    tests = results["steps"]["tests of secure sums"]["rows"]
    assert all(row["passed"] > 0 == row["failed"] for row in tests)


@telling
def test_errors_of_split_products_above_their_bound_fail_the_step(monkeypatch):
    assert all(row["of bound"] <= 1 for row in rounding.rows(width=8))
    whole = products.parts
    monkeypatch.setattr(products, "parts", lambda x: (whole(x)[0], 0 * whole(x)[1]))
    with pytest.raises(SystemExit, match="times the bound"):
        list(rounding.rows(width=8))


@pytest.mark.slow
def test_networks_side_by_side_are_the_emnist_cnn():
    from benchmarks.accelerator.layouts import EmnistCnn
    from fedjax_dp import models

    example = jax.ShapeDtypeStruct((28, 28, 1), np.float32)
    model = models.emnist_cnn(example, 62)
    params = model.init(jax.random.key(0))
    x = np.random.default_rng(0).random((2, 28, 28, 1), np.float32)
    for dtype, tolerance in ((np.float32, 1e-5), (jax.numpy.bfloat16, 0.05)):
        found = EmnistCnn(dtype).apply(params, x)
        assert found.dtype == dtype
        np.testing.assert_allclose(
            np.float32(found), model.predict(params, x), rtol=tolerance, atol=tolerance
        )


def test_options_are_checked_before_any_step(capsys):
    for bad, message in ((["--minutes", "0"], "above 0"), (["--only", "W9"], "no step or group")):
        with pytest.raises(SystemExit):
            main(bad)
        assert message in capsys.readouterr().err
