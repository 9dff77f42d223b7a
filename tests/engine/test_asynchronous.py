"""Asynchronous rounds against an event simulation by hand, their laws, guarantees and refusals."""

import os
import pathlib
import subprocess
import sys
from functools import cache, partial

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting import rdp
from marks import later, telling
from oracles import asynchronous as by_hand
from oracles import logistic
from side_by_side import several_devices
from small_problem import NUM_CLIENTS, make_data, make_model, plain_trainer, snapshot, theta_of

from fedjax_dp import models
from fedjax_dp.algorithms import (
    OutputPerturbation,
    dp_fedavg,
    fedavg,
    ifca,
    scaffold,
    warm_start_averaging,
)
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import FederatedData, participants, sampling
from fedjax_dp.engine import (
    ExecutionConfig,
    Fate,
    PrivacyAccounting,
    asynchronous,
    clocked,
    compute_seconds,
    examples_of,
    federation,
    latencies,
    simulation,
)
from fedjax_dp.engine.wrappers.asynchronous import Arrivals
from fedjax_dp.privacy.mechanisms.clipping import AdaptiveClipping
from fedjax_dp.privacy.mechanisms.distributed import make_plan
from fedjax_dp.privacy.mechanisms.noise import banded_noise
from fedjax_dp.server import (
    adaptive_gaussian_mean,
    by_realised_count,
    correlated_gaussian_mean,
    discrete_mean,
    gaussian_mean,
    secure,
    staircase_mean,
    trimmed_mean,
    uniform_mean,
)

KEY = jax.random.key(5)
ROUNDS = 8
NEAR = latencies(["here"], [[0.25]], ["here"] * NUM_CLIENTS, "here")
EQUAL = compute_seconds(NUM_CLIENTS)
SECONDS = np.array([0.5, 0.5, 1.5, 2.5, 6.5, 19.5])
SLOW = compute_seconds(NUM_CLIENTS, per_round=SECONDS)
TIMED = {"latencies": NEAR, "compute": SLOW, "server_seconds": 0.25}
RULES = {**TIMED, "concurrency": 4, "max_staleness": 3}
UNSURE = {**RULES, "latencies": NEAR._replace(jitter=np.full((1, 1), 0.5))}
OWN = ("round_seconds", "simulated_seconds", "staleness_mean", "staleness_max")
OWN += ("num_too_stale", "num_in_flight")


def one_step_trainer(model, rate=0.5):
    """One step of gradient descent on all records of a client."""
    config = LocalConfig(learning_rate=rate, batch_size=1, num_steps=1)
    return local_trainer(model, config, sampler=sampling.full_participation())


@cache
def algorithm(name):
    model = make_model()
    match name:
        case "fedavg":
            return fedavg(model, plain_trainer(model))
        case "descent":
            return fedavg(model, one_step_trainer(model))
        case "clipped":
            # Some of the updates are longer than the bound.
            mean = gaussian_mean(0.2, 0.0, 2)
            return dp_fedavg(model, one_step_trainer(model), aggregator=mean)
        case "dp_fedavg":
            return dp_fedavg(model, plain_trainer(model), aggregator=gaussian_mean(1.0, 1.5, 2))
        case "both":
            trainer = dp_sgd_trainer(
                model,
                LocalConfig(learning_rate=0.2, batch_size=2, clip_norm=1.0, noise_multiplier=1.0),
            )
            return dp_fedavg(model, trainer, aggregator=gaussian_mean(1.0, 1.5, 2))
        case "correlated":
            noise = banded_noise(ROUNDS, 2, min_separation=2)
            mean = correlated_gaussian_mean(noise, 1.0, 1.5, 2)
            return dp_fedavg(model, plain_trainer(model), aggregator=mean)
        case "scaffold":
            trainer = local_trainer(model, LocalConfig(learning_rate=0.2, batch_size=2))
            return scaffold(model, trainer, num_clients=NUM_CLIENTS)
    raise KeyError(name)


def joined(sampler=None, size=2):
    return participants.participation(sampler or sampling.fixed_size(), NUM_CLIENTS, size)


def everyone():
    return participants.participation(sampling.full_participation(), NUM_CLIENTS)


def simulated(name, rules, cohorts=None, placement="device", chunk=1):
    execution = ExecutionConfig(
        clients_per_chunk=chunk, devices=None, placement=placement, rounds_per_call=ROUNDS
    )
    wrapper = None if rules is None else partial(asynchronous, **rules)
    cohorts = cohorts or joined()
    return simulation(algorithm(name), make_data(), cohorts, execution, wrapper=wrapper)


def run(sim, rounds=ROUNDS):
    state, record, info = sim.run(sim.init(KEY), KEY, rounds)
    return sim.portable(state), record, info


@cache
def unsure():
    """A run with jitter, stragglers and updates that are too old."""
    sim = simulated("fedavg", {**UNSURE, "max_staleness": 1})
    return sim, *run(sim)


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def cohorts_of(record):
    """By round, the clients that arrived and their fates."""
    return [
        {int(c): int(f) for c, f in zip(ids, fates, strict=True) if c >= 0}
        for ids, fates in zip(record.clients, record.fate, strict=True)
    ]


def orders_of(rounds):
    """The random order of the clients in each round, by which idle places are filled."""
    key, draw = fold(KEY, Purpose.PARTICIPATION), joined(size=NUM_CLIENTS).draw
    return [np.asarray(draw(key, r).indices) for r in range(rounds)]


# Few and many at work, rests between participations, limits that run out, a server that is slow.
SCHEDULES = {
    "ages": {"buffer": 2, "concurrency": 4, "oldest": 3, "server": 0.25},
    "drops": {"buffer": 2, "concurrency": 5, "oldest": 1, "server": 0.0},
    "rests": {"buffer": 2, "concurrency": 4, "oldest": 99, "server": 0.25, "separation": 2},
    "limits": {"buffer": 2, "concurrency": 3, "oldest": 99, "server": 3.0, "most": 2},
    "all": {"buffer": 6, "concurrency": 6, "oldest": 0, "server": 1.0},
}


@pytest.mark.parametrize("name", later(SCHEDULES, but=("ages", "limits"), mark=telling))
def test_updates_arrive_as_in_a_simulation_by_hand(name):
    rules = SCHEDULES[name]
    expected = by_hand.rounds_of(orders_of(12), SECONDS + 0.5, **rules)
    arrivals = Arrivals(
        sampling.fixed_size(),
        SECONDS + 0.5,
        NEAR,
        rules["server"],
        rules["buffer"],
        rules["concurrency"],
        rules["oldest"],
        rules.get("separation", 1),
        rules.get("most"),
    )
    after, state = jax.jit(arrivals.after), arrivals.none(NUM_CLIENTS)
    for arrived, duration in expected:
        state = after(state, fold(KEY, Purpose.PARTICIPATION))
        order = np.argsort(state.place)[: np.sum(np.asarray(state.place) < NUM_CLIENTS)]
        assert [(int(i), int(state.staleness[i])) for i in order] == arrived
        np.testing.assert_allclose(state.seconds, duration, atol=1e-5)
    ages = {age for arrived, _ in expected for _, age in arrived}
    assert (max(ages) > rules["oldest"]) == (name in ("ages", "drops"))
    if name == "limits":
        assert not expected[-1][0], "all participations are used up"


@pytest.mark.parametrize(
    "sampler, num_clients",
    [
        pytest.param(sampling.fixed_size(), 1100, marks=telling),
        (sampling.min_separated(2), 9),
    ],
)
def test_equal_times_draw_the_cohorts_of_the_sampler(sampler, num_clients):
    """Of many clients too, from whom a cohort is not drawn as the first of all in an order."""
    places = latencies(["here"], [[0.25]], ["here"] * num_clients, "here")
    separation = sampler.separation(num_clients, 3)
    rules = 0.5, 3, 3, 2, separation, None
    arrivals = Arrivals(sampler, np.ones(num_clients), places, *rules).sampler()
    synchronous, found = (
        participants.participation(one, num_clients, 3) for one in (sampler, arrivals)
    )
    expected = synchronous.draws(KEY, np.arange(5))
    draws = found.draws(KEY, np.arange(5))
    np.testing.assert_array_equal(draws.is_real.sum(axis=1), 3)
    np.testing.assert_array_equal(draws.indices[:, :3], expected.indices)


def by_hand_models(sim, name, weigh, rounds=ROUNDS):
    """The model after each round, in float64, from the stored models and the arrivals by hand."""
    clients = [(make_data().client(i)["x"], make_data().client(i)["y"]) for i in range(NUM_CLIENTS)]
    sizes = np.array([len(y) for _, y in clients])
    arrivals = by_hand.rounds_of(
        orders_of(rounds), SECONDS + 0.5, buffer=2, concurrency=4, server=0.25, oldest=3
    )
    models, is_cut = [theta_of(sim.portable(sim.init(KEY)).server.params)], []
    for round_index, (arrived, _) in enumerate(arrivals):
        used = [(i, age) for i, age in arrived if age <= 3]

        def delta(client, age, now=round_index):
            if sizes[client] == 0:
                return np.zeros_like(models[0])
            return -0.5 * logistic.gradients(models[now - age], *clients[client]).mean(axis=0)

        deltas = np.array([delta(*one) for one in used])
        weights = np.array([weigh(age) for _, age in used])
        if name == "descent":
            ids = [i for i, _ in used]
            step = by_hand.weighted_mean(deltas, sizes[ids], weights)
        else:
            step = by_hand.clipped_sum(deltas, weights, clip=0.2, divisor=2)
            is_cut += [(np.linalg.norm(deltas, axis=1) > 0.2) & (weights < 1)]
        models.append(models[-1] + step)
    assert name == "descent" or np.concatenate(is_cut).any(), "an old update is clipped"
    return np.array(models), arrivals


@pytest.mark.parametrize("name", later(("clipped", "descent"), mark=telling))
def test_a_server_steps_along_weighted_updates_of_old_models(name):
    """Algorithm 1 of FedBuff; under a bound, weights multiply what is clipped already."""
    sim = simulated(name, RULES)
    expected, arrivals = by_hand_models(sim, name, weigh=lambda age: (1 + age) ** -0.5)
    state, record, info = run(sim)
    np.testing.assert_allclose(theta_of(state.server.params), expected[-1], atol=2e-6)
    assert [set(cohort) for cohort in cohorts_of(record)] == [
        {i for i, _ in arrived} for arrived, _ in arrivals
    ]
    ages = [[age for _, age in arrived if age <= 3] for arrived, _ in arrivals]
    np.testing.assert_allclose(info.server["staleness_mean"], list(map(np.mean, ages)), rtol=1e-6)
    np.testing.assert_array_equal(info.server["staleness_max"], list(map(max, ages)))
    seconds = [duration for _, duration in arrivals]
    np.testing.assert_allclose(info.server["simulated_seconds"], np.cumsum(seconds), rtol=1e-6)
    assert max(map(max, ages)) > 0


SYNCHRONOUS = {
    "all clients": ("dp_fedavg", everyone(), NUM_CLIENTS),
    "a part": ("fedavg", joined(size=3), 3),
    "separated": ("fedavg", joined(sampling.min_separated(2), 3), 3),
    "client state": ("scaffold", joined(size=3), 3),
    "both units": ("both", joined(size=2), 2),
}


@pytest.mark.parametrize("name", later(SYNCHRONOUS, soon=("a part", "client state")))
def test_equal_times_give_the_synchronous_rounds_bit_for_bit(name):
    """With K = cohort = concurrency; by default weights are 1 for models of no age."""
    of, cohorts, count = SYNCHRONOUS[name]
    rules = {"latencies": NEAR, "compute": EQUAL, "server_seconds": 0.5, "concurrency": count}
    rules |= {"max_staleness": 2} | ({"discount": 0.0} if of == "scaffold" else {})
    state, record, info = run(simulated(of, rules, cohorts))
    expected, plain_record, plain_info = run(simulated(of, None, cohorts))
    assert_equal(state._replace(outer=()), expected)
    assert_equal(record, plain_record)
    server = {name: x for name, x in info.server.items() if name not in OWN}
    assert len(server) == len(info.server) - len(OWN)
    assert_equal(info._replace(server=server), plain_info)
    np.testing.assert_allclose(info.server["round_seconds"], 1.0)
    np.testing.assert_array_equal(info.server["staleness_max"], 0)


@telling
def test_a_resumed_run_equals_an_uninterrupted_one():
    sim, whole, record, _ = unsure()
    first, early, _ = sim.run(sim.init(KEY), KEY, 3)
    resumed, late, _ = sim.run(snapshot(sim.portable(first)), KEY, ROUNDS - 3)
    assert_equal(sim.portable(resumed), whole)
    assert cohorts_of(early) + cohorts_of(late) == cohorts_of(record)
    assert sim.num_traces() == 1
    assert record.count(Fate.LATE).any() and len(set(map(len, cohorts_of(record)))) > 1, "drops"


@telling
@pytest.mark.parametrize("placement, chunk", [("host", 1), ("device", 3)])
def test_streaming_and_layout_change_nothing(placement, chunk):
    _, whole, record, info = unsure()
    rules = {**UNSURE, "max_staleness": 1}
    other = run(simulated("fedavg", rules, placement=placement, chunk=chunk))
    tolerance = 0 if chunk == 1 else 1e-6
    found, expected = (theta_of(state.server.params) for state in (other[0], whole))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    assert_equal(other[0].outer[0].in_flight, whole.outer[0].in_flight)
    assert cohorts_of(other[1]) == cohorts_of(record)
    for name in OWN:
        np.testing.assert_array_equal(other[2].server[name], info.server[name])


@telling
def test_devices_change_nothing(tmp_path):
    """Two devices, in a process of their own; see `asynchronous_worker`."""
    here, output = pathlib.Path(__file__).parent, tmp_path / "end.npz"
    environment = os.environ | {
        "XLA_FLAGS": several_devices(2),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(here / "asynchronous_worker.py"), str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    _, whole, record, _ = unsure()
    with np.load(output) as found:
        assert found["devices"] == 2
        np.testing.assert_allclose(found["theta"], theta_of(whole.server.params), atol=1e-6)
        for name in ("clients", "fate"):
            order = np.argsort(found["clients"]), np.argsort(record.clients)
            got, expected = (
                np.take_along_axis(x, o, -1)
                for x, o in zip((found[name], getattr(record, name)), order, strict=True)
            )
            np.testing.assert_array_equal(got, expected)


def spent(count, noise=1.5, dp_delta=1e-5):
    account = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    account.compose(dp_accounting.GaussianDpEvent(noise), int(count))
    return account.get_epsilon(dp_delta)


@telling
@pytest.mark.parametrize("first", [5, 1])
def test_a_client_pays_one_release_for_each_update_and_no_more_than_it_may_take_part(first):
    """Without amplification, dropped updates too; with a budget the same rounds are foreseen.

    Also if the state before the first round was made from another key than the rounds.
    """
    rules = {**UNSURE, "max_staleness": 1, "max_participations": 3}
    sim = simulated("dp_fedavg", rules)
    state = sim.portable(sim.init(jax.random.key(first)))
    _, record, _ = sim.run(state, KEY, ROUNDS)
    drawn = record.clients[record.clients >= 0]
    times = np.bincount(drawn, minlength=NUM_CLIENTS)
    assert times.max() == 3 and record.count(Fate.LATE).any()
    account = PrivacyAccounting(sim)
    asked = {"client": spent(2)}, {"client": 1e-5}, "rdp"
    foreseen = account.affordable_rounds(state, KEY, ROUNDS, *asked)
    so_far = [record.clients[: r + 1] for r in range(ROUNDS)]
    exact = next(r for r in range(ROUNDS) if np.bincount(so_far[r][so_far[r] >= 0]).max() > 2)
    assert foreseen == exact
    account.charge(record)
    expected = [spent(count) if count else 0.0 for count in times]
    np.testing.assert_allclose(account.epsilon({"client": 1e-5})["client"], expected, rtol=1e-6)


@telling
def test_clients_rest_as_long_as_correlated_noise_needs():
    sim = simulated("correlated", {**RULES, "max_staleness": 5}, joined(sampling.min_separated(2)))
    _, record, _ = run(sim)
    rounds = [
        [r for r, cohort in enumerate(cohorts_of(record)) if i in cohort]
        for i in range(NUM_CLIENTS)
    ]
    gaps = [gap for own in rounds for gap in np.diff(own)]
    assert min(gaps) == 2


@telling
def test_records_pay_for_the_rounds_of_their_client():
    sim = simulated("both", RULES)
    _, record, _ = run(sim)
    account = PrivacyAccounting(sim)
    account.charge(record)
    epsilon = account.epsilon({"client": 1e-5, "record": 1e-5})["record"]
    times = np.bincount(record.clients[record.clients >= 0], minlength=NUM_CLIENTS)
    has_data = make_data().sizes > 0
    np.testing.assert_array_equal(epsilon > 0, (times > 0) & has_data)


@cache
def bound(name="fedavg", sampler="fixed_size"):
    cohorts = (
        everyone() if sampler == "full_participation" else joined(getattr(sampling, sampler)())
    )
    return federation(algorithm(name), make_data(), cohorts)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"concurrency": 1}, "concurrency must be at least 2, the cohort size"),
        ({"concurrency": 7}, "concurrency must be at most 6, the clients that are always free"),
        ({"max_staleness": -1}, "max_staleness must be an integer of at least 0"),
        ({"max_participations": 0}, "max_participations must be an integer of at least 1"),
        ({"max_participations": 2, "num_rounds": 7}, "max_participations must be at least 3: 7"),
        ({"discount": -1.0}, "discount must be"),
        ({"discount": lambda age: 1 + age}, r"discount must be in \[0, 1\] for a staleness of 1"),
        ({"server_seconds": -1.0}, "server_seconds must be at least 0"),
        ({"server_seconds": 1e39}, r"server_seconds must be below 1e\+09"),
        ({"compute": compute_seconds(5)}, "compute must be of the 6 clients"),
    ],
)
def test_bad_numbers_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        asynchronous(bound(), **{**RULES, **changed})


def other(name):
    """A federation whose method or guarantee asynchronous rounds cannot have."""
    model, cohorts = make_model(), joined()
    trainer = plain_trainer(model)
    structure = jax.eval_shape(model.init, KEY)

    def private(aggregator, cohorts=cohorts):
        of = dp_fedavg(model, trainer, aggregator=aggregator)
        return federation(of, make_data(), cohorts)

    def plain(of):
        return federation(of, make_data(), cohorts)

    match name:
        case "poisson":
            return private(gaussian_mean(1.0, 1.0, 2), joined(sampling.poisson()))
        case "cyclic":
            return private(gaussian_mean(1.0, 1.0, 2), joined(sampling.cyclic()))
        case "shares":
            plan = make_plan(4, 1.0, 1.0, num_clients=2, num_shares=2)
            return private(discrete_mean(structure, plan, 2))
        case "masks":
            masks = secure.fixed_point(2), secure.all_pairs(2)
            return plain(fedavg(model, trainer, aggregator=secure.masked(uniform_mean(), *masks)))
        case "adaptive":
            rule = AdaptiveClipping(1.0, 0.5, 0.2, 1.0, 2)
            return private(adaptive_gaussian_mean(rule, 1.0))
        case "stacked":
            return plain(fedavg(model, trainer, aggregator=trimmed_mean()))
        case "lattice":
            return private(staircase_mean(structure, 1.0, 8.0, 2))
        case "unclaimed":
            return private(by_realised_count(gaussian_mean(1.0, 1.0, 2)))
        case "clock":
            return clocked(bound(), latencies=NEAR, compute=EQUAL, server_seconds=0.0)
        case "choice":
            return plain(ifca(model, trainer, num_models=2))
        case "scaffold":
            return bound("scaffold")
    raise KeyError(name)


@pytest.mark.parametrize(
    "name, message",
    [
        ("poisson", "participation must be of fixed_size.* nothing is amplified, got 'poisson'"),
        ("cyclic", "participation must be of fixed_size"),
        ("shares", "aggregator must send plain updates: masks, noise shares"),
        ("masks", "aggregator must send plain updates: masks, noise shares"),
        ("adaptive", "aggregator must send clients no state of its own, such as an adaptive clip"),
        ("stacked", "aggregator must be Summed"),
        ("clock", r"federation must be as federation\(\) returned it; other wrappers"),
        ("lattice", "discount must be 0 unless noise is Gaussian or Laplace: a part of a clipped"),
        ("unclaimed", "discount must be 0 unless noise is Gaussian or Laplace"),
        ("choice", "discount must be 0 for ifca"),
        ("scaffold", "discount must be 0 for scaffold: its clients' states or messages"),
    ],
)
def test_what_has_no_analysis_is_refused_with_the_reason(name, message):
    with pytest.raises(ValueError, match=message):
        asynchronous(other(name), **RULES)


def test_asynchronous_rounds_have_no_second_clock():
    buffered = asynchronous(bound(), **RULES)
    with pytest.raises(ValueError, match="federation must have no clock of its own"):
        clocked(buffered, latencies=NEAR, compute=EQUAL, server_seconds=0.0)


def test_numbers_that_would_change_the_times_are_refused():
    fed = asynchronous(bound(), **RULES)
    longer = fed.hyper._replace(local=fed.hyper.local._replace(num_epochs=np.full(6, 3)))
    with pytest.raises(ValueError, match=r"hyper\.local must give each client as many local"):
        fed.check(longer)
    fed.check(fed.hyper)

    def other(local):
        fed.check(fed.hyper._replace(local=fed.hyper.local._replace(**local)))
        return 0

    jax.vmap(lambda rate: other({"learning_rate": rate}))(np.float32([0.1, 0.2]))
    jax.jit(lambda rate: other({"learning_rate": rate}))(0.1)
    with pytest.raises(ValueError, match=r"hyper\.local must .* got 'traced numbers"):
        jax.vmap(lambda count: other({"num_epochs": count}))(np.array([1, 2]))


@telling
def test_a_sweep_over_local_steps_has_no_stale_times():
    """Rounds of other steps than those that times are of have neither clients nor seconds."""
    fed = asynchronous(bound(), **RULES)
    examples = examples_of(make_data())

    @jax.jit
    @jax.vmap
    def play(count):
        local = fed.hyper.local._replace(num_epochs=count)
        return fed.run_round(fed.init(KEY), fed.hyper._replace(local=local), examples, KEY)

    at_start = fed.hyper.local.num_epochs
    state, record, info = play(np.stack([at_start, at_start + 1]))
    assert record.num_drawn.tolist() == [2, 0]
    assert np.isnan(info.server["round_seconds"]).tolist() == [False, True]
    assert np.isnan(info.server["simulated_seconds"]).tolist() == [False, True]
    assert np.all(np.isfinite(state.server.params["w"]))


def test_models_with_noise_in_shares_of_all_clients_are_refused():
    """Without the shares of all, of which K updates are a part, every round would be lost."""
    rows = np.ones((6, 2), np.float32)
    data = FederatedData.from_client_ids({"x": rows, "y": np.zeros(6, np.int32)}, np.arange(6))
    model = models.logistic_regression(
        jax.ShapeDtypeStruct((2,), np.float32), 2, gradient_bound=1.0
    )
    config = LocalConfig(
        learning_rate=0.5, batch_size=1, num_steps=1, clip_norm=1.0, noise_multiplier=1.0
    )
    sampler = sampling.full_participation()._replace(name="full_batch")
    trainer = dp_sgd_trainer(model, config, sampler=sampler)

    def of(mechanism, cohorts):
        noise = OutputPerturbation(mechanism=mechanism)
        made = warm_start_averaging(
            model, trainer, num_clients=6, rows_per_round=1, perturbation=noise
        )
        return federation(made, data, cohorts)

    rules = {**RULES, "max_staleness": 0, "discount": 0.0}
    asynchronous(of("laplace", joined()), **rules)
    with pytest.raises(ValueError, match="federation must have no noise in shares of clients"):
        asynchronous(of("gamma_shares", everyone()), **{**rules, "concurrency": 6})
    with pytest.raises(ValueError, match="participation must draw 6 clients in a round, without"):
        of("gamma_shares", joined())


def test_a_population_that_rests_bounds_the_clients_at_work():
    cohorts = joined(sampling.min_separated(2))
    fed = federation(algorithm("fedavg"), make_data(), cohorts)
    with pytest.raises(ValueError, match="concurrency must be at most 4"):
        asynchronous(fed, **{**RULES, "concurrency": 5})
