"""A base that groups of devices divide: results, messages and memory of the compiled rounds."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from marks import slow
from model_axis_worker import RULES, algorithm_of, divided, made
from side_by_side import several_devices
from small_problem import NUM_CLIENTS

from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import ExecutionConfig, Layout, ModelAxis, simulation
from fedjax_dp.models import mlp

HERE = pathlib.Path(__file__).parent
# Norms of examples and of clients; one program and its twin on one device.
TELLING = ("dp_both:mlp:device",)
# Attention; examples and client states in host memory; wrapped rounds.
OTHERS = ("dp_sgd:transformer:device", "dp_fedavg:transformer:host", "scaffold:mlp:host")
OTHERS += ("anderson:mlp:device", "asynchronous:mlp:device")
# Refused before anything is placed on them.
TWO = [jax.devices()[0]] * 2


def run_jobs(folder, jobs):
    """The results of a worker's jobs, and the text of the rounds that it compiled."""
    dump = f"--xla_dump_hlo_module_re=jit_block_of --xla_dump_to={folder} --xla_dump_hlo_as_text"
    environment = os.environ | {
        "XLA_FLAGS": f"{several_devices(4)} {dump}",
        "JAX_PLATFORMS": "cpu",
        # A program that is read from there has no text.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    output = folder / "results.npz"
    command = [sys.executable, str(HERE / "model_axis_worker.py"), str(output), *jobs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    texts = [path.read_text() for path in folder.glob("*cpu_after_optimizations.txt")]
    with np.load(output) as arrays:
        return dict(arrays), texts


def messages(text, kind):
    """The shapes that messages between devices have afterwards."""
    found = re.findall(rf"= (.*?) {kind}(?:-start)?\(", text)
    shapes = [shape for result in found for shape in re.findall(r"\[([\d,]*)\]", result)]
    return [tuple(map(int, shape.split(","))) if shape else () for shape in shapes]


def is_part_of(kernel, shape):
    """Whether an array holds a kernel or half of one, its axes in any order."""
    ones = sorted(size for size in shape if size > 1)
    halves = [(*kernel[:i], kernel[i] // 2, *kernel[i + 1 :]) for i in range(len(kernel))]
    return ones in [sorted(size for size in part if size > 1) for part in (kernel, *halves)]


def kernels_of(job):
    kind = job.split(":")[1]
    return divided(kind, made(kind)[0])


# One process for many jobs: starting it and compiling is most of the work.
@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param(TELLING, id="telling", marks=slow),
        pytest.param(OTHERS, id="others", marks=slow),
    ],
)
def test_a_divided_base_changes_nothing_and_is_never_gathered(jobs, tmp_path):
    results, texts = run_jobs(tmp_path, jobs)
    for job in jobs:
        assert results[f"{job}/devices"] == 4
        names = [n.rpartition("/one/")[2] for n in results if n.startswith(f"{job}/one/")]
        assert any(name.startswith("state/server/") for name in names)
        for name in names:
            found, one = results[f"{job}/divided/{name}"], results[f"{job}/one/{name}"]
            # Norms of updates are those of differences.
            rtol = 1e-5 if name.startswith("info/") else 1e-6
            np.testing.assert_allclose(found, one, rtol, atol=1e-6, err_msg=f"{job} {name}")
        whole, part = results[f"{job}/held"].T
        np.testing.assert_array_equal(whole, 2 * part)
        assert len(whole) == 4 * len(kernels_of(job))
    over_devices = [text for text in texts if "num_partitions=4" in text]
    assert len(jobs) <= len(over_devices) < len(texts)
    kernels = [shape for job in jobs for shape in kernels_of(job)]
    for text in over_devices:
        # Sums of activations and gradients cross the axis.
        assert messages(text, "all-reduce")
        for kind in ("all-gather", "all-to-all", "collective-permute"):
            for shape in messages(text, kind):
                assert not any(is_part_of(kernel, shape) for kernel in kernels), (kind, shape)


@slow
def test_a_division_that_would_stop_cpu_devices_is_refused(tmp_path):
    job = "dp_fedavg:llama:device"
    results, _ = run_jobs(tmp_path, [job])
    message = r"model_axis\.rules must divide .*, and attention by whole heads"
    assert re.match(message, str(results[f"{job}/refused"]))


def build(execution, kind="mlp", model=None):
    adapted, data = made(kind)
    joins = participants.participation(sampling.poisson(), NUM_CLIENTS, 4.0)
    return simulation(algorithm_of("dp_fedavg", model or adapted), data, joins, execution)


@pytest.mark.parametrize(
    ("size", "rules", "rule"),
    [
        (2, {}, "model_axis.rules must hold a pattern"),
        (0, RULES["mlp"], "model_axis.size must be"),
        (3, RULES["mlp"], "model_axis.size must divide the number of devices, 2"),
        (2, {"params/Dense_7/kernel": 0}, "rules must name frozen parameters, .*Dense_7"),
        (2, {"params/Dense_0/kernel": 2}, "must be an axis of params/Dense_0/kernel"),
        (2, {"params/Dense_1/bias": 0}, r"must divide axis 0 of params/Dense_1/bias.*\(11,\)"),
    ],
)
def test_an_axis_that_cannot_be_is_refused(size, rules, rule):
    with pytest.raises(ValueError, match=rule):
        build(ExecutionConfig(1, devices=TWO, model_axis=ModelAxis(size, rules)))


def test_rounds_without_a_frozen_base_are_refused():
    model = mlp(jax.ShapeDtypeStruct((20,), jnp.float32), 11, hidden_sizes=(24,))
    execution = ExecutionConfig(1, devices=TWO, model_axis=ModelAxis(2, RULES["mlp"]))
    with pytest.raises(ValueError, match="model_axis must be None for rounds without frozen"):
        build(execution, model=model)


def test_the_first_rule_that_matches_counts():
    frozen = made("mlp")[0].frozen
    axis = ModelAxis(2, {"params/Dense_0/kernel": -1, "params/*/kernel": 0})
    pairs = zip(frozen[0].constants, axis.specs(frozen)[0], strict=True)
    specs = {x.shape: tuple(spec) for x, spec in pairs}
    assert specs[20, 24] == (None, "model") and specs[24, 11] == ("model",)
    assert specs[24,] == specs[11,] == ()
    assert axis.bytes_per_device(frozen) == 4 * ((20 * 24 + 24 * 11) // 2 + 24 + 11)


def test_groups_of_devices_share_a_cohort(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *args: [None] * 4)
    axis = ModelAxis(2, RULES["mlp"])
    settle = ExecutionConfig(model_axis=axis).for_cohort
    # Two groups of two devices, or one where a second has too few clients.
    assert settle(7).devices == 2 and settle(8).devices == 4
    mesh = AbstractMesh((2, 2), ("clients", "model"))
    layout = Layout(mesh=mesh)
    assert layout.num_devices == 2 and layout.mesh_size == 4 and layout.divides_model
    alone = Layout(mesh=AbstractMesh((2,), ("clients",)))
    assert alone.num_devices == alone.mesh_size == 2 and not alone.divides_model
