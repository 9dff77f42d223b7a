"""Laws that every algorithm obeys: how a round is laid out changes nothing but its speed."""

import jax
import numpy as np
import pytest
from cases import CASES, KINDS, kinds_first, quick_first
from marks import later, telling
from references import PLAIN, num_slab_sizes, reference
from rounds import after_one_round, flat, hand_round
from small_problem import ROUNDS, assert_same_state, make_data, make_model, snapshot

from fedjax_dp.algorithms import scaffold
from fedjax_dp.algorithms.base import ClientState
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine.cohort import Examples
from fedjax_dp.engine.execution.compile import simulation
from fedjax_dp.engine.layout import ExecutionConfig, Layout
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.round import run_round

NAMES = tuple(CASES)
# Between them: state by client, several models, a streamed store. That two clients side by side
# change nothing is tested for every algorithm below.
QUICK_LAYOUTS = [("fedavg", "chunks of 3, streamed")]
TELLING_LAYOUTS = [
    ("scaffold", "chunks of 3, streamed"),
    ("ifca", "chunks of 8"),
    ("median", "chunks of 3, streamed"),
    ("dp_both", "chunks of 2"),
]
LAYOUTS = {
    "chunks of 2": ExecutionConfig(clients_per_chunk=2, placement="device", rounds_per_call=1),
    "chunks of 3, streamed": ExecutionConfig(clients_per_chunk=3, placement="host"),
    "chunks of 8": ExecutionConfig(clients_per_chunk=8, placement="device", rounds_per_call=5),
}

ALL = [(name, layout) for name in NAMES for layout in LAYOUTS]


def traits(name):
    """What a case declares beyond the least that every algorithm does."""
    case = CASES[name]
    algorithm = case.make(make_model())
    found = {case.is_pooled, type(algorithm.aggregator)}
    parts = (algorithm.training, algorithm.numbers, algorithm.views, algorithm.stages)
    states = algorithm.client_state, algorithm.aggregator
    for part in (algorithm, *parts, *states, *algorithm.stages.host_steps):
        defaults = getattr(part, "_field_defaults", {})
        found |= {(type(part), f) for f, value in defaults.items() if getattr(part, f) != value}
    found.add(type(getattr(algorithm.client_state, "finish", None)))
    # For wrappers alone: no round reads it.
    return found - {(ClientState, "iterate")}


def test_laws_run_soon_on_whatever_an_algorithm_may_declare():
    assert set().union(*map(traits, KINDS)) == set().union(*map(traits, CASES))


@pytest.mark.parametrize("name, layout", later(ALL, but=QUICK_LAYOUTS, soon=TELLING_LAYOUTS))
def test_layout_changes_nothing(name, layout):
    ref = reference(name)
    sim = ref.case.simulation(LAYOUTS[layout])
    final, record, info = sim.run(ref.initial, ref.key, ROUNDS)
    assert_same_state(snapshot(final), ref.final, atol=1e-6)
    # How many slots are empty is a matter of layout.
    for fate in set(Fate) - {Fate.EMPTY}:
        np.testing.assert_array_equal(record.count(fate), ref.record.count(fate))
    np.testing.assert_array_equal(record.overflow, ref.record.overflow)
    np.testing.assert_allclose(
        info.training.train_loss, ref.info.training.train_loss, rtol=1e-5, atol=1e-6
    )
    is_streamed = LAYOUTS[layout].placement == "host"
    shapes = num_slab_sizes(sim, record.clients) if is_streamed else 1
    assert sim.num_traces() == shapes


@pytest.mark.parametrize("name", kinds_first(NAMES))
def test_padding_and_chunks_change_nothing(name):
    """Twice as many clients side by side, empty slots, a larger limit, gaps in the store."""
    hand = hand_round(name)
    state, info = hand(hand.drawn())
    expected, expected_info = after_one_round(name)
    assert_same_state(state, expected, atol=1e-6)
    assert info["num_participants"] == expected_info["num_participants"][0]
    assert info["num_examples"] == expected_info["num_examples"][0]
    np.testing.assert_allclose(info["train_loss"], expected_info["train_loss"][0], rtol=1e-5)


@pytest.mark.parametrize("name", kinds_first(NAMES))
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_unused_rows_change_nothing(name, garbage):
    hand = hand_round(name)
    clean, clean_info = hand(hand.drawn())
    state, info = hand(hand.drawn(), garbage=garbage)
    assert_same_state(state, clean, atol=0)
    for kind in info:
        np.testing.assert_array_equal(info[kind], clean_info[kind], err_msg=kind)


@pytest.mark.parametrize("name", kinds_first(NAMES))
def test_order_of_the_slots_changes_nothing(name):
    """Draws follow the client, not the slot: the cohort in reverse gives the same round."""
    hand = hand_round(name)
    forward, _ = hand(np.sort(hand.drawn()))
    backward, _ = hand(np.sort(hand.drawn())[::-1])
    assert_same_state(backward, forward, atol=1e-6)


@pytest.mark.parametrize("name", kinds_first(n for n in NAMES if not CASES[n].is_pooled))
def test_a_client_of_the_cohort_matters(name):
    """The laws above would hold of a round that ignores its cohort; this one does not."""
    hand = hand_round(name)
    all_of_them, _ = hand([0, 2, 3])
    fewer, _ = hand([0, 2])
    kept = (all_of_them.server, all_of_them.clients)
    assert np.abs(flat(kept) - flat((fewer.server, fewer.clients))).max() > 1e-4


@telling
def test_names_of_clients_do_not_matter_where_nothing_is_drawn():
    """Full batches of all clients: clients stored in another order give the same model."""
    data, model = make_data(), make_model()
    order = np.array([3, 5, 0, 4, 1, 2])
    rates = np.linspace(0.1, 0.4, data.num_clients)
    finals = []
    for stored, learning_rate in ((data, rates), (data.select(order), rates[order])):
        config = LocalConfig(learning_rate=learning_rate, batch_size=1, num_steps=4)
        trainer = local_trainer(model, config, sampler=sampling.full_participation())
        participation = participants.participation(sampling.full_participation(), data.num_clients)
        algorithm = scaffold(model, trainer, num_clients=data.num_clients)
        sim = simulation(algorithm, stored, participation, PLAIN)
        key = jax.random.key(0)
        finals.append(snapshot(sim.run(sim.init(key), key, ROUNDS)[0]))
    first, second = finals
    np.testing.assert_allclose(flat(second.server), flat(first.server), atol=1e-6)
    np.testing.assert_allclose(second.clients["w"], first.clients["w"][order], atol=1e-6)


@pytest.mark.parametrize("name", quick_first(NAMES))
def test_resumed_equals_uninterrupted_bit_for_bit(name):
    """Killed after each round and carried on from NumPy arrays."""
    ref = reference(name)
    state = ref.initial
    for _ in range(ROUNDS):
        state, _, _ = ref.sim.run(state, ref.key, 1)
        state = snapshot(state)
    assert_same_state(state, ref.final, atol=0)
    assert ref.sim.num_traces() == 1


@pytest.mark.parametrize("name", quick_first(NAMES))
def test_same_seed_same_bits_and_another_seed_another_model(name):
    ref = reference(name)
    start = ref.sim.init(ref.key)
    assert_same_state(snapshot(start), ref.initial, atol=0)
    again, record, _ = ref.sim.run(start, ref.key, ROUNDS)
    assert_same_state(snapshot(again), ref.final, atol=0)
    np.testing.assert_array_equal(record.clients, ref.record.clients)
    other_key = jax.random.key(11)
    other, _, _ = ref.sim.run(ref.initial, other_key, ROUNDS)
    kept = (ref.final.server, ref.final.clients)
    assert np.abs(flat((other.server, other.clients)) - flat(kept)).max() > 1e-4
    assert ref.sim.num_traces() == 1


@pytest.mark.parametrize("name", quick_first(NAMES))
def test_one_trace_whatever_the_numbers(name):
    """Numbers of rounds, learning rates, clip norms and noise change without a new trace."""
    ref = reference(name)
    state = ref.initial
    for num_rounds in (1, 2, 5):
        state, record, info = ref.sim.run(state, ref.key, num_rounds)
        assert len(info.training.train_loss) == len(record.clients) == num_rounds
    for numbers in ({"learning_rate": 0.5}, {"clip_norm": 0.1, "noise_multiplier": 2.0}):
        local = ref.sim.hyper.local
        numbers = {
            field: np.full(np.shape(getattr(local, field)), value, np.float32)
            for field, value in numbers.items()
            if getattr(local, field) is not None
        }
        if not numbers:
            continue
        changed = ref.sim.hyper._replace(local=local._replace(**numbers))
        final, _, _ = ref.sim.run(ref.initial, ref.key, ROUNDS, changed)
        kept = (final.server, final.clients)
        assert np.abs(flat(kept) - flat((ref.final.server, ref.final.clients))).max() > 1e-4
    assert ref.sim.num_traces() == 1


@pytest.mark.parametrize("name", later(NAMES, soon=["dp_both"]))
def test_eager_equals_compiled(name):
    """One client with data and one without, step by step in Python."""
    hand = hand_round(name)
    ids = [0] if hand.ref.case.is_pooled else [3, 1]
    compiled, _ = hand(ids)
    sim = hand.ref.sim
    on_device = jax.tree.map(
        jax.numpy.asarray,
        (
            hand.ref.initial,
            sim.hyper,
            hand.examples(),
            hand.cohort(ids),
            hand.starts,
            hand.sizes,
            hand.validation(),
        ),
    )
    state, hyper, arrays, cohort, starts, sizes, second = on_device
    examples = Examples(arrays, starts, sizes, second, limit=int(hand.sizes.max()))
    with jax.disable_jit():
        eager, _, _ = run_round(
            sim.algorithm, Layout(), state, hyper, examples, cohort, hand.ref.key
        )
    assert_same_state(snapshot(eager), compiled, atol=1e-6)
