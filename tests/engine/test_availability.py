"""Who can be reached, the first updates of a round, keys agreed anew, edge servers."""

import math
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timed
from marks import slow, telling
from side_by_side import several_devices
from small_problem import (
    NUM_CLIENTS,
    assert_same_state,
    make_data,
    make_model,
    plain_trainer,
    snapshot,
)

from fedjax_dp.algorithms import dp_fedavg
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import (
    ExecutionConfig,
    Fate,
    Moment,
    PrivacyAccounting,
    absences,
    all_of,
    clocked,
    compute_seconds,
    daily,
    federation,
    in_rounds,
    latencies,
    round_times,
    serverless,
    simulation,
)
from fedjax_dp.server import gaussian_mean

HOUR = 3600.0
EVERYONE = jnp.arange(NUM_CLIENTS)


def reached(availability, seconds=0.0, round=0):
    """Which clients can be reached before anything is remembered, as a list of clients."""
    memory = availability.init(NUM_CLIENTS)
    found = availability.reaches(memory, EVERYONE, Moment(jnp.int32(round), jnp.float32(seconds)))
    return np.flatnonzero(found).tolist()


def away(record):
    """By round, the clients that could not be reached."""
    pairs = zip(record.clients, record.fate, strict=True)
    return [sorted(ids[fates == Fate.UNANNOUNCED].tolist()) for ids, fates in pairs]


def fates_of(record):
    """By round, the fate of each drawn client."""
    pairs = zip(record.clients, record.fate, strict=True)
    found = [dict(zip(i.tolist(), f.tolist(), strict=True)) for i, f in pairs]
    return [{i: f for i, f in each.items() if i >= 0} for each in found]


def of_class(*hours):
    return daily({"a": hours[0], "b": hours[1]}, ["a", "b"] * 3)


@pytest.mark.parametrize(
    ("hour", "clients"),
    [(7.99, []), (8, [0, 2, 4]), (21.99, [0, 2, 4]), (22, [1, 3, 5]), (24, [1, 3, 5]),
     (5.99, [1, 3, 5]), (6, []), (12.5, [0, 1, 2, 3, 4, 5]), (36.5, [0, 1, 2, 3, 4, 5])],
)  # fmt: skip
def test_windows_of_a_day_may_pass_midnight_and_repeat(hour, clients):
    """Phones are reached by day, servers at night and at lunch."""
    assert reached(of_class([8, 22], [[22, 6], [12, 13]]), hour * HOUR) == clients


def test_clients_join_and_leave_at_their_rounds():
    growing = in_rounds([0, 0, 1, 2, 3, 3], end=[3, 9, 9, 9, 9, 4])
    found = [reached(growing, round=r) for r in range(5)]
    assert found == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4]]
    both = all_of([growing, of_class([0, 1], [0, 2])])
    assert reached(both, 1.5 * HOUR, round=2) == [1, 3]


@telling
def test_after_singapore_leaves_a_run_has_the_times_of_table_5_3():
    """Two rounds with all clients, then those without it; it is on record, and not in the sum."""
    without = in_rounds(end=[99, 2, 99] * 2)
    sim = timed.simulated(partial(clocked, **timed.TIMED, availability=without))
    state, record, info = timed.run(sim, 4)
    times = info.server["received_seconds"]
    np.testing.assert_allclose(times, [6.0, 6.0, 0.9, 0.9], atol=1e-4)
    np.testing.assert_allclose(
        info.server["simulated_seconds"], np.cumsum([4, 4, 0.6, 0.6]), atol=1e-3
    )
    assert away(record) == [[], [], [1, 4], [1, 4]]
    assert info.server["num_unreachable"].tolist() == [0, 0, 2, 2]
    always = timed.simulated(partial(timed.without_clients, is_gone=[False, True, False] * 2))
    middle, _, _ = timed.run(sim, 2)
    other, _, _ = always.run(middle._replace(outer=()), timed.KEY, 2)
    assert_same_state(state, always.portable(other), atol=0)


@pytest.mark.slow
def test_a_night_passes_in_rounds_without_clients():
    """At 23:00 all are away; a deadline of half an hour ends two empty rounds."""
    clock = partial(
        clocked,
        **timed.TIMED,
        deadline=HOUR / 2,
        start_seconds=23 * HOUR,
        availability=daily([0, 23]),
    )
    _, record, info = timed.run(timed.simulated(clock), 3)
    assert record.count(Fate.UNANNOUNCED).tolist() == [6, 6, 0]
    np.testing.assert_allclose(info.server["round_seconds"], [1800, 1800, 4.0], atol=1e-3)


@pytest.mark.slow
def test_the_first_updates_to_arrive_are_kept():
    """By hand: NYC after 0.2 s, Boston after 0.6 s; of the equal two the first client."""
    state, record, info = timed.run(timed.simulated(partial(clocked, **timed.TIMED, keep=3)))
    is_late = np.array([False, True, False, True, True, False])
    for ids, fates in zip(record.clients, record.fate, strict=True):
        np.testing.assert_array_equal(fates == Fate.LATE, is_late[ids])
    np.testing.assert_allclose(info.server["round_seconds"], 0.6, atol=1e-6)
    other, _, _ = timed.run(timed.simulated(partial(timed.without_clients, is_gone=is_late)))
    assert_same_state(state, other, atol=0)
    times = round_times(timed.places(), timed.FREE, keep=3)
    np.testing.assert_array_equal(times.is_late, is_late)
    assert times.closes == pytest.approx(0.6)


def test_fewer_updates_than_are_kept_end_at_the_deadline():
    """A round ends with the fifth update, from Singapore after 4 s, or before it."""
    sim = timed.simulated(partial(clocked, **timed.TIMED, keep=5, deadline=3.0))
    for deadline, seconds, num_late in ((3.0, 3.0, 2), (5.0, 4.0, 1)):
        _, record, info = timed.run(sim, deadline=deadline)
        assert record.count(Fate.LATE).tolist() == [num_late] * 3
        np.testing.assert_allclose(info.server["round_seconds"], seconds, atol=1e-4)


@pytest.mark.slow
def test_keys_are_agreed_anew_before_chosen_rounds():
    clock = partial(clocked, **timed.TIMED, key_seconds=7.0, key_rounds=(0, 2))
    _, _, info = timed.run(timed.simulated(clock), 4)
    np.testing.assert_allclose(info.server["round_seconds"], [11, 4, 11, 4], atol=1e-4)


def test_an_edge_server_sends_one_sum_on():
    """Client to edge to root by hand; with jitter the two legs of an edge are shared."""
    sites = ("a", "b", "root")
    table = [[0, 9, 1], [9, 0, 2], [4, 8, 0]]
    near = latencies(sites, table, ["b", "a", "a"], "root", edges=["a", "a", "b"])
    # Down: root to edge to client. Up: client to edge to root.
    np.testing.assert_allclose(near.down, [4 + 9, 4 + 0, 8 + 9])
    np.testing.assert_allclose(near.up, [9 + 1, 0 + 1, 9 + 2])
    times = round_times(near, compute_seconds(3))
    np.testing.assert_allclose(times.arrive, [23, 5, 28])
    still = np.where(np.eye(3), 0.0, [[0, 0, 1], [0, 0, 1], [1, 1, 0]])
    jittered = latencies(sites, table, ["a", "a", "b"], "root", edges=["a", "a", "b"], jitter=still)
    times = round_times(jittered, compute_seconds(3), key=timed.KEY, round_index=1)
    assert times.arrive[0] == times.arrive[1] != 5 and times.arrive[2] > 2
    assert times.receive[0] == times.receive[1] > times.server + 4


@telling
def test_times_on_the_host_are_those_of_a_compiled_round():
    """Jitter is drawn by run, client and round, in places and through an edge server."""
    for edges in (None, ["NYC"] * NUM_CLIENTS):
        far = latencies(timed.CITIES, timed.TABLE, timed.PLACES, "hub", jitter=0.3, edges=edges)
        clock = partial(clocked, latencies=far, compute=timed.FREE, server_seconds=0.5)
        _, _, info = timed.run(timed.simulated(clock))
        for r in range(3):
            times = round_times(far, timed.FREE, server_seconds=0.5, key=timed.KEY, round_index=r)
            assert info.server["round_seconds"][r] == pytest.approx(times.server, rel=1e-6)
            last = info.server["received_seconds"][r]
            assert last == pytest.approx(np.max(times.receive), rel=1e-6)


def test_devices_of_a_class_differ_by_their_spread():
    many = 4000
    spread = {"phone": 0.5, "server": 0.0}
    kinds = ["phone", "server"] * (many // 2)
    found = compute_seconds(many, per_step=2.0, per_round=1.0, classes=kinds, spread=spread, seed=3)
    np.testing.assert_array_equal(found.per_step[1::2], 2.0)
    np.testing.assert_allclose(found.per_step, 2 * found.per_round)
    logs = np.log(found.per_round[::2])
    error = 0.5 / math.sqrt(len(logs))
    assert abs(logs.mean()) < 4 * error and abs(logs.std() - 0.5) < 4 * error
    fewer = compute_seconds(10, per_round=1.0, classes=kinds[:10], spread=spread, seed=3)
    np.testing.assert_array_equal(fewer.per_round, found.per_round[:10])


@telling
def test_clients_leave_by_chance_and_return():
    """Of 600 rounds: a share of p / (p + 1 / r) is away; none for other than r rounds."""
    chance, rounds, back = 0.05, 600, 4
    part = absences(chance, rounds=back)

    def one(memory, r):
        there = part.reaches(memory, EVERYONE, Moment(r, jnp.float32(0)))
        after = Moment(r + 1, jnp.float32(0))
        return part.after(memory, after, fold(timed.KEY, Purpose.CLOCK, r)), there

    start = part.init(NUM_CLIENTS)
    _, there = jax.lax.scan(one, start, jnp.arange(rounds))
    there = np.asarray(there)
    lengths = []
    for client in there.T:
        edges = np.flatnonzero(np.diff(np.concatenate([[1], client, [1]]).astype(int)))
        starts, ends = edges[::2], edges[1::2]
        lengths += (ends - starts)[ends < rounds].tolist()
    # A client may leave again at the end of the round before it returns to be seen.
    assert min(lengths) == back and np.mean(np.array(lengths) % back == 0) == 1
    expected = chance * back / (1 + chance * back)
    num_stays = rounds * NUM_CLIENTS * chance
    assert abs(1 - there.mean() - expected) < 4 * expected / math.sqrt(num_stays)


UNSURE = {
    **timed.TIMED,
    "compute": timed.WORK,
    "latencies": timed.places(jitter=0.3),
    "deadline": 5.0,
}
UNSURE |= {"dropout": 0.3, "keep": 3}
AWAY = absences(0.3, seconds=6.0)


@telling
@pytest.mark.parametrize("placement, chunk", [("host", 1), ("device", 3)])
def test_resumed_streamed_and_laid_out_runs_are_the_same(placement, chunk):
    away = all_of([absences(0.1, seconds=6.0), in_rounds([0, 0, 0, 0, 3, 2])])
    clock = partial(clocked, **UNSURE, availability=away)
    sim = timed.simulated(clock, cohorts=timed.some("plain"))
    whole, record, info = timed.run(sim, 8)
    counts = [record.count(fate).sum() for fate in (Fate.LATE, Fate.DROPPED, Fate.UNANNOUNCED)]
    assert min(counts) > 0
    other = timed.simulated(clock, cohorts=timed.some("plain"), placement=placement, chunk=chunk)
    state, early, _ = other.run(other.init(timed.KEY), timed.KEY, 3)
    state, late, more = other.run(snapshot(other.portable(state)), timed.KEY, 5)
    timed.assert_equal(other.portable(state).outer, whole.outer)
    assert_same_state(other.portable(state), whole, atol=0 if chunk == 1 else 1e-6)
    for name in timed.OWN:
        np.testing.assert_array_equal(more.server[name], info.server[name][3:])
    assert fates_of(record) == fates_of(early) + fates_of(late)


@telling
def test_the_ledger_charges_clients_that_are_away_or_over_selected():
    model, spent = make_model(), []
    private = dp_fedavg(model, plain_trainer(model), aggregator=gaussian_mean(1.0, 1.0, 3))
    cohorts = participants.participation(sampling.cyclic(), NUM_CLIENTS, 3)
    for wrapper in (
        None,
        partial(clocked, **timed.TIMED, keep=1, availability=in_rounds([0] * 5 + [9])),
    ):
        sim = simulation(private, make_data(), cohorts, wrapper=wrapper)
        _, record, _ = sim.run(sim.init(timed.KEY), timed.KEY, 4)
        privacy = PrivacyAccounting(sim)
        privacy.charge(record)
        spent.append(privacy.epsilon({"client": 1e-3})["client"])
    assert record.count(Fate.LATE).sum() > 0 and record.count(Fate.UNANNOUNCED).sum() > 0
    np.testing.assert_array_equal(*spent)
    assert min(spent[0]) > 0


def on_several_devices():
    """Compares runs on one device and on four; for a process that has them."""
    assert jax.device_count() == 4
    unsure = partial(clocked, **UNSURE, availability=AWAY)
    alone = partial(
        clocked,
        latencies=latencies(timed.CITIES, timed.TABLE, timed.PLACES, jitter=0.3),
        compute=timed.WORK,
    )
    growing = in_rounds([0, 0, 0, 1, 2, 9])

    def without_server(inner):
        return alone(serverless(inner), server_seconds=0.0, availability=growing)

    for cohorts, clock in ((timed.some("plain"), unsure), (timed.all_join(), without_server)):
        found = []
        for devices in (1, 4):
            execution = ExecutionConfig(clients_per_chunk=2, devices=devices)
            sim = simulation(timed.algorithm(), make_data(), cohorts, execution, wrapper=clock)
            state, record, info = timed.run(sim, 4)
            found.append((state, fates_of(record), {name: info.server[name] for name in timed.OWN}))
        assert found[0][1] == found[1][1] and any(
            Fate.UNANNOUNCED in f.values() for f in found[0][1]
        )
        timed.assert_equal(found[0][0].outer, found[1][0].outer)
        timed.assert_equal(found[0][2], found[1][2])
        assert_same_state(found[0][0], found[1][0], atol=1e-6)


@slow
def test_four_devices_give_the_clock_of_one():
    environment = os.environ | {
        "XLA_FLAGS": several_devices(4),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")]),
    }
    program = "import test_availability; test_availability.on_several_devices()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: daily([8, 8]), "hours must end at another hour"),
        (lambda: daily([8, 25]), r"hours must be in \[0, 24\]"),
        (lambda: daily([8, 9, 10]), "hours must be hours from and to"),
        (lambda: daily({"a": [8, 9]}), "classes must name the class of each client"),
        (lambda: daily({"phone": [8, 9]}, ["phones"]), "did you mean 'phone'"),
        (lambda: daily([8, 9], ["a"]), "classes must be left out"),
        (lambda: in_rounds([1, 2]), "first must be 0 for one client"),
        (lambda: in_rounds(0.5), "first must be a whole number"),
        (lambda: in_rounds([0, 4], [4, 4]), "end must be above first"),
        (lambda: in_rounds([0, 4], [5]), "end must be of the"),
        (lambda: absences(1.0), r"chance must be in \(0, 1\)"),
        (lambda: absences(0.1, rounds=1, seconds=1.0), "must be left out with"),
        (lambda: all_of([]), "parts must hold an availability"),
        (lambda: all_of([in_rounds([0]), in_rounds([0, 0])]), "parts must be of the same clients"),
    ],
)  # fmt: skip
def test_bad_availability_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("plain", {"keep": 7}, "keep must be at most the 6 clients"),
        ("plain", {"keep": 0}, "keep must be .* at least 1"),
        ("shares", {"keep": 3}, "keep must be at least 4, the clients whose noise"),
        ("private", {"keep": 2}, "keep must be left out where Poisson cohorts amplify"),
        ("plain", {"availability": in_rounds([0, 0])}, "availability must be of the 6 clients"),
        ("plain", {"availability": daily([8, 9])}, "deadline must be given for availability"),
        (
            "private",
            {"availability": daily([8, 9]), "deadline": 9.0},
            "availability must depend on rounds alone where secret cohorts amplify",
        ),
        ("plain", {"key_seconds": -1.0}, "key_seconds must be at least 0"),
    ],
)  # fmt: skip
def test_what_no_claim_covers_or_no_round_has_is_refused(name, changed, message):
    cohorts = timed.some(name) if name == "private" else timed.all_join()
    fed = federation(timed.algorithm(name), make_data(), cohorts)
    with pytest.raises(ValueError, match=message):
        clocked(fed, **{**timed.TIMED, **changed})


def test_a_bad_spread_is_refused():
    with pytest.raises(ValueError, match="spread must be at least 0"):
        compute_seconds(2, per_step=1.0, spread=-1.0)
    with pytest.raises(ValueError, match="spread must leave all seconds below"):
        compute_seconds(2, per_step=1.0, spread=1000.0)
    with pytest.raises(ValueError, match="edges must name the edge server of each of the 2"):
        latencies(["a"], [[0.0]], ["a", "a"], "a", edges=["a"])
