"""Servers side by side: each as if alone until they exchange models, and what is refused."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from small_problem import (
    NUM_CLIENTS,
    SIZES,
    assert_same_state,
    make_data,
    make_model,
    plain_trainer,
    snapshot,
)
from timed import KEY, TIMED, all_join, assert_equal, some
from timed import algorithm as small_algorithm

from fedjax_dp.algorithms import dp_fedavg, fedavg, scaffold
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import full_participation
from fedjax_dp.engine import (
    ExecutionConfig,
    Fate,
    Layout,
    PrivacyAccounting,
    clocked,
    examples_of,
    federation,
    several_servers,
    simulation,
)
from fedjax_dp.server import gaussian_mean, secure, uniform_mean

# Of clients 0 to 5.
SERVERS = np.array([0, 1, 0, 1, 1, 1])
TWO = partial(several_servers, servers=SERVERS, exchange_every=2)


@cache
def averaging():
    """FedAvg without random draws."""
    model = make_model()
    trainer = local_trainer(
        model, LocalConfig(learning_rate=0.3, num_steps=2), sampler=full_participation()
    )
    return fedavg(model, trainer, aggregator=uniform_mean())


def compiled(built, cohorts=None, wrapper=TWO, **options):
    execution = ExecutionConfig(**{"clients_per_chunk": 1, **options})
    return simulation(built, make_data(), cohorts or all_join(), execution, wrapper=wrapper)


def run(sim, rounds):
    state, record, info = sim.run(sim.init(KEY), KEY, rounds)
    return sim.portable(state), record, info


def by_hand(theta, clients, rounds):
    """Averages two full-batch steps of logistic regression of some clients, in float64."""
    for _ in range(rounds):
        ends = []
        for i in clients:
            x, y = (make_data().client(i)[name].astype(np.float64) for name in "xy")
            own = theta.copy()
            for _ in range(2 if len(x) else 0):
                residual = 1 / (1 + np.exp(-(x @ own[1:] + own[0]))) - y
                own -= 0.3 * np.r_[residual.mean(), residual @ x / len(x)]
            ends.append(own)
        theta = np.mean(ends, axis=0)
    return theta


def vector(params):
    return np.r_[np.float64(params["b"]), np.asarray(params["w"], np.float64)]


@telling
def test_servers_are_alone_until_they_exchange_models():
    """Two rounds of each alone, then their mean, then one more round; by NumPy."""
    sim = compiled(averaging())
    start = vector(sim.federation.shared(sim.portable(sim.init(KEY))))
    groups = [np.flatnonzero(s == SERVERS) for s in range(2)]
    mean = np.mean([by_hand(start, g, 2) for g in groups], axis=0)
    state, record, info = run(sim, 2)
    np.testing.assert_allclose(vector(sim.federation.shared(state)), mean, atol=1e-6)
    # Each client reads its examples twice, for one server or the other.
    np.testing.assert_array_equal(info.training.num_examples, 2 * sum(SIZES))
    state, record, _ = run(sim, 3)
    models = [by_hand(mean, g, 1) for g in groups]
    examples = examples_of(make_data())
    for client in range(NUM_CLIENTS):
        found = vector(sim.federation.personal(state, examples.client(client)))
        np.testing.assert_allclose(found, models[SERVERS[client]], atol=1e-6)
    shared = vector(sim.federation.shared(state))
    np.testing.assert_allclose(shared, np.mean(models, axis=0), atol=1e-6)
    np.testing.assert_array_equal(np.sort(record.clients), [np.arange(6)] * 3)
    assert np.all(record.fate == Fate.CONTRIBUTED)
    moved = sim.federation.views.shared.write(state, {"b": jnp.float32(7.0), "w": jnp.ones(3)})
    np.testing.assert_allclose(vector(sim.federation.shared(moved)), [7, 1, 1, 1])


@telling
@pytest.mark.parametrize("placement, chunk", [("host", 1), ("device", 3)])
def test_resumed_and_streamed_runs_are_the_same(placement, chunk):
    """With client state, jitter and cohorts of some clients, around a clock."""
    model = make_model()
    trainer = local_trainer(model, LocalConfig(learning_rate=0.1, batch_size=4, num_steps=2))
    built = scaffold(model, trainer, num_clients=NUM_CLIENTS)

    def both(inner):
        return clocked(TWO(inner), **TIMED, deadline=3.0)

    whole = run(compiled(built, some("plain"), both), 5)
    sim = compiled(built, some("plain"), both, clients_per_chunk=chunk, placement=placement)
    state, _, _ = sim.run(sim.init(KEY), KEY, 2)
    state, record, _ = sim.run(snapshot(sim.portable(state)), KEY, 3)
    assert_same_state(sim.portable(state), whole[0], atol=0 if chunk == 1 else 1e-6)
    np.testing.assert_array_equal(record.num_drawn, whole[1].num_drawn[2:])
    assert whole[1].count(Fate.LATE).sum() > 0


@telling
def test_clients_that_are_computed_alone_may_be_of_any_server():
    """The longest is of the first server, the next of the second."""
    trainer = local_trainer(make_model(), LocalConfig(learning_rate=0.1, batch_size=1))
    fed = TWO(federation(fedavg(make_model(), trainer), make_data(), all_join()))
    state, ends = fed.init(KEY), []
    for layout in (Layout(), Layout(chunk=2, alone_above=8)):
        play = jax.jit(partial(fed.run_round, examples=examples_of(make_data()), layout=layout))
        after, record, _ = play(state, fed.hyper, key=KEY)
        ends.append(snapshot(after))
        assert np.sum(record.fate == Fate.CONTRIBUTED) == NUM_CLIENTS
    assert_same_state(*ends, atol=1e-6)


@telling
def test_servers_draw_noise_of_their_own_and_clients_pay_once():
    model = make_model()
    trainer = local_trainer(model, LocalConfig(learning_rate=0.0, batch_size=4, num_steps=1))
    built = dp_fedavg(model, trainer, aggregator=gaussian_mean(1.0, 1.0, 3))
    spent, noises = [], None
    for wrapper in (None, partial(several_servers, servers=SERVERS, exchange_every=9)):
        sim = compiled(built, some("private"), wrapper)
        state, record, _ = run(sim, 2)
        privacy = PrivacyAccounting(sim)
        privacy.charge(record)
        spent.append(privacy.epsilon({"client": 1e-3})["client"])
        if wrapper is not None:
            examples = examples_of(make_data())
            noises = [vector(sim.federation.personal(state, examples.client(c))) for c in (0, 1)]
    assert spent[0] == spent[1] > 0
    assert noises is not None and np.all(noises[0] != noises[1])


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("plain", {"servers": [0, 1]}, "servers must be a whole number from 0 for each of the 6"),
        ("plain", {"servers": [0] * 6}, "servers must be 0, 1 and so on"),
        ("plain", {"servers": [0, 2] * 3}, "servers must be 0, 1 and so on"),
        ("plain", {"exchange_every": 0}, "exchange_every must be .* at least 1"),
        ("shares", {}, "aggregator must add no noise in shares of clients"),
    ],
)
def test_servers_without_clients_or_enough_noise_are_refused(name, changed, message):
    fed = federation(small_algorithm(name), make_data(), all_join())
    with pytest.raises(ValueError, match=message):
        several_servers(fed, **{"servers": SERVERS, "exchange_every": 2, **changed})


def test_masks_for_more_clients_than_a_server_has_are_refused():
    """With two clients and a graph of three, each of its rounds would be lost."""

    def under_masks(count):
        mean = secure.masked(uniform_mean(), secure.fixed_point(7), secure.all_pairs(count))
        built = averaging()._replace(aggregator=mean)
        return federation(built, make_data(), all_join())

    TWO(under_masks(2))
    with pytest.raises(ValueError, match="aggregator must share masks among at most 2 clients"):
        TWO(under_masks(3))
    with pytest.raises(ValueError, match="aggregator must share masks among at most 6 clients"):
        under_masks(7)


def test_masks_of_a_server_are_refused_where_cohorts_are_secret():
    """Of four clients drawn at random, a server of two has none, one or both."""
    private = gaussian_mean(1.0, 1.0, 2)
    masks = secure.masked(private, secure.fixed_point(4), secure.all_pairs(2))

    def of(aggregator, cohorts):
        built = dp_fedavg(make_model(), plain_trainer(make_model()), aggregator=aggregator)
        return federation(built, make_data(), cohorts)

    TWO(of(masks, all_join()))
    TWO(of(private, some("plain")))
    with pytest.raises(ValueError, match="aggregator must have no masks where secret cohorts"):
        TWO(of(masks, some("plain")))


def test_servers_are_inside_of_other_wrappers():
    fed = federation(small_algorithm(), make_data(), all_join())
    with pytest.raises(ValueError, match="federation must have no wrapper of its own"):
        TWO(clocked(fed, **TIMED))
    inside = clocked(TWO(fed), **TIMED)
    outer = jax.eval_shape(inside.init, KEY).outer
    assert_equal(
        jax.tree.map(jnp.shape, outer[1:]),
        jax.tree.map(jnp.shape, jax.eval_shape(TWO(fed).init, KEY).outer),
    )
