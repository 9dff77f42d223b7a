"""Rounds of every method and wrapper are compiled for devices that are not here."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import elsewhere_worker
import jax
import pytest
from marks import slow

from fedjax_dp.core import targets

ROOT = pathlib.Path(__file__).parents[2]
WORKER = pathlib.Path(elsewhere_worker.__file__)
RESULTS = ROOT / "benchmarks" / "results" / "compiled.jsonl"
PACKAGES = {"v5e": "libtpu", "h100": "jax_plugins"}
# How far figures may be from those of the page.
BAND = 0.05
# A process compiles a part of all rounds, in some minutes.
PARTS = 6


def require_compiler(target):
    if importlib.util.find_spec(PACKAGES[target]) is None:
        pytest.skip(f"{PACKAGES[target]} is not installed")


def printed(command, target):
    own = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, own))
    environment = os.environ | targets.environment(targets.target(target))
    environment["PYTHONPATH"] = paths
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def test_every_method_and_wrapper_is_among_them():
    names = {*elsewhere_worker.CASES, *elsewhere_worker.VARIANTS, *elsewhere_worker.WRAPPERS}
    assert names <= set(elsewhere_worker.BUILDS) and len(names) >= 70


@slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", PACKAGES)
def test_rounds_of_every_method_and_wrapper_are_compiled(target, part):
    require_compiler(target)
    names = list(elsewhere_worker.BUILDS)[part::PARTS]
    found = {row["name"]: row for row in printed([str(WORKER), target, *names], target)}
    assert found.keys() == set(names) and len(names) >= 10
    assert {name: row["error"] for name, row in found.items() if "error" in row} == {}
    for row in found.values():
        # A tiny round takes between a microsecond and a second.
        assert row["operations"] > 10 and 1e-6 < row["seconds"] < 1


@slow
@pytest.mark.parametrize("name", ["W1", "W3nodp", "W4dp"])
@pytest.mark.parametrize("target", PACKAGES)
def test_a_round_costs_what_the_page_of_compiled_rounds_says(target, name):
    require_compiler(target)
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    key = name, "ours", target
    stored = [row for row in rows if (row["workload"], row["program"], row["target"]) == key]
    if not stored or stored[0]["jax"] != jax.__version__:
        pytest.skip(f"the page has no figures of JAX {jax.__version__}")
    (now,) = printed(["-m", "benchmarks.compiled.one", name, target], target)
    if now["compiler"] != stored[0].get("compiler"):
        pytest.skip(f"the page has no figures of {now['compiler']}")
    for figure in ("temporaries_MB", "round_seconds"):
        assert now[figure] == pytest.approx(stored[0][figure], rel=BAND), figure
    for loops, costs in stored[0]["costs"].items():
        assert now["costs"][loops]["operations"] == pytest.approx(costs["operations"], rel=BAND)
