"""Canary audits: quiet where privacy is as claimed, loud where noise or sampler are not."""

import functools

import audit_cases as cases
import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling

from fedjax_dp.algorithms import fedavg, registry
from fedjax_dp.audit.canaries import MARK, plant_clients, plant_records
from fedjax_dp.audit.canary_records import LEVELS, plant_votes
from fedjax_dp.audit.runs import AuditResult, audit, run_audit
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.core.made import made
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import Fate, scheduled, simulation
from fedjax_dp.models.base import Model
from fedjax_dp.privacy import mechanisms
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.reports.auditing import linear_direction
from fedjax_dp.server.private import private_mean

pytestmark = [pytest.mark.xdist_group("audited runs"), floats]

NUM_SEEDS = 20
NUM_ROUNDS = cases.NUM_ROUNDS
SMALL = [
    *(("dp_fedavg", "client"), ("dp_sgd", "record"), ("scaffold", "record")),
    *(("scaffold", "client"), ("feddyn", "client")),
]


def run(planted, num_runs, num_rounds=NUM_ROUNDS, key=0, **options):
    return run_audit(
        planted,
        jax.random.key(key),
        num_runs=num_runs,
        num_rounds=num_rounds,
        execution=cases.EXECUTION,
        **options,
    )


@functools.cache
def runs_of(name, unit, num_canaries, num_runs):
    return run(cases.plant(name, unit, num_canaries), num_runs)


def results_of(runs):
    """Audits all runs together, and each of the first runs on its own."""
    alone = [audit(runs, cases.DP_DELTA, audited_run=i)[0] for i in range(NUM_SEEDS)]
    assert {result.method for result in alone} == {"one_run"}
    return alone + audit(runs, cases.DP_DELTA)[1:]


def require_quiet_but_awake(runs):
    """No bound beyond its claim, and a signal that an audit could have found."""
    broken = [result for result in results_of(runs) if result.is_violated]
    assert not broken, broken
    half = len(runs.seen) // 2
    by_canary = np.moveaxis(runs.seen, 1, 2)
    learned, included = by_canary[:half], runs.is_included[:half]
    direction = linear_direction(learned[included], learned[~included])
    scores, included = by_canary[half:] @ direction, runs.is_included[half:]
    gap = scores[included].mean() - scores[~included].mean()
    assert gap > 5 * scores.std() / np.sqrt(included.sum())


@pytest.mark.parametrize(("name", "unit"), later(SMALL, mark=telling))
def test_no_lower_bound_exceeds_what_is_claimed(name, unit):
    require_quiet_but_awake(runs_of(name, unit, 40, 200))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "unit"), cases.private_pairs())
def test_no_lower_bound_of_any_algorithm_exceeds_what_is_claimed(name, unit):
    require_quiet_but_awake(run(cases.plant(name, unit, 40), 400, key=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.MEANS)
def test_no_lower_bound_on_any_private_mean_exceeds_what_is_claimed(name):
    aggregator, participation = cases.aggregators()[name]
    planted = cases.plant("dp_fedavg", "client", 10, participation, aggregator=aggregator)
    require_quiet_but_awake(run(planted, 400, key=1))


def test_every_algorithm_and_mean_that_claims_privacy_is_audited():
    assert set(cases.MEANS) == set(cases.aggregators())
    assert set(SMALL) <= set(cases.private_pairs())
    claimed = {
        (name, unit)
        for name, entry in registry.ALGORITHMS.items()
        for unit in ("client", "record")
        if {unit, "both"} & set(entry.units) and name not in cases.ON_MODELS
    }
    assert set(cases.private_pairs()) == claimed and len(claimed) >= 32


def violations(planted, num_runs=1000, num_rounds=NUM_ROUNDS) -> list[AuditResult]:
    """What the audit finds beyond the tightest claim that there is."""
    runs = run(planted, num_runs, num_rounds, key=2)
    return [r for r in audit(runs, cases.DP_DELTA, accountant="pld") if r.is_violated]


def plant_one_record(trainer_of):
    def make(model):
        return cases.build("dp_sgd", model, "record", trainer_of(model))

    return cases.plant_in(plant_records, make)


honest = pytest.param(mechanisms.gaussian, marks=pytest.mark.slow)


@pytest.mark.parametrize("make", [pytest.param(cases.half_the_noise, marks=telling), honest])
def test_half_the_noise_on_updates_is_found(make):
    aggregator = private_mean(make, 0.5, 2.0, 2.0)
    participation = cases.full_participation()
    planted = cases.plant("dp_fedavg", "client", 1, participation, aggregator=aggregator)
    found = {result.method for result in violations(planted)}
    assert found >= {"threshold", "gaussian"} if make is cases.half_the_noise else not found


@telling
@pytest.mark.parametrize("make", [cases.half_the_noise, honest])
@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_half_the_noise_on_an_update_of_several_parts_is_found(name, make):
    aggregator = private_mean(make, 0.5, 2.0, 2.0)
    participation = cases.full_participation()
    planted = cases.plant(name, "client", 1, participation, aggregator=aggregator)
    found = {result.method for result in violations(planted)}
    assert found >= {"threshold", "gaussian"} if make is cases.half_the_noise else not found


@telling
@pytest.mark.parametrize("make", [cases.half_the_noise, honest])
def test_half_the_noise_on_gradients_is_found(make):
    numbers = cases.NUMBERS._replace(noise_multiplier=2.0)

    def trainer_of(model):
        rule = clipped(model, make_mechanism=make)
        return local_trainer(model, numbers, sampler=cases.FULL, gradient_rule=rule)

    found = {result.method for result in violations(plant_one_record(trainer_of))}
    assert found >= {"threshold", "gaussian"} if make is cases.half_the_noise else not found


@pytest.mark.parametrize("make", [pytest.param(cases.half_the_noise, marks=telling), honest])
def test_half_the_noise_on_gradients_is_found_through_votes(make):
    numbers = cases.NUMBERS._replace(noise_multiplier=2.0)

    def make_voters(model, public_x):
        rule = clipped(model, make_mechanism=make)
        trainer = local_trainer(model, numbers, sampler=cases.FULL, gradient_rule=rule)
        return cases.build("ae_dpfl", model, "record", trainer, public_x=public_x)

    planted = cases.plant_in(plant_votes, make_voters, NUM_ROUNDS)
    found = {result.method for result in violations(planted)}
    assert found >= {"threshold", "gaussian"} if make is cases.half_the_noise else not found


@telling
def test_all_clients_drawn_where_poisson_sampling_is_accounted_is_found():
    # A mechanism with a rate of 1/4 that draws all clients.
    swapped = made(cases.POISSON._replace(draw=sampling.full_participation().draw))
    participation = participants.participation(swapped, cases.NUM_CLIENTS, 1)
    assert violations(cases.plant("dp_fedavg", "client", 1, participation), num_runs=600)


@telling
def test_fixed_batches_where_poisson_sampling_is_accounted_are_found():
    # The same two records at every step, of which the canary, the last of its client, is one.
    def draw(state, key, step, size, batch_size, limit, capacity, *rest):
        slots = jnp.arange(capacity)
        return state, sampling.Draw(jnp.maximum(size - 1 - slots, 0), slots < 2, jnp.int32(0))

    swapped = made(cases.POISSON._replace(draw=draw))
    numbers = cases.NUMBERS._replace(batch_size=2.0)

    def trainer_of(model):
        return local_trainer(model, numbers, sampler=swapped, gradient_rule=clipped(model))

    assert violations(plant_one_record(trainer_of), num_rounds=8)


@telling
def test_replacing_a_canary_moves_scores_twice_as_far_and_is_accounted():
    algorithm = cases.build("dp_fedavg", cases.model(), "client")
    planted = cases.plant_in(plant_clients, algorithm, num_canaries=10, relation="replace_one")
    runs = run(planted, 100, 1)
    scores = runs.seen[:, 0]
    gap = scores[runs.is_included].mean() - scores[~runs.is_included].mean()
    # A contribution of ±0.5 is divided by the expected cohort of 2; the noise of each mean of about
    # 500 scores is 0.25/√500.
    assert gap == pytest.approx(0.5, abs=5 * 0.25 * np.sqrt(2 / 500))
    results = audit(runs, cases.DP_DELTA, accountant="pld")
    # Twice the distance at the same noise.
    expected = dp_accounting.get_epsilon_gaussian(0.5, cases.DP_DELTA)
    assert results[0].epsilon_claimed == pytest.approx(expected, rel=1e-3)
    assert not any(result.is_violated for result in results)


def test_planted_clients_are_the_last_and_send_one_clipped_entry_each():
    planted = cases.plant("dp_fedavg", "client", 5)
    assert planted.data.num_clients == cases.NUM_CLIENTS + 5
    assert planted.participation.num_clients == cases.NUM_CLIENTS + 5
    assert planted.participation.cohort_size / planted.participation.num_clients == 0.5
    np.testing.assert_array_equal(planted.owners, cases.NUM_CLIENTS + np.arange(5))
    np.testing.assert_array_equal(
        planted.data.examples[MARK], [-1] * cases.data().num_examples + [0, 1, 2, 3, 4]
    )
    np.testing.assert_array_equal(planted.data.sizes[-5:], 1)


@telling
def test_without_noise_a_score_is_the_clipped_contribution_and_nothing_without_the_canary():
    algorithm = fedavg(cases.model(), cases.plain_trainer(cases.model()), aggregator=cases.mean(0))

    # Clients that send nothing of their own: what is left is the canaries'.
    def client(*arguments):
        output = algorithm.client(*arguments)
        return output._replace(update=jax.tree.map(jnp.zeros_like, output.update))

    silent = algorithm._replace(client=client)
    planted = cases.plant_in(plant_clients, silent, num_canaries=8)
    runs = run(planted, 3, 2)
    expected = np.where(runs.is_included, 0.5 / 2.0, 0.0)
    np.testing.assert_allclose(runs.seen[:, 0], expected, atol=1e-6)
    np.testing.assert_allclose(runs.seen[:, 1], expected, atol=1e-6)
    assert np.isinf(audit(runs, cases.DP_DELTA)[0].epsilon_claimed)


@telling
def test_without_noise_a_records_score_is_its_clipped_gradient():
    numbers = cases.NUMBERS._replace(noise_multiplier=0.0)

    def make(model):
        # One layer holds all canaries, ordinary records have no gradient of their own.
        frozen = model._replace(
            loss_fn=lambda outputs, batch: jnp.where(
                batch[MARK] == -1, 0.0, model.loss_fn(outputs, batch)
            )
        )
        trainer = local_trainer(frozen, numbers, sampler=cases.FULL, gradient_rule=clipped(frozen))
        return cases.build("dp_sgd", frozen, "record", trainer)

    planted = cases.plant_in(plant_records, make, num_canaries=9)
    np.testing.assert_array_equal(planted.data.sizes, [11, 10, 10, 10])
    runs = run(planted, 3, 2)
    # Learning rate times clip norm over the size of the client's batch, in each of two rounds.
    step = 0.1 * 0.5 / planted.data.sizes[planted.owners]
    for seen in np.moveaxis(runs.seen, 1, 0):
        np.testing.assert_allclose(seen, step * runs.is_included, atol=1e-7)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(np.float32, marks=pytest.mark.slow), pytest.param(np.uint8, marks=telling)],
)
def test_without_noise_votes_name_the_level_below_what_a_canary_did(dtype):
    numbers = cases.NUMBERS._replace(noise_multiplier=0.0, learning_rate=0.7)
    plain = cases.data().examples
    inputs = np.abs(8 * plain["x"]).astype(dtype)
    targets = plain["y"].astype(np.int32)
    data = FederatedData({"x": inputs, "y": targets}, cases.data().offsets)
    two = Model.from_functions(
        lambda key: {"b": jnp.ones((2,)), "w": jnp.ones((cases.NUM_FEATURES, 2))},
        lambda params, x: x.astype(jnp.float32) @ params["w"] + params["b"],
        loss="softmax_cross_entropy",
    )

    def make(model, public_x):
        # Ordinary records have no gradient of their own.
        silent = model._replace(
            loss_fn=lambda outputs, batch: (
                model.loss_fn(outputs, batch) * (batch[MARK] != -1 if MARK in batch else 1)
            )
        )
        trainer = local_trainer(silent, numbers, sampler=cases.FULL, gradient_rule=clipped(silent))
        return cases.build("ae_dpfl", silent, "record", trainer, public_x=public_x)

    planted = cases.plant_in(plant_votes, make, NUM_ROUNDS, num_canaries=9, on=two, store=data)
    runs = run(planted, 3, 2)
    step = 0.7 * 0.5 / planted.data.sizes[planted.owners]
    # Where nothing moved, 0 is not passed and the level below it is.
    below = LEVELS[np.searchsorted(LEVELS, np.where(runs.is_included, step, 0.0)) - 1]
    for seen in np.moveaxis(runs.seen, 1, 0):
        np.testing.assert_allclose(seen, below, atol=1e-5)


@telling
def test_an_ordinary_run_of_the_engine_has_the_same_scores():
    runs = runs_of("dp_sgd", "record", 40, 200)
    planted = runs.planted
    _, init_key, run_key = jax.random.split(jax.random.key(0), 3)
    marks = np.asarray(planted.marks(jnp.asarray(runs.is_included[1])))
    data = FederatedData(planted.data.examples | {MARK: marks}, planted.data.offsets)
    sim = simulation(planted.algorithm, data, planted.participation, cases.EXECUTION)
    key = jax.random.split(run_key, 200)[1]
    _, record, info = sim.run(sim.init(init_key), key, NUM_ROUNDS)
    np.testing.assert_allclose(planted.scores(record, info), runs.seen[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(record.clients, runs.record.clients[1])


@pytest.mark.slow
def test_runs_side_by_side_are_the_runs_one_by_one():
    one_by_one = runs_of("dp_fedavg", "client", 40, 200)
    together = run(one_by_one.planted, 200, runs_at_once=64)
    np.testing.assert_allclose(one_by_one.seen, together.seen, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(one_by_one.record.clients, together.record.clients)


@telling
def test_claims_are_those_of_the_run_in_which_the_canary_took_part_most_often():
    runs = runs_of("dp_sgd", "record", 40, 200)
    times = np.arange(200) % 4
    first = runs.planted.owners[0]
    drawn = np.arange(NUM_ROUNDS) < times[:, None]
    clients = np.where(drawn[:, :, None], first, runs.planted.owners[1])
    fate = np.full_like(clients, Fate.CONTRIBUTED)
    changed = runs._replace(record=runs.record._replace(clients=clients, fate=fate))
    [claim] = [
        result.epsilon_claimed
        for result in audit(changed, cases.DP_DELTA)
        if result.method == "threshold" and result.dp_delta == cases.DP_DELTA
    ]
    ledger = Ledger("record")
    event = dp_accounting.PoissonSampledDpEvent(6 / 18, dp_accounting.GaussianDpEvent(1.0))
    ledger.charge(event, count=3)
    assert claim == pytest.approx(ledger.epsilon(cases.DP_DELTA)[0], rel=1e-6)


def without_claims(model):
    return fedavg(model, cases.plain_trainer(model))


def voters(model, public_x):
    return cases.build("ae_dpfl", model, "record", public_x=public_x)


FAR = FederatedData({"x": np.full((2, 60), -(2.0**21))}, np.array([0, 2]))


@pytest.mark.parametrize(
    ("plant", "match"),
    [
        (lambda: cases.plant("dp_fedavg", "client", 500), "num_canaries must be at most 61"),
        (lambda: cases.plant("dp_sgd", "record", 0), "num_canaries must be an integer"),
        (
            lambda: cases.plant_in(plant_clients, without_claims(cases.model())),
            "algorithm must claim privacy for clients",
        ),
        (
            lambda: cases.plant_in(plant_records, without_claims),
            "algorithm must claim privacy for records",
        ),
        (
            lambda: cases.plant_in(plant_votes, voters, 1, store=FAR),
            "data must hold inputs above -1048576",
        ),
        (
            lambda: run(cases.plant_in(plant_votes, voters, NUM_ROUNDS - 1), 1),
            "num_rounds must be such that a round queries 83 inputs",
        ),
        (lambda: run(cases.plant("dp_sgd", "record", 1), 0, 1), "num_runs must be an integer"),
    ],
)
def test_what_cannot_be_audited_is_refused(plant, match):
    with pytest.raises(ValueError, match=match):
        plant()


@telling
def test_audits_share_what_may_go_wrong():
    results = audit(runs_of("dp_sgd", "record", 40, 200), 1e-5, confidence=0.9)
    assert [r.method for r in results] == ["one_run", "threshold", "threshold"]
    assert all(r.confidence == pytest.approx(1 - 0.1 / 3) for r in results)
    assert {r.unit for r in results} == {"record"}


@telling
def test_a_score_is_never_learned_from_the_runs_that_prove_something():
    # Runs that may be learned from show canaries in the first round, all others in the second.
    runs = runs_of("dp_sgd", "record", 40, 200)
    seen = np.random.default_rng(0).normal(size=runs.seen.shape)
    included = runs.is_included
    learned = np.zeros(200, bool)
    for side in (included[:, 0], ~included[:, 0]):
        learned[np.nonzero(side)[0][::2]] = True
    shown = 8.0 * included
    split = seen.copy()
    split[learned, 0] += shown[learned]
    split[~learned, 1] += shown[~learned]
    for result in audit(runs._replace(seen=split), cases.DP_DELTA):
        assert result.method == "one_run" or result.epsilon_lower == 0
    alone = seen.copy()
    alone[0, 1] += shown[0]
    alone[1:, 0] += shown[1:]
    assert audit(runs._replace(seen=alone), cases.DP_DELTA)[0].epsilon_lower < 0.1
    seen[:, 0] += shown
    assert min(r.epsilon_lower for r in audit(runs._replace(seen=seen), cases.DP_DELTA)) > 1.5


@telling
def test_an_audit_at_less_noise_charges_the_noise_that_each_round_claims():
    factors = np.array([1.5, 1.0, 0.75, 0.5], np.float32)
    tables = {"aggregator.noise_multiplier": factors}
    planted = cases.plant("dp_fedavg", "client", 2)
    quieter = planted.algorithm.with_hyper(
        planted.algorithm.hyper._replace(
            aggregator={**planted.algorithm.hyper.aggregator, "noise_multiplier": 0.1}
        )
    )
    wrapper = functools.partial(scheduled, schedules=tables, num_rounds=len(factors))
    seen = run(planted, 40, num_rounds=len(factors), running=quieter, wrapper=wrapper)
    (one, *_) = audit(seen, cases.DP_DELTA)
    ledger, cohorts = Ledger("client", planted.relation), planted.participation
    for factor in factors:
        noise = dp_accounting.GaussianDpEvent(float(np.float32(cases.NOISE_MULTIPLIER) * factor))
        ledger.charge(cohorts.event(noise))
    assert one.epsilon_claimed == pytest.approx(float(ledger.epsilon(one.dp_delta)[0]), rel=1e-6)
