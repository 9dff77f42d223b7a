"""Several processes give what one process with all of their devices gives."""

import functools
import itertools
import os
import pathlib
import sys

import numpy as np
import pytest
from marks import slow
from side_by_side import free_address, run_all
from small_problem import NUM_CLIENTS

HERE = pathlib.Path(__file__).parent
ONE, MANY, NUM_DEVICES = "one", (2, 4), 4
# The clients of a device.
OWNED = -(-NUM_CLIENTS // NUM_DEVICES)
NAMES = (
    *("fedavg", "dp_fedavg", "scaffold", "robust_hdp", "r_dpcfl", "discrete", "masked"),
    *("fedavg:host", "scaffold:host"),
)


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    """`(count) -> folder` of the results of so many processes, by number."""

    @functools.cache
    def work(count):
        folder, address = tmp_path_factory.mktemp("processes"), free_address()
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES // count),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        environment.pop("XLA_FLAGS", None)
        lines = [[folder / f"{process}.npz", process, count, address] for process in range(count)]
        start = sys.executable, str(HERE / "processes_worker.py")
        run_all([[*start, *map(str, words)] for words in lines], environment, folder)
        return [dict(np.load(folder / f"{process}.npz")) for process in range(count)]

    return work


@pytest.fixture(params=MANY)
def results(request, worked):
    """The results of one process with several devices, and of each of several processes."""
    return {ONE: worked(1)[0], **dict(enumerate(worked(request.param)))}


def of_each(results):
    """The results of each process."""
    return [results[name] for name in results if name != ONE]


@slow
@pytest.mark.parametrize("name", NAMES)
def test_models_states_records_and_infos_are_those_of_one_process(results, name):
    expected = results[ONE]
    own = f"{name}/held", f"{name}/read"
    parts = [key for key in expected if key.startswith(f"{name}/") and key not in own]
    assert len(parts) > 10
    for found in of_each(results):
        for key in parts:
            # Sums of whole numbers are the same in any order; means of losses are not.
            is_exact = name in ("discrete", "masked") and "/left/" not in key
            tolerance = 0 if is_exact else 1e-6
            np.testing.assert_allclose(
                found[key], expected[key], rtol=0, atol=tolerance, err_msg=key
            )
        assert found[f"{name}/traces"] == expected[f"{name}/traces"]


@slow
def test_each_process_holds_the_states_of_its_own_clients(results):
    count = len(of_each(results))
    for found, name in itertools.product(of_each(results), ("scaffold", "scaffold:host")):
        np.testing.assert_array_equal(found[f"{name}/held"], [OWNED * NUM_DEVICES // count] * 2)


@slow
@pytest.mark.parametrize("name", ["fedavg:host", "scaffold:host"])
def test_each_process_reads_the_examples_of_its_own_slots(results, name):
    """All that are read are of clients that were drawn, once, by one of the processes."""
    count = len(of_each(results))
    read = [found[f"{name}/read"].astype(int) for found in of_each(results)]
    assert sum(map(len, read)) == len(results[ONE][f"{name}/read"]) > 0
    together = np.sort(np.concatenate(read))
    np.testing.assert_array_equal(together, np.sort(results[ONE][f"{name}/read"]))
    assert all(len(ids) < len(together) for ids in read)
    if name.startswith("scaffold"):
        # A client's state is on one device for ever, and so its examples are read by one process.
        owned = OWNED * NUM_DEVICES // count
        for process, ids in enumerate(read):
            np.testing.assert_array_equal(ids // owned, process)


@slow
def test_the_smallest_machine_decides_for_all_processes(results):
    # The last one has 1 GiB, which its devices share.
    count = len(of_each(results))
    assert all(found["memory"] == 2.0**30 * count / NUM_DEVICES for found in of_each(results))


@slow
def test_the_first_process_chooses_for_all(results):
    assert all(found["chosen"].tolist() == ["b", "None"] for found in of_each(results))


@slow
def test_what_several_processes_cannot_do_is_refused(results):
    for found in of_each(results):
        whole, tuned, disk = found["refusals"]
        assert f"devices must be 'auto' or {NUM_DEVICES}" in whole
        assert "clients_per_chunk must be a number or 'auto' for several processes" in tuned
        assert "placement must not be 'disk' for several processes" in disk
