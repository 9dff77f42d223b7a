"""Layouts that are tuned: the fastest is taken, tried once, and changes no result."""

import itertools

import jax
import pytest
from marks import telling
from references import reference
from small_problem import ROUNDS, assert_same_state, snapshot

from fedjax_dp.engine import ExecutionConfig, Trial
from fedjax_dp.engine.execution import tuning


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(tuning, "_CHOSEN", {})


def test_candidates_lie_around_the_guess_and_within_the_cohort():
    assert tuning.candidates(1, 50) == [1, 8]
    assert tuning.candidates(64, 10_000) == [8, 64, 512]
    assert tuning.candidates(64, 100) == [8, 64, 100]
    assert tuning.candidates(4, 1) == [1]


class Fake:
    """A simulation whose rounds take as long as a table says."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def init(self, key):
        return 0

    def compile(self, state, key):
        self.clock[0] += 10
        return state

    def run(self, state, key, num_rounds):
        self.clock[0] += self.seconds.pop(0)
        return state, None, None


def test_the_fastest_of_two_rounds_is_taken_and_never_tried_again():
    clock, built = [0.0], []
    table = {1: [9.0, 4.0], 8: [3.0, 7.0], 64: [5.0, 5.0]}

    def build(chunk):
        built.append(chunk)
        return Fake(clock, list(table[chunk]))

    class Kept(dict):
        """Trials as a folder of files keeps them."""

        def read(self, work, chunks):
            return self.get((*work.values(), *chunks))

        def write(self, work, trials):
            self[*work.values(), *sorted(trial.clients_per_chunk for trial in trials)] = trials

    kept = Kept()

    def go(name):
        return tuning.trials({"name": name}, [1, 8, 64], build, kept, lambda: clock[0])

    chosen = go("work")
    assert chosen == (Trial(8, 3.0, 10.0), Trial(1, 4.0, 10.0), Trial(64, 5.0, 10.0))
    assert go("work") == chosen and built == [1, 8, 64]
    go("other work")
    assert built == [1, 8, 64] * 2
    # A later process.
    tuning._CHOSEN.clear()
    assert go("work") == chosen and built == [1, 8, 64] * 2


@telling
def test_a_tuned_layout_is_reported_and_gives_the_same_result(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: float(next(seconds)))
    ref = reference("fedavg")
    sim = ref.case.simulation(ExecutionConfig(clients_per_chunk="tuned"))
    assert sim.layout.chunk == sim.layouts[0].clients_per_chunk
    assert {trial.clients_per_chunk for trial in sim.layouts} > {1}
    state, _, _ = sim.run(ref.initial, ref.key, ROUNDS)
    assert_same_state(snapshot(state), ref.final, 1e-6)
    again = ref.case.simulation(ExecutionConfig(clients_per_chunk="tuned"))
    assert again.layouts is sim.layouts


def test_other_words_are_refused():
    with pytest.raises(ValueError, match=r"clients_per_chunk must be one of .*tuned.*got 'best'"):
        ExecutionConfig(clients_per_chunk="best").validate()
    with pytest.raises(ValueError, match="chunks must not be empty"):
        tuning.trials({}, [], Fake)


def test_devices_are_shared_where_each_gets_a_few_clients(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: ["a", "b"])
    settle = ExecutionConfig().for_cohort
    assert settle(7).devices is None and settle(8).devices == 2
    assert ExecutionConfig(devices=2).for_cohort(1).devices == 2
    assert ExecutionConfig(devices=None).for_cohort(100).devices is None
    with pytest.raises(ValueError, match="devices must be one of"):
        ExecutionConfig(devices="all").validate()
