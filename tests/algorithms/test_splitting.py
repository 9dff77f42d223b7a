"""Operator splitting on least squares: closed forms, equal forms, and what is refused."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import later, telling
from oracles.splitting import (
    SETTINGS,
    LeastSquares,
    Quadratics,
    accelerated_descent,
    ergodic,
    splitting,
)

from fedjax_dp import algorithms
from fedjax_dp.algorithms import ProximalStep, schedules
from fedjax_dp.clients.base import LocalConfig, LocalResult, TrainingMetrics
from fedjax_dp.clients.client_data import PublicClient
from fedjax_dp.clients.regularizers import Quadratic, accelerated, proximal_move
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.core.registry import grouped
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import scheduled, simulation
from fedjax_dp.models.dense import least_squares, logistic_regression

NUM_CLIENTS, NUM_ROWS, NUM_FEATURES = 5, 20, 4
ETA = 0.05
KEY = jax.random.key(0)
X = jax.ShapeDtypeStruct((NUM_FEATURES,), jnp.float32)


def problem(*, is_same=False):
    rng = np.random.default_rng(1)
    a = rng.normal(size=(NUM_CLIENTS, NUM_ROWS, NUM_FEATURES)).astype("f4")
    b = a @ rng.normal(size=NUM_FEATURES) + 0.5 * rng.normal(size=(NUM_CLIENTS, NUM_ROWS))
    if is_same:
        a, b = (np.repeat(part[:1], NUM_CLIENTS, axis=0) for part in (a, b))
    return a, b.astype("f4")


A, B = problem()
ORACLE = LeastSquares(A, B)


def model():
    return least_squares(X, scale=NUM_ROWS)


def trainer(k=1, rate=0.01, **options):
    config = LocalConfig(learning_rate=rate, batch_size=NUM_ROWS, num_steps=k)
    return local_trainer(model(), config, **options)


def simulated(algorithm, a=A, b=B, sampler=None, cohort=None):
    data = FederatedData.from_clients([{"x": x, "y": y} for x, y in zip(a, b, strict=True)])
    who = participants.participation(sampler or sampling.full_participation(), NUM_CLIENTS, cohort)
    return simulation(algorithm, data, who)


def after(algorithm, rounds, **options):
    sim = simulated(algorithm, **options)
    state, _, _ = sim.run(sim.init(KEY), KEY, rounds)
    return np.asarray(sim.federation.shared(state), np.float64)


EXACT = {"step": ProximalStep(ETA, solver="exact")}
LIMITS = {
    "fedavg, k = 1": (
        lambda: algorithms.splitting(model(), trainer(), client_map="gradient"),
        lambda: ORACLE.optimum,
    ),
    "fedavg, k = 5": (
        lambda: algorithms.splitting(model(), trainer(5), client_map="gradient"),
        lambda: ORACLE.fedavg_limit(0.01, 5),
    ),
    "fedprox": (
        lambda: algorithms.splitting(model(), trainer(), **EXACT),
        lambda: ORACLE.fedprox_limit(ETA),
    ),
    "fedrp": (
        lambda: algorithms.fedrp(model(), trainer(), **EXACT),
        lambda: ORACLE.fedprox_limit(ETA),
    ),
    "fedsplit": (lambda: algorithms.fedsplit(model(), trainer(), **EXACT), lambda: ORACLE.optimum),
    "fedpi": (lambda: algorithms.fedpi(model(), trainer(), **EXACT), lambda: ORACLE.optimum),
    "reflected_fedprox": (
        lambda: algorithms.reflected_fedprox(model(), trainer(), **EXACT),
        lambda: ORACLE.fedprox_limit(ETA / 2),
    ),
    "reflected_fedavg": (
        lambda: algorithms.reflected_fedavg(model(), trainer()),
        lambda: ORACLE.fedprox_limit(-0.01 / 2),
    ),
}


@pytest.mark.parametrize(
    "name", later(LIMITS, soon=["fedavg, k = 5", "fedprox", "fedpi", "reflected_fedavg"])
)
def test_a_constant_step_leads_to_the_closed_form(name):
    make, limit = LIMITS[name]
    np.testing.assert_allclose(after(make(), 600), limit(), rtol=0, atol=1e-6)


def test_the_closed_forms_are_apart():
    apart = [ORACLE.optimum, ORACLE.fedavg_limit(0.01, 5), *map(ORACLE.fedprox_limit, (ETA, -5e-3))]
    for i, one in enumerate(apart):
        assert all(np.abs(one - other).max() > 1e-4 for other in apart[:i])


@telling
@pytest.mark.parametrize("name", ["fedsplit", "fedrp", "reflected_fedavg"])
def test_clients_that_agree_have_one_limit(name):
    a, b = problem(is_same=True)
    options = {} if name == "reflected_fedavg" else EXACT
    algorithm = getattr(algorithms, name)(model(), trainer(), **options)
    expected = LeastSquares(a, b).optimum
    np.testing.assert_allclose(after(algorithm, 400, a=a, b=b), expected, rtol=0, atol=1e-6)


@telling
@pytest.mark.parametrize("form", ["decentralised", "centralised"])
def test_relaxations_change_by_round(form):
    by_round = ([2.0, 1.5, 1.0], [2.0, 1.0, 0.5, 1.5], [1.0, 0.5])
    curves = {f"algorithm.{name}": np.ones(ROUNDS) for name in NUMBERS}
    wrapper = partial(scheduled, schedules=curves, num_rounds=ROUNDS)
    compared(from_start("prox", form, PARTIAL, wrapper), "prox", form, by_round)


@telling
def test_who_holds_the_points_of_absent_clients_matters_only_for_numbers_that_change():
    """With γ = 1 a point is that of the last round of its client, whose β is held with it."""
    runs = {}
    for form in ("centralised", "decentralised"):
        wrapper = partial(scheduled, schedules={"algorithm.beta": np.ones(4)}, num_rounds=4)
        sim = from_start("prox", form, PARTIAL, wrapper, beta=2.0)
        for betas in ([2.0] * 4, [2.0, 1.0, 0.5, 1.5]):
            hyper = sim.hyper._replace(factors={"algorithm.beta": np.float32(betas) / 2})
            state, record, _ = sim.run(sim.init(KEY), KEY, 4, hyper)
            assert len(np.unique(np.asarray(record.clients)[:2])) > 3, "clients come and go"
            runs[form, betas[1]] = np.asarray(sim.federation.shared(state))
    same, other = ((runs["centralised", b], runs["decentralised", b]) for b in (2.0, 1.0))
    np.testing.assert_allclose(*same, rtol=0, atol=1e-6)
    assert np.abs(other[0] - other[1]).max() > 0.05


def test_fedpi_is_admm_with_a_dual_variable():
    theta, dual = np.zeros(NUM_FEATURES), np.zeros((NUM_CLIENTS, NUM_FEATURES))
    found = after(algorithms.fedpi(model(), trainer(), **EXACT), 6)
    for _ in range(6):
        z = ORACLE.prox(theta + dual, ETA)
        # The scheme's z is 2 P(v) − v, whose mean is 2 mean P(v) − mean v.
        reported = 2 * z.mean(axis=0) - (theta + dual).mean(axis=0)
        theta_next = (z - dual).mean(axis=0)
        dual = dual + theta_next - z
        theta = theta_next
    np.testing.assert_allclose(found, reported, rtol=0, atol=1e-6)


@telling
def test_fedsplit_is_its_form_with_two_states():
    s = np.zeros((NUM_CLIENTS, NUM_FEATURES))
    mean = s.mean(axis=0)
    for _ in range(6):
        x = ORACLE.prox(2 * mean - s, ETA)
        s = s + 2 * (x - mean)
        mean = s.mean(axis=0)
    found = after(algorithms.fedsplit(model(), trainer(), **EXACT), 6)
    np.testing.assert_allclose(found, mean, rtol=0, atol=1e-6)


@telling
def test_a_frozen_dual_is_fedprox_and_gradient_steps_are_fedavg():
    config = LocalConfig(learning_rate=0.01, batch_size=7, num_epochs=2)
    same = local_trainer(model(), config)
    pairs = [
        (
            algorithms.splitting(model(), same, step=ProximalStep(ETA), is_weighted=True),
            algorithms.fedprox(model(), same, mu=1 / ETA),
        ),
        (
            algorithms.splitting(model(), same, client_map="gradient", is_weighted=True),
            algorithms.fedavg(model(), same),
        ),
    ]
    for setting, own in pairs:
        np.testing.assert_allclose(after(setting, 3), after(own, 3), rtol=0, atol=1e-6)


@telling
@pytest.mark.parametrize("optimizer", [optax.sgd, optax.adam])
def test_a_local_solver_comes_to_the_exact_step(optimizer):
    local = trainer(4000, 0.02, optimizer=optimizer)
    inexact = algorithms.fedpi(model(), local, step=ProximalStep(ETA, tolerance=1e-4))
    exact = algorithms.fedpi(model(), trainer(), **EXACT)
    sim = simulated(inexact)
    state, _, info = sim.run(sim.init(KEY), KEY, 5)
    found = np.asarray(sim.federation.shared(state))
    np.testing.assert_allclose(found, after(exact, 5), rtol=0, atol=2e-5)
    # The tolerance ended it long before the last step that it was given.
    assert np.all(info.training.num_examples < NUM_CLIENTS * NUM_ROWS * 1500)


@pytest.mark.parametrize("memory", later([1, 2], but=[2]))
def test_accelerated_steps_are_as_by_hand(memory):
    h, c, rate = ORACLE.h[0], ORACLE.c[0], 0.02
    at = jnp.float32([1.0, -2.0, 0.5, 3.0])
    expected = list(accelerated_descent(lambda x: h @ x - c, at, rate, memory, 5))
    steps = accelerated(optax.identity(), rate, memory=memory)
    state, update = steps.init(at), jax.jit(steps.update)
    for right in expected:
        gradient, state = update(jnp.float32(h) @ at - jnp.float32(c), state, at)
        at = at - rate * gradient
        np.testing.assert_allclose(at, right, rtol=0, atol=2e-4)
    # Plain steps are still far away by then.
    plain = np.linalg.matrix_power(np.eye(4) - rate * h, 5)
    away = plain @ (np.array([1.0, -2.0, 0.5, 3.0]) - np.linalg.solve(h, c))
    assert np.linalg.norm(right - np.linalg.solve(h, c)) < np.linalg.norm(away) / 5
    # At the minimum there is nothing to mix.
    gradient, _ = update(0 * at, steps.init(at), at)
    np.testing.assert_array_equal(gradient, 0)


@telling
def test_accelerated_steps_find_a_proximal_point_sooner():
    exact = after(algorithms.fedpi(model(), trainer(), **EXACT), 5)
    num_steps = {}
    for memory in (None, 4):
        step = ProximalStep(ETA, tolerance=1e-3, inner_memory=memory)
        algorithm = algorithms.fedpi(model(), trainer(4000, 0.005), step=step)
        sim = simulated(algorithm)
        state, _, info = sim.run(sim.init(KEY), KEY, 5)
        np.testing.assert_allclose(sim.federation.shared(state), exact, rtol=0, atol=1e-4)
        num_steps[memory] = np.sum(info.training.num_examples) / (5 * NUM_CLIENTS * NUM_ROWS)
    # With four parameters the fifth mix is 0 but for rounding, of which float32 asks a few more.
    assert 5 <= num_steps[4] < num_steps[None] / 5, num_steps


@telling
@pytest.mark.parametrize("form", ["decentralised", "centralised"])
def test_personal_models_are_the_model_and_a_share_of_the_dual(form):
    """FedPi's limit has u_i = θ* + η ∇f_i(θ*), since its proximal step leads to θ*."""

    def made(weight):
        return algorithms.fedpi(model(), trainer(), form=form, dual_weight=weight, **EXACT)

    sim = simulated(made(1.0))
    before = sim.init(KEY)
    client = PublicClient(jnp.int32(NUM_ROWS), jnp.int32(1), NUM_ROWS)
    np.testing.assert_array_equal(sim.federation.personal(before, client), before.server.params)
    state, _, _ = sim.run(before, KEY, 600)
    slopes = ORACLE.gradients(ORACLE.optimum)
    assert np.abs(ETA * slopes).max() > 0.1
    for weight in (1.0, -1.0, 0.5):
        expected = ORACLE.optimum + weight * ETA * slopes
        personal = made(weight).views.personal
        for i in range(NUM_CLIENTS):
            row = jax.tree.map(lambda x, i=i: x[i], state.clients)
            found = personal(state.server, row, client)
            np.testing.assert_allclose(found, expected[i], rtol=0, atol=1e-5)
        assert not np.allclose(expected[0], expected[1])


def test_accelerated_steps_ask_for_plain_exact_gradients():
    config = LocalConfig(0.01, batch_size=5, clip_norm=1.0, noise_multiplier=2.0)
    with pytest.raises(ValueError, match="would amplify the noise"):
        algorithms.fedpi(
            model(), dp_sgd_trainer(model(), config), step=ProximalStep(inner_memory=2)
        )
    with pytest.raises(ValueError, match="plain steps of"):
        algorithms.fedpi(model(), trainer(optimizer=optax.adam), step=ProximalStep(inner_memory=2))


NUMBERS = ("alpha", "beta", "gamma")
# Five clients of unequal sizes, one of them without data, and a start that is not 0.
RAGGED_SIZES = (3, 5, 0, 2, 4)
START = np.array([1.5, -2.0, 0.7])
LOCAL_STEPS, RATE, ROUNDS = 2, 0.2, 6


def ragged():
    rng = np.random.default_rng(3)
    return [(rng.normal(size=(n, 3)), rng.normal(size=n) + 2) for n in RAGGED_SIZES]


PAIRS = ragged()
QUADRATICS = Quadratics.of_rows(PAIRS)

NO_METRICS = TrainingMetrics(*[jnp.float32(0)] * 6)


def unequal_clients():
    pairs = [{"x": a.astype("f4"), "y": b.astype("f4")} for a, b in PAIRS]
    return FederatedData.from_clients(pairs)


def from_start(phi, form, sampler, wrapper=None, **options):
    """A simulation of the ragged clients from START, with Φ "prox", "local" or "gradient"."""
    own = least_squares(jax.ShapeDtypeStruct((3,), jnp.float32))
    own = own._replace(init=lambda key: jnp.float32(START))
    config = LocalConfig(learning_rate=RATE, batch_size=5, num_steps=LOCAL_STEPS)
    solvers = {"prox": "exact", "local": "local"}
    if phi in solvers:
        options["step"] = ProximalStep(0.7, solver=solvers[phi])
    else:
        options["client_map"] = phi
    algorithm = algorithms.splitting(own, local_trainer(own, config), form=form, **options)
    drawn = participants.participation(*sampler)
    return simulation(algorithm, unequal_clients(), drawn, wrapper=wrapper)


FULL = (sampling.full_participation(), 5)
PARTIAL = (sampling.fixed_size(), 5, 3)


def compared(sim, client_map, form, numbers, *, is_weighted=False, atol=2e-6):
    """Plays rounds one by one; each model must be that of the equations."""
    # The last number of a list holds for all later rounds.
    by_round = [np.atleast_1d(n) for n in numbers]
    by_round = [n[np.minimum(np.arange(ROUNDS), len(n) - 1)] for n in by_round]
    own = {name: np.float32(n[0]) for name, n in zip(NUMBERS, by_round, strict=True)}
    tables = [np.float32(n / n[0]) for n in by_round]
    factors = dict(zip(sim.hyper.factors, tables, strict=True)) if sim.hyper.factors else {}
    hyper = sim.hyper._replace(algorithm={**sim.hyper.algorithm, **own}, factors=factors)
    state, models, cohorts = sim.init(KEY), [], []
    for _ in range(ROUNDS):
        state, record, _ = sim.run(state, KEY, 1, hyper)
        models.append(np.asarray(sim.federation.shared(state)))
        cohorts.append([int(i) for i in record.clients[0] if i >= 0])
    sizes = np.array(RAGGED_SIZES, float)
    phi = {
        "prox": QUADRATICS.proximal(0.7),
        "gradient": QUADRATICS.gradient_steps(LOCAL_STEPS, RATE),
    }[client_map]
    weights = sizes if is_weighted else (sizes > 0).astype(float)
    waits = form == "decentralised"
    expected = splitting(phi, START, weights, cohorts, by_round, waits=waits)
    np.testing.assert_allclose(models, expected.models, rtol=0, atol=atol)
    return cohorts


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_late_client_begins_between_the_start_and_the_model(setting):
    """It holds z = u = θ0, so that its point is (1 − γβ) θ0 + γβ z̄, by (2.16) and (2.17)."""
    _, *numbers = SETTINGS[setting]
    begun = []

    def train(start, *_, **__):
        begun.append(start)
        return LocalResult(0 * start, start, jnp.float32(1), jnp.int32(1), NO_METRICS)

    options = dict(zip(NUMBERS, numbers, strict=True))
    fake = trainer()._replace(train=train)
    algorithm = algorithms.splitting(model(), fake, client_map="gradient", **options)
    server = algorithm.init(KEY)._replace(params=jnp.float32([1.0, 2.0, 3.0, 4.0]))
    row = algorithm.client_state.init(server)
    newest = jnp.float32([0.5, -1.0, 0.0, 2.0])
    client = PublicClient(jnp.int32(7), jnp.int32(3), NUM_ROWS, round=4)
    output = algorithm.client(newest, row, client, algorithm.hyper, KEY)
    _, beta, gamma = numbers
    expected = (1 - gamma * beta) * np.array([1, 2, 3, 4]) + gamma * beta * np.asarray(newest)
    np.testing.assert_allclose(begun[0], expected, atol=1e-6)
    # What it sends is z − z̄, and Φ went nowhere.
    np.testing.assert_allclose(output.update["model"], expected - newest, atol=1e-6)


# The form, whether clients are weighted, and who joins.
SETUPS = list(itertools.product(["decentralised", "centralised"], [False, True], [FULL, PARTIAL]))


@pytest.mark.parametrize(
    ("form", "is_weighted", "sampler"), later(SETUPS, soon=[SETUPS[0], SETUPS[3], SETUPS[7]])
)
@pytest.mark.parametrize("client_map", ["prox", "gradient"])
def test_every_setting_is_the_equations(client_map, form, is_weighted, sampler):
    sim = from_start(client_map, form, sampler, is_weighted=is_weighted)
    settings = [numbers for phi, *numbers in SETTINGS.values() if phi == client_map]
    for numbers in (*settings, (1.3, 0.4, 0.7)):
        cohorts = compared(sim, client_map, form, numbers, is_weighted=is_weighted)
        # Late clients, and rounds with the client that has no data.
        assert len(set(cohorts[0])) == (5 if sampler is FULL else 3)
        assert any(2 in cohort for cohort in cohorts)
    assert sim.num_traces() == 1


@telling
def test_every_number_is_swept_without_a_second_trace():
    step = ProximalStep(ETA, tolerance=1e-3)
    sim = simulated(algorithms.splitting(model(), trainer(5), step=step))
    ends = set()
    for name in (None, *sim.hyper.algorithm):
        own = dict(sim.hyper.algorithm)
        if name is not None:
            own[name] = {"gamma": 0.5, "tolerance": 50.0}.get(name, 0.6 * own[name])
        hyper = sim.hyper._replace(algorithm=own)
        state, _, _ = sim.run(sim.init(KEY), KEY, 4, hyper)
        ends.add(np.asarray(sim.federation.shared(state)).tobytes())
    assert sim.num_traces() == 1 and len(ends) == 1 + len(sim.hyper.algorithm)


def test_a_proximal_step_is_where_its_gradient_says():
    values, vectors = np.linalg.eigh(ORACLE.h[0])
    quadratic = Quadratic(*map(jnp.float32, (vectors, values, ORACLE.c[0] @ vectors)), True)
    v = np.array([0.3, -1.0, 2.0, 0.1])
    move = np.asarray(proximal_move(quadratic, jnp.float32(v), ETA), np.float64)
    gradient = ORACLE.h[0] @ (v + move) - ORACLE.c[0]
    np.testing.assert_allclose(v + move + ETA * gradient, v, atol=1e-5)

    # ∇M = (v − P(v)) / η, by differences of the envelope itself.
    def envelope(at):
        x = ORACLE.prox(np.tile(at, (NUM_CLIENTS, 1)), ETA)[0]
        return x @ ORACLE.h[0] @ x / 2 - ORACLE.c[0] @ x + np.sum((x - at) ** 2) / (2 * ETA)

    slope = [(envelope(v + 1e-5 * e) - envelope(v - 1e-5 * e)) / 2e-5 for e in np.eye(4)]
    np.testing.assert_allclose(-move / ETA, slope, rtol=1e-4)


# Φ and the form.
OVER_ROUNDS = list(
    itertools.product(["prox", "gradient", "local"], ["decentralised", "centralised"])
)


@telling
@pytest.mark.parametrize(
    ("phi", "form"), later(OVER_ROUNDS, but=[OVER_ROUNDS[0], OVER_ROUNDS[2]], mark=telling)
)
def test_a_step_over_rounds_is_that_of_the_equations_and_of_the_weights_of_the_average(phi, form):
    halved = schedules.exponential(every=2, staircase=True)
    steps = {"local.learning_rate" if phi == "gradient" else "algorithm.step_size": halved}
    if phi == "local":
        # The average has the weights of η, not of the rate of the steps to a proximal point.
        steps["local.learning_rate"] = schedules.inverse(every=4)
    wrapper = partial(scheduled, schedules=steps, num_rounds=ROUNDS)
    numbers = (1.3, 0.4, 0.7)
    options = dict(zip(NUMBERS, numbers, strict=True))
    sim = from_start(phi, form, PARTIAL, wrapper=wrapper, is_averaged=True, **options)
    state, record, _ = sim.run(sim.init(KEY), KEY, ROUNDS)
    rounds = np.arange(ROUNDS)
    factors = 0.5 ** (rounds // 2)
    maps = {
        "prox": [QUADRATICS.proximal(0.7 * f) for f in factors],
        "gradient": [QUADRATICS.gradient_steps(LOCAL_STEPS, RATE * f) for f in factors],
        "local": [
            QUADRATICS.inner_steps(LOCAL_STEPS, RATE / (t / 4 + 1), 0.7 * f)
            for t, f in zip(rounds, factors, strict=True)
        ],
    }[phi]
    weights = (np.array(RAGGED_SIZES) > 0).astype(float)
    cohorts = [[int(i) for i in row if i >= 0] for row in record.clients]
    by_round = [np.full(ROUNDS, n) for n in numbers]
    waits = form == "decentralised"
    found = splitting(
        lambda t, *at: maps[t](t, *at), START, weights, cohorts, by_round, waits=waits
    )
    average = ergodic(START, found.models, factors, np.ones(ROUNDS))
    np.testing.assert_allclose(state.server.params, found.models[-1], rtol=0, atol=2e-6)
    np.testing.assert_allclose(sim.federation.shared(state), average, rtol=0, atol=2e-6)
    # Equal weights are apart from it.
    assert np.abs(found.models.mean(axis=0) - average).max() > 1e-3


def test_inner_steps_must_fit_the_proximal_step_of_every_round():
    fed = simulated(
        algorithms.fedpi(model(), trainer(5, 0.0095), step=ProximalStep(ETA))
    ).federation
    # 2η is 0.1 / 11 in round 10; a rate with the same curve fits in all rounds.
    steps = {"algorithm.step_size": schedules.inverse()}
    with pytest.raises(ValueError, match=r"in round 10, learning_rate must be below .* = 0\.00909"):
        scheduled(fed, steps, 20)
    scheduled(fed, {**steps, "local.learning_rate": schedules.inverse()}, 20)


def test_inner_steps_of_several_runs_must_each_fit_their_own_proximal_step():
    algorithm = algorithms.fedpi(model(), trainer(5, 0.05), step=ProximalStep(0.05))
    steps, rates = np.array([0.05, 0.5]), np.array([0.05, 0.5])
    own, local = algorithm.hyper.algorithm, algorithm.hyper.local
    several = algorithm.hyper._replace(algorithm={**own, "step_size": steps})
    algorithm.check(several._replace(local=local._replace(learning_rate=rates)))
    with pytest.raises(ValueError, match=r"learning_rate must be below .* = 0\.1 .*, got 0\.5"):
        algorithm.check(several._replace(local=local._replace(learning_rate=rates[::-1])))


def test_record_level_privacy_is_that_of_the_trainer():
    config = LocalConfig(0.1, batch_size=5, num_steps=3, clip_norm=1.0, noise_multiplier=2.0)
    private = dp_sgd_trainer(model(), config)
    algorithm = algorithms.fedpi(model(), private)
    found = algorithm.claims.record.events[0](20, algorithm.hyper)
    assert found == private.claim.events[0](20, config) and algorithm.claims.client is None


BY_STEPS = {"client_map": "gradient"}
REFUSED = {
    "alpha must be": {"alpha": 2.5},
    "gamma must be in [0, 1]": {"gamma": 1.5},
    "dual_weight must be left out if beta and gamma are 1": {"dual_weight": 1.0},
    "dual_weight must be 0 or of a size that float32 can": {"beta": 2.0, "dual_weight": 1e39},
    "inner_memory must be left out if Φ is local training": {**BY_STEPS, "inner_memory": 2},
    "inner_memory must be left out for exact steps": {"solver": "exact", "inner_memory": 2},
    "learning_rate must be below 2 / (L + 1/step_size) = 0.02": {"step_size": 0.01},
    "learning_rate must be below 2 / (L + 1/step_size) = 0.00": {"smoothness": 400.0},
    "step_size must be left out if Φ is local training": {**BY_STEPS, "step_size": 1.0},
    "solver must be 'local' if Φ is local training": {**BY_STEPS, "solver": "exact"},
    "tolerance must be left out for exact steps": {"solver": "exact", "tolerance": 1e-3},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_defined_is_refused(words):
    with pytest.raises(ValueError) as error:
        options = grouped(algorithms.splitting, REFUSED[words])
        algorithms.splitting(model(), trainer(rate=0.025), **options)
    assert words in str(error.value)


def test_exact_steps_ask_for_a_quadratic_loss_and_open_records():
    logistic = logistic_regression(X, num_classes=2)
    with pytest.raises(ValueError, match="model must be one whose loss is quadratic"):
        algorithms.fedpi(logistic, trainer(), **EXACT)
    config = LocalConfig(0.1, batch_size=5, clip_norm=1.0, noise_multiplier=2.0)
    with pytest.raises(ValueError, match="reads records without noise"):
        algorithms.fedpi(model(), dp_sgd_trainer(model(), config), **EXACT)
