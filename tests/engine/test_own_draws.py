"""The price of cohorts that a wrapper draws itself, by compositions of dp-accounting."""

import copy
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp
from marks import later, slow, telling
from own_draws_worker import COHORT, DP_DELTA, LAYOUTS, WRAPPERS
from side_by_side import several_devices
from small_problem import NUM_CLIENTS, ROUNDS, make_data, make_model, plain_trainer, private_trainer

from fedjax_dp import algorithms
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.core.ranges import Positive
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import (
    Fate,
    PrivacyAccounting,
    RoundRecord,
    compile_federation,
    federation,
)
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import OTHERS
from fedjax_dp.privacy import banded_noise, make_plan
from fedjax_dp.server import correlated_gaussian_mean, discrete_mean, gaussian_mean

KEY, NOISE, DELTA = jax.random.key(7), 4.0, {"client": 1e-6, "record": 1e-5}
SAMPLERS = {
    "poisson": sampling.poisson(),
    "fixed_size": sampling.fixed_size(),
    "cyclic": sampling.cyclic(),
    "min_separated": sampling.min_separated(3),
    "full_participation": sampling.full_participation(),
}


@functools.cache
def bound(sampler=SAMPLERS["poisson"], unit="client"):
    """A federation that is made once: what is traced of it, is traced once."""
    model = make_model()
    if unit == "record":
        return bound_to(algorithms.dp_sgd(model, private_trainer(model)), sampler)
    return with_mean(gaussian_mean(1.0, NOISE, 2), sampler)


def with_mean(mean, sampler=SAMPLERS["poisson"]):
    model = make_model()
    return bound_to(algorithms.dp_fedavg(model, plain_trainer(model), aggregator=mean), sampler)


def bound_to(algorithm, sampler):
    size = None if sampler.name == "full_participation" else 2
    return federation(
        algorithm, make_data(), participants.participation(sampler, NUM_CLIENTS, size)
    )


def with_cohorts(fed, change):
    return fed._replace(cohorts=change(fed.cohorts))


def thinned(fed, keeps):
    return with_cohorts(fed, lambda cohorts: cohorts.thinned(keeps))


def with_fates(fed, fates, **options):
    return with_cohorts(fed, lambda cohorts: cohorts.with_fates(fates, **options))


def repeating(fed):
    """The cohort of round 0 in every round."""

    def draw(state, hyper, key, layout=Layout()):
        return fed.cohorts.draw(state._replace(round=jnp.int32(0)), hyper, key, layout)

    return fed._replace(cohorts=fed.cohorts.given(draw))


def of_the_model(fed):
    """A cohort that depends on the model."""

    def draw(state, hyper, key, layout=Layout()):
        first = jax.tree.leaves(state.server.params)[0].ravel()[0]
        return fed.cohorts.draw(state._replace(round=jnp.int32(first > 0)), hyper, key, layout)

    return fed._replace(cohorts=fed.cohorts.given(draw, reads_state=True))


def spent(num_releases):
    account = rdp.RdpAccountant()
    account.compose(GaussianDpEvent(NOISE), num_releases)
    return account.get_epsilon(DELTA["client"])


def record_of_one(cohort):
    clients = jnp.where(cohort.is_drawn, cohort.ids, -1)
    return RoundRecord(clients, cohort.fate, cohort.overflow, jnp.int32(0), jnp.bool_(True))


def record_of(cohort, rounds):
    every = record_of_one(cohort)
    return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], rounds, axis=0), every)


@pytest.mark.parametrize("name", later(SAMPLERS, but=["poisson"], soon=["cyclic"]))
def test_a_cohort_that_is_repeated_is_charged_what_it_costs(name):
    fed = repeating(bound(SAMPLERS[name]))
    state, rounds = fed.init(KEY), 6
    cohort = fed.cohorts.draw(state, fed.hyper, KEY)
    drawn = np.unique(np.asarray(cohort.ids)[np.asarray(cohort.is_drawn)])
    assert len(drawn) > 0
    expected = np.zeros(NUM_CLIENTS)
    expected[drawn] = spent(rounds)
    accounting = PrivacyAccounting(fed)
    planned = accounting.planned(state, KEY, rounds)["client"].epsilon(DELTA["client"])
    np.testing.assert_allclose(planned, expected, rtol=1e-6)
    # Between the price of three and of four rounds for those drawn.
    budget = {"client": (spent(3) + spent(4)) / 2}
    assert accounting.affordable_rounds(state, KEY, rounds, budget, DELTA, "rdp") == 3
    accounting.charge(record_of(cohort, rounds))
    np.testing.assert_allclose(accounting.epsilon(DELTA)["client"], expected, rtol=1e-6)


@pytest.mark.parametrize("unit", ["client", "record"])
def test_all_clients_pay_where_released_models_decide_who_is_drawn(unit):
    fed = of_the_model(bound(unit=unit))
    state = fed.init(KEY)
    accounting = PrivacyAccounting(fed)
    accounting.charge(record_of(fed.cohorts.draw(state, fed.hyper, KEY), 2))
    every = bound(SAMPLERS["full_participation"], unit)
    expected = PrivacyAccounting(every)
    expected.charge(record_of(every.cohorts.draw(state, every.hyper, KEY), 2))
    for ledger, other in (
        (accounting.ledgers[unit], expected.ledgers[unit]),
        (accounting.planned(state, KEY, 3)[unit], expected.planned(state, KEY, 3)[unit]),
    ):
        np.testing.assert_array_equal(ledger.num_compositions, other.num_compositions)
        assert ledger.num_compositions.max() > 0


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_draw_of_its_own_sees_nothing_without_noise(is_ahead):
    seen, inner = [], bound()

    def draw(state, hyper, key, layout=Layout()):
        seen.append(state)
        return inner.cohorts.draw(state, hyper, key, layout)

    fed = inner._replace(cohorts=inner.cohorts.given(draw, reads_state=not is_ahead))
    fed.cohorts.draw(inner.init(KEY)._replace(clients=jnp.ones(NUM_CLIENTS)), fed.hyper, KEY)
    (state,) = seen
    assert state.clients is None and state.aggregator == ()
    assert (state.server == ()) == is_ahead


def test_a_draw_of_its_own_has_each_client_once_and_no_others():
    wide, inner = bound(SAMPLERS["full_participation"]), bound(SAMPLERS["cyclic"])
    found = jnp.array([-1, 2, 2, NUM_CLIENTS, -NUM_CLIENTS, 4], jnp.int32)
    cohort = wide.cohorts.draw(wide.init(KEY), wide.hyper, KEY)._replace(ids=found)
    fed = with_cohorts(inner, lambda c: c.given(lambda state, hyper, key, layout=Layout(): cohort))
    drawn = fed.cohorts.draw(fed.init(KEY), fed.hyper, KEY)
    np.testing.assert_array_equal(np.sort(drawn.ids[drawn.is_drawn]), [2, 4])


def test_a_step_that_goes_back_repeats_no_cohort_and_no_noise():
    fed = bound()

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        return state._replace(round=jnp.int32(0)), record_of_one(cohort), None

    back = fed._replace(step=step)
    after, _, _ = back.run_round(fed.init(KEY)._replace(round=jnp.int32(4)), fed.hyper, None, KEY)
    assert after.round == 5


def test_a_draw_that_reads_more_than_it_receives_says_so():
    own = of_the_model(bound()).cohorts.own.function
    fed = with_cohorts(bound(), lambda cohorts: cohorts.given(own))
    with pytest.raises(ValueError, match=r"draw must read .* unless reads_state is true"):
        PrivacyAccounting(fed).planned(fed.init(KEY), KEY, 3)


@slow
def test_wrappers_that_change_cohorts_are_charged_right_in_every_layout(tmp_path):
    """In a process of its own, since a process has one set of devices."""
    worker, output = pathlib.Path(__file__).with_name("own_draws_worker.py"), tmp_path / "found.npz"
    environment = os.environ | {
        "XLA_FLAGS": several_devices(2),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(worker.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(worker), str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(output) as arrays:
        found = dict(arrays)
    account = rdp.RdpAccountant()
    account.compose(PoissonSampledDpEvent(COHORT / NUM_CLIENTS, GaussianDpEvent(NOISE)), ROUNDS)
    amplified = account.get_epsilon(DP_DELTA)
    for name in (wrapper.__name__ for wrapper in WRAPPERS):
        first = f"{name}:device:1"
        for job in (f"{name}:{placement}:{devices}" for placement, devices in LAYOUTS):
            assert found[f"{job}/devices"] == int(job[-1]), job
            np.testing.assert_array_equal(found[f"{job}/drawn"], found[f"{first}/drawn"], job)
            np.testing.assert_array_equal(found[f"{job}/epsilon"], found[f"{first}/epsilon"], job)
            params = found[f"{first}/params"]
            np.testing.assert_allclose(found[f"{job}/params"], params, atol=1e-6, err_msg=job)
    drawn = found["repeating:device:1/drawn"]
    assert 0 < np.sum(drawn[0]) < NUM_CLIENTS and np.all(drawn == drawn[0])
    expected = np.where(drawn[0], spent(ROUNDS), 0.0)
    np.testing.assert_allclose(found["repeating:device:1/epsilon"], expected, rtol=1e-6)
    drawn = found["thinning:device:1/drawn"]
    assert not np.any(drawn[:, : NUM_CLIENTS // 2]) and np.any(drawn)
    np.testing.assert_allclose(found["thinning:device:1/epsilon"], amplified, rtol=1e-6)
    turns = (np.arange(NUM_CLIENTS) - COHORT * np.arange(ROUNDS)[:, None]) % NUM_CLIENTS < COHORT
    np.testing.assert_array_equal(found["in_turn:device:1/drawn"], turns)
    np.testing.assert_array_equal(found["in_turn:device:1/outer"], [COHORT * ROUNDS % NUM_CLIENTS])
    np.testing.assert_allclose(found["in_turn:device:1/epsilon"], spent(ROUNDS), rtol=1e-6)


@telling
def test_a_draw_of_its_own_is_refused_where_a_claim_needs_more():
    mean = correlated_gaussian_mean(banded_noise(6, 3, min_separation=3), 1.0, NOISE, 2)
    with pytest.raises(ValueError, match=r"participation must keep 3 rounds .*'any_draw"):
        PrivacyAccounting(repeating(with_mean(mean, SAMPLERS["cyclic"])))
    model = make_model()
    structure = jax.eval_shape(model.init, KEY)
    plan = make_plan(4, 1.0, 1.0, num_clients=NUM_CLIENTS, num_shares=NUM_CLIENTS, bits=16)
    mean = discrete_mean(structure, plan, NUM_CLIENTS)
    shares = with_mean(mean, SAMPLERS["full_participation"])
    for other in (repeating(shares), thinned(shares, lambda round_index, clients: clients > 0)):
        with pytest.raises(ValueError, match=f"the updates of at least {NUM_CLIENTS} clients"):
            PrivacyAccounting(other)


def test_thinned_cohorts_have_the_price_of_the_sampler_and_lower_what_follows_them():
    fed = bound()
    fewer = fed.cohorts.thinned(lambda round_index, clients: clients >= 3)
    assert fewer.event(GaussianDpEvent(1.0)) == fed.cohorts.event(GaussianDpEvent(1.0))
    later = fed.cohorts.thinned(lambda round_index, clients: round_index > 0)
    cohort = later.draw(fed.init(KEY), fed.hyper, KEY)
    assert not np.any(cohort.is_drawn)
    cyclic = thinned(bound(SAMPLERS["cyclic"]), lambda round_index, clients: clients < 3)
    accounting = PrivacyAccounting(cyclic)
    counts = accounting.planned(cyclic.init(KEY), KEY, 6)["client"].num_compositions
    np.testing.assert_array_equal(counts.ravel(), [2, 2, 2, 0, 0, 0])
    # A price that was lost is not found again.
    assert thinned(repeating(fed), lambda *_: True).cohorts.name == "any_draw"


def all_contribute(state, hyper, cohort):
    return jnp.full_like(cohort.fate, Fate.CONTRIBUTED)


def none_is_drawn(state, hyper, cohort):
    return jnp.full_like(cohort.fate, Fate.EMPTY)


def one_is_late(state, hyper, cohort):
    assert state.clients is None and state.aggregator == ()
    return jnp.where(cohort.ids == 1, Fate.LATE, cohort.fate)


@pytest.mark.parametrize("fates", [all_contribute, none_is_drawn, one_is_late])
@pytest.mark.parametrize("is_own", [False, True])
def test_fates_change_nobody_who_is_drawn(fates, is_own):
    inner = repeating(bound()) if is_own else bound()
    fed, state = with_fates(inner, fates), inner.init(KEY)
    before, after = (f.cohorts.draw(state, f.hyper, KEY) for f in (inner, fed))
    np.testing.assert_array_equal(after.ids, before.ids)
    np.testing.assert_array_equal(after.is_drawn, before.is_drawn)
    expected = fates(state._replace(clients=None, aggregator=()), None, before)
    changes = before.is_drawn & (expected != Fate.EMPTY)
    np.testing.assert_array_equal(after.fate, np.where(changes, expected, before.fate))
    assert fed.cohorts.name == ("any_draw" if is_own else "poisson")


def test_plans_of_own_draws_need_no_state_of_their_fates():
    fed = with_fates(repeating(bound()), lambda state, *_: state.server.params, reads_state=True)
    planned = PrivacyAccounting(fed).planned(fed.init(KEY), KEY, 2)["client"]
    assert planned.num_compositions.max() == 2


@pytest.mark.parametrize("found", [0.0, np.zeros(99, int), None])
def test_fates_are_integers_one_for_each_slot(found):
    fed = with_fates(bound(), lambda state, hyper, cohort: found)
    with pytest.raises(ValueError, match="a function of fates must return fates, integers"):
        fed.cohorts.draw(fed.init(jax.random.key(0)), fed.hyper, jax.random.key(0))


def test_numbers_that_are_no_fates_change_none():
    fed, key = bound(), jax.random.key(0)
    other = with_fates(fed, lambda state, hyper, cohort: jnp.full_like(cohort.fate, 99))
    cohorts = [each.cohorts.draw(each.init(key), each.hyper, key) for each in (fed, other)]
    np.testing.assert_array_equal(*(cohort.fate for cohort in cohorts))


def test_copies_of_a_sampling_keep_its_price():
    """As a tree that was mapped over, or another process, has it: tuples of its own."""
    first = participants.participation(SAMPLERS["poisson"], NUM_CLIENTS, 2)
    event = first.event(GaussianDpEvent(1.0))
    for copied in (
        jax.tree.map(lambda x: x, first),
        first._replace(cohort_size=2.0),
        copy.deepcopy(first),
    ):
        assert copied.event(GaussianDpEvent(1.0)) == event


def test_a_draw_with_a_price_draws_what_is_priced():
    fed = bound()
    every = bound(SAMPLERS["full_participation"]).cohorts.sampling
    other = with_cohorts(fed, lambda cohorts: dataclasses.replace(cohorts, sampling=every))
    assert np.all(other.cohorts.draw(fed.init(KEY), fed.hyper, KEY).is_drawn)
    assert other.cohorts.participation is every

    class Forged(type(fed.cohorts)):
        def draw(self, state, hyper, key, layout=Layout()):
            return super().draw(state._replace(round=jnp.int32(0)), hyper, key, layout)

    with pytest.raises(ValueError, match=r"the cohorts of a federation must be those .*Forged"):
        PrivacyAccounting(with_cohorts(fed, lambda cohorts: Forged(*cohorts.__dict__.values())))
    wide = participants.participation(SAMPLERS["poisson"], 10 * NUM_CLIENTS, 2)
    wider = with_cohorts(fed, lambda cohorts: dataclasses.replace(cohorts, sampling=wide))
    with pytest.raises(ValueError, match=f"participation must be bound to the {NUM_CLIENTS} clie"):
        PrivacyAccounting(wider)


@pytest.mark.parametrize("reads_state", [False, True])
def test_fates_see_no_more_of_the_state_than_they_ask_for(reads_state):
    seen = []

    def fates(state, hyper, cohort):
        seen.append(state)
        return cohort.fate

    fed = with_fates(bound(), fates, reads_state=reads_state)
    fed.cohorts.draw(fed.init(KEY)._replace(clients=jnp.ones(3)), fed.hyper, KEY)
    (state,) = seen
    assert state.clients is None and state.aggregator == ()
    assert (state.server != ()) == reads_state == fed.cohorts.reads_state


def forged(sampler, name):
    """A sampler with another part, which does the same."""
    part = getattr(sampler, name)
    other = (lambda *given: part(*given)) if callable(part) else np.array(part)[()]
    return sampler._replace(**{name: other})


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_with_another_draw_has_no_price(name):
    sampler = SAMPLERS[name]
    parts = ["draw", "analysis", "charges_all", "separation", "min_drawn", "capacity", "init"]
    samplers = [forged(sampler, part) for part in parts]
    samplers += [sampling.Sampler(*sampler[:-1])]
    if name in ("poisson", "fixed_size"):
        samplers += [sampling.without_amplification(samplers[0])]
    for other in samplers:
        joined = participants.participation(other, NUM_CLIENTS, 2).of_at_least(0)
        rule = r"sampler must be as it was made .*(another |did not make)"
        with pytest.raises(ValueError, match=rule):
            joined.event(GaussianDpEvent(1.0))
    with pytest.raises(ValueError, match=r"sampler must be as it was made .*another draw"):
        bound(samplers[0])
    # Nothing is claimed for the members of a population that has no price.
    model = make_model()
    joined = participants.participation(samplers[0], NUM_CLIENTS, 2)
    federation(algorithms.fedavg(model, plain_trainer(model)), make_data(), joined)


def test_batches_and_cohorts_of_a_sampler_with_another_draw_are_refused():
    model, other = make_model(), forged(SAMPLERS["poisson"], "draw")
    config = private_trainer(model).config
    with pytest.raises(ValueError, match=r"sampler must be as it was made .*another draw"):
        local_trainer(model, config, sampler=other, gradient_rule=clipped(model))
    joined = participants.participation(SAMPLERS["poisson"], NUM_CLIENTS, 2)
    for changes in ({"capacity": 1}, {"cohort_size": 1.0}, {"num_clients": 60}):
        with pytest.raises(ValueError, match=f"participation must .*another {next(iter(changes))}"):
            joined._replace(**changes).event(GaussianDpEvent(1.0))


def quieter(fed):
    """The algorithm of more noise than the step adds."""
    return with_mean(gaussian_mean(1.0, 9 * NOISE, 2)).algorithm


def unclaimed(fed):
    model = make_model()
    return algorithms.fedavg(model, plain_trainer(model))


def larger(fed):
    """A population of more records than the step reads."""
    return fed.population._replace(sizes=9 * fed.population.sizes)


EXCHANGED = {
    "algorithm": [quieter, unclaimed],
    "population": [larger],
    "cohorts": [
        lambda fed: dataclasses.replace(fed.cohorts, algorithm=unclaimed(fed)),
        lambda fed: dataclasses.replace(fed.cohorts, population=larger(fed)),
    ],
    "made": [lambda fed: None],
}


@pytest.mark.parametrize(
    ("name", "make"), [(name, make) for name, makes in EXCHANGED.items() for make in makes]
)
@pytest.mark.parametrize("unit", ["client", "record"])
def test_what_sets_the_price_is_what_was_bound(name, make, unit):
    fed = bound(unit=unit)
    other = fed._replace(**{name: make(fed)})
    for again in (
        other,
        other.with_numbers({}, {}),
        repeating(other),
        thinned(other, lambda *_: 1),
    ):
        with pytest.raises(ValueError, match="the parts of a wrapped federation must be as"):
            PrivacyAccounting(again)
        with pytest.raises(ValueError, match="the parts of a wrapped federation must be as"):
            compile_federation(again, make_data())
    # Numbers that a wrapper adds leave the price as it is.
    PrivacyAccounting(fed.with_numbers({"speed": 1.0}, {"speed": Positive}))


def test_a_wrapper_drops_no_range_of_a_number():
    fed = bound()._replace(check=lambda hyper: None)
    wrong = fed.hyper._replace(aggregator={**fed.hyper.aggregator, "noise_multiplier": -NOISE})
    accounting = PrivacyAccounting(fed)
    record = record_of(fed.cohorts.draw(fed.init(KEY), fed.hyper, KEY), 1)
    for make in (
        lambda: PrivacyAccounting(fed._replace(hyper=wrong)),
        lambda: compile_federation(fed._replace(hyper=wrong), make_data()),
        lambda: accounting.charge(record, wrong),
    ):
        with pytest.raises(ValueError, match=r"hyper\.aggregator\.noise_multiplier must"):
            make()


@pytest.mark.parametrize("name", ["participation", "claims", "shared"])
def test_what_follows_from_the_draw_and_the_algorithm_is_not_replaced(name):
    with pytest.raises((ValueError, TypeError), match=name):
        bound()._replace(**{name: None})


def stepping(fed, change):
    """A step that runs a changed cohort, and says so."""

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        return state, record_of_one(change(cohort)), None

    return fed._replace(step=step)


def others(cohort):
    return cohort._replace(ids=(cohort.ids + 1) % NUM_CLIENTS)


def more(cohort):
    return cohort._replace(fate=jnp.full_like(cohort.fate, Fate.CONTRIBUTED))


@pytest.mark.parametrize("unit", ["client", "record"])
@pytest.mark.parametrize("change", [others, more])
def test_a_step_that_adds_clients_is_not_charged_as_if_it_had_not(unit, change):
    fed = thinned(bound(SAMPLERS["cyclic"], unit), lambda round_index, clients: clients == 0)
    _, record, _ = stepping(fed, change).run_round(fed.init(KEY), fed.hyper, None, KEY)
    assert OTHERS in np.asarray(record.clients)
    with pytest.raises(ValueError, match="clients of a record must be those that were drawn"):
        PrivacyAccounting(fed).charge(jax.tree.map(lambda x: np.asarray(x)[None], record))


def test_a_step_hides_no_client_that_was_drawn():
    fed = bound(SAMPLERS["cyclic"])
    hiding = stepping(fed, lambda c: c._replace(fate=jnp.full_like(c.fate, Fate.EMPTY)))
    _, record, _ = hiding.run_round(fed.init(KEY), fed.hyper, None, KEY)
    np.testing.assert_array_equal(record.clients, [0, 1])
    np.testing.assert_array_equal(record.fate, Fate.UNANNOUNCED)
