"""Client state on disk: the bits of memory, only entries that were written, none overwritten."""

import errno
import functools
import os
import shutil
from collections import namedtuple

import jax
import numpy as np
import pytest
from cases import CASES
from marks import later, telling
from small_problem import NUM_CLIENTS, make_model

from fedjax_dp import algorithms
from fedjax_dp.algorithms.base import FinishForAll
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import FederatedData, participation, poisson
from fedjax_dp.data.record_file import FILE
from fedjax_dp.engine import ExecutionConfig, communication, evaluator, simulation
from fedjax_dp.engine.client_store import ClientStore, stored_in
from fedjax_dp.engine.execution import round_loop
from fedjax_dp.engine.execution.round_loop import Table
from fedjax_dp.engine.record import Fate
from fedjax_dp.io import Checkpoints

KEY = jax.random.key(3)
ROUNDS = (1, 3, 2)


def execution(placement, folder=None):
    return ExecutionConfig(
        clients_per_chunk=2, devices=None, placement=placement, folder=folder, rounds_per_call=2
    )


def on_disk(name, folder):
    return CASES[name].simulation(execution("disk", folder))


@functools.cache
def shared(placement):
    """Compiled once for all tests; each has states in a folder of its own."""
    return CASES["scaffold"].simulation(execution(placement))


def begun(folder):
    sim = shared("disk")
    return sim, stored_in(sim.init(KEY), folder)


def in_memory(state):
    """The state with all clients' states in memory."""
    if isinstance(state.clients, ClientStore):
        state = state._replace(clients=state.clients.of_all(lambda own: own))
    return jax.tree.map(np.array, jax.device_get(state))


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def ran(sim, state=None, rounds=ROUNDS):
    state = sim.init(KEY) if state is None else state
    for count in rounds:
        state, record, _ = sim.run(state, KEY, count)
    return state, record


# Client state of every kind; half of the other cases have none.
SOON = ["feddyn", "fedpi", "ifca", "r_dpcfl", "mr_mtl", "fedrep", "ditto", "jump_start"]


@pytest.mark.parametrize("name", later(CASES, but=["scaffold"], soon=["fedavg", *SOON]))
def test_client_state_on_disk_equals_that_in_memory(name, tmp_path):
    """Cohorts overlap from round to round, and some clients are never drawn before the last."""
    kept = CASES[name].make(make_model()).client_state
    if kept is not None and isinstance(kept.finish, FinishForAll):
        with pytest.raises(ValueError, match=r"placement must be 'device' for .*got 'disk'"):
            on_disk(name, tmp_path)
        return
    in_host = shared("host") if name == "scaffold" else CASES[name].simulation(execution("host"))
    expected, _ = ran(in_host)
    found, _ = ran(on_disk(name, tmp_path))
    assert_same(in_memory(found), in_memory(expected))
    assert isinstance(found.clients, ClientStore) == (kept is not None)
    assert kept is not None or not list(tmp_path.iterdir()), "an empty file"


@telling
def test_unwritten_states_take_no_space(tmp_path):
    sim = on_disk("scaffold", tmp_path)
    state = sim.init(KEY)
    assert not list(tmp_path.iterdir()), "nothing before the first round"
    state, record = ran(sim, state, (1,))
    drawn = np.unique(record.clients[record.clients >= 0])
    assert 0 < len(drawn) < NUM_CLIENTS
    np.testing.assert_array_equal(np.flatnonzero(state.clients.slots >= 0), drawn)
    assert (tmp_path / FILE).stat().st_size == len(drawn) * state.clients.file.num_bytes
    # However long it runs, a state has two slots at most.
    state, _ = ran(sim, state, (3, 3, 3))
    size = (tmp_path / FILE).stat().st_size
    assert size <= (NUM_CLIENTS + sim.participation.capacity) * state.clients.file.num_bytes


@telling
def test_a_checkpoint_finds_its_records_however_long_the_run_continues(tmp_path):
    sim = on_disk("scaffold", tmp_path / "rows")
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    state = sim.init(KEY)
    ends = {}
    for _ in range(4):
        state, _ = ran(sim, state, (2,))
        ends[int(state.round)] = in_memory(state)
        checkpoints.save(sim.portable(state), sim.hyper, {})
    assert ends.keys() == {2, 4, 6, 8}
    ran(sim, state, (3,))

    def restored(step):
        other = on_disk("scaffold", tmp_path / "rows")
        like = other.portable(other.init(KEY))
        assert checkpoints.newest_intact(like) == (8, {})
        found, _, _ = checkpoints.restore(like, other.hyper, step)
        assert_same(in_memory(found), ends[step])
        return other, found

    again, _ = ran(*restored(6), (2,))
    assert_same(in_memory(again), ends[8])
    ran(*restored(8), (3, 3))
    restored(6)
    restored(8)
    checkpoints.close()


@telling
@pytest.mark.parametrize("harm", later(["flip", "cut", "delete"], but=["flip"], mark=telling))
def test_damaged_records_lose_the_checkpoints_that_refer_to_them(tmp_path, harm):
    sim, state = begun(tmp_path / "rows")
    checkpoints, ends = Checkpoints(tmp_path / "checkpoint"), []
    for _ in range(2):
        state, record = ran(sim, state, (1,))
        ends.append(in_memory(state))
        checkpoints.save(sim.portable(state), sim.hyper, {})
    path, num_bytes = tmp_path / "rows" / FILE, state.clients.file.num_bytes
    client = int(np.max(record.clients[-1]))
    data, start = bytearray(path.read_bytes()), int(state.clients.slots[client]) * num_bytes
    if harm == "flip":
        data[start + 3] ^= 4
    path.write_bytes(data[: start + 1] if harm == "cut" else data)
    if harm == "delete":
        path.unlink()
    like = sim.portable(begun(tmp_path / "rows")[1])
    step, damaged = checkpoints.newest_intact(like)
    words = {"flip": "the state of client", "cut": "ends at", "delete": "No such file"}[harm]
    assert words in damaged[2]
    if harm == "delete":
        assert step is None and len(damaged) == 2
    else:
        assert step == 1
        assert_same(in_memory(checkpoints.restore(like, sim.hyper, 1)[0]), ends[0])
    checkpoints.close()


@telling
def test_personal_models_are_evaluated_from_disk(tmp_path, monkeypatch):
    case = CASES["ditto"]
    monkeypatch.setattr("fedjax_dp.engine.evaluation._PART_BYTES", 40)
    results = []
    for placement in ("device", "disk"):
        sim = case.simulation(execution(placement, tmp_path))
        state, _ = ran(sim)
        evaluate = evaluator(sim, make_model(), case.data(), clients=case.data()).clients
        results.append(evaluate(state))
    np.testing.assert_array_equal(results[0].client_loss, results[1].client_loss)
    np.testing.assert_array_equal(results[0].client_sizes, results[1].client_sizes)


def test_a_donated_state_does_not_read_the_records_of_its_successor(tmp_path):
    sim, state = begun(tmp_path)
    state, _ = ran(sim, state)
    before = in_memory(state).clients
    donated = sim.portable(state)
    assert_same(in_memory(donated).clients, before)
    ran(sim, donated, (3,))
    with pytest.raises(ValueError, match=r"the state of client \d must be as it was written"):
        state.clients.many(range(NUM_CLIENTS))
    with pytest.raises(ValueError, match=r"the state of client \d must be as it was written"):
        ran(sim, state, (3,))


@telling
@pytest.mark.parametrize("step", [None, pytest.param(4, marks=telling)])
def test_a_restored_state_survives_a_crash(tmp_path, step):
    """Restored by itself, run on without a checkpoint, and restored once more."""
    sim = on_disk("scaffold", tmp_path / "rows")
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    state, ends = sim.init(KEY), {}
    for _ in range(2):
        state, _ = ran(sim, state, (2,))
        ends[int(state.round)] = in_memory(state)
        checkpoints.save(sim.portable(state), sim.hyper, {})
    for _ in range(2):
        other = on_disk("scaffold", tmp_path / "rows")
        like = other.portable(other.init(KEY))
        found, _, _ = checkpoints.restore(like, other.hyper, step)
        assert_same(in_memory(found), ends[4])
        ran(other, found, (3,))
    other = on_disk("scaffold", tmp_path / "rows")
    assert checkpoints.newest_intact(other.portable(other.init(KEY))) == (4, {})
    found, _, _ = checkpoints.restore(other.portable(other.init(KEY)), other.hyper, 2)
    assert_same(in_memory(found), ends[2])
    checkpoints.close()


def many_clients(placement, folder=None):
    """Forty clients, of whom a Poisson draw takes one or two."""
    rng = np.random.default_rng(0)
    data = FederatedData.from_clients(
        [
            {"x": rng.normal(size=(3, 3)).astype("float32"), "y": np.ones(3, "int32")}
            for _ in range(40)
        ]
    )
    model = make_model()
    trainer = local_trainer(model, LocalConfig(learning_rate=0.1, batch_size=2))
    joins = participation(poisson(), 40, 1.5)
    return simulation(algorithms.ditto(model, trainer), data, joins, execution(placement, folder))


@telling
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_slots_on_the_device_follow_the_expected_cohort(placement, tmp_path, monkeypatch):
    """A larger cohort than expected is complete nevertheless."""
    widths, narrow = [], round_loop.narrowed

    def recorded(*arguments):
        found = narrow(*arguments)
        widths.append((len(found.ids), int(np.sum(np.asarray(found.fate) != Fate.EMPTY))))
        return found

    monkeypatch.setattr(round_loop, "narrowed", recorded)
    expected, record = ran(many_clients("device"), rounds=(90, 30))
    found, other = ran(many_clients(placement, tmp_path), rounds=(90, 30))
    assert_same(in_memory(found), in_memory(expected))
    assert_same(record, other)
    assert {width for width, _ in widths} == {4, 8}
    assert max(drawn for _, drawn in widths) > 4 and min(drawn for _, drawn in widths) == 0


@telling
def test_messages_of_cohorts_of_other_widths_are_counted(tmp_path):
    sims = [many_clients("device"), many_clients("host")]
    found = []
    for sim in sims:
        _, record, info = sim.run(sim.init(KEY), KEY, 24)
        found.append(communication(sim, record, info).by_round("both"))
    np.testing.assert_array_equal(*found)
    assert len(set(found[0].tolist())) > 2


def test_a_state_on_the_host_is_not_changed_by_later_rounds(tmp_path):
    sim = shared("host")
    state, _ = ran(sim, rounds=(1,))
    kept = sim.portable(state)
    before = jax.tree.map(np.copy, kept)
    ran(sim, state, (2,))
    assert_same(kept, before)


@telling
def test_trials_of_layouts_leave_the_folder_alone(tmp_path):
    state, _ = ran(on_disk("scaffold", tmp_path), rounds=(2,))
    before = in_memory(state)
    names = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    tuned = execution("disk", tmp_path)._replace(clients_per_chunk="tuned")
    CASES["scaffold"].simulation(tuned)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == names
    assert_same(in_memory(state), before)


def test_a_folder_belongs_to_the_newest_state(tmp_path):
    sim, state = begun(tmp_path)
    first, _ = ran(sim, state, (1,))
    ran(*begun(tmp_path), (1,))
    with pytest.raises(ValueError, match="belong to one simulation at a time"):
        sim.run(first, KEY, 1)


def test_client_state_on_disk_needs_a_folder_before_a_run(tmp_path):
    sim = shared("disk")
    with pytest.raises(
        ValueError, match="folder must be given when client state is stored on disk"
    ):
        sim.run(sim.init(KEY), KEY, 1)
    state, _ = ran(sim, stored_in(sim.init(KEY), tmp_path), (1,))
    assert np.any(state.clients.slots >= 0)
    for placement in ("device", "host"):
        other = CASES["scaffold"].simulation(execution(placement))
        with pytest.raises(ValueError, match="placement must be that of the state"):
            other.run(state, KEY, 1)
    with pytest.raises(ValueError, match="placement must be that of the state"):
        sim.run(other.init(KEY), KEY, 1)


def test_work_on_the_host_reads_all_clients_and_nothing_else(tmp_path):
    """Padding of devices is not read."""
    state, _ = ran(*begun(tmp_path))
    table = in_memory(state).clients
    padded = jax.tree.map(lambda x: np.concatenate([x, x[:2] + 9]), table)
    for kept in (state.clients, Table(table), Table(padded, NUM_CLIENTS)):
        jax.tree.map(np.testing.assert_array_equal, kept.of_all(lambda own: own), table)
        of_one = jax.tree.map(lambda x: x[2], table)
        jax.tree.map(np.testing.assert_array_equal, kept.of(2), of_one)
        part = kept.of_all(lambda own: own["w"])
        np.testing.assert_array_equal(part, table["w"])


def test_a_disk_that_is_too_small_is_refused_before_a_round(tmp_path, monkeypatch):
    """Space for six states and the three of a cohort; then, with all written once, for a cohort."""
    sim, state = begun(tmp_path)
    num_bytes, free = state.clients.file.num_bytes, [0]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, free[0]))
    capacity = sim.participation.capacity
    first = num_bytes * (NUM_CLIENTS + capacity)
    free[0] = first - 1
    rule = f"folder must be on a disk with {first:,} bytes free.*got '{first - 1:,} bytes free in"
    with pytest.raises(ValueError, match=rule):
        sim.run(state, KEY, 50)
    free[0] = first
    state, *_ = sim.run(state, KEY, 50)
    assert np.all(state.clients.slots >= 0)
    # Slots that are free already are written to again.
    unused = set(range(int(state.clients.slots.max()) + 1)) - set(state.clients.slots.tolist())
    free[0] = num_bytes * (capacity - len(unused))
    state, *_ = sim.run(state, KEY, 50)
    free[0] -= 1
    with pytest.raises(ValueError, match="folder must be on a disk"):
        sim.run(state, KEY, 50)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "taken").write_text("")
    sim = on_disk("scaffold", tmp_path / "taken")
    with pytest.raises(ValueError, match="folder must be a folder, or not exist yet"):
        sim.init(KEY)


def test_a_disk_that_is_full_ends_the_run(tmp_path, monkeypatch):
    sim, state = begun(tmp_path)
    state, _ = ran(sim, state, (1,))

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        sim.run(state, KEY, 3)
