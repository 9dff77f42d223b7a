"""How a round is laid out: choices, their limits, and what they cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from references import PLAIN
from small_problem import NUM_CLIENTS, make_data, make_model

from fedjax_dp.algorithms import fedavg
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.core.backend import traced_for
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import layout as layout_module
from fedjax_dp.engine.cohort import Cohort, Examples, draw_cohort, typed
from fedjax_dp.engine.execution.compile import simulation
from fedjax_dp.engine.layout import ExecutionConfig, Layout
from fedjax_dp.engine.round import SimulationState, run_round
from fedjax_dp.models import registry
from fedjax_dp.models.base import Model
from fedjax_dp.models.cost import Cost, cost_of, training_cost


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"placement": "devise"}, "placement must be one of .* did you mean 'device'"),
        ({"rounds_per_call": 0}, "rounds_per_call must be an integer of at least 1"),
        ({"devices": 0}, "devices must be an integer of at least 1"),
        ({"devices": 1000}, "devices must be at most"),
    ],
)
def test_bad_choices_are_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        ExecutionConfig(**choice).validate()


def test_placement_follows_size_and_disk(tmp_path):
    data = make_data()
    assert ExecutionConfig().is_resident(data)
    assert ExecutionConfig(placement="device").is_resident(data)
    assert not ExecutionConfig(placement="host").is_resident(data)
    data.save(tmp_path)
    assert not ExecutionConfig().is_resident(FederatedData.open(tmp_path))
    assert ExecutionConfig(placement="device").is_resident(FederatedData.open(tmp_path))
    # An array that says it is large without being so.
    large = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2**30, 4), (0, 0))
    assert not ExecutionConfig().is_resident(FederatedData({"x": large}, np.array([0, 2**30])))


@pytest.mark.parametrize("asked, given", [(1, 1), (2, 2), (100, 3), ("auto", None)])
def test_chunks_are_no_wider_than_the_cohort_that_is_expected(asked, given):
    model = make_model()
    algorithm = fedavg(model, local_trainer(model, LocalConfig(batch_size=2)))
    participation = participants.participation(sampling.poisson(), NUM_CLIENTS, 3)
    execution = PLAIN._replace(clients_per_chunk=asked)
    chunk = simulation(algorithm, make_data(), participation, execution).layout.chunk
    assert chunk == given if given else 1 <= chunk <= NUM_CLIENTS


@pytest.mark.parametrize(
    ("operations", "largest", "expected"),
    [(1e3, 1, 100), (1e30, 1, 1), (1e3, 2**62, 1), (1e3, 2**20, None)],
)
def test_chunks_follow_operations_and_memory(monkeypatch, operations, largest, expected):
    monkeypatch.setattr(layout_module, "memory_per_device", lambda: 2.0**30)
    chunk = ExecutionConfig().chunk(lambda: Cost(operations, operations, largest), 100)
    # A quarter of 1 GiB holds 32 times 8 values of 1 MiB.
    assert chunk == (expected or 32)


@pytest.mark.parametrize(("kind", "deep"), [("gpu", 6), ("tpu", 1)])
def test_a_gpu_needs_more_work_where_a_pass_starts_more_kernels(kind, deep):
    one = Cost(8e10, 8e10, 1, products=12)
    with traced_for(kind):
        assert ExecutionConfig().chunk(lambda: one, 12) == 1
        assert ExecutionConfig().chunk(lambda: one._replace(products=60), 12) == deep


def test_a_cost_counts_products_and_convolutions():
    def loss(w, x):
        hidden = jax.lax.conv(x, w[0], (1, 1), "SAME")
        return jnp.sum(jnp.square(jnp.einsum("bchw,co->bo", hidden, w[1])))

    w = jnp.ones((3, 2, 3, 3)), jnp.ones((3, 5))
    x = jnp.ones((4, 2, 6, 6))
    assert cost_of(loss, w, x).products == 2
    # Two of weights and one of what is between the layers.
    assert cost_of(jax.grad(loss), w, x).products == 5
    five = cost_of(lambda w: jax.lax.scan(lambda c, _: (c @ w, None), w, length=5), w[1] @ w[1].T)
    assert five.products == 5


@pytest.mark.parametrize(("own_bytes", "expected"), [(0, 100), (2**14, 32), (2**20, 16)])
def test_chunks_of_clients_with_state_fit_a_cache(own_bytes, expected):
    """Half a MiB of states on a CPU, and sixteen clients at least."""
    chunk = ExecutionConfig().chunk(lambda: Cost(1.0, 1.0, 1), 100, own_bytes)
    assert chunk == (expected if jax.default_backend() == "cpu" else 100)


def test_a_cost_names_the_largest_value_on_the_way():
    def fn(x):
        return jax.lax.fori_loop(
            0, x.astype(jnp.int32), lambda i, v: v + (jnp.ones(1000) * v).sum(), x
        )

    assert cost_of(fn, jnp.float32(3)).largest_bytes == 4000
    assert cost_of(lambda a: a @ a, jnp.ones((8, 8)))[:3] == (2 * 8**3, 2 * 8**3, 8 * 8 * 4)
    assert cost_of(lambda: jax.random.split(jax.random.key(0), 5)).operations == 0


def test_convolutions_count_as_direct_sums_however_they_are_computed():
    structure = {"x": jax.ShapeDtypeStruct((28, 28, 1), jnp.float32)}
    model = registry.build("emnist_cnn", structure, 62)
    cost = training_cost(model, (28, 28, 1), 20)
    first, second, *dense = (26**2 * 9 * 32, 24**2 * 9 * 32 * 64, 12**2 * 64 * 128, 128 * 62)
    assert cost.direct_operations == 3 * 2 * (first + second + sum(dense))
    # Sixteen products for every four outputs of the second layer in place of thirty-six; backwards
    # thirty-six for every sixteen entries of its input, where patches take nine for each output.
    tiles = second * 16 / 36 + (26**2 + 28**2) * 36 / 16 * 32 * 64
    done = tiles if jax.default_backend() == "cpu" else 3 * second
    assert cost.operations == pytest.approx(2 * (2 * first + done + 3 * sum(dense)))


@functools.cache
def temporary_bytes(num_slots, chunk, num_features=20_000):
    """Memory that a compiled round needs beyond its arguments and results."""
    model = Model.from_functions(
        lambda key: {"w": jnp.zeros(num_features)},
        lambda params, x: x @ params["w"],
        loss="sigmoid_binary_cross_entropy",
    )
    algorithm = fedavg(model, local_trainer(model, LocalConfig(0.1, 1, 1)))
    server = jax.eval_shape(algorithm.init, jax.random.key(0))
    state = SimulationState(server, (), None, jnp.int32(0))
    examples = {
        "x": jax.ShapeDtypeStruct((8, num_features), jnp.float32),
        "y": jax.ShapeDtypeStruct((8,), jnp.float32),
    }
    slots = jax.ShapeDtypeStruct((num_slots,), jnp.int32)
    cohort = Cohort(slots, jax.ShapeDtypeStruct((num_slots,), jnp.int8), jnp.int32(0))
    examples = Examples(examples, slots, slots, is_by_slot=True)
    run = jax.jit(functools.partial(run_round, algorithm, Layout(chunk)))
    numbers = typed(algorithm.hyper)
    compiled = run.lower(state, numbers, examples, cohort, jax.random.key(0)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@telling
def test_memory_follows_the_chunk_and_not_the_cohort():
    update = 4 * 20_000
    small, large = temporary_bytes(8, 4), temporary_bytes(512, 4)
    # 504 more slots of ids and metrics, not one more update.
    assert large - small < update
    assert temporary_bytes(512, 64) > large + 60 * update


def test_slots_hold_clients_of_like_lengths_side_by_side_and_devices_share_them():
    model = make_model()
    sizes = np.array([5, 0, 40, 7, 39, 1, 8, 41, 6, 2])
    algorithm = fedavg(model, local_trainer(model, LocalConfig(batch_size=2)))
    participation = participants.participation(sampling.poisson(), len(sizes), 6)
    mesh = jax.sharding.AbstractMesh((2,), ("clients",))
    layout, table = Layout(mesh=mesh), jnp.asarray(sizes)
    numbers = typed(algorithm.hyper)
    draw = jax.jit(functools.partial(draw_cohort, algorithm, participation, layout, table, numbers))
    per_device = layout.slots_per_device(participation)
    for round_index in range(5):
        cohort = jax.tree.map(np.asarray, draw(round_index, jax.random.key(0)))
        is_real = cohort.fate != 0
        drawn = cohort.ids[is_real].tolist()
        assert len(set(drawn)) == len(drawn) > 0
        halves, steps = is_real.reshape(2, per_device), np.ceil(sizes[cohort.ids] / 2) * is_real
        counts, loads = halves.sum(axis=1), steps.reshape(2, per_device).sum(axis=1)
        # The last client goes to the device with least work.
        assert abs(loads[0] - loads[1]) <= steps.max()
        for half in range(2):
            assert halves[half][: counts[half]].all(), "the real ones come first on every device"
            part = slice(per_device * half, per_device * half + counts[half])
            assert np.all(np.diff(steps[part]) <= 0)


@telling
def test_padded_work_is_reported():
    """Four clients in chunks of two, grouped by steps: the share can be counted by hand."""
    model = make_model()
    sizes = (1, 8, 2, 8)
    algorithm = fedavg(model, local_trainer(model, LocalConfig(0.1, 2, 1)))
    participation = participants.participation(sampling.full_participation(), 4)
    execution = PLAIN._replace(clients_per_chunk=2)
    sim = simulation(algorithm, make_data(sizes), participation, execution)
    _, _, info = sim.run(sim.init(jax.random.key(0)), jax.random.key(0), 1)
    # (8, 8) run four steps of two, (2, 1) one step of two: 16 + 4 places for 19 examples.
    np.testing.assert_allclose(info.training.padding_share, 1 - 19 / 20, rtol=1e-5)
    assert info.training.num_examples == 19
