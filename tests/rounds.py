"""Single rounds on cohorts made by hand: any order, any padding, any data, one compiled program.

The store has unused rows around clients; there are more slots than clients, and a larger limit.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from references import Reference, reference
from small_problem import snapshot

from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.engine import Cohort, Examples, Fate, Layout, as_metrics
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.round_loop import after_host_step
from fedjax_dp.engine.round import run_round

GAP = 3
CHUNK = 2


class HandRound(NamedTuple):
    """One round of a case; `run(state, key, examples, cohort, hyper)` keeps its arguments."""

    ref: Reference
    run: Any
    starts: np.ndarray
    sizes: np.ndarray
    num_slots: int

    def examples(self, garbage=0.0):
        """The case's data with rows of garbage around every client's own."""
        return _laid_out(self.ref.case.data(), garbage)

    def validation(self, garbage=0.0):
        """The same of a second split, where the case has one."""
        return second_split(self.ref.case, garbage)

    def cohort(self, ids) -> Cohort:
        """A cohort of the clients in the order given, then empty slots that point anywhere."""
        ids = np.asarray(ids, np.int32)
        empty = self.num_slots - len(ids)
        fate = np.where(np.arange(self.num_slots) < len(ids), Fate.CONTRIBUTED, Fate.EMPTY)
        return Cohort(np.pad(ids, (0, empty)), fate.astype(np.int8), np.int32(0))

    def drawn(self, round_index=0):
        """The clients that the case's own participation draws."""
        key = fold(self.ref.key, Purpose.PARTICIPATION)
        drawn = self.ref.case.participation().draw(key, round_index)
        return np.asarray(drawn.indices)[np.asarray(drawn.is_real)]

    def __call__(self, ids, *, garbage=0.0, state=None, examples=None, hyper=None):
        """Runs the first round on the clients given."""
        state, record, info = self.run(
            self.ref.initial if state is None else state,
            self.ref.key,
            self.examples(garbage) if examples is None else examples,
            self.validation(garbage),
            self.cohort(ids),
            self.ref.sim.hyper if hyper is None else typed(hyper),
        )
        sim = self.ref.sim
        for step in sim.algorithm.stages.host_steps:
            if step.after == state.round:
                state = after_host_step(step, state, sim.hyper, self.ref.key)
        return snapshot(state), as_metrics(snapshot(record), snapshot(info))


def _starts(sizes):
    return GAP + np.concatenate([[0], np.cumsum(sizes + GAP)[:-1]])


def _laid_out(data, garbage):
    starts = _starts(data.sizes)
    rows = int(starts[-1] + data.sizes[-1] + GAP)
    store = {
        name: np.full((rows, *array.shape[1:]), garbage, array.dtype)
        for name, array in data.examples.items()
    }
    for i, start in enumerate(starts):
        for name, array in data.client(i).items():
            store[name][start : start + len(array)] = array
    return store


def second_split(case, garbage=0.0) -> Examples | None:
    """The second split of a case as a round reads it, or None where it has none."""
    data = case.validation()
    if data is None:
        return None
    places = _starts(data.sizes).astype(np.int32), data.sizes.astype(np.int32)
    return Examples(_laid_out(data, garbage), *places, limit=int(data.sizes.max()) + 4)


@functools.cache
def hand_round(name: str) -> HandRound:
    """Compiles the hand-made round of a case once for all tests of a process."""
    ref = reference(name)
    algorithm, sizes = ref.sim.algorithm, ref.sim.sizes
    starts = _starts(sizes)
    layout, limit = Layout(chunk=CHUNK), int(sizes.max()) + 4
    places = starts.astype(np.int32), sizes.astype(np.int32)

    @jax.jit
    def run(state, key, arrays, second, cohort, hyper):
        examples = Examples(arrays, *map(jax.numpy.asarray, places), second, limit=limit)
        return run_round(algorithm, layout, state, hyper, examples, cohort, key)

    num_slots = -(-(len(sizes) + 2) // CHUNK) * CHUNK
    return HandRound(ref, run, starts, sizes, num_slots)


@functools.cache
def after_one_round(name: str):
    """The reference state after the first round, from the engine's own program."""
    ref = reference(name)
    state, record, info = ref.sim.run(ref.initial, ref.key, 1)
    return snapshot(state), as_metrics(record, info)


def flat(tree) -> np.ndarray:
    """All numbers of a tree in one row."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
