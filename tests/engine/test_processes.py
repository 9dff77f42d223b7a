"""Several processes give what one process with all of their devices gives."""

import functools
import itertools
import os
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest
from cases import CASES
from marks import slow
from side_by_side import free_address, run_all
from small_problem import KEY, NUM_CLIENTS, ROUNDS

from fedjax_dp.engine.layout import ExecutionConfig
from fedjax_dp.io import Checkpoints

HERE = pathlib.Path(__file__).parent
ONE, MANY, NUM_DEVICES = "one", (2, 4), 4
# The clients of a device.
OWNED = -(-NUM_CLIENTS // NUM_DEVICES)
NAMES = (
    *("fedavg", "dp_fedavg", "scaffold", "robust_hdp", "r_dpcfl", "discrete", "masked"),
    *("fedavg:host", "scaffold:host"),
)
SAVED = ("dp_fedavg", "scaffold", "scaffold:host")


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    """`(count) -> results` of each of so many processes, which restore what fewer have saved."""
    folders = {}

    @functools.cache
    def work(count):
        for fewer in (fewer for fewer in (1, *MANY) if fewer < count):
            work(fewer)
        earlier = list(folders.values())
        folder, address = tmp_path_factory.mktemp("processes"), free_address()
        folders[count] = folder
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES // count),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        lines = [
            [folder / f"{process}.npz", process, count, address, *earlier]
            for process in range(count)
        ]
        start = sys.executable, str(HERE / "processes_worker.py")
        run_all([[*start, *map(str, words)] for words in lines], environment, folder)
        return [dict(np.load(folder / f"{process}.npz")) for process in range(count)]

    work.folders = folders
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
    own = tuple(f"{name}/{part}" for part in ("held", "read", "restored"))
    parts = [k for k in expected if k.startswith(f"{name}/") and not k.startswith(own)]
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
@pytest.mark.parametrize("name", SAVED)
def test_other_numbers_of_processes_restore_every_bit(worked, name):
    """1, 2 and 4 processes restore their own checkpoints, and those of fewer."""
    states = {
        count: [x for key, x in worked(count)[0].items() if key.startswith(f"{name}/state/")]
        for count in (1, *MANY)
    }
    for count in states:
        saved = [states[c] for c in states if c <= count]
        for found in worked(count):
            for i, arrays in enumerate(saved):
                for j, array in enumerate(arrays):
                    restored = found[f"{name}/restored {i}/{j}"]
                    assert restored.dtype == array.dtype
                    np.testing.assert_array_equal(restored, array, err_msg=f"{count} {i} {j}")


@slow
@pytest.mark.parametrize("count", MANY)
def test_one_process_restores_what_several_have_saved_unless_a_share_is_missing(
    worked, count, tmp_path
):
    expected = worked(count)[0]
    sim, folder = CASES["scaffold"].simulation(ExecutionConfig(devices=1)), worked.folders[count]
    like = sim.for_checkpoint(sim.init(jax.random.key(KEY)))
    for name in ("scaffold", "scaffold:host"):
        state, *_ = Checkpoints(folder / name, is_read_only=True).restore(like, sim.hyper)
        for i, leaf in enumerate(jax.tree.leaves(state)):
            np.testing.assert_array_equal(leaf, expected[f"{name}/state/{i}"])
        shutil.copytree(folder / name, tmp_path / name)
        last = next((tmp_path / name).glob(f"*/state/ocdbt.process_{count - 1}"))
        shutil.rmtree(last)
        step, damaged = Checkpoints(tmp_path / name, is_read_only=True).newest_intact(like)
        assert step is None and f"ocdbt.process_{count - 1}" in damaged[ROUNDS]
        assert "is missing" in damaged[ROUNDS]


@slow
def test_checkpoints_are_refused_where_processes_have_folders_of_their_own(results):
    others = list(range(1, len(of_each(results))))
    for found in of_each(results):
        assert "in a file system that all processes share" in str(found["unshared"])
        assert f"another folder for processes {others}" in str(found["unshared"])


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
