"""Two processes with a device each give what one process with two devices gives."""

import os
import pathlib
import sys

import numpy as np
import pytest
from marks import slow
from side_by_side import free_address, run_all
from small_problem import NUM_CLIENTS

HERE = pathlib.Path(__file__).parent
ONE, TWO = "one", ("first", "second")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of one process with two devices, and of each of two processes."""
    folder, address = tmp_path_factory.mktemp("processes"), free_address()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("XLA_FLAGS", None)

    def command(name, process, num_processes):
        words = folder / f"{name}.npz", process, num_processes, address
        return [sys.executable, str(HERE / "processes_worker.py"), *map(str, words)]

    run_all([command(name, i, 2) for i, name in enumerate(TWO)], environment, folder)
    run_all([command(ONE, 0, 1)], environment | {"JAX_NUM_CPU_DEVICES": "2"}, folder)
    return {name: dict(np.load(folder / f"{name}.npz")) for name in (ONE, *TWO)}


@slow
@pytest.mark.parametrize("name", ["dp_fedavg", "scaffold", "robust_hdp", "discrete"])
@pytest.mark.parametrize("process", TWO)
def test_models_states_records_and_infos_are_those_of_one_process(results, process, name):
    expected, found = results[ONE], results[process]
    parts = [key for key in expected if key.startswith(f"{name}/") and "/held" not in key]
    assert len(parts) > 10
    # Sums of whole numbers are the same in any order.
    tolerance = 0 if name == "discrete" else 1e-6
    for key in parts:
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=tolerance, err_msg=key)
    assert found[f"{name}/traces"] == 1


@slow
@pytest.mark.parametrize("process", TWO)
def test_each_process_holds_the_states_of_its_own_clients(results, process):
    np.testing.assert_array_equal(results[process]["scaffold/held"], [[NUM_CLIENTS // 2]] * 2)


@slow
@pytest.mark.parametrize("process", TWO)
def test_the_smallest_machine_decides_for_all_processes(results, process):
    assert results[process]["memory"] == 2.0**30


@slow
@pytest.mark.parametrize("process", TWO)
def test_what_several_processes_cannot_do_is_refused(results, process):
    whole, tuned, host, disk, step = results[process]["refusals"]
    assert "devices must be 'auto' or 2" in whole
    assert "clients_per_chunk must be a number or 'auto' for several processes" in tuned
    assert "placement must be 'device' for several processes" in host and "'host'" in host
    assert "placement must be 'device' for several processes" in disk and "'disk'" in disk
    assert "stages.host_steps must be none for several processes" in step
