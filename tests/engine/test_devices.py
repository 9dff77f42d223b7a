"""Several devices give the model of one, for every algorithm."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import CASES, reference

HERE = pathlib.Path(__file__).parent
QUICK = [
    *(f"{name}:2:device" for name in CASES if not CASES[name].is_pooled),
    "scaffold:4:device",
    "dp_both:4:device",
    "ifca:2:host",
]
SLOW = [
    f"{name}:{devices}:{placement}"
    for name in CASES
    for devices in (2, 4)
    for placement in ("device", "host")
    if f"{name}:{devices}:{placement}" not in QUICK
]


def run_jobs(output, jobs):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        # What is compared is results; compiling with less effort saves half of the time.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "devices_worker.py"), str(output), *jobs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(output) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory):
    return run_jobs(tmp_path_factory.mktemp("devices") / "results.npz", QUICK)


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory):
    return run_jobs(tmp_path_factory.mktemp("devices") / "results.npz", SLOW)


def check(job, results):
    name, devices, _ = job.split(":")
    ref = reference(name)
    assert results[f"{job}/devices"] == int(devices)
    assert results[f"{job}/traces"] == 1
    np.testing.assert_array_equal(results[f"{job}/participants"], ref.info["num_participants"])
    for part in ("server", "rows"):
        for i, leaf in enumerate(jax.tree.leaves(getattr(ref.final, part))):
            got = results[f"{job}/{part}/{i}"]
            np.testing.assert_allclose(got, leaf, rtol=0, atol=1e-6, err_msg=f"{part} {i}")


@pytest.mark.parametrize("job", QUICK)
def test_devices_change_nothing(job, quick_results):
    check(job, quick_results)


@pytest.mark.slow
@pytest.mark.parametrize("job", SLOW)
def test_devices_change_nothing_in_any_layout(job, slow_results):
    check(job, slow_results)
