"""The memory of a round is estimated before it is allocated."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_dp as fdp
from fedjax_dp.engine import layout as layouts
from fedjax_dp.engine.execution import compile as compiling
from fedjax_dp.engine.execution import tuning as estimates
from fedjax_dp.engine.execution.tuning import Memory, explained, memory_of, require_memory
from fedjax_dp.engine.facts import population_of
from fedjax_dp.engine.layout import Layout
from fedjax_dp.server.trimmed_mean import trimmed_mean

WIDTH = 1000
DATA = fdp.FederatedData.from_clients(
    [{"x": np.ones((3, WIDTH), np.float32), "y": np.zeros(3, np.int32)} for _ in range(6)]
)


def parts(width=WIDTH, classes=10):
    model = fdp.Model.from_functions(
        init=lambda key: {"w": jnp.zeros((width, classes))},
        apply=lambda params, x: x @ params["w"],
        loss="softmax_cross_entropy",
    )
    return model, fdp.local_trainer(model, fdp.LocalConfig(learning_rate=0.1, batch_size=3))


def algorithm(width=WIDTH, classes=10, aggregator=None):
    model, trainer = parts(width, classes)
    options = {} if aggregator is None else {"aggregator": aggregator}
    return fdp.fedavg(model, trainer, **options)


def full_participation():
    return fdp.participation(fdp.full_participation(), DATA.num_clients)


def bound(algorithm):
    return fdp.federation(algorithm, population_of(DATA), full_participation())


@pytest.mark.parametrize(("aggregator", "stacked"), [(None, 0), (trimmed_mean(0.1), 6)])
def test_the_estimate_is_counted_from_shapes(aggregator, stacked):
    memory = memory_of(bound(algorithm(aggregator=aggregator)), Layout(2), examples=72_000)
    model = 4 * WIDTH * 10
    assert memory == Memory(model, 2 * model, stacked * model, 0, 72_000)
    assert str(memory).startswith(f"at least {sum(memory) / 1000:.3g} kB (")


def test_what_cannot_fit_is_refused_before_it_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(compiling.jax, "device_put", lambda *args: made.append(args))
    with pytest.raises(MemoryError, match=r"must fit in the .*at least .* TB .*clients in"):
        fdp.simulation(algorithm(classes=2**30), DATA, full_participation())
    assert not made


@pytest.mark.parametrize("placement", ["host", "auto"])
def test_a_table_that_no_memory_holds_is_refused_before_it_is_made(monkeypatch, placement):
    """Six clients that keep a model each: 240 kB, on a machine with 200."""
    model, trainer = parts()
    algorithm = fdp.ditto(model, trainer)
    monkeypatch.setattr(estimates, "memory_of_host", lambda: 200_000)
    monkeypatch.setattr(layouts, "memory_per_device", lambda *devices: 1.0)
    execution = fdp.ExecutionConfig(placement=placement)
    rule = r"the states of 6 clients, 40 kB each and 240 kB in all, must fit the 200 kB .*'disk'"
    with pytest.raises(MemoryError, match=rule):
        fdp.simulation(algorithm, DATA, full_participation(), execution)
    monkeypatch.setattr(estimates, "memory_of_host", lambda: 240_000)
    fdp.simulation(algorithm, DATA, full_participation(), execution)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.\nat"), "5 bytes"),
        (MemoryError("Unable to allocate 36 TiB"), "36 TiB"),
        (MemoryError(), "the system has no more memory"),
    ],
)
def test_an_error_of_memory_has_the_estimate(error, words):
    rule = f"{words}.* takes at least 3 kB .examples 2 kB, clients. states 1 kB"
    with pytest.raises(MemoryError, match=rule), explained(Memory(0, 0, 0, 1000, 2000)):
        raise error


def test_other_errors_are_left_as_they_are():
    with pytest.raises(RuntimeError, match="INTERNAL"), explained(Memory(1, 1, 1, 1, 1)):
        raise RuntimeError("INTERNAL: something else")
    require_memory(Memory(1, 1, 1, 1, 1))


def test_steps_that_no_counter_holds_are_refused():
    model = algorithm()
    local = model.hyper.local._replace(num_epochs=2e9)
    model = model.with_hyper(model.hyper._replace(local=local))
    large = fdp.FederatedData.from_clients(
        [{"x": np.ones((9, WIDTH), np.float32), "y": np.zeros(9, np.int32)}]
    )
    with pytest.raises(ValueError, match=r"num_epochs or num_steps must give each client fewer"):
        fdp.simulation(model, large, fdp.participation(fdp.full_participation(), 1))
