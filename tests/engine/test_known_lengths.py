"""Loops over local steps whose length the compiler of an accelerator knows."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from marks import telling
from small_problem import make_data, make_model

from fedjax_dp.algorithms import Hyper, fedavg
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.core import jaxprs
from fedjax_dp.core.backend import traced_for
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.execution.compile import simulation
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.layout import AXIS, EqualWork, ExecutionConfig, Layout
from fedjax_dp.engine.round import run_round
from fedjax_dp.models.base import Model
from fedjax_dp.server import gaussian_mean

_EQUAL = (8,) * 6
_TWO = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,))


def _simulation(config, sizes=_EQUAL, trainer=local_trainer, clients_per_chunk=3, **options):
    data = make_data(sizes)
    model = make_model()
    return simulation(
        fedavg(model, trainer(model, config), **options),
        data,
        participants.participation(sampling.fixed_size(), len(sizes), 4),
        ExecutionConfig(clients_per_chunk=clients_per_chunk, devices=None),
    )


def _run(config, kind, rounds=2, hyper=None, **options):
    """Runs rounds as they are traced for a kind of backend, here by this machine."""
    with traced_for(kind):
        made = _simulation(config, **options)
        key = jax.random.key(1)
        state, record, _ = made.run(made.init(key), key, rounds, hyper=hyper)
        return made, jax.tree.map(np.asarray, (state.server, record))


def _assert_as_on_a_cpu(config, kind="tpu", **options):
    made, found = _run(config, kind, **options)
    _, expected = _run(config, "cpu", **options)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for mine, other in pairs:
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    return made


# Batches that are not all full, then full ones, one step, none, and more than fit an epoch.
@telling
@pytest.mark.parametrize(
    "numbers",
    [
        {"batch_size": 3, "num_epochs": 1},
        {"batch_size": 4, "num_epochs": 2},
        {"batch_size": 8, "num_epochs": 1},
        {"batch_size": 4, "num_steps": 0},
        {"batch_size": 5, "num_steps": 7},
    ],
)
def test_equal_work_is_that_of_any_length(numbers):
    made = _assert_as_on_a_cpu(LocalConfig(**numbers))
    assert made.layout.equal_work is not None


def test_equal_work_takes_all_steps_on_all_examples():
    """Slopes of a linear loss do not change: one epoch in halves moves by twice their mean."""
    model = Model.from_functions(
        init=lambda key: jnp.float32(0), apply=jnp.multiply, loss=lambda outputs, targets: outputs
    )
    x = np.float32([1, -4, 2, 8, 16, 0.5, -32, 64])
    client = examples_of(FederatedData.from_clients([{"x": x, "y": x}])).client(0)
    config = LocalConfig(0.25, batch_size=4, num_epochs=1)
    with traced_for("tpu"):
        train = partial(local_trainer(model, config).train, jnp.float32(3), config=config)
        result = jax.jit(train)(client=client.replace(common_size=8), key=jax.random.key(1))
    assert result.delta == -0.25 * 2 * x.mean() and result.num_steps == 2


@telling
def test_private_rounds_of_equal_work():
    config = LocalConfig(batch_size=2, num_steps=3, clip_norm=0.5, noise_multiplier=1.0)
    _assert_as_on_a_cpu(config, trainer=dp_sgd_trainer)


@telling
@pytest.mark.parametrize("trainer", [local_trainer, dp_sgd_trainer])
def test_one_step_of_clients_that_share_the_servers_parameters(trainer):
    config = LocalConfig(batch_size=8, num_steps=1, clip_norm=0.5, noise_multiplier=1.0)
    _assert_as_on_a_cpu(config, "gpu", trainer=trainer)


@telling
@pytest.mark.parametrize(("kind", "has_loop"), [("gpu", False), ("tpu", True)])
def test_one_step_is_no_loop_on_a_gpu(kind, has_loop):
    with traced_for(kind):
        made = _simulation(LocalConfig(batch_size=8, num_steps=1), clients_per_chunk=4)
        given = made.program.arguments
        run = partial(made.federation.run_round, layout=made.layout)
        closed = jax.make_jaxpr(run)(given[0], given[1], given[2], given[4])
    assert (1 in set(_lengths_of_scans(closed))) is has_loop


@telling
def test_one_chunk_of_all_clients():
    _assert_as_on_a_cpu(LocalConfig(batch_size=4, num_epochs=2), clients_per_chunk=4)


@telling
def test_other_numbers_of_a_call_run_by_another_program():
    """A sweep over steps must not run the steps that the program was built with."""
    config, more = LocalConfig(batch_size=4, num_epochs=1), LocalConfig(batch_size=4, num_epochs=3)
    with traced_for("tpu"):
        hyper = _simulation(more).hyper
    made, found = _run(config, "tpu", hyper=hyper)
    _, expected = _run(more, "cpu")
    for mine, other in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    assert made.layout.equal_work.num_epochs == 1


def test_work_is_equal_for_equal_sizes_and_numbers_alone():
    same, local = np.full(5, 8, np.int32), LocalConfig(batch_size=4)
    hyper = Hyper(local)
    assert EqualWork.of(same, hyper) == EqualWork(8, 4.0, 1.0, None)
    assert EqualWork.of(np.array([8, 7]), hyper) is None
    assert EqualWork.of(np.zeros(3, np.int32), hyper) is None
    assert EqualWork.of(same, Hyper(local._replace(batch_size=np.full(5, 4)))) is None
    # A number that changes over rounds is no constant of a program.
    tables = {"local.learning_rate": np.ones(2)}
    assert EqualWork.of(same, hyper._replace(factors=tables)) is not None
    tables = {"local.num_epochs": np.array([1.0, 0.5], np.float32)}
    assert EqualWork.of(same, hyper._replace(factors=tables)) is None


def _lengths_of_scans(closed):
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        for body in jaxprs.inner_jaxprs(eqn):
            yield from _lengths_of_scans(body)


@telling
@pytest.mark.parametrize("trainer", [local_trainer, pytest.param(dp_sgd_trainer, marks=telling)])
@pytest.mark.parametrize("mesh", [None, pytest.param(_TWO, marks=telling)], ids=["one", "two"])
def test_the_compiler_knows_the_length_of_the_loop_over_steps(mesh, trainer):
    config = LocalConfig(batch_size=2, num_steps=13, clip_norm=0.5, noise_multiplier=1.0)

    def lengths(sizes):
        with traced_for("gpu"):
            made = _simulation(config, sizes, trainer, clients_per_chunk=2)
            state, hyper, examples, _, key, _ = made.program.arguments
            layout = made.layout._replace(mesh=mesh)
            cohort = jax.eval_shape(
                lambda *given: made.federation.cohorts.draw(*given, layout), state, hyper, key
            )
            run = partial(run_round, made.algorithm, layout)
            return set(_lengths_of_scans(jax.make_jaxpr(run)(state, hyper, examples, cohort, key)))

    # Two chunks of a cohort of four; devices share it out, and may have none.
    assert {13} <= lengths(_EQUAL) and (2 in lengths(_EQUAL)) is (mesh is None)
    assert not {2, 13} & lengths((8, 7, 8, 8, 8, 8))


@pytest.mark.parametrize(
    ("fewest", "num_slots", "fills"),
    [(4, 4, True), (3, 4, True), (2, 4, False), (4, 6, False), (0, 2, True)],
)
def test_a_chunk_without_clients_is_not_computed(fewest, num_slots, fills):
    layout = Layout(2, equal_work=EqualWork(8, 4.0, 1.0, None), fewest_clients=fewest)
    assert layout.fills_chunks(num_slots) is fills
    assert not layout._replace(equal_work=None).fills_chunks(num_slots)
    assert not layout._replace(alone_above=3).fills_chunks(num_slots)


def _readers_of_stored(kind, clip_norm):
    """Counts how often each update of a round is read as it is stored."""
    mean = None if clip_norm is None else gaussian_mean(clip_norm, 1.0, 4)
    with traced_for(kind):
        made = _simulation(LocalConfig(batch_size=4, num_steps=2), aggregator=mean)
        given = made.program.arguments
        run = partial(made.federation.run_round, layout=made.layout)
        closed = jax.make_jaxpr(run)(given[0], given[1], given[2], given[4])
    found = Counter()

    def count(closed):
        for eqn in closed.jaxpr.eqns:
            if eqn.primitive.name == "materialize":
                found[eqn.invars[0]] += 1
            for body in jaxprs.inner_jaxprs(eqn):
                count(body)

    count(closed)
    return sorted(found.values())


@telling
def test_an_accelerator_reads_a_clipped_update_in_one_pass():
    """Its norm as a metric and whether it is finite are of the array that clipping stores."""
    num_arrays = len(jax.tree.leaves(make_model().init(jax.random.key(0))))
    assert _readers_of_stored("cpu", 1.0) == [1] * num_arrays
    assert _readers_of_stored("gpu", 1.0) == [3] * num_arrays
    assert _readers_of_stored("gpu", None) == []


@telling
def test_slots_of_a_draw_that_was_exchanged_may_be_empty():
    def half(*given, **named):
        state, draw = sampling.shuffled().draw(*given, **named)
        return state, draw._replace(is_real=draw.is_real & (jnp.arange(len(draw.is_real)) % 2 == 0))

    own = sampling.shuffled()._replace(draw=half)
    _assert_as_on_a_cpu(
        LocalConfig(batch_size=4, num_epochs=1), trainer=partial(local_trainer, sampler=own)
    )


def test_a_client_of_another_size_is_not_of_the_common_one():
    client = examples_of(make_data(_EQUAL)).client(0).replace(common_size=8)
    assert client.replace(round=1).common_size == 8
    assert client.replace(size=np.int32(3)).common_size is None
