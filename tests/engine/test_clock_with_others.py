"""A clock with other parts: what a server or a claim would miss, and wrappers in each other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import median_aggregator
from marks import telling
from small_problem import NUM_CLIENTS, make_data, make_model, plain_trainer
from timed import CITIES, KEY, PLACES, TABLE, TIMED, algorithm, all_join, some

from fedjax_dp.algorithms import dp_fedavg, fedavg, retrained_averaging
from fedjax_dp.algorithms.base import ClientState, FinishForAll
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import (
    Moment,
    absences,
    all_of,
    anderson,
    clocked,
    daily,
    federation,
    in_rounds,
    latencies,
    leaving,
    serverless,
    several_servers,
)
from fedjax_dp.server import gaussian_mean, secure, uniform_mean

EVERYONE = jnp.arange(NUM_CLIENTS)
TWO = partial(several_servers, servers=np.arange(NUM_CLIENTS) % 2, exchange_every=2)
FAST = partial(anderson, memory=2, num_rounds=4)


def test_an_edge_server_has_no_update_of_each_client():
    """A median reads all updates, which one sum of an edge server does not hold."""
    model = make_model()
    median = fedavg(model, plain_trainer(model), aggregator=median_aggregator())
    edges = latencies(CITIES, TABLE, PLACES, "hub", edges=["NYC"] * NUM_CLIENTS)
    with pytest.raises(ValueError, match="edges must be left out for fedavg, whose server reads"):
        clocked(federation(median, make_data(), all_join()), **{**TIMED, "latencies": edges})
    clocked(federation(algorithm(), make_data(), all_join()), **{**TIMED, "latencies": edges})


def test_clients_that_are_away_miss_no_message_to_all():
    """Such a message changes the state of every client, and an absent one keeps that of before."""
    states = ClientState(
        lambda server: {"sum": jnp.float32(0)},
        FinishForAll(lambda server, aggregate: (), lambda message, own, hyper: own),
    )
    built = algorithm()._replace(client_state=states)
    fed = federation(built, make_data(), all_join())
    with pytest.raises(ValueError, match="availability must be left out for fedavg, whose rounds"):
        clocked(fed, **TIMED, availability=absences(0.1))


def under_masks(cohorts, dropouts=1, fits=NUM_CLIENTS):
    model = make_model()
    private = secure.masked(
        gaussian_mean(1.0, 1.0, 4),
        secure.fixed_point(fits),
        secure.all_pairs(min(4, fits), dropouts=dropouts),
    )
    built = dp_fedavg(model, plain_trainer(model), aggregator=private)
    return federation(built, make_data(), cohorts)


@pytest.mark.parametrize(
    "changed", [{"deadline": 9.0}, {"availability": in_rounds([0, 0, 0, 0, 2, 2])}]
)
def test_whether_masks_are_lost_does_not_depend_on_a_secret_cohort(changed):
    """Of cohorts that differ in one client one is summed, the other lost: two zeros, not a swap."""
    (name,) = changed
    with pytest.raises(ValueError, match=f"{name} must be left out for masked sums"):
        clocked(under_masks(some("plain")), **TIMED, **changed)
    cyclic = participants.participation(sampling.cyclic(), NUM_CLIENTS, 4)
    clocked(under_masks(cyclic), **TIMED, **changed)
    # As many messages in every round.
    clocked(under_masks(some("plain")), **TIMED, keep=3)
    with pytest.raises(ValueError, match="keep must be at least 3, with fewer of whose messages"):
        clocked(under_masks(some("plain")), **TIMED, keep=2)


def test_rounds_that_few_clients_lose_are_refused_with_secret_cohorts():
    """A Poisson cohort has fewer than four of six clients in most rounds, which would show."""
    with pytest.raises(ValueError, match="participation must give 4 to 6 updates in every round"):
        under_masks(some("private"))
    # Too many for the words.
    with pytest.raises(ValueError, match=r"participation must give 3 to 3 .* got .4 to 4"):
        under_masks(some("plain"), fits=3)
    # Nothing is amplified.
    masks = secure.masked(uniform_mean(), secure.fixed_point(6), secure.all_pairs(4))
    built = fedavg(make_model(), plain_trainer(make_model()), aggregator=masks)
    federation(built, make_data(), some("private"))


@pytest.mark.parametrize("name", ["plain", "private"])
def test_masks_are_recovered_from_the_cohort_less_its_drop_outs(name):
    """Of a cohort of six all but one, though their graph is for four or more."""
    model = make_model()
    mean = gaussian_mean(1.0, 1.0, 6) if name == "private" else uniform_mean()
    masks = secure.masked(mean, secure.fixed_point(6), secure.all_pairs(4, dropouts=1))
    declare = dp_fedavg if name == "private" else fedavg
    fed = federation(
        declare(model, plain_trainer(model), aggregator=masks), make_data(), all_join()
    )
    clocked(fed, **TIMED, keep=5)
    with pytest.raises(ValueError, match="keep must be at least 5, with fewer of whose messages"):
        clocked(fed, **TIMED, keep=4)


@telling
def test_an_edge_server_sees_no_sum_of_too_few_shares():
    """Three edges of two clients each, whose noise is half of what two of four would be."""
    edges = latencies(CITIES, TABLE, PLACES, "hub", edges=PLACES)
    shares = federation(algorithm("shares"), make_data(), all_join())
    with pytest.raises(ValueError, match=r"edges must be left out without secure\.masked\(\): the"):
        clocked(shares, **{**TIMED, "latencies": edges})
    masks = secure.masked(
        algorithm("shares").aggregator, secure.fixed_point(6), secure.all_pairs(6)
    )
    built = algorithm("shares")._replace(aggregator=masks)
    clocked(federation(built, make_data(), all_join()), **{**TIMED, "latencies": edges})


def averaging():
    model = make_model()
    return retrained_averaging(model, plain_trainer(model), num_clients=NUM_CLIENTS)


@pytest.mark.parametrize(
    ("built", "wrap", "message"),
    [
        (averaging, lambda fed: TWO(leaving(fed)), "draw cohorts that depend on no server's state"),
        (averaging, lambda fed: leaving(TWO(fed)), "have one server, with whose model"),
        (algorithm, lambda fed: TWO(serverless(fed)), "federation must have a server"),
        (algorithm, lambda fed: serverless(TWO(fed)), "have one model for all clients"),
        (algorithm, lambda fed: FAST(TWO(fed)), "have one server, whose model is accelerated"),
    ],
)
def test_wrappers_of_one_server_do_not_read_the_first_of_several(built, wrap, message):
    """With several servers the state's server is the first, and no model of all."""
    fed = federation(built(), make_data(), all_join())
    with pytest.raises(ValueError, match=message):
        wrap(fed)


def test_a_clock_is_alone_and_around_a_federation_without_a_server():
    """Two would share one deadline, and the first would close a sum that no server makes."""
    timed = clocked(federation(algorithm(), make_data(), all_join()), **TIMED, deadline=9.0)
    with pytest.raises(ValueError, match="federation must have no clock of its own: the outer"):
        clocked(timed, **TIMED, deadline=3.0)
    with pytest.raises(ValueError, match="federation must be inside the clock"):
        serverless(timed)


def test_absences_of_several_causes_are_drawn_apart():
    """Of 1000 rounds: independent causes of 0.3 and 0.4 leave 0.42 of clients; equal draws 0.6."""
    either = all_of([absences(0.3, rounds=1), absences(0.4, rounds=1)])
    memory = either.init(NUM_CLIENTS)

    def there(r):
        now = Moment(r, jnp.float32(0))
        after = either.after(memory, now, fold(KEY, Purpose.CLOCK, r))
        return either.reaches(after, EVERYONE, now)

    share = np.mean(jax.jit(jax.vmap(there))(jnp.arange(1, 1001)))
    assert abs(share - 0.7 * 0.6) < 4 * np.sqrt(0.42 * 0.58 / (1000 * NUM_CLIENTS))


def test_an_absence_may_be_longer_than_any_run():
    """Round and absence together are no int32."""
    long = absences(0.999, rounds=2**31 - 1)
    now = Moment(jnp.int32(7), jnp.float32(0))
    memory = long.after(long.init(NUM_CLIENTS), now, KEY)
    assert not np.any(long.reaches(memory, EVERYONE, now))


def test_an_absence_shorter_than_floats_resolve_misses_a_round():
    """At 1e9 s float32 has steps of 64 s: a client that is away for 1 s misses the next round."""
    short, now = absences(0.999, seconds=1.0), Moment(jnp.int32(7), jnp.float32(1e9))
    memory = short.after(short.init(NUM_CLIENTS), now, KEY)
    assert not np.any(short.reaches(memory, EVERYONE, now))
    later = now._replace(seconds=jnp.float32(1e9 + 64))
    assert np.all(short.reaches(memory, EVERYONE, later))


def test_a_window_from_midnight_to_midnight_is_empty():
    with pytest.raises(ValueError, match="hours must end at another hour"):
        daily([24, 0])
    daily([0, 24])
