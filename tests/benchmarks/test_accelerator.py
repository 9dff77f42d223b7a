"""The measurement of an accelerator loses nothing when it stops, and says what it did not do."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
import typing

import jax
import numpy as np
import pytest
from marks import slow, telling

from benchmarks.accelerator import constants, estimates, kernels, rounding, rounds
from benchmarks.accelerator import page as pages
from benchmarks.accelerator import steps as lists
from benchmarks.accelerator.__main__ import main
from benchmarks.accelerator.measurements import MEASUREMENTS
from benchmarks.accelerator.runner import ROOT, Book, Step, play_all
from fedjax_dp.core import choices, products
from fedjax_dp.core.targets import KINDS
from fedjax_dp.experiment.studies.workloads import WORKLOADS, synthetic_data
from fedjax_dp.io import read_measured

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


def test_a_step_that_was_cut_off_comes_after_those_that_never_ran(tmp_path):
    cut = {"group": "workloads", "date": "2000-01-01", "status": "cut off", "rows": []}
    results = {"machine": MACHINE, "steps": {"slow": cut | {"error": "no end", "seconds": 500.0}}}
    (tmp_path / "a.json").write_text(json.dumps(results))
    heard = []
    assert played(tmp_path, [made("slow"), made("last")], say=heard.append) == []
    assert [line.partition(":")[0] for line in heard] == ["last", "last", "slow", "slow"]


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
            assert asked["do"] in MEASUREMENTS
            assert step.decides and (step.missing or step.seconds < step.limit <= 600)
            assert all((ROOT / file).exists() for file in asked.get("files", ()))
            for case in asked.get("cases", ()):
                assert set(case["changes"]) <= set(WORKLOADS[case["name"]]._fields)
    assert [s.name for s in lists.on_cpu()] == [s.name for s in lists.on_accelerator()]
    assert set(lists.FORMS) <= set(typing.get_args(choices.Convolutions))


def test_what_is_worth_most_comes_first_and_all_of_it_fits_a_quarter_of_an_hour():
    steps = lists.on_accelerator()
    firsts = list(dict.fromkeys(step.group for step in steps))
    assert firsts == [
        *("tests", "rounding", "workloads", "peers", "peaks", "layouts", "settings", "scale"),
        "trace",
    ]
    last = [step.name for step in steps].index("trace of P1")
    # A machine takes up to two minutes to start, and packages seconds to install.
    assert sum(step.seconds for step in (lists.MACHINE, *steps[: last + 1])) <= 12.9 * 60


def test_a_plan_lists_each_step_with_its_seconds_and_starts_none(monkeypatch, capsys):
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    main(["--plan"])
    lines = capsys.readouterr().out.splitlines()
    steps = [lists.MACHINE, *lists.on_accelerator()]
    assert [line[:24].strip() for line in lines[1:-1]] == [step.name for step in steps]
    ran = [step for step in steps if not step.missing]
    for line, step in zip(lines[1:-1], steps, strict=True):
        assert line.endswith(step.missing or step.decides)
    assert f"{sum(s.seconds for s in ran) / 60:.1f} minutes" in lines[-1]
    main(["--plan", "--only", "scale"])
    names = [line[:24].strip() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert names == ["machine", "cohorts of W4", "cohorts of P1", "a million clients"]


def test_the_command_for_a_machine_without_a_network_is_one_short_line():
    readme = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    section = readme.partition("## An accelerator")[2].partition("\n## ")[0]
    fetched, run = (block.partition("```")[0] for block in section.split("```sh\n")[1:])
    (line,) = run.strip().splitlines()
    assert len(line) <= 2000
    for text in (fetched, line):
        subprocess.run(["bash", "-n", "-c", text], check=True)
    # What is fetched is ignored by Git, and what is installed is what was fetched.
    (folder,) = set(re.findall(r"-d (\S+)", fetched))
    assert f"{folder}/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert f"{folder}/*.whl" in line and "--no-index" in line


@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_made_up_speeds_change_the_form_of_convolutions_alone(target):
    facts = KINDS[target].facts
    default = choices.choices(facts)
    for form in lists.ROUND_FORMS:
        chosen = choices.choices(facts, rounds.preferring(form, facts))
        assert chosen == default._replace(convolutions=form)


def test_rounds_stand_beside_estimates_of_the_same_rounds(tmp_path, monkeypatch):
    rows = [("P1", "h100", 0.5), ("P1", "v5e", 7.0), ("P1", "h100", 0.25)]
    keys = ("workload", "target", "round_seconds")
    path = tmp_path / "compiled.jsonl"
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    monkeypatch.setattr(estimates, "FILE", path)
    card = {"device": "NVIDIA H200", "compute_capability": "9.0", "jax": "1"}
    row = {"name": "P1", "form": "native", "seconds_per_round": 1.0, "clients_per_second": 50.0}
    others = [row | {"form": "products"}, row | {"cohort": 10}, row | {"name": "F9"}]
    found = estimates.read(card)
    # An H200 computes as an H100 does; the last of two rows holds.
    assert (found.target, found.seconds(row)) == ("h100", 0.25)
    assert [found.seconds(other) for other in others] == [None] * 3
    assert estimates.read({"device": "TPU v5 lite"}).rounds == {"P1": 7.0}
    assert estimates.read({"device": "cpu"}) == estimates.Estimates()
    step = {"group": "workloads", "date": "2000-01-01", "status": "done", "rows": [row]}
    page = pages.page({"machine": card, "steps": {"P1": step}, "left": []})
    assert "| estimated | over the estimate |" in page and "| 0.25 | 4 |" in page


def test_constants_are_those_that_measured_speeds_decide(tmp_path):
    def row(form, precision, clients, rate):
        # Steps of 1 GFLOP.
        numbers = {"seconds": clients / rate, "clients_per_second": rate, "gflops": rate}
        return {"form": form, "precision": precision, "clients": clients, **numbers}

    rows = [
        row("native", "default", 4, 100.0),
        row("products", "default", 16, 290.0),
        row("products", "default", 64, 300.0),
        {"form": "products", "precision": "default", "clients": 256, "error": "no memory"},
        row("records", "float32", 4, 100.0),
        row("records", "split", 4, 110.0),
    ]
    step = {"group": "layouts", "status": "done", "rows": rows}
    card = {"device": "H", "backend": "gpu", "compute_capability": "9.0", "multiprocessors": 100}
    path = tmp_path / "accelerator-gpu.json"
    path.write_text(json.dumps({"machine": card, "steps": {"products steps": step}}))
    measured = read_measured(path)
    text = "\n".join(constants.lines(constants.facts_of(card), measured))
    # Products are faster by more than a quarter, and 16 clients reach nine tenths of the best.
    assert "convolutions: native -> products" in text
    assert '_ACCELERATED = "products"' in text and "_WIDEST = 16" in text
    assert "products default: 300 (at 64; enough at 16)" in text
    # 16 steps of 1 GFLOP on 100 multiprocessors.
    assert "_OPERATIONS_OF_A_CORE = 1.6e+08" in text
    assert 'products by default = "exact"' in text


def test_kernels_are_counted_on_the_streams_of_a_device_alone():
    def line(name, *events):
        made = [types.SimpleNamespace(name=k, duration_ns=ns) for k, ns in events]
        return types.SimpleNamespace(name=name, events=made)

    streams = [
        line("Stream #13(Compute)", ("dot", 4e9), ("add", 1e9)),
        line("Stream #14", ("dot", 2e9)),
    ]
    ops = line("XLA Ops", ("dot.1", 9e9))
    gpu = types.SimpleNamespace(name="/device:GPU:0", lines=[*streams, ops])
    host = types.SimpleNamespace(name="/host:CPU", lines=[line("python", ("run", 1e9))])
    of = kernels.of(types.SimpleNamespace(planes=[host, gpu]))
    assert of == {"dot": (6.0, 2), "add": (1.0, 1)}
    tpu = types.SimpleNamespace(name="/device:TPU:0", lines=[ops])
    assert kernels.of(types.SimpleNamespace(planes=[host, tpu])) == {"dot.1": (9.0, 1)}


def test_tokens_of_p2_are_followed_by_their_labels():
    data = synthetic_data(WORKLOADS["P2"]._replace(num_clients=2))
    x, y = data.examples["x"], data.examples["y"]
    assert x.shape == y.shape == (128, 20) and x.dtype == y.dtype == np.int32
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    assert x.min() >= 0 and 9000 < x.max() < 10_000


# Steps whose programs compile fast.
FAST = ("rounding", "F4", "peaks", "products steps", "records steps", "trace of P1", "peer flower")


@slow
def test_the_command_measures_its_steps_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.accelerator", "--minutes", "30", "--only", *FAST]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # Kernels that are not optimised compile fastest.
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        timeout=1800,
    )
    path, steps = tmp_path / "accelerator-cpu.json", lists.on_cpu()
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "accelerator-cpu.md"}
    results = json.loads(path.read_text())
    chosen = [step for step in steps if {step.name, step.group} & set(FAST)]
    assert list(results["steps"]) == [step.name for step in chosen]
    others = [step.name for step in steps if step not in chosen and not step.missing]
    assert results["left"] == others
    assert results["machine"]["backend"] == "cpu" and results["machine"]["cores"] > 0
    page = path.with_suffix(".md").read_text()
    for step in chosen:
        found = results["steps"][step.name]
        assert found["group"] == step.group
        if step.missing:
            assert found["status"] == "skipped" and f"{step.name}: skipped" in done.stdout
            continue
        assert found["status"] == "done" and not found["error"], found
        lines = [line for line in page.splitlines() if f'--only "{step.name}"' in line]
        assert len(lines) == len(found["rows"]) > 0
        assert f"## {pages._TABLES[step.group][0]}" in page
    single, together = results["steps"]["F4"]["rows"]
    assert single["rounds_per_call"] == 1 and together["rounds_per_call"] == 2
    rate = 2 / together["seconds_per_round"]
    assert together["clients_per_second"] == pytest.approx(rate)
    peaks = results["steps"]["peaks"]["rows"]
    assert {row["what"] for row in peaks} == {"product", "copy"}
    whole, *each = results["steps"]["trace of P1"]["rows"]
    assert whole["runs"] >= sum(row["runs"] for row in each) > 0


@telling
def test_errors_of_split_products_above_their_bound_fail_the_step(monkeypatch):
    assert all(row["of bound"] <= 1 for row in rounding.rows(width=8))
    whole = products.parts
    monkeypatch.setattr(products, "parts", lambda x: (whole(x)[0], 0 * whole(x)[1]))
    with pytest.raises(SystemExit, match="times the bound"):
        list(rounding.rows(width=8))


@pytest.mark.slow
def test_networks_side_by_side_are_the_emnist_cnn():
    from fedjax_dp import models
    from fedjax_dp.experiment.studies.measuring import EmnistCnn

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
