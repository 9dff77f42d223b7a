"""Several devices give the model of one, for every algorithm."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import CASES
from marks import slow, telling
from references import num_slab_sizes, reference
from side_by_side import several_devices
from small_problem import NUM_CLIENTS

HERE = pathlib.Path(__file__).parent
# Between them: state by client, several models, a streamed store, two devices and four.
QUICK = ("scaffold:4:device", "ifca:2:host")
# And: stacked updates, both noises.
TELLING = (
    *("median:2:device", "dp_both:4:device+split", "fedavg:2:device"),
    *("scaffold:2:device", "scaffold:2:disk"),
)
# All devices train the longest clients of a cohort together.
SPLIT = ("fedavg", "fedprox", "fedadam", "gma_private", "term", "propfair")
OTHERS = {
    name: [
        job
        for n in (2, 4)
        for placement in ("device", "host", *(["device+split"] if name in SPLIT else []))
        if (job := f"{name}:{n}:{placement}") not in QUICK + TELLING
    ]
    for name in CASES
}


def run_jobs(output, jobs):
    environment = os.environ | {
        "XLA_FLAGS": several_devices(4),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "devices_worker.py"), str(output), *jobs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(output) as arrays:
        return dict(arrays)


def check(job, results):
    name, devices, placement = job.split(":")
    placement, _, splits = placement.partition("+")
    assert np.any(results[f"{job}/split"] > 0) == bool(splits), job
    ref = reference(name)
    assert results[f"{job}/devices"] == int(devices), job
    participants = results[f"{job}/participants"]
    shapes = num_slab_sizes(ref.sim, results[f"{job}/slots"]) if placement != "device" else 1
    assert results[f"{job}/traces"] == shapes, job
    counts = np.sum(participants[: len(ref.record.clients)] >= 0, axis=1)
    np.testing.assert_array_equal(counts, ref.record.num_drawn)
    if ref.final.clients is not None and placement == "device":
        # Each device holds the rows of its own clients and no others.
        held = results[f"{job}/held"]
        assert len(held) and np.all(held == -(-NUM_CLIENTS // int(devices))), job
    for part in ("server", "clients"):
        for i, leaf in enumerate(jax.tree.leaves(getattr(ref.final, part))):
            got = results[f"{job}/{part}/{i}"]
            np.testing.assert_allclose(got, leaf, rtol=0, atol=1e-6, err_msg=f"{job} {part} {i}")


# One process for many jobs: starting it and compiling is most of the work.
@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(QUICK, id="quick", marks=telling),
        pytest.param(TELLING, id="telling", marks=slow),
        *(pytest.param(jobs, id=f"others of {name}", marks=slow) for name, jobs in OTHERS.items()),
    ],
)
def test_devices_change_nothing(jobs, tmp_path):
    results = run_jobs(tmp_path / "results.npz", jobs)
    for job in jobs:
        check(job, results)
