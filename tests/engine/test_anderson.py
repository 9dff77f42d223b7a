"""Anderson acceleration against NumPy, the recorded rounds of the chapter, and what it refuses."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from marks import floats, slow, telling
from oracles.splitting import LeastSquares, chapter_data
from small_problem import ALONE, make_data, make_model, plain_trainer

from fedjax_dp import algorithms
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.regularizers import mixing_weights
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import (
    ExecutionConfig,
    PrivacyAccounting,
    anderson,
    compile_federation,
    federation,
)
from fedjax_dp.models.dense import least_squares

KEY = jax.random.key(0)
METHODS = {"fedprox": (1, 1, 1), "fedrp": (2, 1, 1), "fedsplit": (2, 2, 1), "fedpi": (2, 2, 0.5)}
STEP_SIZES = (1e-5, 1e-4)
# Rounds until the gap, with the factor ½, is the limit's to TOLERANCE; the first round is round 0.
# Half the tolerance takes 325, 158, 147, 301 plain rounds at the smaller step.
PLAIN_ROUNDS = {1e-5: (313, 152, 144, 294), 1e-4: (42, 15, 13, 33)}
MIXED_ROUNDS = {1e-5: (9, 9, 48, 42), 1e-4: (9, 7, 9, 10)}
TOLERANCE = 2e-6


class Shifted:
    """The chapter's problem with its origin at the minimum, by Cholesky factors of AᵀA."""

    def __init__(self, a, b):
        whole = LeastSquares(a, b)
        self.start = -whole.optimum
        self.rows = np.swapaxes(np.linalg.cholesky(whole.h), 1, 2)
        gradient = -whole.gradients(whole.optimum)
        self.targets = np.linalg.solve(np.swapaxes(self.rows, 1, 2), gradient[..., None])[..., 0]
        self.oracle = LeastSquares(self.rows, self.targets)
        self.num_clients, self.size = self.targets.shape

    def federation(self, numbers, eta, form="centralised", copies=None):
        shape = jax.ShapeDtypeStruct((self.size,), jnp.float32)
        model = least_squares(shape, scale=self.size)
        model = model._replace(init=lambda key: jnp.asarray(self.start, jnp.float32))
        trainer = local_trainer(model, LocalConfig(1e-9, batch_size=self.size, num_steps=1))
        names = dict(zip(("alpha", "beta", "gamma"), map(float, numbers), strict=True))
        step = algorithms.ProximalStep(eta, solver="exact")
        is_weighted = copies is not None
        algorithm = algorithms.splitting(
            model, trainer, step=step, form=form, is_weighted=is_weighted, **names
        )
        return federation(algorithm, self.data(copies), full_participation(self.num_clients))

    def data(self, copies=None):
        """Each client's rows, `copies` of them: the same mean loss, and a larger weight."""
        pairs = zip(self.rows.astype("f4"), self.targets.astype("f4"), strict=True)
        copies = copies or [1] * self.num_clients
        return FederatedData.from_clients(
            [
                {"x": np.tile(x, (n, 1)), "y": np.tile(y, n)}
                for n, (x, y) in zip(copies, pairs, strict=True)
            ]
        )

    def limit_gap(self, name, eta):
        is_biased = name in ("fedprox", "fedrp")
        return self.oracle.gap(self.oracle.fedprox_limit(eta)) if is_biased else 0.0

    def num_rounds(self, fed, name, eta, most):
        """The first round whose model has the gap of the limit."""
        sim = compile_federation(fed, self.data(), ExecutionConfig(rounds_per_call=1))
        state, limit = sim.init(KEY), self.limit_gap(name, eta)
        for r in range(most):
            state, _, _ = sim.run(state, KEY)
            if abs(self.oracle.gap(fed.shared(state)) - limit) < TOLERANCE:
                return r
        return None

    def num_rounds_by_hand(self, oracle, name, eta, **options):
        run = by_hand(oracle, self.start, METHODS[name], eta, memory=2, **options)
        gaps, limit = (self.oracle.gap(z) for z, _ in run), self.limit_gap(name, eta)
        return next(r for r, gap in enumerate(gaps) if abs(gap - limit) < TOLERANCE)


@functools.cache
def chapter():
    return Shifted(*chapter_data(0.25))


@functools.cache
def small():
    rng = np.random.default_rng(2)
    a = rng.normal(size=(4, 15, 5)) * [1.0, 2.0, 0.5, 1.0, 3.0]
    return Shifted(a, a @ rng.normal(size=5) + rng.normal(size=(4, 15)))


def full_participation(num_clients):
    return participants.participation(sampling.full_participation(), num_clients)


def by_hand(
    oracle, start, numbers, eta, *, memory, ridge, damping=0.0, first=None, weigh=None, norm=None
):
    """Accelerated rounds in float64; yields z̄, by the oracle's weights, and all points."""
    alpha, beta, gamma = numbers
    pi = oracle.weights
    root = np.sqrt(pi if norm is None else np.asarray(norm) / np.sum(norm))[:, None]
    u = np.tile(start, (len(oracle.c), 1))
    starts, images, r = [], [], 0
    first = memory + 1 if first is None else first
    while True:
        z = (1 - alpha) * u + alpha * oracle.prox(u, eta)
        mean = pi @ z
        yield mean, u
        image = (1 - gamma) * u + gamma * ((1 - beta) * z + beta * mean)
        starts, images = [*starts, u][-memory - 1 :], [*images, image][-memory - 1 :]
        u = image
        if r >= first:
            residuals = root * (np.array(starts) - np.array(images))
            residuals = residuals.reshape(len(starts), -1)
            w = (weigh or solved)(residuals @ residuals.T, ridge)
            w = (1 - damping) * w
            w[-1] += damping
            u = np.tensordot(w, np.array(images), axes=1)
        r += 1


def solved(products, ridge):
    system = products + ridge * np.trace(products) * np.eye(len(products))
    w = np.linalg.solve(system, np.ones(len(products)))
    return w / w.sum()


@slow
@pytest.mark.parametrize("eta", STEP_SIZES)
def test_plain_rounds_are_as_many_as_recorded(eta):
    problem = chapter()
    for (name, numbers), expected in zip(METHODS.items(), PLAIN_ROUNDS[eta], strict=True):
        found = problem.num_rounds(problem.federation(numbers, eta), name, eta, 400)
        # FedProx's gap runs into its limit so flat that float32 may be a round early.
        assert abs(found - expected) <= (name == "fedprox" and eta == 1e-4), name


@slow
@pytest.mark.parametrize("eta", STEP_SIZES)
def test_mixed_rounds_are_as_many_as_recorded_in_64_bits(eta):
    problem = chapter()

    def weigh(products, ridge):
        everything = jnp.ones(len(products), bool)
        return np.array(mixing_weights(products, everything, len(products) - 1, ridge, 0.0))

    with jax.enable_x64(True):
        for name, expected in zip(METHODS, MIXED_ROUNDS[eta], strict=True):
            found = problem.num_rounds_by_hand(problem.oracle, name, eta, ridge=1e-15, weigh=weigh)
            assert found == expected, name


@slow
def test_errors_of_32_bits_change_the_rounds_of_fedprox_alone():
    # The first residuals of FedProx are nearly parallel, so its weights follow the last digits.
    problem, eta, rng = chapter(), 1e-4, np.random.default_rng(0)

    def errors(shape):
        return 1 + 2.0**-20 * rng.uniform(-1, 1, shape)

    def weigh(products, ridge):
        both = errors(products.shape)
        return solved(products * np.sqrt(both * both.T), ridge)

    def prox(u, eta):
        return problem.oracle.prox(u, eta) * errors(u.shape)

    inexact = types.SimpleNamespace(prox=prox, c=problem.oracle.c, weights=problem.oracle.weights)
    for name, expected in zip(METHODS, MIXED_ROUNDS[eta], strict=True):
        differences = {
            abs(problem.num_rounds_by_hand(inexact, name, eta, ridge=1e-10, weigh=weigh) - expected)
            for _ in range(32)
        }
        assert differences == ({0, 1} if name == "fedprox" else {0}), name


@floats
@telling
def test_mixed_rounds_of_the_engine_are_as_many_as_recorded():
    problem, eta = chapter(), 1e-4
    for (name, numbers), expected in zip(METHODS.items(), MIXED_ROUNDS[eta], strict=True):
        fed = anderson(problem.federation(numbers, eta), memory=2, of="clients")
        found = problem.num_rounds(fed, name, eta, 60)
        # Rounding alone changes FedProx's rounds by one, as the test before this one shows by hand.
        assert abs(found - expected) <= (name == "fedprox"), name


@slow
def test_the_limit_is_unchanged_and_reached_sooner_in_32_bits():
    # The recorded 9, 9, 42 at this step hang on the last digits of 64-bit products.
    problem, eta = chapter(), 1e-5
    for name, plain in zip(METHODS, PLAIN_ROUNDS[eta], strict=True):
        fed = anderson(problem.federation(METHODS[name], eta), memory=2, of="clients")
        assert problem.num_rounds(fed, name, eta, 60) < plain / 2.5, name


@telling
@pytest.mark.parametrize("damping", [0.0, pytest.param(0.3, marks=telling)])
def test_points_of_all_clients_are_mixed_as_by_hand(damping):
    problem, eta, numbers = small(), 0.02, (2, 2, 0.5)
    options = {"memory": 2, "ridge": 1e-6, "damping": damping}
    fed = anderson(problem.federation(numbers, eta), of="clients", **options)
    sim = compile_federation(fed, problem.data())
    state, _, info = sim.run(sim.init(KEY), KEY, 7)
    start = problem.start.astype("f4").astype("f8")
    run = by_hand(problem.oracle, start, numbers, eta, **options)
    shown = [next(run) for _ in range(8)]
    # Short of the end, so that the way is compared.
    assert problem.oracle.gap(shown[6][0]) > 1e-4
    np.testing.assert_allclose(fed.shared(state), shown[6][0], rtol=0, atol=2e-4)
    np.testing.assert_allclose(state.clients.of_point.point, shown[7][1], rtol=0, atol=2e-4)
    assert info.server["is_mixed"].tolist() == [0, 0, 0, 1, 1, 1, 1]


COPIES = [1, 2, 9, 3]


@telling
@pytest.mark.parametrize("weights", ["federation", "equal", [0.1, 0.5, 0.0, 0.4]])
def test_residuals_are_measured_with_the_weights_of_clients(weights):
    problem, eta, numbers = small(), 0.02, (2, 2, 0.5)
    options = {"memory": 2, "ridge": 1e-4}
    given = {} if weights == "federation" else {"weights": weights}
    fed = anderson(
        problem.federation(numbers, eta, copies=COPIES), of="clients", **options, **given
    )
    sim = compile_federation(fed, problem.data(COPIES))
    state, _, _ = sim.run(sim.init(KEY), KEY, 7)
    start = problem.start.astype("f4").astype("f8")
    oracle = LeastSquares(problem.rows, problem.targets, np.array(COPIES) / sum(COPIES))
    found = np.asarray(fed.shared(state))

    def expected(norm):
        run = by_hand(oracle, start, numbers, eta, norm=norm, **options)
        return [next(run) for _ in range(7)][-1][0]

    norms = {"federation": None, "equal": [1, 1, 1, 1]}
    right = expected(norms[weights] if isinstance(weights, str) else weights)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-4)
    # Measured in another way it comes out elsewhere.
    other = expected([1, 1, 1, 1] if weights == "federation" else None)
    assert np.abs(found - other).max() > 1e-3


@telling
def test_one_point_for_all_clients_is_the_shared_model():
    problem, eta = small(), 0.02
    central = problem.federation((1, 1, 1), eta)
    points = anderson(central, memory=2, ridge=1e-4, of="clients")
    shared = anderson(problem.federation((1, 1, 1), eta, "decentralised"), memory=2, ridge=1e-4)
    ends = []
    for fed in (shared, points):
        sim = compile_federation(fed, problem.data())
        state, _, _ = sim.run(sim.init(KEY), KEY, 5)
        ends.append(fed.shared(state) if fed is shared else state.clients.of_point.point[0])
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-4)


def test_weights_have_the_sum_1_and_one_place_is_no_acceleration():
    products = np.float32([[4.0, 1.0, 0.3], [1.0, 2.0, 0.2], [0.3, 0.2, 0.5]])
    found = np.asarray(mixing_weights(products, jnp.ones(3, bool), 2, 0.0, 0.0), np.float64)
    np.testing.assert_allclose(found, solved(products.astype(float), 0.0), rtol=1e-5)
    # Shorter than any other mix of sum 1, by a walk around it.
    length = found @ products @ found
    for move in ([1, -1, 0], [0, 1, -1], [-1, 0, 1]):
        other = found + 0.01 * np.array(move)
        assert other @ products @ other > length
    only = np.asarray(mixing_weights(products, jnp.array([False, True, False]), 1, 1e-10, 0.0))
    np.testing.assert_array_equal(only, [0, 1, 0])
    damped = np.asarray(mixing_weights(products, jnp.ones(3, bool), 0, 0.0, 1.0))
    np.testing.assert_array_equal(damped, [1, 0, 0])
    nothing = mixing_weights(0 * products, jnp.ones(3, bool), 2, 1e-10, 0.0)
    assert not np.any(np.isfinite(nothing))


def _fedavg(memory=2, **options):
    case = CASES["fedavg"]
    fed = federation(case.make(make_model()), make_data(), full_participation(6))
    return anderson(fed, memory=memory, **options)


@telling
def test_buffers_are_as_rounds_leave_them():
    """A buffer whose rounds go back and forth would be extrapolated to what no round came to."""
    model = make_model()
    plain = algorithms.fedavg(model, plain_trainer(model))

    def server_step(server, aggregate, hyper, round, key):
        after, info = plain.server_step(server, aggregate, hyper, round, key)
        moved = after.params | {"b": 3.0 * (round.index % 2) - 1.0}
        return after._replace(params=moved), info

    fed = federation(plain._replace(server_step=server_step), make_data(), full_participation(6))
    found = {}
    for shown, flags in {"weight": None, "buffer": lambda p: {"w": False, "b": True}}.items():
        sim = compile_federation(anderson(fed, memory=2, is_buffer=flags), make_data(), ALONE)
        state, _, info = sim.run(sim.init(KEY), KEY, 8)
        assert info.server["is_mixed"].any()
        found[shown] = float(sim.federation.shared(state)["b"])
    assert found["buffer"] == 2.0 != pytest.approx(found["weight"])


@telling
def test_what_has_arrived_stays_there():
    problem = small()
    fed = anderson(problem.federation((1, 1, 1), 0.5), memory=3, of="clients")
    sim = compile_federation(fed, problem.data())
    state, _, info = sim.run(sim.init(KEY), KEY, 300)
    assert np.all(np.isfinite(info.server["residual"]))
    limit = problem.oracle.fedprox_limit(0.5)
    np.testing.assert_allclose(fed.shared(state), limit, rtol=0, atol=1e-5)


@telling
def test_a_residual_that_grows_starts_the_memory_anew():
    fed = _fedavg(growth=1.0, first=2)
    sim = compile_federation(fed, make_data(), ALONE)
    _, _, info = sim.run(sim.init(KEY), KEY, 40)
    residual, is_mixed = info.server["residual"], info.server["is_mixed"]
    # With the bound 1 whatever is longer than the shortest in memory stays plain.
    grown = np.array([False, *(residual[1:] > residual[:-1])])
    assert grown.any() and not np.any(is_mixed[grown]) and is_mixed.any()


@telling
def test_numbers_are_swept_and_damping_of_1_is_no_acceleration():
    sim = compile_federation(_fedavg(), make_data(), ALONE)
    plain = compile_federation(
        federation(CASES["fedavg"].make(make_model()), make_data(), full_participation(6)),
        make_data(),
        ALONE,
    )
    expected, _, _ = plain.run(plain.init(KEY), KEY, 6)
    ends = {}
    for damping in (1.0, 0.5, 0.0):
        hyper = sim.hyper._replace(algorithm={**sim.hyper.algorithm, "anderson_damping": damping})
        state, _, _ = sim.run(sim.init(KEY), KEY, 6, hyper)
        ends[damping] = np.asarray(sim.federation.shared(state)["w"])
    assert sim.num_traces() == 1
    np.testing.assert_allclose(ends[1.0], expected.server.params["w"], atol=1e-6)
    assert np.abs(ends[0.5] - ends[0.0]).max() > 1e-4
    with pytest.raises(ValueError, match=r"anderson_damping must be in \[0, 1\]"):
        numbers = {**sim.hyper.algorithm, "anderson_damping": 1.5}
        sim.run(sim.init(KEY), KEY, 1, sim.hyper._replace(algorithm=numbers))


@telling
def test_a_run_resumes_from_its_state():
    sim = compile_federation(_fedavg(), make_data(), ALONE)
    whole, _, _ = sim.run(sim.init(KEY), KEY, 7)
    whole = sim.portable(whole)
    half, _, _ = sim.run(sim.init(KEY), KEY, 4)
    rest, _, _ = sim.run(sim.portable(half), KEY, 3)
    jax.tree.map(np.testing.assert_array_equal, sim.portable(rest), whole)


@telling
def test_privacy_is_what_it_was():
    case = CASES["dp_both"]
    fed = federation(case.make(make_model()), make_data(), case.participation())
    with pytest.warns(UserWarning, match="heuristic"):
        fast = anderson(fed, memory=2)
    spent = []
    for one in (fed, fast):
        sim = compile_federation(one, make_data(), ALONE)
        state, record, _ = sim.run(sim.init(KEY), KEY, 5)
        accounting = PrivacyAccounting(one)
        accounting.charge(record)
        spent.append(accounting.epsilon({"client": 1e-5, "record": 1e-5}))
        assert np.all(np.isfinite(one.shared(state)["w"]))
    for unit in ("client", "record"):
        np.testing.assert_array_equal(spent[0][unit], spent[1][unit])
        assert np.max(spent[0][unit]) > 0


def test_what_cannot_be_accelerated_is_refused():
    refused = {
        "memory must be below the 5 rounds, got 5": lambda: _fedavg(5, num_rounds=5),
        "first must be at least the memory, 2, got 1": lambda: _fedavg(first=1),
        "of must be 'shared' for fedavg": lambda: _fedavg(of="clients"),
        "weights must be left out for of='shared'": lambda: _fedavg(weights=[1.0] * 6),
    }
    for words, make in refused.items():
        with pytest.raises(ValueError) as error:
            make()
        assert words in str(error.value), error.value
    central = algorithms.fedpi(make_model(), plain_trainer(make_model()), form="centralised")
    everyone = federation(central, make_data(), full_participation(6))
    with pytest.raises(ValueError, match="of must be 'clients' for fedpi"):
        anderson(everyone, memory=1)
    for weights in ([1.0], [0.0] * 6):
        with pytest.raises(ValueError, match="weights must be one number of at least 0 for each"):
            anderson(everyone, memory=1, of="clients", weights=weights)
    with pytest.raises(ValueError, match="weights must be"):
        anderson(everyone, memory=1, of="clients", weights="sizes")
    some = participants.participation(sampling.poisson(), 6, 3)
    with pytest.raises(ValueError, match="participation must be full where"):
        anderson(federation(central, make_data(), some), memory=1, of="clients")
    averaged = CASES["splitting"].make(make_model())
    with pytest.raises(ValueError, match="is an average of many"):
        anderson(federation(averaged, make_data(), full_participation(6)), memory=1)
    own = CASES["local_only"]
    with pytest.raises(ValueError, match="algorithm with a shared model"):
        anderson(federation(own.make(make_model()), make_data(), full_participation(6)), memory=1)
