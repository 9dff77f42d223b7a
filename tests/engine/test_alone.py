"""Clients of very unlike work: the largest are computed alone, and nothing but time changes."""

import functools

import jax
import numpy as np
import pytest
from marks import later, telling
from small_problem import make_data, make_model

from fedjax_dp.algorithms import dp_sgd, fedavg, scaffold
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.data import full_participation, participation, poisson
from fedjax_dp.engine import Fate, federation, simulation
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.layout import ExecutionConfig, Layout, alone_above
from fedjax_dp.server.trimmed_mean import trimmed_mean

SIZES = (1, 40, 2, 1, 0, 1, 33, 1, 2, 1, 1, 12, 1)
NUMBERS = LocalConfig(learning_rate=0.1, batch_size=2)


@pytest.mark.parametrize(
    ("steps", "chunk", "share", "expected"),
    [
        ([5] * 100, 10, 1.0, None),
        ([3125] + [1] * 1000, 256, 1.0, 1),
        ([3125] + [1] * 1000, 1, 1.0, None),
        ([3125, 3000] + [1] * 1000, 256, 0.5, 1),
        ([4] + [1] * 1000, 256, 1.0, None),
        (list(range(1, 1001)), 8, 1.0, None),
        ([7], 4, 1.0, None),
        ([0, 0, 0], 2, 1.0, None),
    ],
)
def test_who_is_computed_alone_follows_from_what_it_saves(steps, chunk, share, expected):
    assert alone_above(np.array(steps), chunk, share) == expected
    assert alone_above(np.array(steps[::-1]), chunk, share) == expected


def build(name):
    model = make_model()
    trainer = local_trainer(model, NUMBERS)
    if name == "dp_sgd":
        private = NUMBERS._replace(clip_norm=0.5, noise_multiplier=1.0)
        return dp_sgd(model, dp_sgd_trainer(model, private))
    if name == "scaffold":
        return scaffold(model, trainer, num_clients=len(SIZES))
    aggregator = trimmed_mean(0.1) if name == "stacked" else None
    return fedavg(model, trainer, aggregator=aggregator)


CASES = [
    ("scaffold", "full_participation"),
    ("fedavg", "poisson"),
    ("fedavg", "full_participation"),
    ("dp_sgd", "poisson"),
    ("stacked", "full_participation"),
]
TELLING = [case for case in CASES if case[0] != "fedavg"]


@telling
@pytest.mark.parametrize(("name", "drawn"), later(CASES, but=TELLING))
def test_computing_some_alone_changes_nothing(name, drawn):
    data, key = make_data(SIZES), jax.random.key(2)
    sampler, size = (poisson(), 6) if drawn == "poisson" else (full_participation(), None)
    cohorts = participation(sampler, len(SIZES), size)
    ends = []
    for layout in (Layout(), Layout(chunk=4, alone_above=4), Layout(chunk=4, alone_above=0)):
        made = federation(build(name), data, cohorts)
        step = jax.jit(functools.partial(made.run_round, examples=examples_of(data), layout=layout))
        state, seen = jax.jit(functools.partial(made.init, layout=layout))(key), []
        for _ in range(3):
            state, record, info = step(state, made.hyper, key=key)
            fate = np.asarray(record.fate)
            seen.append(sorted(np.asarray(record.clients)[fate != Fate.EMPTY].tolist()))
            seen.append(float(info.training.train_loss))
            padding = float(info.training.padding_share)
        ends.append((state, seen, padding))
    (one, first, none), *others = ends
    for state, seen, _ in others:
        assert [seen[i] for i in (0, 2, 4)] == [first[i] for i in (0, 2, 4)]
        np.testing.assert_allclose(seen[1::2], first[1::2], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(
                np.asarray(a)[: len(b)] if np.ndim(b) else a, b, rtol=1e-5, atol=1e-6
            )
    # With every client alone there is no more padding than a client has of its own.
    assert ends[2][2] == pytest.approx(none) and ends[1][2] < 0.9


def test_slots_of_a_cohort_leave_room_for_chunks():
    """Those alone come first, and chunks begin at a multiple of their width behind them."""
    data, key = make_data(SIZES), jax.random.key(2)
    layout = Layout(chunk=4, alone_above=4)
    made = federation(build("fedavg"), data, participation(full_participation(), len(SIZES)))
    cohort = made.cohorts.draw(made.init(key), made.hyper, key, layout)
    ids, fate = np.asarray(cohort.ids), np.asarray(cohort.fate)
    assert len(ids) % 4 == 0
    filled = np.flatnonzero(fate != Fate.EMPTY)
    steps = -(-np.array(SIZES) // 2)
    assert sorted(ids[filled[:3]]) == [1, 6, 11] and np.all(steps[ids[filled[:3]]] > 4)
    assert filled[:3].tolist() == [0, 1, 2] and filled[3] == 4
    assert sorted(ids[filled]) == list(range(len(SIZES)))


@telling
def test_a_compiled_simulation_chooses_it_where_it_pays():
    data = make_data((4000,) + (1,) * 400)
    trainer = local_trainer(make_model(), NUMBERS)
    execution = ExecutionConfig(devices=1, clients_per_chunk=64)
    cohorts = participation(full_participation(), data.num_clients)
    made = simulation(fedavg(make_model(), trainer), data, cohorts, execution)
    assert made.layout.alone_above == 1 and made.layout.chunk == 64
    _, _, info = made.run(made.init(jax.random.key(0)), jax.random.key(0))
    assert info.training.padding_share[0] < 0.3
