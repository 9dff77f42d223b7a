"""Messages under masks: any summed aggregator gives the same sums, and messages say nothing."""

import functools
import importlib
import inspect
import itertools
import os
import pathlib
import pkgutil
import subprocess
import sys
import typing
from fractions import Fraction
from math import comb

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from marks import floats, later, telling
from oracles.floats import nearest
from scipy import stats
from side_by_side import several_devices
from small_problem import NUM_CLIENTS, make_data, make_model, plain_trainer

from fedjax_dp import server
from fedjax_dp.algorithms import fedavg
from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Training
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.core import messages, sums
from fedjax_dp.core.masks import Sparse
from fedjax_dp.data import full_participation, participation
from fedjax_dp.engine import Cohort, Examples, Fate, Layout, examples_of, federation
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.round_loop import Count, one_round
from fedjax_dp.engine.layout import AXIS
from fedjax_dp.engine.round import SimulationState, run_round
from fedjax_dp.privacy.mechanisms import distributed
from fedjax_dp.privacy.mechanisms.clipping import AdaptiveClipping
from fedjax_dp.privacy.mechanisms.noise import banded_noise
from fedjax_dp.server.base import Close, Diagnostic, Roster, Sender, Stacked, Summed
from fedjax_dp.server.secure import aggregator as wrapper
from fedjax_dp.server.secure import (
    agreed_keys,
    all_pairs,
    fixed_point,
    mask_messages,
    masked,
    masking_facts,
    random_neighbors,
)
from fedjax_dp.server.secure.graphs import arranged, failure_bound

HERE = pathlib.Path(__file__).parent
KEY = jax.random.key(0)
IDS = np.array([6, 2, 9, 4, 0, 7, 11, 3, 0, 0], np.int32)
SLOTS, REAL = len(IDS), 8
GRAPH = all_pairs(REAL, colluders=1, dropouts=5)
SENT, LOST, NAN = Fate.CONTRIBUTED, Fate.DROPPED, Fate.NOT_FINITE
# Multiples of 2^-10 of which sums in float32 are exact.
ON_LATTICE = np.random.default_rng(0).integers(-900, 900, (12, 5)).astype(np.float32) / 1024
SHAPE = {"w": jax.ShapeDtypeStruct((3,), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.float32)}


def tree_of(row):
    return {"w": row[:3], "b": row[3]}


def update_of(name, row):
    """A client's update in the form that an aggregator wants."""
    tree = tree_of(row)
    if name == "sparse_mean":
        return Sparse(tree, jax.tree.map(lambda x: x > 0, tree))
    if name == "mean_per_model":
        return server.ModelChoice((row[4] > 0).astype(jnp.int32), tree)
    return tree


def discrete(num_shares=3, **options):
    plan = distributed.make_plan(4, 4.0, 1.0, num_clients=REAL, bits=20, num_shares=num_shares)
    return server.discrete_mean(SHAPE, plan, 8, **options)


ADAPTIVE = AdaptiveClipping(
    initial_clip_norm=4.0,
    target_quantile=0.5,
    learning_rate=0.2,
    count_stddev=1.0,
    expected_cohort_size=6.0,
)
SUMMED = {
    "weighted_mean": server.weighted_mean,
    "uniform_mean": server.uniform_mean,
    "scaled_sum": lambda: server.scaled_sum(3.0),
    "per_part": lambda: server.per_part({"w": server.weighted_mean(), "b": server.uniform_mean()}),
    "mean_per_model": lambda: server.mean_per_model(2),
    "weighted_by_client": lambda: server.weighted_by_client(12),
    "sparse_mean": server.sparse_mean,
    "gradient_mask": server.gradient_mask,
    "gradient_mask_around_noise": lambda: server.gradient_mask(server.gaussian_mean(4.0, 1.0, 6.0)),
    "gaussian_mean": lambda: server.gaussian_mean(4.0, 1.0, 6.0),
    "private_mean": lambda: server.gaussian_mean(4.0, 1.0, 6.0, per_layer=True),
    "laplace_mean": lambda: server.laplace_mean(8.0, 1.0, 6.0),
    "staircase_mean": lambda: server.staircase_mean(SHAPE, 1.0, 1.0, 6.0),
    "bounded_laplace_mean": lambda: server.bounded_laplace_mean(SHAPE, 1.0, 1.0, 6.0, 1e-3),
    "adaptive_gaussian_mean": lambda: server.adaptive_gaussian_mean(ADAPTIVE, 1.0),
    "correlated_gaussian_mean": lambda: server.correlated_gaussian_mean(
        banded_noise(8, 2, min_separation=2), 4.0, 1.0, 6.0
    ),
    "by_realised_count": lambda: server.by_realised_count(server.gaussian_mean(4.0, 1.0, 6.0)),
    "central_discrete_mean": lambda: server.central_discrete_mean(SHAPE, 4.0, 1.0, 6.0),
    "discrete_mean": discrete,
    "discrete_mean_of_varying_cohorts": lambda: discrete(REAL, varies=True),
    "counted_mean": server.counted_mean,
    "oblivious_mean": lambda: server.oblivious_mean(SHAPE, 4.0, 0.0, 3),
    "by_parts": lambda: server.by_parts(server.gaussian_mean(4.0, 1.0, 6.0), scales={"b": 0.5}),
    "by_parts_in_shares": lambda: server.by_parts(
        server.gaussian_mean(4.0, 1.0, 6.0), shares={"w": 0.8, "b": 0.6}
    ),
}


def test_every_summed_aggregator_of_the_package_is_tried():
    """Public functions of all modules of `server`, exported or not, that return such a one."""
    made = set()
    for info in pkgutil.walk_packages(server.__path__, "fedjax_dp.server."):
        module = importlib.import_module(info.name)
        for name, f in vars(module).items():
            if inspect.isfunction(f) and f.__module__ == info.name and not name.startswith("_"):
                kind = inspect.signature(f).return_annotation
                if Summed in (kind, *typing.get_args(kind)):
                    made.add(name)
    assert len(made) > 15 and made - {"masked"} <= set(SUMMED)


@functools.cache
def played(name, wraps=None, updates="lattice"):
    """One round of an aggregator by itself, compiled: of fates, what `combine` gives.

    `wraps` are the options of `masked` and the bits of words, None for the plain aggregator.
    """
    aggregator = SUMMED[name]()
    if wraps is not None:
        options = dict(wraps)
        encoding = fixed_point(SLOTS, integer_bits=8, word_bits=options.pop("bits", 32))
        aggregator = masked(aggregator, encoding, options.pop("graph", GRAPH), **options)
    rows = jnp.asarray(ON_LATTICE)
    numbers = aggregator.numbers
    state = aggregator.init(jax.eval_shape(lambda: update_of(name, rows[0])))

    @jax.jit
    def run(fates):
        is_there = jnp.isin(fates, jnp.array([SENT, LOST, NAN, Fate.LATE]))
        roster = Roster(jnp.asarray(IDS), is_there)

        def message(client, fate):
            key = jax.random.fold_in(KEY, client)
            weight = 1.0 + (client % 3).astype(jnp.float32)
            sender = Sender(client, weight, key, KEY, roster)
            told = aggregator.broadcast(state)
            sent = aggregator.contribute(told, numbers, update_of(name, rows[client]), sender)
            sent = jax.tree.map(lambda x: jnp.where(fate == SENT, x, jnp.zeros_like(x)), sent)
            if aggregator.encode is not None:
                sent = aggregator.encode(told, numbers, sent, sender)
            has_sent = (fate == SENT) | (fate == NAN)
            return jax.tree.map(lambda x: jnp.where(has_sent, x, jnp.zeros_like(x)), sent)

        each = jax.vmap(message)(roster.clients, fates)
        total = sums.value(sums.over_first_axis(each))
        close = Close(roster, fates, KEY, jax.random.fold_in(KEY, 1))
        return aggregator.combine(state, numbers, total, close), each

    return run


def fates_of(*last):
    """Eight clients, of which the last have these fates, and two empty slots."""
    fates = [SENT] * (REAL - len(last)) + list(last) + [Fate.EMPTY] * 2
    return jnp.asarray(fates, jnp.int8)


def without(info, names):
    return {k: v for k, v in info.items() if k not in names}


DROPPED = [(), (LOST,), (Fate.LATE, LOST, NAN, LOST)]


@floats
@pytest.mark.parametrize(
    ("name", "bits"),
    later(
        itertools.product(sorted(set(SUMMED) - {"oblivious_mean"}), (32, 64)),
        but=[("uniform_mean", 32)],
        soon=[("discrete_mean", 32), ("discrete_mean", 64), ("gaussian_mean", 64)],
    ),
)
def test_masked_cancelled_and_plain_are_bit_for_bit_alike(name, bits):
    wide = () if bits == 32 else (("bits", bits),)
    forms = [played(name, (("form", form), *wide)) for form in ("masked", "cancelled")]
    for last in DROPPED:
        fates = fates_of(*last)
        plain, _ = played(name)(fates)
        for form in forms:
            (state, aggregate, info), _ = form(fates)
            chex.assert_trees_all_equal((state, aggregate), plain[:2])
            # `Diagnostic` figures are not sent under masks.
            own = {"num_lost", "num_clipped"} if "discrete" in name else {"num_lost"}
            chex.assert_trees_all_equal(
                {k: info[k] for k in plain[2].keys() - own}, without(plain[2], own)
            )
            assert info["num_out_of_range"] == 0 and info["num_lost"] == 0
            assert info["num_recovered"] == sum(f in (LOST, Fate.LATE) for f in last)


# One round of the engine: what each client sends, and what the server finds.

WIDTH = 4096
ROUNDED = (np.random.default_rng(1).uniform(-3, 3, (12, WIDTH))).astype(np.float32)
# Of words of 64 bits as many as are left, so that floats from 2^-35 on are words exactly.
FRACTION_BITS = {32: 12, 64: 58}


@functools.cache
def engine_round(form, neighbors=None, chunk=2, bits=32, rows=SENT, kind=Summed, devices=1):
    """A compiled round in which clients send their lines of `ROUNDED` (zeros for EMPTY)."""
    more = -SLOTS % (chunk * devices)
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()), (AXIS,))
    # One client may not be notified.
    n = REAL - 1
    graph = all_pairs(n, dropouts=5)
    if neighbors is not None:
        graph = random_neighbors(n, dropouts=2, failure=0.9, num_neighbors=neighbors)
        graph = graph._replace(threshold=1)
    encoding = fixed_point(SLOTS, integer_bits=1, fraction_bits=FRACTION_BITS[bits], word_bits=bits)
    aggregator = masked(server.scaled_sum(1.0), encoding, graph, form=form)
    lines = ROUNDED if rows == SENT else np.zeros_like(ROUNDED)
    if kind is Stacked:  # The messages themselves, as the server receives them.
        aggregator = Stacked(
            *aggregator[:2],
            lambda state, numbers, total, close: (state, total, {}),
            encode=aggregator.encode,
            numbers=aggregator.numbers,
        )

    def client(message, own, client, hyper, key):
        update = jnp.asarray(lines)[client.index]
        return ClientOutput(update, jnp.float32(1), own)

    algorithm = FederatedAlgorithm(
        name="secure_sum",
        init=lambda key: (),
        broadcast=lambda server, client: (),
        client=client,
        aggregator=aggregator,
        server_step=lambda server, total, hyper, round, key: (server, {"total": total}),
        training=Training(LocalConfig(0.1, 1, 1), lambda size, config: jnp.int32(1)),
    )
    ones = np.ones(SLOTS + more, np.int32)
    examples = Examples({}, 0 * ones, ones, is_by_slot=True)
    state = SimulationState((), (), None, jnp.int32(3))
    ids = jnp.asarray(np.pad(IDS, (0, more)))
    return jax.jit(
        lambda fates: run_round(
            algorithm,
            Layout(chunk=chunk, mesh=mesh),
            state,
            algorithm.hyper,
            examples,
            Cohort(ids, jnp.pad(fates, (0, more)), jnp.int32(0)),
            KEY,
        )[2]
    )


def summed_by_hand(fates, bits):
    """The sum of rounded lines in Python's integers, entries being within 2, as float32."""
    lines = ROUNDED[IDS[np.asarray(fates) == SENT]].astype(np.float64)
    words = np.rint(np.ldexp(np.clip(lines, -2, 2), FRACTION_BITS[bits]))
    total = [nearest(sum(map(int, column))) for column in words.T]
    return np.ldexp(np.array(total, np.float64), -FRACTION_BITS[bits])


@pytest.mark.parametrize(
    ("form", "neighbors", "chunk", "bits"),
    later(
        itertools.chain.from_iterable(
            (("masked", 4, 2, b), ("masked", None, 5, b), ("cancelled", None, 2, b))
            for b in (32, 64)
        ),
        but=[("masked", 4, 2, 32)],
        soon=[("masked", 4, 2, 64)],
    ),
)
def test_a_compiled_round_gives_the_sum_of_rounded_contributions(form, neighbors, chunk, bits):
    run = engine_round(form, neighbors, chunk, bits)
    for last in ((), (LOST,), (Fate.LATE, Fate.UNANNOUNCED)):
        info = run(fates_of(*last))
        np.testing.assert_array_equal(info.server["total"], summed_by_hand(fates_of(*last), bits))
        # Every line of 4,096 numbers has some beyond 2.
        assert info.aggregator["num_out_of_range"] == REAL - len(last)


@telling
def test_eight_devices_find_the_sum_of_one(tmp_path):
    """In a process of its own, which has eight; of words of both sizes, with a drop-out."""
    environment = os.environ | {
        "XLA_FLAGS": several_devices(8),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "masks_worker.py"), str(tmp_path / "sums.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(tmp_path / "sums.npz") as arrays:
        for bits in (32, 64):
            found = arrays[f"{bits}/total"], arrays[f"{bits}/num_recovered"]
            np.testing.assert_array_equal(found[0], summed_by_hand(fates_of(LOST), bits))
            assert found[1] == 1


def chi_squared(words, bits):
    """The p-value of uniform bytes, for the lowest and for the highest byte of words."""
    words = np.asarray(words).ravel()
    found = (words & 255, words >> (bits - 8))
    return [stats.chisquare(np.bincount(b.astype(int), minlength=256)).pvalue for b in found]


@pytest.mark.parametrize("bits", later([32, 64], but=[32], soon=[64]))
def test_masks_and_all_messages_but_one_look_uniform(bits):
    """The messages of zeros, alone and any but one of them together, have uniform bytes."""
    run = engine_round("masked", 4, 2, bits, Fate.EMPTY, Stacked)
    words, _ = run(fates_of()).server["total"]
    sent = np.asarray(words.values)[:REAL]
    if bits == 64:
        # Limbs of 16 bits, into which all carries went.
        assert sent.shape == (REAL, 4, WIDTH) and np.max(sent) < 2**16
        shifts = np.uint64([[0], [16], [32], [48]])
        sent = np.sum(sent.astype(np.uint64) << shifts, axis=1, dtype=np.uint64)
    but_one = sent.sum(axis=0, dtype=sent.dtype) - sent
    assert np.min([chi_squared(part, bits) for part in (*sent, *but_one)]) > 1e-5
    assert np.max(np.abs(np.corrcoef(sent) - np.eye(REAL))) < 6 / WIDTH**0.5
    # Masks that were doubled would be even.
    assert chi_squared(2 * sent[0], bits)[0] < 1e-5
    # Only the server, which has all of them and the seeds of their own masks, finds the sum.
    found = engine_round("masked", 4, 2, bits, Fate.EMPTY)(fates_of())
    np.testing.assert_array_equal(found.server["total"], np.zeros(WIDTH))


@telling
def test_a_lost_round_is_one_of_zeros():
    run = played("gaussian_mean", (("form", "masked"),))
    (_, noise, info), _ = run(fates_of(*[LOST] * 6))
    assert info["num_lost"] == 1 and info["num_recovered"] == 0 and info["num_clipped"] == 0
    plain = played("gaussian_mean")(jnp.full(SLOTS, Fate.EMPTY, jnp.int8))[0]
    chex.assert_trees_all_equal(noise, plain[1])


def test_a_round_that_the_graph_is_not_for_is_lost():
    graph, places = all_pairs(8, colluders=2, dropouts=1), jnp.arange(12)

    @jax.jit
    def is_lost(num_notified, num_sent):
        is_there = places < num_notified
        circle = arranged(graph, KEY, Roster(places, is_there))
        return wrapper._is_lost(graph, fixed_point(16), circle, places < num_sent, is_there)

    # Of twelve clients, too, only one may drop out; and seven are too few.
    found = [is_lost(n, sent) for n, sent in ((8, 7), (12, 11), (8, 6), (12, 10), (12, 8), (7, 7))]
    assert found == [False, False, True, True, True, True]


def test_the_sum_of_clients_with_noise_holds_nothing_that_no_event_covers():
    """No wrap beyond 2^B, and no exact flag: half of the updates are longer than the bound."""
    plan = distributed.make_plan(4, 1.0, 1.0, num_clients=REAL, bits=12)
    aggregator = server.discrete_mean(SHAPE, plan, REAL)
    aggregator = masked(aggregator, fixed_point(REAL), all_pairs(REAL), form="cancelled")
    ids = jnp.arange(REAL)
    roster = Roster(ids, ids >= 0)

    @jax.jit
    def encoded(rows):
        def one(client, row):
            sender = Sender(client, 1.0, jax.random.fold_in(KEY, client), KEY, roster)
            return aggregator.encode((), {}, tree_of(row), sender)

        return jax.vmap(one)(ids, rows)

    rows = np.where(np.arange(REAL)[:, None] % 2, 5.0, 0.1) * np.array([1, -1, 1, -1.0])
    sent = encoded(rows.astype(np.float32))
    # Figures for the experimenter are not sent.
    parts = jax.tree.leaves(sent, is_leaf=lambda x: isinstance(x, Diagnostic))
    words, count = jax.tree.leaves([x for x in parts if not isinstance(x, Diagnostic)])
    # Multiples of 2^20, whose sum modulo 2^32 is one modulo 2^12, though some are negative.
    assert np.all(np.asarray(words) % 2**20 == 0)
    assert 0 < np.mean(np.asarray(words) >> 31) < 1
    np.testing.assert_array_equal(count, np.ones(REAL))
    close = Close(roster, jnp.full(REAL, SENT, jnp.int8), KEY, KEY)
    total = jax.tree.map(lambda x: x[0], sent)
    info = jax.eval_shape(lambda total: aggregator.combine((), {}, total, close)[2], total)
    assert "num_lost" in info and "num_clipped" not in info
    # Four coordinates and the count.
    assert messages.tariff_of(aggregator.message(SHAPE, 1.0)).fixed["dense"] == {"uint32": 20}


def test_the_part_of_failure_that_breaks_secrecy_is_that_of_counting():
    """Hypergeometric tails by binomial coefficients; lost rounds do not count."""
    n, k, t, d = 100, 20, 30, 5
    graph = random_neighbors(n, colluders=t, dropouts=d, num_neighbors=k, failure=0.5)
    ways = range(graph.threshold, k + 1)
    betrayed = Fraction(sum(comb(t, i) * comb(n - 1 - t, k - i) for i in ways), comb(n - 1, k))
    split = Fraction(comb(t + d, k // 2), comb(n, k // 2))
    assert graph.secrecy_failure == pytest.approx(float(n * (betrayed + split)), rel=1e-9)
    assert 1e-3 < graph.secrecy_failure <= graph.failure
    assert masking_facts(graph)["secrecy_failure"] == graph.secrecy_failure
    assert all_pairs(9, colluders=3).secrecy_failure == 0
    both = random_neighbors(n, colluders=20, dropouts=20, num_neighbors=24, failure=0.9)
    assert 0 < both.secrecy_failure < 0.9 * both.failure


def test_the_statement_names_no_more_colluders_than_the_noise_is_for():
    graph = all_pairs(8, colluders=3)
    plans = [distributed.make_plan(4, 1.0, 1.0, num_clients=8, colluders=t) for t in (0, 3, 4)]
    with pytest.raises(ValueError, match=r"plan\.colluders must be at least the 3 of the graph"):
        masking_facts(graph, plans[0])
    assert [masking_facts(graph, plan)["colluders"] for plan in plans[1:]] == [3, 3]
    assert masking_facts(graph)["colluders"] == 0


@functools.cache
def neighbors_of(k):
    """By mask of slots: an adjacency matrix by client, found by the code."""
    graph = all_pairs(2) if k is None else random_neighbors(k + 1, failure=0.999, num_neighbors=k)
    ids = jnp.arange(10, 20)

    @jax.jit
    def adjacency(is_there):
        circle = arranged(graph, KEY, Roster(ids, is_there))
        places = jnp.arange(10)

        def add(step, matrix):
            at, exists = circle.neighbor(places, step)
            exists &= places < circle.count
            return matrix.at[circle.slots[places], circle.slots[at]].add(exists.astype(int))

        zeros = jnp.zeros((10, 10), int)
        counts = circle.num_sending(jnp.ones(10, bool))
        matrix = jax.lax.fori_loop(0, 2 * circle.reach, add, zeros)
        return matrix, jnp.zeros(10, int).at[circle.slots].set(counts)

    return adjacency


@pytest.mark.parametrize("k", [None, 4])
def test_graphs_are_symmetric_and_regular(k):
    for count in range(11):
        is_there = np.random.default_rng(count).permutation(10) < count
        matrix, counts = map(np.asarray, neighbors_of(k)(jnp.asarray(is_there)))
        assert matrix.max(initial=0) <= 1 and not np.any(np.diag(matrix))
        np.testing.assert_array_equal(matrix, matrix.T)
        degree = max(count - 1, 0) if k is None else min(k, max(count - 1, 0))
        np.testing.assert_array_equal(matrix.sum(axis=1), degree * is_there)
        np.testing.assert_array_equal(counts[is_there], degree)


def test_the_bound_on_failure_holds_for_graphs_that_are_counted():
    """All placements of 5 colluders and a drop-out among 16 clients, up to rotation."""
    n, k, t, gone = 16, 6, 5, 0
    bound, threshold = failure_bound(n, k, t, 1)
    near = [{(i + s * o) % n for o in range(1, k // 2 + 1) for s in (1, -1)} for i in range(n)]
    failed, counted = [], []
    for colluders in itertools.combinations(range(1, n), t):
        honest = {*range(1, n)} - {*colluders}
        betrayed = [len(near[i] & {*colluders}) >= threshold for i in {gone} | honest]
        stuck = [len(near[i] - {gone}) < threshold for i in honest]
        windows = [not honest & {(i + j) % n for j in range(k // 2)} for i in range(n)]
        seen, new = set(), {min(honest)}
        while new:
            seen |= new
            new = set().union(*(near[i] for i in new)) & honest - seen
        failed.append(any(betrayed) or any(stuck) or seen != honest)
        counted.append(np.mean(betrayed) + np.mean(stuck) + np.mean(windows))
    np.testing.assert_allclose(bound, n * np.mean(counted), rtol=1e-9)
    assert 0 < np.mean(failed) <= bound < 1
    # Of 1,000 clients, far fewer than all are neighbours.
    few = random_neighbors(1000, colluders=100, dropouts=100)
    assert few.failure <= 2**-40 and few.num_neighbors < 150
    assert failure_bound(1000, few.num_neighbors - 2, 100, 100)[0] > 2**-40
    # No number of neighbours is certain enough for six of eight.
    assert random_neighbors(8, colluders=3, dropouts=3).num_neighbors is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fixed_point(1), "max_clients must be an integer of at least 2"),
        (
            lambda: fixed_point(50, integer_bits=4, fraction_bits=22),
            "fraction_bits must be from -4",
        ),
        (lambda: fixed_point(2**20, integer_bits=12), "integer_bits must be at most 10"),
        (lambda: fixed_point(9, word_bits=16), "word_bits must be one of 32, 64"),
        (
            lambda: masked(
                server.uniform_mean(), fixed_point(2**16 + 1, word_bits=64), all_pairs(9)
            ),
            "encoding.word_bits must be 32 for rounds of 65537 clients, more than 65536",
        ),
        (lambda: all_pairs(1), "num_clients must be an integer of at least 2"),
        (lambda: all_pairs(5, colluders=5), "colluders must be at most 3, so that 2 of the 5"),
        (lambda: all_pairs(5, colluders=2, dropouts=2), "dropouts must leave 2 of 5 clients"),
        (lambda: random_neighbors(9, num_neighbors=9), "num_neighbors must be even"),
        (lambda: random_neighbors(9, num_neighbors=10), "below the 9 clients, got 10"),
        (lambda: random_neighbors(99, colluders=30, num_neighbors=8), "keep the probability"),
        (lambda: masked(server.trimmed_mean(), fixed_point(9), all_pairs(9)), "aggregator must be"),
        (lambda: masked(server.uniform_mean(), fixed_point(8), all_pairs(9)), "the 9 clients"),
        (
            lambda: masked(discrete(), fixed_point(9), all_pairs(8, dropouts=6)),
            "graph must let no round be summed of fewer than the 3 clients",
        ),
        (
            lambda: played("oblivious_mean", (("form", "cancelled"), ("graph", all_pairs(8))))(
                fates_of()
            ),
            "aggregator must send integers alone, since its clients add the noise, got 'float32'",
        ),
        (
            lambda: masked(server.uniform_mean(), fixed_point(9), all_pairs(9), form="hidden"),
            "form must be one of cancelled, masked",
        ),
    ],
)
def test_bad_input_is_refused_before_any_work(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_words_hold_what_they_can_and_cut_off_the_rest():
    from fedjax_dp.server.secure import words

    # The largest exponent with 2 n 2^e < 2^32, found by trying.
    for n in (2, 3, 50, 64, 65, 5000, 2**20):
        most = max(e for e in range(31) if 2 * n * 2**e < 2**32)
        assert fixed_point(n, integer_bits=3).fraction_bits == most - 3
    encoding = fixed_point(4, integer_bits=2, fraction_bits=8)
    x = np.array([-5.0, -4.0, -0.3, 0.0, 1e-9, 0.3, 4.0, 4.1, np.nan, np.inf], np.float32)
    for rounding, by_hand in (("nearest", np.rint), ("toward_zero", np.trunc)):
        coded, was_cut = words.encode(encoding, x, rounding)
        expected = by_hand(np.clip(np.nan_to_num(x, nan=0.0, posinf=4), -4, 4) * 256.0) / 256
        np.testing.assert_array_equal(words.decode(encoding, coded), expected)
        assert was_cut
    assert not words.encode(encoding, x[1:7], "nearest")[1]
    small = {"i": np.array([-3, 7], np.int8), "u": np.array([250], np.uint8), "b": np.array([True])}
    found = words.decode(encoding, words.encode(encoding, small, "nearest")[0])
    np.testing.assert_array_equal(found["i"], [-3, 7])
    assert found["u"] == 250 and found["b"] == 1


def test_the_meter_counts_words():
    """Four parameters, and whether the update was clipped."""

    def bytes_of(mean, bits):
        aggregator = masked(mean, fixed_point(8, word_bits=bits), all_pairs(8))
        sent = aggregator.message(SHAPE, jnp.float32(1))
        return messages.tariff_of(sent).fixed["dense"]

    mean = server.gaussian_mean(1.0, 1.0, 8.0)
    assert bytes_of(mean, 32) == {"uint32": 20}
    assert bytes_of(mean, 64) == {"uint64": 40}
    # Integers, and the count of clients, have words of 32 bits.
    assert bytes_of(discrete(), 32) == bytes_of(discrete(), 64) == {"uint32": 20}


@pytest.mark.parametrize("k", [None, 4])
def test_keys_and_shares_are_counted_message_by_message(k):
    """Rounds of 8, 9 and 2 clients, of which 1, 0 and 1 did not send."""
    graph = all_pairs(8, dropouts=1)._replace(num_neighbors=k)
    exchange, found = mask_messages(graph), {"up": [], "down": []}
    key, share, tag = 32, 66, 16
    for notified, sent in ((8, 7), (9, 9), (2, 1)):
        near = {i: notified - 1 if k is None else min(k, notified - 1) for i in range(notified)}
        up, down = {"keys": 0, "shares": 0}, {"keys": 0, "shares": 0, "bool": 0}
        for i in range(notified):
            up["keys"] += 2 * key
            for _ in range(near[i]):
                down["keys"] += 2 * key
                up["shares"] += share + share + tag
                down["shares"] += share + share + tag
                up["shares"] += share if i < sent else 0
            down["bool"] += int(np.ceil(near[i] / 8)) if i < sent else 0
        found["up"].append(up)
        found["down"].append(down)
    counts = np.arange(3), np.array([8, 9, 2]), np.array([7, 9, 1])
    for direction, expected in found.items():
        counted = getattr(exchange, direction)(*counts)
        assert counted.keys() == expected[0].keys()
        for name, by_round in counted.items():
            np.testing.assert_array_equal(by_round, [each[name] for each in expected])


@telling
def test_noise_is_enough_when_colluders_subtract_theirs():
    """A mean of 4,096 squares errs by 2.2 %; with two more colluders a third is missing."""
    size, stddev = 4096, 2.0
    plan = distributed.make_plan(size, 1.0, stddev, num_clients=8, colluders=2)
    mechanism = distributed.discrete_mechanism(jax.ShapeDtypeStruct((size,), jnp.float32), plan)
    encode = jax.jit(lambda key: mechanism.encode(KEY, key, jnp.zeros(size)))
    messages = [np.asarray(encode(key)) for key in jax.random.split(KEY, 8)]
    for colluders, share in ((2, 1.0), (4, 4 / 6)):
        left = np.sum(messages[colluders:], axis=0, dtype=np.uint32)
        noise = np.asarray(mechanism.decode(KEY, jnp.asarray(left)), np.float64)
        np.testing.assert_allclose(np.mean(noise**2) / stddev**2, share, atol=0.1)
    plan = distributed.make_plan(4, 4.0, 1.0, num_clients=8, colluders=2)
    claim = server.discrete_mean(SHAPE, plan, 8).claim
    assert (plan.num_shares, plan.shares_in_sum, claim.min_participants) == (6, 8, 8)
    with pytest.raises(ValueError, match="colluders must leave 2 of the 8 shares of noise, got 7"):
        distributed.make_plan(4, 4.0, 1.0, num_clients=8, colluders=7)
    with pytest.raises(ValueError, match=r"plan\.colluders must be 0 if cohorts vary"):
        server.discrete_mean(SHAPE, plan, 8.0, varies=True)
    with pytest.raises(ValueError, match=r"plan\.shares_in_sum must be at most the cohort of 7"):
        server.discrete_mean(SHAPE, plan, 7)


@pytest.mark.parametrize("form", later(["masked", "cancelled"], but=["masked"], mark=telling))
def test_agreed_seeds_are_an_argument_of_the_compiled_round(form):
    """Programs of other seeds have the same text, which JAX may keep on disk."""
    pytest.importorskip("cryptography")
    model = make_model()
    trainer = plain_trainer(model)
    joins = participation(full_participation(), NUM_CLIENTS)

    def text_and_seeds():
        keys = agreed_keys(NUM_CLIENTS)
        graph = all_pairs(NUM_CLIENTS)
        mean = masked(server.uniform_mean(), fixed_point(NUM_CLIENTS), graph, keys=keys, form=form)
        bound = federation(fedavg(model, trainer, aggregator=mean), make_data(), joins)
        seeds = [part.constants for part in bound.facts.frozen]
        step = one_round(bound, Layout(chunk=2), seeds, Count()).step
        arguments = bound.init(KEY), typed(bound.hyper), examples_of(make_data()), None, KEY
        return step.lower(*arguments, seeds).as_text(), seeds

    (text, seeds), (other, _) = text_and_seeds(), text_and_seeds()
    assert text == other
    sizes = [[x.shape for x in part] for part in seeds]
    assert sizes == [[(NUM_CLIENTS, NUM_CLIENTS, 2), (NUM_CLIENTS, 2)]] * (form == "masked")
