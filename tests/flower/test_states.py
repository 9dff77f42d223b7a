"""Client states on nodes: after a restart, after replies that did not count, and when lost."""

from functools import partial

import jax
import numpy as np
import pytest
from cases import CASES
from federations import deploy, key
from flwr.app import RecordDict
from marks import telling
from small_problem import ROUNDS

from fedjax_dp.engine import Fate
from fedjax_dp.flower import plan
from fedjax_dp.flower.ledger import StatesInContext, StatesOnDisk, run_digest
from fedjax_dp.io import JournalFile

NAME, RUN = "scaffold", run_digest("run")


@pytest.fixture(params=["disk", "context"])
def states_of(request, tmp_path):
    """Returns the states of a run in one place for all runs."""
    if request.param == "disk":
        return lambda run: StatesOnDisk(tmp_path, run)
    return partial(StatesInContext, RecordDict())


@pytest.fixture
def states(states_of):
    return states_of(RUN)


def test_each_run_has_states_of_its_own(states_of):
    runs = [run_digest(name) for name in "abc"]
    for value, run in enumerate(runs):
        states_of(run).write(3, 2, {"own/0": np.float32(value)}, -1)
    # A later round of one run, before which another state of that run alone is out of date.
    states_of(runs[0]).write(3, 4, {"own/0": np.float32(9)}, 3)
    assert states_of(runs[0]).read(3, 2) is None and states_of(runs[0]).read(3, 4)["own/0"] == 9
    assert [states_of(run).read(3, 2)["own/0"] for run in runs[1:]] == [1, 2]
    # A client whose number begins alike is another.
    assert states_of(runs[0]).read(34, 4) is None


def test_the_state_that_counted_last_and_those_after_it_stay(states):
    for round in (2, 5, 7):
        states.write(3, round, {"own/0": np.float32([round])}, 2)
    # Whatever round a message names, that which counted last is still there for the next.
    states.write(3, 6, {"own/0": np.float32([6])}, -1)
    for round in (2, 5, 6, 7):
        assert states.read(3, round)["own/0"] == round and states.has(3, round)
    assert states.read(4, 2) is None and not states.has(4, 2)
    states.write(3, 9, {"own/0": np.float32(9)}, 7)
    assert not any(states.has(3, round) for round in (2, 5, 6))
    assert states.has(3, 7) and states.read(3, 9)["own/0"].shape == ()


def test_states_on_the_disk_are_for_their_owner_alone(tmp_path):
    # Whatever made the folder, it may be open to others.
    tmp_path.chmod(0o755)
    StatesOnDisk(tmp_path, RUN).write(3, 1, {"own/0": np.float32(1)}, 0)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]


def restarted(there):
    for context in there.grid.contexts.values():
        context.state = RecordDict()


def run_with_restarts(there):
    state, records = there.simulation.init(key()), []
    for _ in range(ROUNDS):
        state, record, _ = there.simulation.run(state, key(), 1)
        records.append(record)
        restarted(there)
    return state, records


@telling
def test_states_on_the_disk_outlast_their_node_and_lost_ones_are_named(tmp_path):
    simulated = CASES[NAME].simulation()
    expected, _, _ = simulated.run(simulated.init(key()), key(), ROUNDS)
    state, _ = run_with_restarts(deploy(NAME, state_dir=tmp_path))
    pairs = (jax.tree.leaves(each.server) for each in (state, expected))
    for x, y in zip(*pairs, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    with pytest.warns(UserWarning, match=r"the state of client \d must be stored on this node"):
        _, records = run_with_restarts(deploy(NAME))
    assert any(np.any(record.fate == Fate.DROPPED) for record in records)


@telling
def test_two_runs_at_once_with_one_folder_go_their_own_ways_and_resume(tmp_path, monkeypatch):
    def there(run, folder):
        journal = JournalFile(tmp_path / f"{run}.jsonl")
        return deploy(NAME, journal=journal, state_dir=tmp_path / folder).simulation

    alone = there("alone", "alone")
    expected, _, _ = alone.run(alone.init(key()), key(), ROUNDS)
    one, other = there("one", "both"), there("other", "both")
    state, beside = one.init(key()), other.init(jax.random.key(9))
    for number in range(ROUNDS):
        if number == ROUNDS - 1:
            # Resumed from its journal, with other versions on both sides.
            monkeypatch.setattr(plan, "libraries", lambda: {"optax": "later"})
            one = there("one", "both")
        state, _, _ = one.run(state, key(), 1)
        beside, _, _ = other.run(beside, jax.random.key(9), 1)
    pairs = (jax.tree.leaves(each.server) for each in (state, expected))
    for x, y in zip(*pairs, strict=True):
        np.testing.assert_array_equal(x, y)


@telling
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_state_whose_reply_was_lost_is_forgotten():
    lost_round = 1

    def change(sent, reply):
        is_lost = sent.metadata.message_type == "train" and sent.metadata.group_id == "1"
        return [] if is_lost else [reply]

    there, simulated = deploy(NAME, change=change).simulation, deploy(NAME).simulation
    state, record, _ = there.run(there.init(key()), key(), ROUNDS)
    assert set(record.fate[lost_round]) <= {Fate.EMPTY, Fate.DROPPED}
    # The same rounds of a federation whose second one has no client.
    expected, _, _ = simulated.run(simulated.init(key()), key(), 1)
    skipped = expected._replace(round=expected.round + 1)
    expected, _, _ = simulated.run(skipped, key(), 1)
    for x, y in zip(
        jax.tree.leaves(state.clients[2]), jax.tree.leaves(expected.clients[2]), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    pairs = (jax.tree.leaves(each.server) for each in (state, expected))
    for x, y in zip(*pairs, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
