"""Clients longer than the mean load of a device: which are split, where, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from small_problem import NUM_CLIENTS, make_data, make_model, normed

from fedjax_dp.algorithms import fedavg, scaffold
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import full_participation, participation
from fedjax_dp.engine import ExecutionConfig, Fate, ModelAxis, federation, simulation
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.layout import Layout
from fedjax_dp.experiment.studies.timing import loads
from fedjax_dp.server import trimmed_mean

NUMBERS = LocalConfig(learning_rate=0.1, batch_size=2)
# Refused before anything is placed on them.
TWO = [jax.devices()[0]] * 2


def layout_on(num_devices, **options):
    mesh = None if num_devices == 1 else AbstractMesh((num_devices,), ("clients",))
    return Layout(mesh=mesh, has_spare_slots=True, splits_longest=True, **options)


@pytest.mark.parametrize("num_devices", [1, 2, 4, 7])
def test_clients_above_the_mean_load_are_counted_exactly(num_devices):
    rng, layout = np.random.default_rng(num_devices), layout_on(num_devices)
    for largest in (3, 50, 2**30):
        # One of them above all others together; their sum may be no int32.
        steps = [*rng.integers(0, largest // 4 + 1, 20).tolist(), largest, 0]
        expected = sum(s * num_devices > sum(steps) for s in steps)
        assert layout.num_split(jnp.asarray(steps, jnp.int32)) == expected < num_devices
    on_the_mean = [5] * num_devices
    assert layout.num_split(jnp.asarray(on_the_mean)) == 0
    assert layout._replace(splits_longest=False).num_split(jnp.asarray([9, 0])) == 0


def test_clients_that_are_split_come_first_on_the_first_device():
    # 15 steps in all: the first client has 8, more than the mean of three devices.
    sizes = (16, 8, 0, 1, 2, 2)
    made = federation(
        fedavg(make_model(), local_trainer(make_model(), NUMBERS)),
        make_data(sizes),
        participation(full_participation(), len(sizes)),
    )
    state, key = made.init(jax.random.key(0)), jax.random.key(1)
    for chunk in (1, 2):
        layout = layout_on(3, chunk=chunk)
        cohort = jax.jit(partial(made.cohorts.draw, layout=layout))(state, made.hyper, key)
        is_drawn = np.reshape(cohort.fate, (3, -1)) != Fate.EMPTY
        ids = np.where(is_drawn, np.reshape(cohort.ids, (3, -1)), -1)
        assert cohort.num_split == 1 and ids[0, 0] == 0
        assert sorted(ids[is_drawn]) == list(range(len(sizes)))
        assert is_drawn.shape[1] % chunk == 0
        # The others are shared out as if it were not there.
        taken = np.where(is_drawn, -(-np.asarray(sizes)[ids] // 2), 0)
        assert sorted(taken.sum(axis=1) - [8, 0, 0]) == [1, 2, 4]
        # Chunks begin at a multiple of their width.
        assert (ids[0, 1] == -1) == (chunk == 2)
        per_device = loads(layout_on(3), taken.reshape(-1), 1)
        assert sorted(per_device) == pytest.approx([8 / 3 + 1, 8 / 3 + 2, 8 / 3 + 4])


def build(kind="fedavg", execution=None, model=None, **options):
    model = model or make_model()
    trainer = local_trainer(model, NUMBERS)
    joins = participation(full_participation(), NUM_CLIENTS)
    if kind == "scaffold":
        algorithm = scaffold(model, trainer, num_clients=NUM_CLIENTS)
    else:
        algorithm = fedavg(model, trainer, **options)
    if kind == "reads nothing":
        algorithm = algorithm._replace(client=partial(client_of_others, algorithm))
    execution = execution or ExecutionConfig(1, TWO, "device", split_clients=True)
    return simulation(algorithm, make_data(), joins, execution)


def client_of_others(algorithm, message, own, client, hyper, key):
    """A client whose own batches are not trained on."""
    other = jax.tree.map(jnp.asarray, examples_of(make_data())).client(0)
    return algorithm.client(message, own, other, hyper, key)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"kind": "scaffold"}, "be False for scaffold, whose clients have states"),
        ({"aggregator": trimmed_mean(0.2)}, "be False for fedavg, which holds all updates"),
        ({"kind": "reads nothing"}, "be False for fedavg, whose clients sum no gradients"),
        ({"model": normed()}, "model must keep examples apart"),
    ],
)
def test_what_cannot_be_split_is_refused(options, rule):
    with pytest.raises(ValueError, match=rule):
        build(**options)


def test_streamed_examples_and_several_processes_are_refused(monkeypatch):
    for_host = ExecutionConfig(1, TWO, "host", split_clients=True)
    with pytest.raises(ValueError, match="split_clients must be False unless examples are in"):
        build(execution=for_host)
    of_model = for_host._replace(placement="device", model_axis=ModelAxis(2, {"params/*": 0}))
    with pytest.raises(ValueError, match="split_clients must be False where groups of devices"):
        build(execution=of_model)
    module = "fedjax_dp.engine.layout.is_distributed"
    monkeypatch.setattr(module, partial(bool, 1))
    with pytest.raises(ValueError, match="split_clients must be False for several processes"):
        build()
