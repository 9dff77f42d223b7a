"""PrivacyFL's averages of models: what a client pays, knows and uses, and who leaves."""

from functools import partial

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow, telling
from scipy import stats
from scipy.special import softmax
from small_problem import ALONE, assert_same_state

from fedjax_dp import algorithms, engine, models
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.core.messages import tariff_of
from fedjax_dp.core.registry import grouped
from fedjax_dp.data import (
    FederatedData,
    fixed_size,
    full_participation,
    participation,
    poisson,
)
from fedjax_dp.engine import Fate, PrivacyAccounting, RoundRecord
from fedjax_dp.privacy.claims import OnceClaim, RecordClaim
from fedjax_dp.server import counted_mean, secure, weighted_mean

SIZES, ROWS, ALPHA, STEPS, ROUNDS = (12, 9, 16), [3, 3, 4], 0.3, 6, 3
MODEL = models.logistic_regression(jax.ShapeDtypeStruct((2,), jnp.float32), 2, gradient_bound=1.0)
ENTRIES, KEY = 6, jax.random.key(4)
WARM, ANEW = algorithms.warm_start_averaging, algorithms.retrained_averaging


def data_of(sizes=SIZES):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(sizes), 2)).astype(np.float32)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return FederatedData.from_client_ids({"x": x, "y": (x[:, 0] > 0).astype(np.int32)}, owner)


def algorithm_of(factory=WARM, *, noise_multiplier=1.0, sizes=SIZES, **options):
    config = LocalConfig(
        learning_rate=1.0,
        batch_size=1,
        num_steps=STEPS,
        clip_norm=1.0,
        noise_multiplier=noise_multiplier,
    )
    whole = full_participation()._replace(name="full_batch")
    trainer = dp_sgd_trainer(MODEL, config, sampler=whole)
    options = {"rows_per_round": ROWS[: len(sizes)], "regularizer": ALPHA, **options}
    return factory(MODEL, trainer, num_clients=len(sizes), **grouped(factory, options))


def simulation_of(algorithm, *, sizes=SIZES, execution=ALONE, wrapper=None):
    joins = participation(full_participation(), len(sizes))
    return engine.simulation(algorithm, data_of(sizes), joins, execution, wrapper=wrapper)


def played(algorithm, rounds=ROUNDS, **options):
    sim = simulation_of(algorithm, **options)
    state, record, info = sim.run(sim.init(KEY), KEY, rounds)
    return sim, sim.portable(state), record, info


def flat(params):
    return np.concatenate(
        [np.asarray(params["kernel"], np.float64), np.asarray(params["bias"])[..., None, :]],
        axis=-2,
    )


# What a client pays; nothing is compiled.


def charged(algorithm, cohorts, relation="replace_one"):
    bound = engine.federation(algorithm, data_of(), participation(full_participation(), 3))
    account, rounds = PrivacyAccounting(bound, relation=relation), len(cohorts)
    clients = np.array(cohorts, np.int32)
    fate = np.where(clients >= 0, Fate.CONTRIBUTED, Fate.EMPTY).astype(np.int8)
    zeros = np.zeros(rounds, np.int32)
    account.charge(RoundRecord(clients, fate, zeros, zeros, np.ones(rounds, bool), None))
    return account


EVERYONE = [[0, 1, 2]] * 4


def test_disjoint_data_are_paid_once_by_whom_they_are_read_and_cumulative_data_in_each_round():
    cohorts = [[0, -1, 2], [0, -1, 2], [0, 1, -1]]
    once = charged(algorithm_of(WARM, mechanism="gaussian"), cohorts)
    assert once.ledgers["record"].num_compositions.tolist() == [1, 1, 1]
    again = charged(algorithm_of(ANEW, mechanism="gaussian"), cohorts)
    assert again.ledgers["record"].num_compositions.tolist() == [3, 1, 2]
    for factory, growth, kind in ((WARM, "cumulative", RecordClaim), (ANEW, "disjoint", OnceClaim)):
        assert type(algorithm_of(factory, growth=growth).training.record) is kind
    assert type(algorithm_of(WARM, rows_per_round=None).training.record) is RecordClaim


def test_a_later_charge_of_disjoint_data_is_free_also_after_an_interruption():
    algorithm = algorithm_of(WARM, mechanism="gaussian")
    account = charged(algorithm, EVERYONE)
    spent = account.epsilon({"record": 1e-5})["record"]
    resumed = charged(algorithm, EVERYONE[:1])
    resumed.restore(account.to_json())
    record = RoundRecord(
        np.array([[0, 1, 2]], np.int32),
        np.full((1, 3), Fate.CONTRIBUTED, np.int8),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        np.ones(1, bool),
        None,
    )
    resumed.charge(record)
    np.testing.assert_array_equal(resumed.epsilon({"record": 1e-5})["record"], spent)
    # Other numbers are another mechanism, whose price adds to it.
    hyper = resumed._federation.hyper
    weaker = hyper._replace(local=hyper.local._replace(noise_multiplier=np.float32(0.5)))
    resumed.charge(record, weaker)
    assert np.all(resumed.epsilon({"record": 1e-5})["record"] > spent)


@pytest.mark.parametrize("calibration", ["corrected", "paper"])
def test_each_client_pays_for_its_own_noise(calibration):
    """ε of a release of d parameters: √d·2/z under replace-one, n times that as printed."""
    z = np.array([20.0, 40.0, 400.0])
    algorithm = algorithm_of(ANEW, noise_multiplier=z, calibration=calibration)
    ledger = charged(algorithm, EVERYONE).ledgers["record"]
    spent = []
    for i in range(3):
        (part,) = ledger.events(i).events
        # Of Laplace noise 2/multiplier under replacement, added up over four rounds.
        assert part.count == 4 and isinstance(part.event, dpa.LaplaceDpEvent)
        spent.append(part.count * 2 / part.event.noise_multiplier)
    times = 3 if calibration == "paper" else 1
    np.testing.assert_allclose(spent, 4 * times * np.sqrt(ENTRIES) * 2 / z, rtol=1e-6)


def test_what_has_no_noise_is_named():
    own = algorithm_of(personal="own").claims.not_covered
    assert own is not None and "own model without noise" in own
    assert algorithm_of(personal="shared").claims.not_covered is None
    shares = algorithm_of(mechanism="gamma_shares", personal="shared").claims.not_covered
    assert shares is not None and "by itself" in shares


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rows_per_round=None, calibration="paper"), "rows_per_round must be given"),
        (dict(rows_per_round=None, mechanism="gamma_shares"), "rows_per_round must be given"),
        (dict(rows_per_round=[1, 2]), "rows_per_round must be one number or have one for each"),
        (dict(rows_per_round=0), "rows_per_round must be"),
        (dict(growth="shrinking"), "growth must be"),
        (dict(calibration="printed"), "calibration must be"),
        (dict(personal="theirs"), "personal must be"),
        (dict(regularizer=0.0), "regularizer must be above 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        algorithm_of(**options)


def test_leaving_is_refused_where_it_would_reveal_a_model():
    joins = participation(full_participation(), 3)
    bound = engine.federation(algorithm_of(mechanism="gamma_shares"), data_of(), joins)
    with pytest.raises(ValueError, match="noise that protects each client's model by itself"):
        engine.leaving(bound)
    with pytest.raises(ValueError, match="federation must add no noise in shares without a ser"):
        engine.serverless(bound)
    plain = local_trainer(MODEL, LocalConfig())
    other = engine.federation(algorithms.fedavg(MODEL, plain), data_of(), joins)
    with pytest.raises(ValueError, match="average whole models"):
        engine.leaving(other)
    with pytest.raises(ValueError, match="tolerance must be above 0"):
        engine.leaving(bound, tolerance=0.0)


def masks_for(num_clients):
    return secure.masked(counted_mean(), secure.fixed_point(3), secure.all_pairs(num_clients))


def test_masks_are_for_the_clients_that_may_be_left():
    """A round of fewer clients than the graph's is lost: nothing would change any more."""

    def leaves(joins, graph, min_active=2):
        built = algorithm_of(aggregator=masks_for(graph))
        bound = engine.federation(built, data_of(), participation(joins, 3, cohort_size=3))
        return engine.leaving(bound, min_active=min_active)

    leaves(full_participation(), 2)
    leaves(full_participation(), 3, min_active=3)
    with pytest.raises(ValueError, match="aggregator must have a graph of masks for 2 or fewer"):
        leaves(full_participation(), 3)
    joins = participation(fixed_size(), 3, cohort_size=2)
    bound = engine.federation(algorithm_of(aggregator=masks_for(2)), data_of(), joins)
    engine.leaving(bound, min_active=3)
    with pytest.raises(ValueError, match="aggregator must have a graph of masks for 1 or fewer"):
        engine.leaving(bound)
    with pytest.raises(ValueError, match="min_active must be at most 3, the number of clients"):
        leaves(full_participation(), 2, min_active=4)


def test_masks_never_release_a_part_of_the_shares():
    """A sum of two of three shares has not the noise of the claim, also if it is discarded."""
    joins = participation(full_participation(), 3)

    def under_masks(dropouts, mechanism="gamma_shares"):
        mean = counted_mean(required=3)
        graph = secure.all_pairs(3, dropouts=dropouts)
        mean = secure.masked(mean, secure.fixed_point(3), graph)
        return engine.federation(
            algorithm_of(mechanism=mechanism, aggregator=mean), data_of(), joins
        )

    bound = under_masks(0)
    # Six parameters and the number of clients: whether entries were cut is not sent.
    assert tariff_of(bound.facts.up).fixed["dense"] == {"uint32": 28}
    rule = "aggregator must add no noise in shares of clients: a server may sum fewer"
    with pytest.raises(ValueError, match=rule):
        engine.several_servers(bound, servers=[0, 0, 1], exchange_every=1)
    under_masks(1, "laplace")
    with pytest.raises(ValueError, match="no round be summed of fewer than the 3 clients whose"):
        under_masks(1)


def test_clients_do_not_leave_asynchronous_rounds():
    joins = participation(full_participation(), 3)
    buffered = engine.asynchronous(
        engine.federation(algorithm_of(), data_of(), joins),
        latencies=engine.latencies(["here"], [[0.1]], ["here"] * 3, "here"),
        compute=engine.compute_seconds(3),
        server_seconds=0.0,
        concurrency=3,
        max_staleness=0,
        discount=0.0,
    )
    with pytest.raises(ValueError, match="federation must have the mean of the clients"):
        engine.leaving(buffered)


def test_a_client_that_has_left_is_drawn_and_charged_but_not_notified():
    joins = participation(full_participation(), 3)
    bound = engine.leaving(engine.federation(algorithm_of(ANEW), data_of(), joins))
    state = bound.init(KEY)
    for active, fates in (
        ([True, False, True], [Fate.CONTRIBUTED, Fate.UNANNOUNCED, Fate.CONTRIBUTED]),
        ([False, False, True], [Fate.UNANNOUNCED] * 3),
    ):
        now = state._replace(server=state.server._replace(is_active=np.array(active)))
        cohort = bound.cohorts.draw(now, bound.hyper, KEY)
        assert np.asarray(cohort.fate)[np.argsort(cohort.ids)].tolist() == fates
        assert np.all(cohort.is_drawn)


def test_models_that_are_averaged_are_no_changes_of_older_ones():
    joins = participation(full_participation(), 3)
    bound = engine.federation(algorithm_of(ANEW), data_of(), joins)
    places, seconds = ["a", "server"], [[0, 1], [1, 0]]
    clock = engine.latencies(places=places, seconds=seconds, clients=["a"] * 3, server="server")
    rules = {"compute": engine.compute_seconds(3), "server_seconds": 0.0, "discount": 0.0}
    made = partial(engine.asynchronous, bound, latencies=clock, concurrency=3, **rules)
    made(max_staleness=0)
    with pytest.raises(ValueError, match="max_staleness must be 0 for retrained_averaging"):
        made(max_staleness=1)


# Rounds.


def by_hand(rounds, *, is_warm, is_new, active=lambda r: [0, 1, 2]):
    """Rounds without noise in NumPy: the mean, and the clients' own models."""
    data, mean = data_of(), np.zeros((3, 2))
    own = np.zeros((3, 3, 2))
    for r in range(rounds):
        for i in active(r):
            first = r * ROWS[i] if is_new else 0
            rows = slice(first, (r + 1) * ROWS[i])
            x = np.asarray(data.client(i)["x"], np.float64)[rows]
            x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
            norm = np.linalg.norm(x, axis=1, keepdims=True)
            x *= np.minimum(1, np.sqrt(0.5) / norm)
            y = np.eye(2)[data.client(i)["y"][rows]]
            w = mean.copy() if is_warm else np.zeros_like(mean)
            for _ in range(STEPS):
                w -= x.T @ (softmax(x @ w, axis=1) - y) / len(x) + ALPHA * w
            own[i] = w
        mean = own[active(r)].mean(axis=0)
    return mean, own


@telling
@pytest.mark.parametrize(
    ("factory", "is_warm", "is_new"), [(WARM, True, True), (ANEW, False, False)]
)
def test_rounds_are_those_of_numpy_and_clients_know_what_they_added(factory, is_warm, is_new):
    """Without noise the algorithms by hand; with noise, the received less the own noise."""
    sim = simulation_of(algorithm_of(factory, personal="received"))
    hyper = sim.federation.hyper
    quiet = hyper._replace(local=hyper.local._replace(noise_multiplier=np.float32(0)))
    state, _, _ = sim.run(sim.init(KEY), KEY, ROUNDS, quiet)
    mean, own = by_hand(ROUNDS, is_warm=is_warm, is_new=is_new)
    np.testing.assert_allclose(flat(state.server.params), mean, atol=2e-6)
    np.testing.assert_allclose(flat(state.clients.trained), own, atol=2e-6)
    np.testing.assert_allclose(flat(state.clients.sent), own, atol=2e-6)

    state, _, _ = sim.run(sim.init(KEY), KEY, ROUNDS)
    sent, trained = flat(state.clients.sent), flat(state.clients.trained)
    np.testing.assert_allclose(flat(state.server.params), sent.mean(axis=0), atol=1e-5)
    noise = sent - trained
    assert np.all(np.std(noise, axis=(1, 2)) > 0.01)
    if not is_warm:
        np.testing.assert_allclose(trained, own, atol=2e-6)
    for i in range(3):
        client = engine.examples_of(data_of()).client(i)
        received = flat(sim.federation.personal(state, client))
        expected = flat(state.server.params) - noise[i] / 3
        np.testing.assert_allclose(received, expected, atol=1e-5)


@telling
def test_a_client_alone_takes_all_noise_out_of_what_it_receives():
    algorithm = algorithm_of(ANEW, sizes=(12,), personal="received", noise_multiplier=3.0)
    sim, state, _, _ = played(algorithm, 1, sizes=(12,))
    received = sim.federation.personal(state, engine.examples_of(data_of((12,))).client(0))
    trained = jax.tree.map(lambda a: a[0], state.clients.trained)
    np.testing.assert_allclose(flat(received), flat(trained), atol=1e-5)
    assert np.max(np.abs(flat(state.server.params) - flat(trained))) > 0.1


@telling
@pytest.mark.parametrize("is_masked", [False, True])
def test_clients_leave_for_good_and_are_not_counted_but_charged_as_if_they_had_stayed(is_masked):
    """A client leaves after the round in which its model agrees with the mean, by hand."""
    tolerance, left = 0.1, {}

    def active(r):
        return [i for i in range(3) if left.get(i, ROUNDS) >= r]

    for r in range(ROUNDS):
        mean, own = by_hand(r + 1, is_warm=False, is_new=False, active=active)
        for i in active(r):
            if np.all(np.abs(own[i] - mean) < tolerance):
                left[i] = r
        if len(active(r + 1)) < 2:
            break
    wrapper = partial(engine.leaving, tolerance=tolerance)
    mean = masks_for(2) if is_masked else None
    sim = simulation_of(algorithm_of(ANEW, aggregator=mean), wrapper=wrapper)
    hyper = sim.federation.hyper
    quiet = hyper._replace(local=hyper.local._replace(noise_multiplier=np.float32(0)))
    state, record, info = sim.run(sim.init(KEY), KEY, ROUNDS, quiet)
    counts = [len(active(r + 1)) for r in range(ROUNDS)]
    assert list(info.server["num_active"]) == counts
    rows = zip(np.asarray(record.clients), np.asarray(record.fate), strict=True)
    trained = [sorted(clients[fates == Fate.CONTRIBUTED].tolist()) for clients, fates in rows]
    expected = [active(r) if len(active(r)) >= 2 else [] for r in range(ROUNDS)]
    assert trained == expected and counts[-1] < 3
    if is_masked:
        assert list(info.aggregator["num_lost"]) == [int(not clients) for clients in expected]
    # When a client leaves depends on its records: it pays for the rounds that it might have seen.
    account = PrivacyAccounting(sim, relation="replace_one")
    account.charge(record._replace(digest=None))
    assert account.ledgers["record"].num_compositions.tolist() == [ROUNDS] * 3
    mean, _ = by_hand(ROUNDS, is_warm=False, is_new=False, active=active)
    if len(active(ROUNDS - 1)) >= 2:
        np.testing.assert_allclose(flat(state.server.params), mean, atol=2e-6)


@slow
def test_with_all_clients_gone_nothing_changes():
    sim = simulation_of(algorithm_of(), wrapper=partial(engine.leaving, tolerance=1e6))
    one, _, info = sim.run(sim.init(KEY), KEY, 1)
    assert info.server["num_active"][0] == 0
    after_one = sim.portable(one)
    three, record, _ = sim.run(one, KEY, 2)
    assert list(record.num_announced) == [0, 0]
    for part in ("server", "clients"):
        jax.tree.map(
            np.testing.assert_array_equal,
            getattr(after_one, part),
            getattr(sim.portable(three), part),
        )


@telling
def test_streamed_rounds_of_clients_that_leave_are_the_resident_ones():
    wrapper = partial(engine.leaving, tolerance=0.4)
    states = []
    for placement in ("device", "host"):
        _, state, record, _ = played(
            algorithm_of(ANEW, noise_multiplier=0.3),
            execution=ALONE._replace(placement=placement),
            wrapper=wrapper,
        )
        states.append((jax.device_get(state), np.asarray(record.clients)))
    np.testing.assert_array_equal(states[0][1], states[1][1])
    assert_same_state(states[0][0], states[1][0], 0)


@telling
def test_shares_sum_to_the_noise_of_one_and_a_round_without_all_of_them_is_lost():
    algorithm = algorithm_of(ANEW, mechanism="gamma_shares", noise_multiplier=2.0)
    _, state, _, info = played(algorithm, 1)
    assert list(info.aggregator["is_lost"]) == [0] and list(info.aggregator["num_averaged"]) == [3]
    assert state.clients.sent is None
    joins = participation(poisson(), 3, cohort_size=1.5)
    # One that loses no round itself must not release a part of the shares.
    careless = algorithm_of(
        ANEW, mechanism="gamma_shares", noise_multiplier=2.0, aggregator=counted_mean()
    )
    for made in (algorithm, careless):
        sim = engine.simulation(made, data_of(), joins, ALONE)
        state, record, info = sim.run(sim.init(KEY), KEY, 6)
        # A client has no records left after the first rounds.
        lost = (np.asarray(record.num_drawn) < 3) | (np.arange(6) >= ROUNDS)
        assert list(info.aggregator["is_lost"]) == list(lost & (made is algorithm))
        assert int(state.server.round) == max(np.flatnonzero(~lost), default=-1)
        if lost.all():
            assert not np.any(flat(state.server.params))


@telling
@pytest.mark.parametrize(("mechanism", "is_noised"), [("gamma_shares", True), ("laplace", False)])
def test_shares_of_noise_are_sent_without_records_too(mechanism, is_noised):
    """Clients without the records of a round send it: one that has them counts on all shares."""
    mean, sums = counted_mean(required=3), []

    def combine(state, numbers, total, close):
        jax.debug.callback(lambda x: sums.append(flat(x)), total[0])
        return mean.combine(state, numbers, total, close)

    algorithm = algorithm_of(
        ANEW, mechanism=mechanism, sizes=(2, 2, 3), aggregator=mean._replace(combine=combine)
    )
    _, state, _, info = played(algorithm, 1, sizes=(2, 2, 3))
    jax.effects_barrier()
    assert info.aggregator["is_lost"] == 1 and not np.any(flat(state.server.params))
    (total,) = sums
    assert np.all(np.isfinite(total)) and np.all((total != 0) == is_noised)


@telling
def test_an_aggregator_without_counts_is_refused():
    sim = simulation_of(algorithm_of(aggregator=weighted_mean()))
    with pytest.raises(ValueError, match="aggregator must average with counts"):
        sim.run(sim.init(KEY), KEY, 1)


@slow
def test_masks_change_nothing_but_rounding():
    graph = secure.all_pairs(3)
    masked = secure.masked(counted_mean(), secure.fixed_point(3), graph)
    plain, hidden = (
        played(algorithm_of(ANEW, aggregator=mean))[1] for mean in (counted_mean(), masked)
    )
    difference = np.abs(flat(plain.server.params) - flat(hidden.server.params))
    assert difference.max() < 1e-5 < 0.1 < np.max(np.abs(flat(plain.server.params)))


@telling
def test_released_rounds_train_without_a_regulariser_and_add_the_noise_of_another():
    """Squared error through a sigmoid by hand; Laplace noise of z·B/(k·1)/n, B the clip norm."""
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    model = models.logistic_regression(shape, 2, single_logit=True, loss="squared_error")
    config = LocalConfig(
        learning_rate=1.0, batch_size=1, num_steps=STEPS, clip_norm=0.5, noise_multiplier=6.0
    )
    whole = full_participation()._replace(name="full_batch")
    noise = algorithms.OutputPerturbation(0.0, calibration="released", noise_regularizer=1.0)
    algorithm = WARM(
        model,
        dp_sgd_trainer(model, config, sampler=whole),
        num_clients=3,
        rows_per_round=ROWS,
        perturbation=noise,
    )
    sim, data, draws = simulation_of(algorithm), data_of(), []
    start = sim.init(KEY)
    zeros = jax.tree.map(jnp.zeros_like, start.server.params)
    start = start._replace(server=start.server._replace(params=zeros))
    for seed in range(120):
        state, _, _ = sim.run(jax.tree.map(jnp.copy, start), jax.random.key(seed), 1)
        draws += [np.ravel(x) for x in jax.tree.leaves(jax.device_get(state.clients.noise))]
    # The smallest client has 3 records in a round, and the scale is over 3 clients.
    law = stats.laplace(scale=6.0 * 0.5 / 3 / 3)
    assert stats.kstest(np.concatenate(draws), law.cdf).pvalue > 1e-3
    assert stats.kstest(1.25 * np.concatenate(draws), law.cdf).pvalue < 1e-3
    for i in range(3):
        x = np.asarray(data.client(i)["x"], np.float64)[: ROWS[i]]
        x, y = np.concatenate([x, np.ones((len(x), 1))], axis=1), data.client(i)["y"][: ROWS[i]]
        w = np.zeros(3)
        for _ in range(STEPS):
            p = 1 / (1 + np.exp(-x @ w))
            w -= ((p - y) * p * (1 - p)) @ x / len(x)
        trained = jax.tree.leaves(jax.tree.map(lambda a, i=i: a[i], state.clients.trained))
        found = np.concatenate([np.ravel(part) for part in trained])
        np.testing.assert_allclose(np.sort(found), np.sort(w), atol=2e-6)
