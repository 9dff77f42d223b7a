"""Simulations that share a program: together each plays the rounds that it plays alone."""

import functools

import jax
import numpy as np
import pytest
from marks import later, telling
from small_problem import KEY, make_data, make_model

from fedjax_dp.algorithms import dp_fedavg
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.data import participation, poisson
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.engine.execution.joint import Joint, Request
from fedjax_dp.experiment.studies.workloads import Workload, prepare
from fedjax_dp.server import gaussian_mean

RATES, ROUNDS = (0.1, 0.3, 0.5), 3


def made(rate, *, clip_norm=0.5, cohort=3.0, data=None, rounds_per_call=4):
    data = make_data() if data is None else data
    model = make_model()
    local = LocalConfig(learning_rate=rate, batch_size=4, num_epochs=1)
    private = gaussian_mean(clip_norm=clip_norm, noise_multiplier=0.5, expected_cohort_size=cohort)
    algorithm = dp_fedavg(model, local_trainer(model, local), aggregator=private)
    drawn = participation(poisson(), data.num_clients, cohort_size=cohort)
    execution = ExecutionConfig(clients_per_chunk=2, rounds_per_call=rounds_per_call)
    return simulation(algorithm, data, drawn, execution)


@functools.cache
def plain():
    return made(0.1).program


def wanted(simulations, num_rounds=ROUNDS):
    return {
        i: Request(each.init(jax.random.key(i)), jax.random.key(KEY + i), each.hyper, num_rounds)
        for i, each in enumerate(simulations)
    }


def alone(simulations):
    return [
        each.run(each.init(jax.random.key(i)), jax.random.key(KEY + i), ROUNDS)
        for i, each in enumerate(simulations)
    ]


def assert_same(played, expected, atol):
    for x, y in zip(jax.tree.leaves(played), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)


@pytest.mark.parametrize("width", later([1, 2, 3], soon=[2]))
def test_together_each_plays_the_rounds_that_it_plays_alone(width):
    """Rates, noise and starts differ, and three are no multiple of two."""
    data = make_data()
    # Those of one data alone are side by side.
    simulations = [made(rate, clip_norm=rate, data=data) for rate in RATES]
    joint = Joint([each.program for each in simulations], width)
    played = joint.run(wanted(simulations))
    for i, (state, record, info) in enumerate(alone(simulations)):
        assert_same(played[i].state, state, 0 if width == 1 else 1e-6)
        assert_same(played[i].record, record, 0)
        assert_same(played[i].info, info, 0 if width == 1 else 1e-5)
    assert joint.num_traces == 1


@telling
def test_clients_of_other_values_are_arguments_of_the_same_program():
    simulations = [made(0.1), made(0.1, data=make_data(seed=5))]
    joint = Joint([each.program for each in simulations], 2)
    played = joint.run(wanted(simulations))
    for i, (state, *_) in enumerate(alone(simulations)):
        assert_same(played[i].state, state, 1e-6)
    assert joint.num_traces == 1


@telling
def test_all_play_as_many_rounds_as_the_fewest_wanted_and_one_call_holds():
    simulations = [made(rate) for rate in RATES[:2]]
    joint = Joint([each.program for each in simulations])
    asked = wanted(simulations, 9)
    asked[1] = asked[1]._replace(num_rounds=2)
    assert [len(each.record.stage) for each in joint.run(asked).values()] == [2, 2]
    played = joint.run({0: wanted(simulations, 9)[0]})
    assert len(played[0].record.stage) == 4


@pytest.mark.parametrize(
    "other",
    [
        dict(cohort=4.0),
        pytest.param(dict(data=make_data((7, 1, 12, 5, 9, 3))), marks=telling),
        pytest.param(dict(rounds_per_call=2), marks=telling),
    ],
)
def test_programs_that_differ_in_more_than_numbers_are_refused(other):
    programs = [plain(), made(0.1, **other).program]
    with pytest.raises(ValueError, match="programs must be of one digest"):
        Joint(programs)


@telling
def test_programs_that_call_python_back_share_nothing():
    """Their text is the same whatever they call."""

    def calling(value):
        one = made(0.1)
        shape = jax.ShapeDtypeStruct((), np.float32)
        inner = one.algorithm.server_step

        def step(server, aggregate, hyper, round, key):
            factor = jax.pure_callback(lambda: np.float32(value), shape)
            aggregate = jax.tree.map(lambda x: factor * x, aggregate)
            return inner(server, aggregate, hyper, round, key)

        algorithm = one.algorithm._replace(server_step=step)
        return simulation(algorithm, make_data(), one.participation).program

    with pytest.raises(ValueError, match="programs must be of one digest"):
        Joint([calling(1.0), calling(2.0)])


def test_streamed_rounds_have_no_program_to_share():
    one = made(0.1)
    execution = ExecutionConfig(placement="host")
    streamed = simulation(one.algorithm, make_data(), one.participation, execution)
    assert streamed.program is None and one.program is not None


@telling
def test_memory_grows_with_the_points_side_by_side_and_not_otherwise():
    """As the compiled calls say, besides arguments and results."""
    parts = prepare(Workload("", (784,), 10, "logistic_regression", 4, 8, 4))
    execution = ExecutionConfig(devices=1, rounds_per_call=1)
    one = simulation(parts.algorithm, parts.data, parts.participation, execution)
    sims = [one] * 8
    asked = wanted(sims, 1)
    sizes = {
        width: Joint([each.program for each in sims], width).temporary_bytes(
            {i: asked[i] for i in range(width)}
        )
        for width in (2, 4, 8)
    }
    of_a_point = (sizes[8] - sizes[4]) / 4
    assert of_a_point > 0
    assert sizes[4] - sizes[2] == pytest.approx(2 * of_a_point, rel=0.2)
