"""The simulated clock: printed times, late clients, drop-outs, and what it refuses."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, telling
from small_problem import (
    NUM_CLIENTS,
    assert_same_state,
    make_data,
    snapshot,
)
from timed import (
    CITIES,
    KEY,
    OWN,
    PLACES,
    ROUNDS,
    SLOW,
    STEPS,
    TABLE,
    TIMED,
    UNSURE,
    algorithm,
    all_join,
    assert_equal,
    places,
    run,
    simulated,
    some,
    without_clients,
)

from fedjax_dp.engine import (
    Fate,
    PrivacyAccounting,
    clocked,
    compute_seconds,
    federation,
    key_exchange_seconds,
    latencies,
    round_times,
    serverless_times,
)


@cache
def plain():
    return simulated(None)


@cache
def slow_sim():
    return simulated(partial(clocked, **SLOW))


def test_times_of_table_5_3():
    """To the millisecond, and after Singapore has left."""
    cities = latencies(CITIES, TABLE, CITIES[:3], "hub")
    free = compute_seconds(3)
    times = round_times(cities, free)
    np.testing.assert_allclose(times.receive, [4.3, 6.0, 4.1], atol=1e-9)
    np.testing.assert_allclose(times.arrive, [0.6, 4.0, 0.2], atol=1e-9)
    times = round_times(cities, free, active=[True, False, True])
    np.testing.assert_allclose(times.receive, [0.9, np.nan, 0.7], atol=1e-9)
    times = round_times(cities, free, deadline=0.5, server_seconds=0.25)
    np.testing.assert_array_equal(times.is_late, [True, True, False])
    assert times.server == 0.75


@pytest.mark.parametrize(
    "deadline, closes, last", later([(5.0, 4.0, 6.0), (3.0, 3.0, 5.0)], but=[(5.0, 4.0, 6.0)])
)
def test_a_compiled_round_takes_the_time_of_table_5_3(deadline, closes, last):
    """The server waits no longer than for the last client that it needs."""
    _, record, info = run(slow_sim(), deadline=deadline)
    np.testing.assert_allclose(info.server["round_seconds"], closes, atol=1e-4)
    np.testing.assert_allclose(info.server["received_seconds"], last, atol=1e-4)
    np.testing.assert_allclose(info.server["simulated_seconds"], [closes, 2 * closes, 3 * closes])
    assert record.count(Fate.LATE).tolist() == [2 * (deadline == 3)] * ROUNDS


def test_serverless_rounds_and_the_exchange_of_keys():
    """Who is last to be heard of, by hand; one direction of a pair may be slower."""
    cities = latencies(CITIES, TABLE, CITIES[:3], "hub")
    work = compute_seconds(3, per_round=[1.0, 2.0, 3.0])
    np.testing.assert_allclose(serverless_times(cities, work), [6.0, 9.0, 9.0])
    found = serverless_times(cities, work, active=[True, False, True])
    np.testing.assert_allclose(found, [3.25, np.nan, 1.2])
    assert key_exchange_seconds(cities, work) == 9.0
    assert key_exchange_seconds(cities, compute_seconds(3)) == 7.0


def without_clock(state, record, info):
    """The results of a run with a clock, as one without it has them."""
    server = {name: x for name, x in info.server.items() if name not in OWN}
    assert len(info.server) - len(server) == len(OWN)
    return state._replace(outer=()), record, info._replace(server=server)


@telling
def test_a_clock_without_deadline_changes_nothing_and_counts_seconds():
    """Plain float32 would lose up to 1/32 s a round, after 10⁶ seconds."""
    device = compute_seconds(
        NUM_CLIENTS,
        per_step={"phone": 0.5, "laptop": 0.25},
        per_round=np.arange(6.0),
        classes=["phone", "laptop"] * 3,
    )
    options = {"latencies": places(), "compute": device, "server_seconds": 0.51}
    found = run(simulated(partial(clocked, **options, start_seconds=1e6)))
    assert_equal(without_clock(*found), run(plain()))
    legs = np.array([0.6, 4.0, 0.2] * 2)
    arrive = legs + np.array([0.5, 0.25] * 3) * STEPS + np.arange(6)
    seconds = arrive.max() + 0.51
    np.testing.assert_allclose(found[2].server["round_seconds"], seconds, rtol=1e-6)
    (clock,) = found[0].outer
    exact = np.float64(clock.seconds.high) + np.float64(clock.seconds.low)
    assert exact == pytest.approx(1e6 + ROUNDS * seconds, abs=1e-4)


@telling
def test_a_clock_with_jitter_changes_no_noise_and_no_cohort():
    timed = {**UNSURE, "deadline": None, "dropout": None}
    found = run(simulated(partial(clocked, **timed), "private", some("private")))
    assert len(set(found[2].server["round_seconds"].tolist())) == ROUNDS
    assert_equal(without_clock(*found), run(simulated(None, "private", some("private"))))


@telling
def test_late_clients_are_absent_from_the_sum_and_on_record():
    state, record, info = run(slow_sim(), deadline=3.0)
    is_late = np.array([False, True, False] * 2)
    other, _, _ = run(simulated(partial(without_clients, is_gone=is_late)))
    assert_same_state(state, other, atol=0)
    everyone = jax.tree.leaves(run(plain())[0].server)
    assert any(np.any(x != y) for x, y in zip(jax.tree.leaves(state.server), everyone, strict=True))
    for ids, fates in zip(record.clients, record.fate, strict=True):
        np.testing.assert_array_equal(np.sort(ids), np.arange(NUM_CLIENTS))
        np.testing.assert_array_equal(fates == Fate.LATE, is_late[ids])
    assert info.server["num_late"].tolist() == [2] * ROUNDS


def test_a_deadline_that_all_clients_miss_leaves_the_model():
    """Such a deadline is refused when a clock is built, and defined in a sweep."""
    state, record, info = run(slow_sim(), deadline=0.125)
    assert record.count(Fate.LATE).tolist() == [NUM_CLIENTS] * ROUNDS
    assert info.server["round_seconds"].tolist() == [0.125] * ROUNDS
    assert_equal(state.server, plain().portable(plain().init(KEY)).server)
    assert slow_sim().num_traces() == 1


@telling
def test_the_ledger_charges_all_drawn_clients():
    spent = []
    for options in (None, UNSURE):
        timed = None if options is None else partial(clocked, **options)
        sim = simulated(timed, "private", some("private"))
        _, record, _ = run(sim)
        assert (record.count(Fate.LATE, Fate.DROPPED).sum() > 0) == (options is not None)
        privacy = PrivacyAccounting(sim)
        privacy.charge(record)
        spent.append(privacy.epsilon({"client": 1e-3})["client"])
    assert spent[0] == spent[1] > 0


@cache
def unsure():
    """A run with drop-outs, late clients and jitter, on a part of the clients."""
    sim = simulated(partial(clocked, **UNSURE), cohorts=some("plain"))
    return sim, *run(sim, 6)


@telling
def test_a_resumed_run_equals_an_uninterrupted_one():
    sim, whole, record, all_info = unsure()
    first, early, _ = sim.run(sim.init(KEY), KEY, 2)
    resumed, late, info = sim.run(snapshot(sim.portable(first)), KEY, 4)
    assert_equal(sim.portable(resumed), whole)
    for name in OWN:
        np.testing.assert_array_equal(info.server[name], all_info.server[name][2:])
    np.testing.assert_array_equal(np.concatenate([early.fate, late.fate]), record.fate)
    assert record.count(Fate.LATE).any() and record.count(Fate.DROPPED).any()
    assert len(set(all_info.server["received_seconds"].tolist())) == 6


@telling
@pytest.mark.parametrize("placement, chunk", [("host", 1), ("device", 3)])
def test_streaming_and_layout_change_nothing(placement, chunk):
    """Chance is drawn by client and round."""
    _, whole, record, info = unsure()
    timed = partial(clocked, **UNSURE)
    other = run(simulated(timed, "plain", some("plain"), placement, chunk), 6)
    assert_same_state(other[0], whole, atol=0 if chunk == 1 else 1e-6)
    assert_equal(other[0].outer, whole.outer)
    for name in OWN:
        np.testing.assert_array_equal(other[2].server[name], info.server[name])
    for one, two in zip(_fates(record), _fates(other[1]), strict=True):
        assert one == two


def _fates(record):
    """By round, the fate of each drawn client."""
    return [
        dict(zip(ids.tolist(), fates.tolist(), strict=True))
        for ids, fates in zip(record.clients, record.fate, strict=True)
    ]


@telling
def test_drop_outs_and_jitter_are_as_often_and_as_long_as_stated():
    """2,000 rounds of six clients: within four standard deviations of the mean."""
    rounds = 2000
    near = latencies(["here"], [[1.0]], ["here"] * NUM_CLIENTS, "here", jitter=0.5)
    fed = federation(algorithm(), make_data(), all_join())
    state = fed.init(KEY)
    cohort = fed.cohorts.draw(state, fed.hyper, KEY)

    def drawn(**options):
        clock = clocked(fed, **{**TIMED, "latencies": near, **options})
        one = clock.step.__self__.simulated
        (own,) = clock.init(KEY).outer

        def of_round(r):
            return one(own, state._replace(round=r), clock.hyper, cohort, KEY)

        return jax.device_get(jax.jit(jax.vmap(of_round))(jnp.arange(rounds)))

    fates, metrics = drawn(dropout=0.2)
    counts, trials = np.sum(fates == Fate.DROPPED, axis=1), rounds * NUM_CLIENTS
    assert abs(counts.sum() - 0.2 * trials) < 4 * np.sqrt(0.2 * 0.8 * trials)
    np.testing.assert_array_equal(metrics["num_dropouts"], counts)
    _, metrics = drawn()
    # The maximum of six sums of two exponential times, by simulation with NumPy.
    sums = np.random.default_rng(0).exponential(0.5, (200_000, NUM_CLIENTS, 2)).sum(-1).max(-1)
    error = sums.std() / np.sqrt(rounds)
    assert abs(metrics["round_seconds"].mean() - 2 - sums.mean()) < 4 * error


@telling
def test_too_few_shares_of_noise_are_never_summed():
    """The claim counts four clients: all arrive by 4.0, four by 0.6, two by 0.2."""
    sim = simulated(partial(clocked, **SLOW), "shares")
    before = jax.tree.leaves(sim.portable(sim.init(KEY)).server.params)
    for deadline, num_late in ((4.5, 0), (1.0, 2), (0.5, 6)):
        state, record, info = run(sim, deadline=deadline)
        assert info.server["is_abandoned"].tolist() == [num_late == 6] * ROUNDS
        assert record.count(Fate.LATE).tolist() == [num_late] * ROUNDS
        after = jax.tree.leaves(state.server.params)
        moved = any(np.any(x != y) for x, y in zip(before, after, strict=True))
        assert moved == (num_late < 6)


HOLE, NEGATIVE = TABLE.copy(), TABLE.copy()
HOLE[0, 2], NEGATIVE[3, 1] = np.nan, -0.1
PAIR = {"places": ["a", "b"], "clients": ["a"], "server": "b"}
WHOLE = {"places": CITIES, "seconds": TABLE, "clients": PLACES, "server": "hub"}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"seconds": HOLE}, "seconds must be at least 0 .* got nan from Boston to NYC"),
        ({"seconds": [[0.0, None], [1.0, 0.0]], **PAIR}, "got None from a to b"),
        ({"seconds": [[0.0, 1.0], [1.0]], **PAIR}, "got nothing from b to b"),
        ({"seconds": [[0.0, ""], [1.0, 0.0]], **PAIR}, "got '' from a to b"),
        ({"seconds": NEGATIVE}, "seconds must be at least 0 .* got -0.1 from hub to Singapore"),
        ({"seconds": np.inf * TABLE.clip(1)}, "seconds must be .* got inf from Boston to Boston"),
        ({"seconds": TABLE[:3]}, "seconds must be a table of 4 × 4 numbers"),
        ({"jitter": -1.0}, "jitter must be at least 0 .* got -1.0 from Boston to Boston"),
        ({"places": ("hub", "NYC", "NYC", "Boston")}, r"places must have different names.*'NYC'"),
        ({"clients": ["Bosten"]}, "clients must be one of .* did you mean 'Boston'"),
        ({"clients": []}, "clients must name the place of a client"),
        ({"server": "home"}, "server must be one of"),
    ],
)
def test_bad_tables_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        latencies(**{**WHOLE, **changed})


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"per_step": -0.1}, "per_step must be at least 0"),
        ({"per_round": [1.0, np.nan]}, "per_round must be at least 0"),
        (
            {"per_step": [1.0, 1.0, 1.0]},
            "per_step must be one number or have one for each of the 2",
        ),
        ({"per_step": {"phone": 1.0}}, "classes must be given"),
        ({"per_step": {"phone": 1.0}, "classes": ["phone", "phones"]}, "did you mean 'phone'"),
        ({"classes": ["phone"]}, "classes must name the class of each of the 2 clients"),
    ],
)
def test_bad_seconds_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        compute_seconds(**{"num_clients": 2, **changed})


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"server_seconds": -1.0}, "server_seconds must be at least 0"),
        ({"deadline": 0.0}, "deadline must be above 0"),
        ({"deadline": 0.1}, "deadline must be at least 0.2, the shortest time of any client"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"compute": compute_seconds(5)}, "compute must be of the 6 clients"),
        ({"latencies": latencies(CITIES, TABLE, CITIES, "hub")}, "latencies must be of the 6"),
    ],
)
def test_bad_clocks_are_refused(changed, message):
    fed = federation(algorithm(), make_data(), all_join())
    with pytest.raises(ValueError, match=message):
        clocked(fed, **{**TIMED, **changed})


def test_numbers_of_a_clock_are_checked_when_swept():
    fed = clocked(federation(algorithm(), make_data(), all_join()), **SLOW)
    wrong = fed.hyper._replace(algorithm={**fed.hyper.algorithm, "clock_deadline": -1.0})
    with pytest.raises(ValueError, match="clock_deadline must be above 0"):
        fed.check(wrong)


@pytest.mark.parametrize(
    "active, message",
    [
        ([True, False, False], "active must include 2 clients or more"),
        ([True, True], "active must be True or False for each of the 3 clients"),
        ([1, 1, 0], "active must be True or False"),
    ],
)
def test_rounds_without_a_server_need_two_clients(active, message):
    with pytest.raises(ValueError, match=message):
        serverless_times(
            latencies(CITIES, TABLE, CITIES[:3], "hub"), compute_seconds(3), active=active
        )
