"""Personal models and tickets: the specification's oracles, and what is refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from aggregating import closed, sent_by
from cases import CASES, JUMP_BY_ALL, VARIANTS
from marks import floats, later, slow, telling
from references import PLAIN
from small_problem import ROUNDS, make_data, make_model, normed

from fedjax_dp import algorithms
from fedjax_dp.algorithms import Tickets
from fedjax_dp.algorithms.base import Stages
from fedjax_dp.clients import cast, dp_sgd_trainer, local_trainer, prune
from fedjax_dp.clients.base import LocalConfig, Objective
from fedjax_dp.clients.pruning import _share_of, weights_of
from fedjax_dp.core import masks
from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.messages import received
from fedjax_dp.core.registry import grouped
from fedjax_dp.data import (
    FederatedData,
    fixed_size,
    full_participation,
    full_participation_first,
    participation,
)
from fedjax_dp.engine import evaluator, simulation
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.federation import init_key
from fedjax_dp.engine.record import Fate
from fedjax_dp.models import Model, kinds
from fedjax_dp.privacy.claims import RecordClaim
from fedjax_dp.server import sparse_mean, uniform_mean

KEY = jax.random.key(0)
A = np.array([-2.0, 0.0, 1.0, 5.0])


def points() -> tuple[Model, FederatedData]:
    """Clients that hold one number each, and a model that is one number: ½ (x − a)²."""
    model = Model.from_functions(
        lambda key: jnp.zeros(()),
        lambda params, x: params + 0 * x,
        loss=lambda outputs, batch: 0.5 * (outputs - batch["y"]) ** 2,
        name="point",
    )
    made = [{"x": np.zeros(1, np.float32), "y": np.float32([a])} for a in A]
    return model, FederatedData.from_clients(made)


def whole_steps(model, num_steps=1, learning_rate=0.3, **options):
    config = LocalConfig(learning_rate=learning_rate, batch_size=1, num_steps=num_steps)
    return local_trainer(model, config, **options)


def ran(algorithm, data, rounds, validation=None, joins=None):
    joins = joins or participation(full_participation(), data.num_clients)
    sim = simulation(algorithm, data, joins, PLAIN, validation=validation)
    state, record, info = sim.run(sim.init(KEY), KEY, rounds)
    return state, record, info


@pytest.mark.parametrize(
    ("strength", "order"),
    later(
        [(0.5, "sequential"), (20.0, "interleaved"), (0.0, "sequential")],
        but=[(20.0, "interleaved")],
        mark=telling,
    ),
)
def test_ditto_stands_between_its_optimum_and_the_shared_one(strength, order):
    model, data = points()
    trainer = whole_steps(model, learning_rate=0.04)
    algorithm = algorithms.ditto(model, trainer, strength=strength, order=order)
    state, _, _ = ran(algorithm, data, 400)
    np.testing.assert_allclose(state.server.params, A.mean(), atol=1e-5)
    expected = (A + strength * A.mean()) / (1 + strength)
    np.testing.assert_allclose(state.clients, expected, atol=1e-5)


def test_mr_mtl_stands_between_its_optimum_and_the_mean():
    model, data = points()
    algorithm = algorithms.mr_mtl(model, whole_steps(model, 3), num_clients=4, strength=0.5)
    state, _, _ = ran(algorithm, data, 100)
    np.testing.assert_allclose(state.server.mean, A.mean(), atol=1e-5)
    np.testing.assert_allclose(state.clients, (A + 0.5 * A.mean()) / 1.5, atol=1e-5)


@telling
@pytest.mark.parametrize(("are_alike", "size"), [(True, 2), pytest.param(False, 60, marks=telling)])
def test_ditto_chooses_the_strength_that_suits_its_validation_data(are_alike, size):
    """Alike, with little data: the shared model is right. Opposite, with much: their own is."""
    rng = np.random.default_rng(0)
    sign = np.ones(8) if are_alike else (-1.0) ** np.arange(8)

    def clients(size):
        x = rng.normal(size=(8, size, 3)).astype(np.float32)
        signal = sign[:, None] * (x @ np.array([2.0, -1.0, 1.0]))
        made = zip(x, (signal > 0).astype(np.float32), strict=True)
        return FederatedData.from_clients([{"x": a, "y": b} for a, b in made])

    model = make_model()
    trainer = local_trainer(model, LocalConfig(learning_rate=0.5, batch_size=4, num_epochs=4))
    # At strength 2 and rate 0.5 a step goes all the way to the shared model.
    algorithm = algorithms.ditto(model, trainer, strengths=[0.0, 2.0])
    _, _, info = ran(algorithm, clients(size), 12, clients(400))
    assert (np.mean(info.clients["strength"][-4:]) > 1) == are_alike


def alive_after(size, rate, times, target=None, values=None):
    """Alive weights after each pruning, and the last mask."""
    values = jnp.asarray(np.random.default_rng(1).normal(size=size), jnp.float32)
    step = jax.jit(lambda m: prune(m, {"w": values}, rate, target))
    mask, alive = {"w": jnp.ones(size, bool)}, []
    for _ in range(times):
        left = step(mask)
        assert not np.any(np.asarray(left["w"]) & ~np.asarray(mask["w"])), "a mask never grows"
        mask = left
        alive.append(int(masks.num_alive(mask)))
    return alive, np.asarray(mask["w"]), np.asarray(values)


@pytest.mark.parametrize(
    ("rate", "times", "share"),
    [(0.1, 22, 0.902), (0.1, 7, 0.522), (0.2, 4, 0.59), (0.2, 11, 0.914)],
)
def test_prunings_add_up_as_the_papers_say(rate, times, share):
    alive, mask, values = alive_after(10_000, rate, times)
    by_hand = 10_000
    for found in alive:
        # Whole numbers, since 0.1 and 0.2 are none in floats.
        by_hand -= by_hand * round(10 * rate) // 10
        assert found == by_hand
    assert round(1 - (1 - rate) ** times, 3) == share
    # Less than one weight a pruning is left over, and a share of it pruned in the next.
    assert -1e-6 < by_hand - 10_000 * (1 - rate) ** times < 1 / rate
    np.testing.assert_array_equal(mask, np.argsort(np.argsort(np.abs(values))) >= 10_000 - by_hand)


def test_pruning_stops_exactly_at_its_target():
    alive, _, _ = alive_after(1000, 0.1, 30, target=0.9)
    assert alive[20] > 100 and alive[23:] == [100] * 7


@pytest.mark.parametrize(
    ("size", "percent"),
    later(
        [(900, 13), (180, 65), (75, 84), (100, 53), (11_164_352, 90), (2**24, 31)],
        but=[(900, 13), (100, 53), (2**24, 31)],
        mark=telling,
    ),
)
def test_as_many_weights_go_as_on_paper(size, percent):
    """By whole numbers: shares that are no floats, and more weights than floats can count."""
    alive = jnp.int32(size)
    assert int(_share_of(alive, percent / 100)) == size * percent // 100
    assert int(jax.jit(_share_of)(alive, jnp.float32(percent / 100))) == size * percent // 100
    mask = {"w": jnp.ones(min(size, 1000), bool)}
    values = {"w": jnp.arange(1.0, min(size, 1000) + 1)}
    left = prune(mask, values, percent / 100)
    assert int(masks.num_alive(left)) == min(size, 1000) - min(size, 1000) * percent // 100


def test_shares_of_any_count_are_exact():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 2**30, 4000)
    millionths = rng.integers(0, 10**6, 4000)
    found = jax.vmap(_share_of)(jnp.asarray(counts, jnp.int32), jnp.asarray(millionths / 1e6))
    np.testing.assert_array_equal(found, counts * millionths // 10**6)


def test_of_equal_weights_the_first_go_and_the_last_alive_stays():
    mask = {"w": jnp.array([True, True, False, True, True, True])}
    params = {"w": jnp.array([1.0, -1.0, 0.0, 1.0, 1.0, -1.0])}
    left = prune(mask, params, 0.6)
    np.testing.assert_array_equal(left["w"], [False, False, False, False, True, True])
    for _ in range(5):
        left = prune(left, params, 0.9)
    np.testing.assert_array_equal(left["w"], [False, False, False, False, False, True])
    lone = {"w": jnp.array([False, True, False])}
    np.testing.assert_array_equal(prune(lone, {"w": jnp.zeros(3)}, 0.99)["w"], lone["w"])


def test_weights_are_compared_within_a_tensor_or_with_all():
    params = {"a": jnp.array([1.0, 2.0, 3.0, 4.0]), "b": jnp.array([10.0, 20.0, 30.0, 40.0])}
    mask = masks.full(params)
    by_tensor = prune(mask, params, 0.5)
    np.testing.assert_array_equal(by_tensor["a"], [False, False, True, True])
    np.testing.assert_array_equal(by_tensor["b"], [False, False, True, True])
    together = prune(mask, params, 0.5, scope="global")
    # Four of eight would be all of the first; its largest stays.
    np.testing.assert_array_equal(together["a"], [False, False, False, True])
    np.testing.assert_array_equal(together["b"], [False, True, True, True])
    capped = prune(mask, params, 0.5, 0.25, scope="global")
    assert int(masks.num_alive(capped)) == 6


def test_tensors_of_any_number_are_pruned_by_the_same_loops():
    """Each as one by one; equal weights of one tensor change no other."""
    rng = np.random.default_rng(0)
    params = {"ties": jnp.asarray(np.round(rng.normal(size=(8, 9)), 1), jnp.float32)}
    params |= {name: jnp.asarray(rng.normal(size=5), jnp.float32) for name in "ab"}
    mask = jax.tree.map(lambda x: jnp.abs(x) > 0.1, params)
    left = prune(mask, params, 0.4)
    for name, kept in mask.items():
        size = np.where(kept, np.abs(params[name]), np.inf).ravel()
        gone = np.argsort(size, kind="stable")[: int(kept.sum()) * 2 // 5]
        expected = np.array(kept).ravel()
        expected[gone] = False
        np.testing.assert_array_equal(left[name].ravel(), expected)

    def num_loops(names):
        part = [{name: tree[name] for name in names} for tree in (mask, params)]
        jaxpr = str(jax.make_jaxpr(lambda m, p: prune(m, p, 0.4))(*part))
        return jaxpr.count(" = while[") + jaxpr.count(" = scan[")

    assert num_loops(["ties"]) == num_loops(params) > 0


def mean_of(updates, is_masked=True):
    aggregator = sparse_mean(is_masked=is_masked)
    contributions = [aggregator.contribute((), {}, update, sent_by()) for update in updates]
    total = jax.tree.map(lambda *x: sum(x), *contributions)
    return aggregator.combine((), {}, total, closed())[1]


def test_the_mean_of_tickets_is_over_clients_that_keep_a_weight():
    updates = [
        Sparse({"w": jnp.array([2.0, 0.0, 0.0])}, {"w": jnp.array([True, False, False])}),
        Sparse({"w": jnp.array([4.0, 6.0, 0.0])}, {"w": jnp.array([True, True, False])}),
    ]
    masked, plain = mean_of(updates), mean_of(updates, is_masked=False)
    np.testing.assert_array_equal(masked.values["w"], [3, 6, 0])
    np.testing.assert_array_equal(plain.values["w"], [3, 3, 0])
    np.testing.assert_array_equal(masked.mask["w"], [True, True, False])


def trainer_of(model, **options):
    return local_trainer(
        model, LocalConfig(learning_rate=0.2, batch_size=4, num_epochs=1), **options
    )


SIZES = (7, 6, 12, 5, 9, 4)


def halves(seed=0):
    return make_data(SIZES, seed=seed)


def joined_by(count):
    return participation(fixed_size(), len(SIZES), count)


@floats
@telling
@pytest.mark.parametrize("make", [normed, make_model])
def test_without_pruning_pull_and_momentum_fed_ltn_is_fedbn(make):
    """And FedAvg where there is no batch norm."""
    model = make()
    options = {} if make is normed else {"prunable": "w"}
    tickets = Tickets(target=0.0, strength=0.0, mixing=1.0, momentum=0.0, **options)
    ltn = algorithms.fed_ltn(model, trainer_of(model), tickets=tickets)
    others = [algorithms.fedbn(model, trainer_of(model), aggregator=uniform_mean())]
    if make is make_model:
        others.append(algorithms.fedavg(model, trainer_of(model), aggregator=uniform_mean()))
    state, _, _ = ran(ltn, halves(), 4, halves(1), joined_by(3))
    for other in others:
        expected, _, _ = ran(other, halves(), 4, None, joined_by(3))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            state.server.params,
            expected.server.params,
        )
    assert others[-1].client_state is None or make is normed


def test_the_server_goes_to_a_mean_that_stays_the_same():
    """τ = λ = ½ on a mean of 1: 0.5, 0.875, 1.03125, …"""
    model = make_model()
    algorithm = algorithms.fed_ltn(model, trainer_of(model), tickets=Tickets(prunable="w"))
    ones = {"b": jnp.ones(()), "w": jnp.ones(3)}
    server = algorithm.init(KEY)._replace(
        params=jax.tree.map(jnp.zeros_like, ones), change=jax.tree.map(jnp.zeros_like, ones)
    )
    aggregate, seen = Sparse(ones, masks.full(ones)), []
    for _ in range(60):
        server, _ = algorithm.server_step(server, aggregate, algorithm.hyper, None, KEY)
        seen.append(float(server.params["w"][0]))
    np.testing.assert_allclose(seen[:3], [0.5, 0.875, 1.03125], rtol=1e-6)
    np.testing.assert_allclose(seen[-1], 1.0, atol=1e-6)


def of_norm(params):
    return [params["batch_stats"]["BatchNorm_0"], params["params"]["BatchNorm_0"]]


def test_batch_norm_that_is_shared_is_averaged_as_it_is():
    """A look-ahead would bring variances below 0."""
    model = normed()
    tickets = Tickets(home="params/Dense_1", mixing=0.5, momentum=1.5)
    algorithm = algorithms.fed_ltn(model, trainer_of(model), tickets=tickets)
    server = algorithm.init(KEY)
    sent = jax.tree.map(lambda x: x, server.change)
    ones = jax.tree.map(jnp.ones_like, sent)
    for value in (0.5, 0.25, 0.01):
        aggregate = Sparse(jax.tree.map(lambda x, v=value: v * x, ones), masks.full(ones))
        server, _ = algorithm.server_step(server, aggregate, algorithm.hyper, None, KEY)
        for leaf in jax.tree.leaves(of_norm(server.params)):
            np.testing.assert_allclose(leaf, value, rtol=1e-6)
    assert np.any(np.asarray(server.params["params"]["Dense_0"]["bias"]) != np.float32(0.01))


@telling
def test_statistics_of_a_body_are_those_of_its_own_fit():
    """They are the same however long heads are fitted, where the body's weights stay."""
    model = normed()
    config = LocalConfig(learning_rate=0.2, batch_size=4, num_epochs=1)
    made = {}
    for epochs in (0, 3):
        algorithm = algorithms.fedrep(
            model, local_trainer(model, config), head="params/Dense_1", head_epochs=epochs
        )
        body_alone = algorithm.hyper._replace(
            local=algorithm.hyper.local._replace(learning_rate=0.0)
        )
        state, _, _ = ran(algorithm.with_hyper(body_alone), halves(), 2)
        made[epochs] = state.server.params["batch_stats"]
    # At a rate of 0 both runs see one and the same body; fits of the head must not move it on.
    chex.assert_trees_all_close(made[0], made[3], rtol=1e-5)
    moved = np.abs(np.asarray(made[3]["BatchNorm_0"]["var"]) - 1.0).max()
    assert moved > 0.05


@telling
def test_a_rate_that_takes_nothing_rewinds_nothing():
    model = make_model()
    states = []
    for threshold in (1e-3, 0.999):
        algorithm = algorithms.lottery_fl(
            model, trainer_of(model), prune_rate=0.2, accuracy_threshold=threshold, prunable="w"
        )
        states.append(ran(algorithm, halves(), 3, halves(1))[0])
    # A fifth of three weights is none: as if no client were good enough.
    chex.assert_trees_all_equal(states[0].server, states[1].server)


@telling
def test_a_personal_model_that_diverges_is_put_back():
    """The shared one keeps training, and no strength that diverges is chosen."""
    model = make_model()
    config = LocalConfig(learning_rate=1.0, batch_size=4, num_epochs=60)
    for options in ({"strength": 1e4}, {"strengths": [1e4, 1e5]}):
        algorithm = algorithms.ditto(model, local_trainer(model, config), **options)
        state, record, _ = ran(algorithm, halves(), 1, halves(1))
        assert np.all(record.fate == Fate.CONTRIBUTED)
        start = jax.jit(algorithm.init)(init_key(KEY))
        for own, first in zip(
            jax.tree.leaves(state.clients), jax.tree.leaves(start.params), strict=True
        ):
            np.testing.assert_array_equal(own, np.broadcast_to(np.asarray(first), own.shape))
    both = algorithms.ditto(model, local_trainer(model, config), strengths=[1e4, 0.0])
    _, record, info = ran(both, halves(), 1, halves(1))
    assert np.all(record.fate == Fate.CONTRIBUTED)
    np.testing.assert_array_equal(info.clients["strength"], 0.0)


@telling
def test_batch_norm_at_home_is_private():
    model = normed()
    algorithm = algorithms.fedbn(model, trainer_of(model))
    data, joins = halves(), joined_by(2)
    sim = simulation(algorithm, data, joins, PLAIN)
    state = jax.tree.map(np.array, sim.init(KEY))
    rng = np.random.default_rng(0)
    state = state._replace(
        clients=jax.tree.map(
            lambda x: (x + 0.1 * np.abs(rng.normal(size=x.shape))).astype(x.dtype), state.clients
        )
    )
    assert sorted(jax.tree.leaves(jax.tree.map(lambda x: x.shape[1:], state.clients))) == [6] * 4
    after, record, _ = sim.run(state, KEY, 1)
    drawn = sorted(record.clients[0])
    others = [i for i in range(len(SIZES)) if i not in drawn]
    for old, new in zip(
        jax.tree.leaves(state.clients), jax.tree.leaves(after.clients), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(new)[others], old[others])
        assert np.all(np.any(np.asarray(new)[drawn] != old[drawn], axis=1))
    # What others keep at home reaches no one else: other rows of theirs change nothing.
    spoiled = jax.tree.map(np.copy, state.clients)
    jax.tree.map(lambda x: x.__setitem__(others, 7.0), spoiled)
    again, _, _ = sim.run(state._replace(clients=spoiled), KEY, 1)
    chex.assert_trees_all_equal(again.server, after.server)
    home = kinds.home(jax.eval_shape(model.init, KEY), "batch_norm", model.buffer_keys)
    jax.tree.map(
        np.testing.assert_array_equal, home.own(after.server.params), home.own(state.server.params)
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(functools.partial(optax.sgd, momentum=0.9), marks=telling),
        pytest.param(functools.partial(optax.adamw, weight_decay=0.3), marks=slow),
        pytest.param(functools.partial(optax.noisy_sgd, seed=1), marks=slow),
    ],
)
def test_tickets_stay_zero_where_they_are_pruned_whatever_trains_them(optimizer):
    model = normed()
    trainer = trainer_of(model, optimizer=optimizer)
    tickets = Tickets(accuracy_threshold=1e-3, prune_rate=0.5)
    algorithm = algorithms.fed_ltn(model, trainer, tickets=tickets)
    state, _, info = ran(algorithm, halves(), 3, halves(1))
    weights = weights_of(model, None, kinds.home(jax.eval_shape(model.init, KEY), "batch_norm"))
    server, own = state.server, state.clients
    sizes = [x.size for x in jax.tree.leaves(weights)]
    assert info.clients["pruned_share"][-1] > 0.5 and sum(sizes) == 24
    one = jax.tree.map(lambda x: jnp.asarray(x)[0], own)
    ticket = masks.parted(algorithm.views.personal(server, one, None))[0]
    mask = masks.unpacked(one.mask, weights)
    for m, x in zip(
        jax.tree.leaves(mask),
        [ticket["params"][n]["kernel"] for n in ("Dense_0", "Dense_1")],
        strict=True,
    ):
        assert np.all(np.asarray(x)[~np.asarray(m)] == 0) and np.any(~np.asarray(m))
    # What is sent, before an aggregator masks it again.
    examples = jax.device_put(examples_of(halves(), halves(1)))
    hyper = typed(algorithm.hyper)

    @jax.jit
    def update_of(i):
        own_row = jax.tree.map(lambda x: jnp.asarray(x)[i], own)
        client = examples.client(i)
        message = received(algorithm.message_to(server, own_row, client))
        return algorithm.client(message, own_row, client, hyper.of_client(i), KEY).update

    for i in range(len(SIZES)):
        sent = update_of(i)
        for m, x in zip(jax.tree.leaves(sent.mask), masked_of(sent), strict=True):
            assert np.all(np.asarray(x)[~np.asarray(m)] == 0) and np.any(np.asarray(x) != 0)
    # Of training itself, which the model of a client no longer shows.
    client = jax.device_put(examples_of(halves())).client(2)
    start = model.init(KEY)
    config = trainer.config.row(2)
    left = jax.jit(
        lambda p: trainer.train(p, client, config, KEY, objective=Objective(mask=mask)).params
    )(start)
    for m, old, new in zip(
        jax.tree.leaves(mask),
        *([t["params"][n]["kernel"] for n in ("Dense_0", "Dense_1")] for t in (start, left)),
        strict=True,
    ):
        m, old, new = map(np.asarray, (m, old, new))
        np.testing.assert_array_equal(new[~m], old[~m])
        assert np.all(new[m] != old[m])


def masked_of(sent):
    """Lists the arrays of a message that have a mask."""
    pairs = jax.tree.map(
        lambda m, x: None if m is None else x, sent.mask, sent.values, is_leaf=lambda m: m is None
    )
    return jax.tree.leaves(pairs)


@telling
def test_figures_of_tickets_are_of_clients_with_data():
    """Four of six have none: they prune nothing, and are not counted."""
    model, sizes = make_model(), (8, 8, 0, 0, 0, 0)
    tickets = Tickets(accuracy_threshold=1e-3, prune_rate=0.4, prunable="w")
    algorithm = algorithms.fed_ltn(model, trainer_of(model), tickets=tickets)
    data, second = (make_data(sizes, seed=seed) for seed in (0, 1))
    _, record, info = ran(algorithm, data, 1, second)
    assert np.all(record.fate == Fate.CONTRIBUTED)
    # One of three weights, which is what 40 % of three come to.
    np.testing.assert_allclose(info.clients["pruned_share"], 1 / 3, rtol=1e-6)


def test_nothing_may_stay_at_home():
    """Batch norm is then shared, averaged, and part of a model that can be used."""
    model = normed()
    ltn = algorithms.fed_ltn(model, trainer_of(model), tickets=Tickets(home=[]))
    assert ltn.views.shared.is_whole and not jax.tree.leaves(
        ltn.client_state.init(ltn.init(KEY)).home
    )
    kept = algorithms.fed_ltn(model, trainer_of(model))
    assert not kept.views.shared.is_whole and jax.tree.leaves(
        kept.client_state.init(kept.init(KEY)).home
    )
    everything = algorithms.fedbn(model, trainer_of(model), home=[])
    assert everything.client_state is None and everything.views.shared.is_whole


def test_a_model_without_its_part_at_home_is_not_evaluated():
    model = make_model()
    joins = participation(full_participation(), len(SIZES))
    for make, is_there in ((algorithms.fedper, False), (algorithms.ditto, True)):
        options = {} if is_there else {"head": "b"}
        sim = simulation(make(model, trainer_of(model), **options), halves(), joins, PLAIN)
        assert (sim.federation.shared is not None) == is_there
        assert (sim.federation.views.shared is not None) == is_there
        of = evaluator(sim, model, halves(), whole=halves(1), clients=halves(2))
        assert of.is_personal and (of.whole is not None) == is_there


@telling
def test_those_whose_accuracy_stays_below_never_prune():
    model = make_model()
    for make in (algorithms.lottery_fl, algorithms.fed_ltn):
        options = grouped(make, {"accuracy_threshold": 0.999, "prunable": "w"})
        algorithm = make(model, trainer_of(model), **options)
        _, _, info = ran(algorithm, halves(), 2, halves(1))
        np.testing.assert_array_equal(info.clients["pruned_share"], 0)


@telling
def test_after_a_jump_all_go_on_from_the_best():
    model = make_model()
    algorithm = algorithms.jump_start(
        model,
        trainer_of(model),
        jump_rounds=2,
        jump_target=0.5,
        tickets=Tickets(prunable="w", accuracy_threshold=0.3, prune_rate=0.4),
    )
    joins = participation(full_participation_first(2, fixed_size()), len(SIZES), 2)
    sim = simulation(algorithm, halves(), joins, PLAIN, validation=halves(1))
    first, record, _ = sim.run(sim.init(KEY), KEY, 1)
    first = jax.tree.map(np.array, first)
    start = jax.tree.map(np.array, sim.init(KEY))
    chex.assert_trees_all_equal(first.server, start.server)
    state, record, _ = sim.run(sim.init(KEY), KEY, 2)
    assert np.all(record.clients >= 0), "all clients join the first rounds"
    best = int(np.argmax(state.clients.accuracy))
    np.testing.assert_array_equal(
        state.server.inner.params["w"], np.asarray(state.clients.params["w"])[best]
    )
    is_kept = np.asarray(state.clients.params["w"])[best] != 0
    assert 0 < is_kept.sum() < is_kept.size
    for i in range(len(SIZES)):
        own = masks.parted(sim.federation.personal(state, examples_of(halves()).client(i)))[0]
        np.testing.assert_array_equal(np.asarray(own["w"]) != 0, is_kept)
    _, record, _ = sim.run(state, KEY, 1)
    assert np.sum(record.clients >= 0) == 2


@telling
@pytest.mark.parametrize("placement", ["device", "disk"])
def test_a_ticket_may_be_chosen_by_the_data_of_all(placement, tmp_path):
    """By hand, where the best at home is not the best at all clients."""
    execution = PLAIN._replace(placement=placement, folder=tmp_path)
    chosen, key = {}, jax.random.key(4)
    for case in (JUMP_BY_ALL, CASES["jump_start"]):
        sim = case.simulation(execution)
        initial = jax.device_get(sim.init(key))
        state, _, _ = sim.run(sim.init(key), key, ROUNDS)
        if placement == "disk":
            all_clients = range(len(sim.sizes))
            initial, state = (
                s._replace(clients=s.clients.many(all_clients)) for s in (initial, state)
            )
        found, expected = case.observe(state), case.expect(case.run_of(initial, key))
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
        chosen[case is JUMP_BY_ALL] = found["params"]
    by_all, by_own = chosen[True], chosen[False]
    assert np.abs(by_all - by_own).max() > 0.02


@pytest.mark.parametrize(
    "name",
    later(
        VARIANTS, soon=set(VARIANTS) - {"r_dpcfl, with a first batch of 8, and a choice at the end"}
    ),
)
def test_variants_agree_with_numpy(name):
    case, key = VARIANTS[name], jax.random.key(4)
    found = []
    for each in (case, CASES[case.name]):
        sim = each.simulation(PLAIN)
        initial = jax.device_get(sim.init(key))
        state, _, _ = sim.run(sim.init(key), key, ROUNDS)
        found.append(each.observe(state))
        if each is case:
            expected = each.expect(each.run_of(initial, key))
            for part in expected:
                np.testing.assert_allclose(found[0][part], expected[part], atol=1e-5, err_msg=part)
    # Else the options would not have been read.
    assert max(np.abs(found[0][part] - found[1][part]).max() for part in expected) > 1e-3


@telling
def test_scores_need_data_and_are_refused_under_privacy_of_records():
    model = make_model()

    def step(server, clients, hyper, key):
        clients.scores(0)
        return server

    base = algorithms.ditto(model, trainer_of(model))
    asks = base._replace(stages=Stages(host_steps=(algorithms.HostStep(1, step),)))
    with pytest.raises(ValueError, match="score must be declared by the host step"):
        ran(asks, halves(), 1, halves(1))
    scoring = algorithms.HostStep(1, step, score=lambda row, validation: jnp.float32(0))
    with pytest.raises(ValueError, match="validation must be given for a host step"):
        ran(base._replace(stages=Stages(host_steps=(scoring,))), halves(), 1)
    private_base = algorithms.ditto(model, private(model))
    with pytest.raises(ValueError, match=r"host_steps\.score must be None under privacy of rec"):
        ran(private_base._replace(stages=Stages(host_steps=(scoring,))), halves(), 1, halves(1))


def test_records_pay_for_each_training():
    """Ditto and FedRep read the data twice a round, FedBN and FedPer once."""
    model = make_model()
    config = LocalConfig(
        learning_rate=0.1, batch_size=2, num_steps=3, clip_norm=1.0, noise_multiplier=1.0
    )
    trainer = dp_sgd_trainer(model, config)
    (one,) = trainer.claim.events
    once = one(8, config)

    def paid(algorithm):
        claim = algorithm.claims.record
        assert isinstance(claim, RecordClaim)
        return claim.at(0)(8, algorithm.hyper)

    assert paid(algorithms.fedper(model, trainer, head="b")) == once
    ditto = paid(algorithms.ditto(model, trainer, personal_epochs=2))
    rep = paid(algorithms.fedrep(model, trainer, head="b", head_epochs=2))
    longer = one(8, config._replace(num_steps=None, num_epochs=2))
    assert longer.count == 8 and once.count == 3
    assert ditto.events == [once, longer] and rep.events == [longer, once]


def cast_trainer(model):
    return trainer_of(model, update_transforms=[cast("bfloat16")])


def private(model):
    config = LocalConfig(batch_size=2, clip_norm=1.0, noise_multiplier=1.0)
    return dp_sgd_trainer(model, config)


W = {"prunable": "w"}
TRANSFORMED = "trainer must have no update transforms"
REFUSED = [
    ("fed_ltn", trainer_of, {"momentum": 2.0, **W}, r"momentum must be below 1 / \(1 - mixing\)"),
    (
        *("fed_ltn", trainer_of, {"momentum": 1.6, "looks_ahead": False, **W}),
        r"momentum must be below \(1 \+ 1 / \(1 - mixing\)\) / 2",
    ),
    ("fed_ltn", trainer_of, {"prunable": ["w", "v"]}, "name weights of the model, got 'v'"),
    ("fed_ltn", cast_trainer, W, TRANSFORMED),
    ("fed_ltn", private, W, "must be non-private: pruning depends on the exact accuracy"),
    ("lottery_fl", trainer_of, {}, "prunable must name weights of logistic"),
    ("lottery_fl", cast_trainer, W, TRANSFORMED),
    ("mr_mtl", cast_trainer, {"num_clients": 6}, TRANSFORMED),
    ("fedper", trainer_of, {"head": "ww"}, "did you mean 'w'"),
    ("fedper", trainer_of, {"head": []}, "head must match a parameter"),
    ("fedrep", trainer_of, {"head": "batch_norm"}, "head must match a parameter"),
    ("fedbn", trainer_of, {"home": ["b", "w"]}, "home must leave one of"),
    ("fedbn", trainer_of, {"home": lambda path, leaf: False}, "home must match one of"),
    ("ditto", trainer_of, {"strengths": []}, "strengths must hold at least one"),
    ("ditto", private, {"order": "interleaved"}, "must be non-private: two gradients of one batch"),
]


@pytest.mark.parametrize(("name", "make_trainer", "options", "message"), REFUSED)
def test_what_cannot_be_meant_is_refused(name, make_trainer, options, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        make = getattr(algorithms, name)
        make(model, make_trainer(model), **grouped(make, options))


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="model must keep examples apart"):
        algorithms.fedbn(normed(), private(normed()))
    model = make_model()
    with pytest.raises(ValueError, match="model must have an accuracy"):
        algorithms.jump_start(
            model._replace(correct_fn=None), trainer_of(model), tickets=Tickets(**W)
        )


def test_clients_without_validation_data_are_named():
    model = make_model()
    algorithm = algorithms.lottery_fl(model, trainer_of(model), prunable="w")
    joins = participation(full_participation(), len(SIZES))
    with pytest.raises(ValueError, match="validation must be given for lottery_fl"):
        simulation(algorithm, halves(), joins)
    lacking = make_data((3, 3, 0, 3, 3, 3))
    with pytest.raises(ValueError, match="got 'none of client 2'"):
        simulation(algorithm, halves(), joins, validation=lacking)
    with pytest.raises(ValueError, match=r"validation must hold at least one .*, got 0"):
        simulation(algorithm, halves(), joins, validation=make_data((0,) * 6))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda e: {**e, "x": e["x"][:, :2]}, r"'x': 'float32\[2\]', 'y'"),
        (lambda e: {"y": e["y"]}, r"got \{'y': 'float32\[\]'\}"),
        (lambda e: {**e, "y": e["y"].astype(np.int32)}, r"'y': 'int32\[\]'\}"),
    ],
)
def test_a_second_split_has_the_form_of_the_first(change, found):
    model, other = make_model(), halves(1)
    algorithm = algorithms.lottery_fl(model, trainer_of(model), prunable="w")
    odd = FederatedData(change(dict(other.examples)), other.offsets)
    rule = r"validation must hold examples of the shapes and types of data, \{'x': 'float32\[3\]'.*"
    with pytest.raises(ValueError, match=rule + found):
        simulation(algorithm, halves(), participation(full_participation(), 6), validation=odd)


def test_tickets_alone_are_averaged_as_tickets():
    model = make_model()
    algorithm = algorithms.fedavg(model, trainer_of(model), aggregator=sparse_mean())
    with pytest.raises(ValueError, match=r"updates must be Sparse .*, got 'dict'"):
        ran(algorithm, halves(), 1)


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        ({"w": np.ones(2, bool), "b": None}, r"be bool\[3\] at w, got 'bool\[2\]'"),
        ({"w": np.ones(3, np.float32), "b": None}, r"be bool\[3\] at w, got 'float32\[3\]'"),
        ({"w": np.ones(3, bool)}, "have the paths of params"),
        ({"w": None, "b": None}, "hold an array"),
    ],
)
def test_a_mask_is_one_of_the_weights(mask, rule):
    with pytest.raises(ValueError, match=f"mask must {rule}"):
        prune(mask, {"w": jnp.ones(3), "b": jnp.ones(())}, 0.5)
