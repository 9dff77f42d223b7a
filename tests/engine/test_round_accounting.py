"""What rounds are charged, against compositions that dp-accounting makes on its own."""

import functools
import json
import pathlib

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import rdp
from marks import later, telling
from small_problem import (
    NUM_CLIENTS,
    SETTINGS,
    SIZES,
    make_data,
    make_model,
    plain_trainer,
    private_trainer,
)

from fedjax_dp import algorithms
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import dp_sgd_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import ExecutionConfig, Fate, PrivacyAccounting, RoundRecord, simulation
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.record import digest_of
from fedjax_dp.server import gaussian_mean

KEY = jax.random.key(7)
DELTA = {"client": 1e-6, "record": 1e-5}
NOISE, COHORT = 1.3, 2.5
PAIRS = LocalConfig(0.1, 2, 1, clip_norm=1.0, noise_multiplier=3.0)
PLAIN = ExecutionConfig(clients_per_chunk=1, placement="device", rounds_per_call=4)


@functools.cache
def spent(event, count, dp_delta, relation="ADD_OR_REMOVE_ONE"):
    account = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation[relation])
    account.compose(event, int(count))
    return account.get_epsilon(dp_delta)


def gaussian(noise):
    return dp_accounting.GaussianDpEvent(noise)


def poisson(rate, noise):
    return dp_accounting.PoissonSampledDpEvent(rate, gaussian(noise))


def simulate(unit, sampler, cohort_size=None, trainer=None):
    """A simulation that protects a unit; nothing is compiled before it runs."""
    model, data = make_model(), make_data()
    central = {"clip_norm": 0.2, "noise_multiplier": NOISE}
    joined = participants.participation(sampler, NUM_CLIENTS, cohort_size)
    if unit == "none":
        algorithm = algorithms.fedavg(model, plain_trainer(model))
    elif unit == "record":
        algorithm = algorithms.dp_sgd(model, trainer or private_trainer(model))
    else:
        inner = plain_trainer(model) if unit == "client" else private_trainer(model)
        central["expected_cohort_size"] = joined.cohort_size
        algorithm = algorithms.dp_fedavg(model, inner, aggregator=gaussian_mean(**central))
    return simulation(algorithm, data, joined, PLAIN)


@functools.cache
def initial(unit, sampler_name, cohort_size=None):
    sim = simulate(unit, getattr(sampling, sampler_name)(), cohort_size)
    return sim, sim.init(KEY)


def accounting(unit, sampler_name, cohort_size=None):
    return PrivacyAccounting(initial(unit, sampler_name, cohort_size)[0])


def record_of(*cohorts):
    """A record of rounds that these clients were drawn for, -1 in empty slots."""
    width, count = max(map(len, cohorts)) + 1, len(cohorts)
    clients = np.array([[*c, *[-1] * (width - len(c))] for c in cohorts], np.int32)
    return RoundRecord(
        clients=clients,
        fate=np.where(clients < 0, Fate.EMPTY, Fate.CONTRIBUTED).astype(np.int8),
        overflow=np.zeros(count, np.int32),
        stage=np.zeros(count, np.int32),
        is_released=np.ones(count, bool),
    )


def record_epsilon(times, dp_delta=DELTA["record"], noises=SETTINGS.noise_multiplier):
    """ε of every client of the small problem that took part so many times."""
    found = []
    for size, batch, epochs, noise, count in zip(
        SIZES, SETTINGS.batch_size, SETTINGS.num_epochs, noises, times, strict=True
    ):
        steps = int(np.ceil(np.ceil(size / batch) * epochs)) * count
        if not steps:
            found.append(0.0)
            continue
        rate = min(1.0, batch / size)
        # The noise runs as float32, and as that is what is accounted.
        event = gaussian(float(np.float32(noise)))
        if rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(rate, event)
        found.append(spent(event, steps, dp_delta))
    return found


FOUR_ROUNDS = ((0, 2, 5), (), (2, 1), (2, 3, 0))
TIMES = (2, 1, 3, 1, 0, 1)
CHARGED_NOISE = float(np.float32(NOISE))


def test_amplified_clients_all_pay_for_every_round():
    account = accounting("client", "poisson", COHORT)
    account.charge(record_of(*FOUR_ROUNDS))
    expected = spent(poisson(COHORT / NUM_CLIENTS, CHARGED_NOISE), 4, DELTA["client"])
    np.testing.assert_allclose(account.epsilon(DELTA)["client"], [expected], rtol=1e-9)


def test_all_clients_pay_without_amplification():
    account = accounting("client", "full_participation")
    account.charge(record_of(range(NUM_CLIENTS), range(NUM_CLIENTS)))
    expected = spent(gaussian(CHARGED_NOISE), 2, DELTA["client"])
    np.testing.assert_allclose(account.epsilon(DELTA)["client"], [expected], rtol=1e-9)


def test_cyclic_clients_pay_for_the_rounds_that_they_took_part_in():
    account = accounting("client", "cyclic", 2)
    account.charge(record_of((0, 1), (2, 3), (4, 5), (0, 1), (2, 3)))
    account.charge(record_of((4, 5), (0, 1)))
    times = (3, 3, 2, 2, 2, 2)
    expected = [spent(gaussian(CHARGED_NOISE), n, DELTA["client"]) for n in times]
    np.testing.assert_allclose(account.epsilon(DELTA)["client"], expected, rtol=1e-9)
    assert account.ledgers["client"].num_compositions.tolist() == list(times)


@pytest.mark.parametrize("sampler", ["poisson", "cyclic", "fixed_size"])
def test_records_pay_for_the_rounds_of_their_client_and_are_never_amplified(sampler):
    account = accounting("record", sampler, 2)
    account.charge(record_of(*FOUR_ROUNDS))
    np.testing.assert_allclose(account.epsilon(DELTA)["record"], record_epsilon(TIMES), rtol=1e-9)


def test_records_pay_for_every_round_where_who_was_drawn_amplifies_the_clients():
    account = accounting("both", "poisson", COHORT)
    for cohort in FOUR_ROUNDS:
        account.charge(record_of(cohort))
    found = account.epsilon(DELTA)
    expected = spent(poisson(COHORT / NUM_CLIENTS, CHARGED_NOISE), 4, DELTA["client"])
    assert sorted(found) == ["client", "record"]
    np.testing.assert_allclose(found["client"], [expected], rtol=1e-9)
    # Accounts that followed the cohorts would publish what the clients' amplification rests on.
    all_clients = record_epsilon([4] * NUM_CLIENTS)
    np.testing.assert_allclose(found["record"], all_clients, rtol=1e-9)
    other = accounting("both", "poisson", COHORT)
    other.charge(record_of((1,), (3,), (4, 5), ()))
    assert other.to_json() == account.to_json()


def test_both_units_pay_each_in_its_own_way_where_turns_are_public():
    account = accounting("both", "cyclic", 2)
    account.charge(record_of(*FOUR_ROUNDS))
    found = account.epsilon(DELTA)
    expected = [n and spent(gaussian(CHARGED_NOISE), n, DELTA["client"]) for n in TIMES]
    np.testing.assert_allclose(found["client"], expected, rtol=1e-9)
    np.testing.assert_allclose(found["record"], record_epsilon(TIMES), rtol=1e-9)


def test_numbers_that_take_the_place_of_none_are_read_anew():
    sim, _ = initial("record", "poisson", COHORT)
    account = PrivacyAccounting(sim)
    local = sim.hyper.local._replace(num_steps=np.int32(1), noise_multiplier=np.float32(0.01))
    changed = sim.hyper._replace(local=local)
    account.charge(record_of(range(NUM_CLIENTS)), changed)
    expected = PrivacyAccounting(sim, hyper=changed)
    expected.charge(record_of(range(NUM_CLIENTS)))
    assert account.to_json() == expected.to_json()


def at_noise(sim, unit, multiplier):
    """The numbers of a simulation with another noise on what it protects."""
    noise, hyper = np.asarray(multiplier, np.float32), sim.hyper
    if unit == "record":
        return hyper._replace(local=hyper.local._replace(noise_multiplier=noise))
    return hyper._replace(aggregator={**hyper.aggregator, "noise_multiplier": noise})


def simulated(unit):
    """What a round of all clients leaves at a noise multiplier of 0.01, but for the playing."""
    sim, _ = initial(unit, "full_participation")
    quiet = at_noise(sim, unit, 0.01)
    return sim, quiet, record_of(range(NUM_CLIENTS))._replace(digest=digest_of(quiet)[None])


def played(unit):
    sim = simulate(unit, sampling.full_participation())
    quiet = at_noise(sim, unit, np.full(NUM_CLIENTS, 0.01) if unit == "record" else 0.01)
    return sim, quiet, sim.run(sim.init(KEY), KEY, 1, quiet)[1]


@pytest.mark.parametrize("unit", ["client", "record"])
@pytest.mark.parametrize("made", [simulated, pytest.param(played, marks=telling)])
def test_rounds_of_quieter_noise_are_never_charged_the_price_of_louder_noise(unit, made):
    sim, quiet, record = made(unit)
    account = PrivacyAccounting(sim)
    before = account.to_json()
    with pytest.raises(ValueError, match=r"hyper must be the numbers that the rounds ran with"):
        account.charge(record)
    with pytest.raises(ValueError, match=r"those of round 0 of this record"):
        account.charge(record, sim.hyper)
    assert account.to_json() == before
    # A refused charge leaves the numbers that the account was opened with.
    opened = PrivacyAccounting(sim, hyper=quiet)
    with pytest.raises(ValueError, match="hyper must be the numbers"):
        opened.charge(record, sim.hyper)
    opened.charge(record)
    account.charge(record, quiet)
    dear = PrivacyAccounting(sim, hyper=quiet)
    dear.charge(record)
    assert account.to_json() == dear.to_json() != before
    assert account.epsilon(DELTA)[unit].max() > 1000


def test_the_page_on_privacy_prints_what_such_a_round_costs():
    file = pathlib.Path(__file__).parents[2] / "docs/privacy/sharp-edges.md"
    page = " ".join(file.read_text("utf-8").split())
    once = (1,) * NUM_CLIENTS
    stated, truth = record_epsilon(once), record_epsilon(once, noises=(0.01,) * NUM_CLIENTS)
    assert f"was {max(stated):.2f} in one round. If the round ran at 0.01, it was " in page
    assert f" it was {max(truth):,.2f}." in page
    sim, quiet, record = simulated("record")
    account = PrivacyAccounting(sim)
    account.charge(record, quiet)
    np.testing.assert_allclose(account.epsilon(DELTA)["record"], truth, rtol=1e-9)


def test_the_digest_of_a_round_is_that_of_its_numbers_however_they_are_given():
    """On the host, traced, in a vmapped sweep and in a scan; of numbers or arrays of any kind."""
    sim, _ = initial("record", "full_participation")
    base = jax.tree.map(np.asarray, sim.hyper)
    multipliers = np.linspace(0.5, 2, 4, dtype=np.float32)

    def hyper_of(z):
        return base._replace(local=base.local._replace(noise_multiplier=z))

    alone = np.stack([digest_of(hyper_of(z)) for z in multipliers])
    assert alone.dtype == np.uint32 and len(np.unique(alone, axis=0)) == 4

    def one(z):
        return digest_of(jax.tree.map(jnp.asarray, hyper_of(z)))

    np.testing.assert_array_equal(jax.jit(jax.vmap(one))(multipliers), alone)
    in_turn = jax.lax.scan(lambda carry, z: (carry, one(z)), 0, multipliers)[1]
    np.testing.assert_array_equal(in_turn, alone)
    # Kinds of number are one; every other number that is priced counts, where it stands too.
    first = digest_of(hyper_of(np.float64(0.5)))
    np.testing.assert_array_equal(first, alone[0])
    by_client, swapped = (digest_of(hyper_of(np.array(z))) for z in ([0.5, 1], [1, 0.5]))
    assert not np.array_equal(by_client, swapped)
    for name, value in (("batch_size", 3), ("num_steps", 7), ("num_epochs", 2), ("clip_norm", 9)):
        other = base._replace(local=base.local._replace(**{name: np.float32(value)}))
        assert not np.array_equal(digest_of(other), digest_of(base)), name
    faster = base._replace(local=base.local._replace(learning_rate=np.float32(7)))
    np.testing.assert_array_equal(digest_of(faster), digest_of(base))


@telling
def test_a_sweep_over_noise_is_charged_run_by_run():
    sim, state = initial("record", "full_participation")
    multipliers = np.array([0.5, 2.0], np.float32)
    base = jax.tree.map(jnp.asarray, sim.hyper)
    examples = examples_of(make_data())

    def hyper_of(z):
        local = base.local._replace(noise_multiplier=z * jnp.ones(NUM_CLIENTS))
        return base._replace(local=local)

    played = jax.jit(
        jax.vmap(lambda z: sim.federation.run_round(state, hyper_of(z), examples, KEY)[1])
    )
    records = jax.tree.map(np.asarray, played(multipliers))
    for i, z in enumerate(multipliers):
        record = jax.tree.map(lambda x, i=i: x[i : i + 1], records)
        account = PrivacyAccounting(sim)
        with pytest.raises(ValueError, match="numbers that the rounds ran with"):
            account.charge(record, hyper_of(multipliers[1 - i]))
        account.charge(record, hyper_of(z))
        expected = PrivacyAccounting(sim, hyper=hyper_of(z))
        expected.charge(record_of(range(NUM_CLIENTS)))
        assert account.to_json() == expected.to_json()


def test_to_ask_what_is_affordable_changes_no_price():
    sim, state = initial("record", "full_participation")
    loud = at_noise(sim, "record", 50)
    account = PrivacyAccounting(sim)
    account.affordable_rounds(state, KEY, 1, {"record": 1.0}, DELTA, "rdp", loud)
    account.charge(record_of(range(NUM_CLIENTS)))
    expected = PrivacyAccounting(sim)
    expected.charge(record_of(range(NUM_CLIENTS)))
    assert account.to_json() == expected.to_json()


@telling
def test_rounds_that_really_ran_are_charged_to_those_whom_the_engine_drew():
    sim = simulate("record", sampling.poisson(), COHORT)
    state = sim.init(KEY)
    account = PrivacyAccounting(sim)
    drawn = np.zeros(NUM_CLIENTS, int)
    for num_rounds in (3, 4, 1):
        state, record, _ = sim.run(state, KEY, num_rounds)
        account.charge(record)
        for cohort in record.clients:
            drawn[cohort[cohort >= 0]] += 1
    assert drawn.sum() > 0 and len(set(drawn)) > 1
    np.testing.assert_allclose(account.epsilon(DELTA)["record"], record_epsilon(drawn), rtol=1e-9)


@telling
def test_a_client_that_contributed_nothing_for_want_of_finite_numbers_pays_all_the_same():
    algorithm = algorithms.dp_sgd(make_model(), private_trainer(make_model()))

    def client(message, own, client, hyper, key):
        output = algorithm.client(message, own, client, hyper, key)
        factor = jnp.where(client.index == 2, jnp.nan, 1.0)
        return output._replace(update=jax.tree.map(lambda x: x * factor, output.update))

    joined = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    sim = simulation(algorithm._replace(client=client), make_data(), joined, PLAIN)
    account = PrivacyAccounting(sim)
    _, record, _ = sim.run(sim.init(KEY), KEY, 2)
    is_lost = record.fate == Fate.NOT_FINITE
    assert record.clients[is_lost].tolist() == [2, 2]
    account.charge(record)
    times = [2] * NUM_CLIENTS
    np.testing.assert_allclose(account.epsilon(DELTA)["record"], record_epsilon(times), rtol=1e-9)


@telling
def test_replacing_a_record_moves_a_sum_twice_as_far():
    trainer = dp_sgd_trainer(make_model(), PAIRS, sampler=sampling.fixed_size())
    sim = simulate("record", sampling.full_participation(), trainer=trainer)
    account = PrivacyAccounting(sim, "replace_one", "rdp")
    account.charge(record_of(range(NUM_CLIENTS)))
    expected = [
        spent(
            dp_accounting.SampledWithoutReplacementDpEvent(size, 2, gaussian(1.5)),
            np.ceil(size / 2),
            DELTA["record"],
            "REPLACE_ONE",
        )
        if size
        else 0.0
        for size in SIZES
    ]
    np.testing.assert_allclose(account.epsilon(DELTA)["record"], expected, rtol=1e-9)
    with pytest.raises(ValueError, match=r"SampledWithoutReplacement.*zero_out"):
        PrivacyAccounting(sim, "zero_out")


def test_accounts_answer_by_the_accountant_that_they_were_opened_with():
    opened = PrivacyAccounting(initial("client", "poisson", COHORT)[0], accountant="pld")
    plain = accounting("client", "poisson", COHORT)
    for account in (opened, plain):
        account.charge(record_of(*FOUR_ROUNDS))
    by_pld, by_rdp = (plain.epsilon(DELTA, name)["client"] for name in ("pld", "rdp"))
    assert by_pld < 0.95 * by_rdp
    assert opened.epsilon(DELTA)["client"] == by_pld
    assert plain.epsilon(DELTA)["client"] == opened.epsilon(DELTA, "rdp")["client"] == by_rdp
    with pytest.raises(ValueError, match="accountant must be"):
        opened.epsilon(DELTA, "")


@pytest.mark.parametrize("unit", ["client", "record"])
def test_an_accountant_without_an_analysis_is_refused_before_any_round(unit):
    sim, _ = initial(unit, "poisson", COHORT)
    PrivacyAccounting(sim, "replace_one")
    PrivacyAccounting(sim, "replace_one", "pld")
    with pytest.raises(ValueError, match="accountant 'rdp'"):
        PrivacyAccounting(sim, "replace_one", "rdp")
    with pytest.raises(ValueError, match="did you mean 'rdp'"):
        PrivacyAccounting(sim, "zero_out", "rpd")


@pytest.mark.parametrize("unit", ["client", "record"])
def test_a_simulation_never_claims_that_a_unit_is_there_or_not(unit):
    """A record more is another rate, another number of steps, another divisor."""
    sim, _ = initial(unit, "poisson", COHORT)
    assert {ledger.relation for ledger in PrivacyAccounting(sim).ledgers.values()} == {"zero_out"}
    with pytest.raises(ValueError, match=r"relation must be 'zero_out' or 'replace_one'.*public"):
        PrivacyAccounting(sim, "add_remove")


def test_a_record_more_is_charged_by_another_rate():
    """Why: the events of neighbours that differ in a record's presence are not the same."""
    (event,) = dp_sgd_trainer(make_model(), PAIRS).private_claim().events
    rates = {event(size, PAIRS).event.sampling_probability for size in (8, 9)}
    assert rates == {2 / 8, 2 / 9}


def test_nothing_is_kept_where_nothing_is_claimed():
    sim, state = initial("none", "poisson", COHORT)
    account = PrivacyAccounting(sim)
    account.charge(record_of(*FOUR_ROUNDS))
    assert account.ledgers == {} and account.epsilon({}) == {}
    with pytest.raises(ValueError, match=r"each unit that is claimed: none is, got \['client'\]"):
        account.epsilon({"client": 1e-3})
    assert account.affordable_rounds(state, KEY, 9, {"client": 0.0}, DELTA, "rdp") == 9


@pytest.mark.parametrize("unit", ["client", "record", "both"])
@pytest.mark.parametrize("rounds", later([1, 5, 8], but=[1, 5]))
@pytest.mark.parametrize("before", later([0, 3], but=[3], mark=telling))
def test_affordable_rounds_are_exact_at_the_boundary(unit, rounds, before):
    sim, state = initial(unit, "poisson", COHORT)
    account = PrivacyAccounting(sim)
    all_clients = range(NUM_CLIENTS)
    if before:
        account.charge(record_of(*[all_clients] * before))
    exact = {
        "client": spent(
            poisson(COHORT / NUM_CLIENTS, CHARGED_NOISE), before + rounds, DELTA["client"]
        ),
        "record": max(record_epsilon([before + rounds] * NUM_CLIENTS)),
    }
    units = ("client", "record") if unit == "both" else (unit,)

    def affordable(budget, wanted=20):
        return account.affordable_rounds(state, KEY, wanted, budget, DELTA, "rdp")

    for bounded in units:
        assert affordable({bounded: exact[bounded]}) == rounds
        assert affordable({bounded: exact[bounded] * (1 - 1e-7)}) == rounds - 1
        assert affordable({bounded: exact[bounded]}, rounds) == rounds
        assert affordable({bounded: exact[bounded]}, rounds + 1) == rounds
        assert affordable({bounded: exact[bounded]}, rounds - 1) == rounds - 1
    generous = {u: 2 * exact[u] for u in units}
    for bounded in units:
        assert affordable(generous | {bounded: exact[bounded]}) == rounds
    assert affordable({}) == 20
    assert affordable({units[0]: 0.0}, 0) == 0
    assert affordable({units[0]: 0.0}) == 0


@pytest.mark.parametrize(
    "fact,value", [("relation", "replace_one"), ("num_units", NUM_CLIENTS + 1), ("unit", "client")]
)
def test_accounts_of_another_kind_are_not_taken(fact, value):
    account = accounting("record", "cyclic", 2)
    account.charge(record_of((0, 1), (2, 3)))
    saved = json.loads(account.to_json())
    saved["record"][fact] = value
    # Whatever the other ledger was charged is valid under its own relation.
    saved["record"]["entries"] = []
    fresh = accounting("record", "cyclic", 2)
    with pytest.raises(ValueError, match=rf"ledgers\.record\.{fact} must be .*{value!r}"):
        fresh.restore(json.dumps(saved))
    assert not fresh.ledgers["record"].num_compositions.any()
    fresh.restore(account.to_json())
    assert fresh.to_json() == account.to_json()


@telling
def test_each_client_has_its_own_delta():
    sim, state = initial("record", "poisson", COHORT)
    account = PrivacyAccounting(sim)
    deltas = np.array([1e-6, 1e-5, 1e-7, 1e-5, 1e-9, 1e-6])
    after = [
        [record_epsilon([rounds] * NUM_CLIENTS, delta)[i] for i, delta in enumerate(deltas)]
        for rounds in (3, 7)
    ]
    budgets = np.array(after[1])

    def affordable(dp_delta):
        asked = {"record": dp_delta}
        return account.affordable_rounds(state, KEY, 9, {"record": budgets}, asked, "rdp")

    assert affordable(deltas) == 7
    assert affordable(np.where(np.arange(NUM_CLIENTS) == 3, 1e-6, deltas)) < 7
    budgets[4] = after[0][4]
    assert affordable(deltas) == 3
    account.charge(record_of(*[range(NUM_CLIENTS)] * 3))
    np.testing.assert_allclose(account.epsilon({"record": deltas})["record"], after[0], rtol=1e-9)


@telling
def test_each_client_has_its_own_budget():
    sim, state = initial("record", "poisson", COHORT)
    account = PrivacyAccounting(sim)
    after = np.array([record_epsilon([n] * NUM_CLIENTS) for n in range(8)])
    budgets = after[7].copy()
    assert account.affordable_rounds(state, KEY, 7, {"record": budgets}, DELTA, "rdp") == 7
    budgets[4] = after[3, 4]
    assert account.affordable_rounds(state, KEY, 7, {"record": budgets}, DELTA, "rdp") == 3
    budgets[1] = 0.0
    assert after[7, 1] == 0.0, "a client without examples pays nothing"
    assert account.affordable_rounds(state, KEY, 7, {"record": budgets}, DELTA, "rdp") == 3


@pytest.mark.parametrize("unit", ["client", "record"])
def test_affordable_rounds_of_cyclic_cohorts_are_exact(unit):
    """Pairs of six clients: each client's third turn is in rounds 7 to 9."""
    sim, state = initial(unit, "cyclic", 2)
    account = PrivacyAccounting(sim)
    two_turns = {
        "client": spent(gaussian(CHARGED_NOISE), 2, DELTA["client"]),
        "record": np.array(record_epsilon([2] * NUM_CLIENTS)),
    }[unit]

    def affordable(at, wanted):
        here = state._replace(round=np.int32(at))
        return account.affordable_rounds(here, KEY, wanted, {unit: two_turns}, DELTA, "rdp")

    assert affordable(0, 20) == 6
    cohorts = [(0, 1), (2, 3), (4, 5)]
    for done in range(1, 7):
        account.charge(record_of(cohorts[(done - 1) % 3]))
        assert affordable(done, 20) == 6 - done
        assert affordable(done, 1) == min(1, 6 - done)


@pytest.mark.parametrize("unit", later(["client", "record", "both"], but=["both"], mark=telling))
@pytest.mark.parametrize("sampler", ["poisson", "cyclic"])
def test_ledgers_survive_as_text(unit, sampler):
    whole, resumed = accounting(unit, sampler, 2), accounting(unit, sampler, 2)
    for cohort in FOUR_ROUNDS:
        whole.charge(record_of(cohort))
        resumed.charge(record_of(cohort))
        text = resumed.to_json()
        resumed = accounting(unit, sampler, 2)
        resumed.restore(text)
    assert resumed.to_json() == whole.to_json()
    assert sorted(json.loads(whole.to_json())) == sorted(whole.ledgers)
    for name, epsilon in whole.epsilon(DELTA).items():
        np.testing.assert_array_equal(resumed.epsilon(DELTA)[name], epsilon)


def test_ledgers_of_other_units_are_refused():
    text = accounting("client", "poisson", COHORT).to_json()
    other = accounting("both", "poisson", COHORT)
    with pytest.raises(ValueError, match=r"ledgers must be those of the units \['client', 'rec"):
        other.restore(text)


def test_clients_that_pay_alike_share_an_event():
    """A million clients of few sizes must not cost a million events."""
    model = make_model()
    numbers = PAIRS._replace(noise_multiplier=1.0)
    data = make_data(sizes=(4, 6) * 500)
    joined = participants.participation(sampling.full_participation(), 1000)
    algorithm = algorithms.dp_sgd(model, dp_sgd_trainer(model, numbers))
    sim = simulation(algorithm, data, joined, PLAIN)
    account = PrivacyAccounting(sim)
    account.charge(record_of(range(1000)))
    found = account.epsilon(DELTA)["record"]
    expected = [spent(poisson(2 / size, 1.0), size // 2, DELTA["record"]) for size in (4, 6)]
    np.testing.assert_allclose(found, expected * 500, rtol=1e-9)
    assert len(account.ledgers["record"].histories()) == 2


@pytest.mark.parametrize("fate", [f for f in Fate if f != Fate.EMPTY])
@pytest.mark.parametrize("sampler", ["poisson", "cyclic"])
def test_every_drawn_client_pays_whatever_its_fate(sampler, fate):
    """A client that sent nothing was drawn all the same, and what was sent has left its owner."""
    whole, other = (accounting("both", sampler, 2) for _ in range(2))
    record = record_of(*FOUR_ROUNDS)
    whole.charge(record)
    changed = np.where(record.fate == Fate.EMPTY, Fate.EMPTY, fate).astype(np.int8)
    other.charge(record._replace(fate=changed, is_released=np.zeros(4, bool)))
    assert other.to_json() == whole.to_json()


def test_what_is_affordable_follows_the_numbers_of_the_rounds_to_come():
    sim, state = initial("client", "full_participation")
    numbers = {**sim.hyper.aggregator, "noise_multiplier": np.float32(2 * NOISE)}
    quiet = sim.hyper._replace(aggregator=numbers)
    budget = {"client": spent(gaussian(float(np.float32(2 * NOISE))), 5, DELTA["client"])}
    asked = (state, KEY, 20, budget, DELTA, "rdp")
    account = PrivacyAccounting(sim)
    assert account.affordable_rounds(*asked, hyper=quiet) == 5
    assert account.affordable_rounds(*asked) < 5
    account.charge(record_of(*[range(NUM_CLIENTS)] * 5), quiet)
    assert account.epsilon(DELTA)["client"] == pytest.approx(budget["client"], rel=1e-9)


def test_one_number_is_the_largest_epsilon_of_the_only_unit():
    model = make_model()
    mean = gaussian_mean(0.2, NOISE, COHORT)
    algorithm = algorithms.dp_fedavg(model, plain_trainer(model), aggregator=mean)
    sim = simulation(algorithm, make_data(), cohort_size=COHORT)
    accounting = PrivacyAccounting(sim)
    accounting.charge(record_of(*FOUR_ROUNDS[:3]))
    expected = spent(poisson(COHORT / NUM_CLIENTS, NOISE), 3, DELTA["client"])
    assert accounting.epsilon(DELTA["client"]) == pytest.approx(expected, rel=1e-6)
    for unit in ("none", "both"):
        other = PrivacyAccounting(simulate(unit, sampling.poisson(), COHORT))
        with pytest.raises(ValueError, match="dp_delta must be given for each unit, by its name"):
            other.epsilon(1e-6)
    with pytest.raises(ValueError, match=r"each unit that is claimed: client, record, got \['rec"):
        other.epsilon({"record": 1e-6})


@pytest.mark.parametrize("joined", [None, participants.participation(sampling.poisson(), 6, 2)])
def test_a_simulation_has_a_participation_or_a_cohort_size(joined):
    model = make_model()
    algorithm = algorithms.fedavg(model, plain_trainer(model))
    size = None if joined is None else 2
    with pytest.raises(ValueError, match="cohort_size must be given without a participation"):
        simulation(algorithm, make_data(), joined, cohort_size=size)
