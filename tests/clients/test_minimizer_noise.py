"""Noise on trained models: its sensitivity by brute force, its laws, its events, its refusals."""

import chex
import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import floats, later, telling
from scipy import stats
from scipy.special import expit, softmax

from fedjax_dp import models
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, gradients, local_trainer
from fedjax_dp.clients.client_data import ClientData, growing
from fedjax_dp.clients.minimizer_noise import minimizer_noise
from fedjax_dp.core.products import Arithmetic, computed_with
from fedjax_dp.data import sampling
from fedjax_dp.privacy.mechanisms import clipping
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaSharesDpEvent
from fedjax_dp.privacy.mechanisms.noise import BoundedLaplaceDpEvent, StaircaseDpEvent

pytestmark = floats

X = jax.ShapeDtypeStruct((3,), jnp.float32)
MODEL = models.logistic_regression(X, 2, gradient_bound=1.0)
ENTRIES = 8


def whole():
    return sampling.full_participation()._replace(name="full_batch")


def trainer(model=MODEL, sampler=None, **numbers):
    config = {"learning_rate": 1.0, "batch_size": 1, "num_steps": 5, "clip_norm": 1.0}
    config = LocalConfig(**{**config, "noise_multiplier": 2.0, **numbers})
    return dp_sgd_trainer(model, config, sampler=sampler or whole())


LONG = models.logistic_regression(X, 2, gradient_bound=3.0)
FREE = models.logistic_regression(X, 2)
UNLIKE = [
    *(trainer(LONG), trainer(FREE)),
    local_trainer(MODEL, trainer().config, sampler=whole(), gradient_rule=gradients.clipped(FREE)),
    trainer()._replace(train=lambda *args, **options: None),
]


def noise_of(mechanism="laplace", model=MODEL, **options):
    chosen = {"regularizer": 0.25, "num_clients": 4, **options}
    numbers = {k: chosen.pop(k) for k in ("learning_rate", "noise_multiplier") if k in chosen}
    return minimizer_noise(model, trainer(model, **numbers), mechanism=mechanism, **chosen)


# Rows and gradients.


@pytest.mark.parametrize(("classes", "single"), [(3, False), (2, True)])
def test_no_gradient_is_longer_than_the_bound_and_the_curvature_is_that_of_numpy(classes, single):
    model = models.logistic_regression(X, classes, single_logit=single, gradient_bound=0.7)
    bounds, rng = models.loss_bounds(model), np.random.default_rng(0)
    x = (10.0 ** rng.uniform(-2, 3, (200, 1)) * rng.normal(size=(200, 3))).astype(np.float32)
    y = rng.integers(0, classes, 200)
    shape = jax.eval_shape(model.init, jax.random.key(0))["kernel"].shape
    w = {"bias": 50 * rng.normal(size=shape[1:]), "kernel": 50 * rng.normal(size=shape)}
    outputs = np.asarray(model.predict(jax.tree.map(jnp.float32, w), x), np.float64)
    # Rows with a 1 for the intercept, scaled down to the largest norm that the bound allows.
    rows = np.concatenate([x.astype(np.float64), np.ones((200, 1))], axis=1)
    longest = 0.7 if single else 0.7 / np.sqrt(2)
    rows *= np.minimum(1, longest / np.linalg.norm(rows, axis=1, keepdims=True))
    expected = rows @ np.concatenate([w["kernel"], w["bias"][None]])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
    if single:
        residual, curves = expit(expected) - y[:, None], 1 / 4
    else:
        residual, curves = softmax(expected, axis=1) - np.eye(classes)[y], 1 / 2
    norms = np.linalg.norm(residual, axis=1) * np.linalg.norm(rows, axis=1)
    assert norms.max() <= bounds.gradient * (1 + 1e-12) and bounds.gradient == 0.7
    assert norms.max() > 0.9 * bounds.gradient
    assert bounds.curvature == pytest.approx(curves * longest**2)


def descend(x, y, alpha, rate, steps, start):
    """Full-batch steps of the softmax regression of rows `[n, d]`, a mean over n."""
    w = start.copy()
    for _ in range(steps):
        w -= rate * (x.T @ (softmax(x @ w, axis=1) - y) / len(x) + alpha * w)
    return w


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_a_record_adds_no_more_than_the_bound_however_long_training_is(steps):
    """Zero-out: the record's term is left out of the sum and the divisor stays."""
    rng, alpha, worst = np.random.default_rng(1), 0.25, 0.0
    noise = noise_of(regularizer=alpha)
    for size in (1, 2, 5):
        for _ in range(40):
            x = rng.normal(size=(size, 4))
            x /= np.sqrt(2) * np.linalg.norm(x, axis=1, keepdims=True)
            y = np.eye(2)[rng.integers(0, 2, size)]
            start = rng.normal(size=(4, 2))
            gone = y.copy()
            # With equal chances as targets and a row of zeros the term has no gradient.
            without = x.copy()
            without[0], gone[0] = 0, 0.5
            both = [
                descend(a, b, alpha, noise.max_learning_rate, steps, start)
                for a, b in ((x, y), (without, gone))
            ]
            moved = np.linalg.norm(both[0] - both[1])
            assert moved <= float(noise.contribution(size))
            worst = max(worst, moved / float(noise.contribution(size)))
    # One record alone at a far start comes near the bound of one step: rate · gradient.
    assert worst > 0.2 or steps > 1


def test_the_bound_is_that_of_the_regularised_minimiser():
    # B/(k·α), half of the 2/(k·α) of replacement, and a little for rounding.
    noise = noise_of(regularizer=0.5)
    assert float(noise.contribution(20)) == pytest.approx(0.1, rel=2e-3)
    assert float(noise.contribution(20)) > 0.1


# Rounding.

FAR, SMALL = np.float32(2 + 2**-22), 2e-6


def train(made, x, y, start, alpha):
    client = ClientData({"x": x, "y": y}, jnp.int32(0), jnp.int32(len(x)), jnp.int32(0), len(x))
    config = made.config._replace(batch_size=jnp.float32(len(x)), noise_multiplier=jnp.float32(0))
    decay = optax.add_decayed_weights(alpha)
    key = jax.random.key(0)
    train = jax.jit(lambda data: made.train(start, data, config, key, gradient_transform=decay))
    return jax.device_get(train(client).params)


def stalled(num_features):
    """Records whose steps of 2e-6 are just below half a unit in the last place of the start."""
    alpha, size = 0.05, 200
    # All rows are those of the intercept: the residual of log-odds of 2.
    ones = size * (expit(FAR) + alpha * FAR - 0.45 * 2.0**-22 / SMALL)
    x, y = np.zeros((size, num_features), np.float32), np.arange(size) < round(ones)
    start = {"bias": jnp.full(1, FAR), "kernel": jnp.zeros((num_features, 1))}
    return alpha, SMALL, 4000, x, y.astype(np.int32), start


def scattered(num_features):
    """Records of many directions, from a far start of many values."""
    alpha, rng = 0.05, np.random.default_rng(num_features)
    x = rng.normal(size=(300, num_features)).astype(np.float32)
    start = {
        "bias": jnp.asarray(rng.normal(size=1), jnp.float32),
        "kernel": jnp.asarray(30 * rng.normal(size=(num_features, 1)), jnp.float32),
    }
    return alpha, 0.5, 200, x, rng.integers(0, 2, 300), start


@pytest.mark.parametrize(
    ("make", "num_features"), [pytest.param(stalled, 1, marks=telling), (scattered, 5)]
)
def test_rounding_of_training_stays_within_its_bound(make, num_features):
    """Against the same steps in float64, on the rows that the model has made in float32."""
    alpha, rate, steps, x, y, start = make(num_features)
    shape = jax.ShapeDtypeStruct((num_features,), jnp.float32)
    model = models.logistic_regression(shape, 2, single_logit=True, gradient_bound=1.0)
    plain = trainer(model, learning_rate=rate, num_steps=steps)
    noise = minimizer_noise(model, plain, regularizer=alpha, mechanism="gaussian", num_clients=2)
    rows = np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1)
    norms = np.linalg.norm(rows, axis=1, keepdims=True).astype(np.float32)
    rows = (rows * np.minimum(1, 1 / (norms * np.float32(1 + 1e-6)))).astype(np.float64)

    def flat(params):
        return np.concatenate([params["kernel"], params["bias"][None]]).astype(float)

    expected = flat(jax.device_get(start))
    allowed = float(noise.step_error(np.linalg.norm(expected))) / alpha
    for _ in range(steps):
        pull = rows.T @ (expit(rows @ expected) - y[:, None]) / len(x)
        expected -= rate * (pull + alpha * expected)
    found = flat(train(noise.training(plain), x, y, start, alpha))
    assert np.linalg.norm(found - expected) <= allowed
    if make is stalled:
        # Plain additions never leave the start, which is further than the bound allows.
        lost = flat(train(plain, x, y, start, alpha))
        np.testing.assert_array_equal(lost, flat(jax.device_get(start)))
        assert np.linalg.norm(lost - expected) > allowed


def test_noise_grows_with_rounding():
    noise = noise_of(regularizer=0.25)
    # Of a start at the longest minimiser, B/α = 4: β = 1/4, n = 4, C = 2; u = 6e-8.
    error = 6e-8 * (0.25 * 4 * (4 + np.sqrt(2) + 2) + (2 + 64 + 32) + 12 * 0.25 * 4)
    assert float(noise.step_error(0.0)) == pytest.approx(error, rel=1e-5)
    assert float(noise.contribution(1e9)) == pytest.approx(2 * error / 0.25, rel=2e-3)
    assert float(noise.contribution(20, 4000.0)) > 1.02 * float(noise.contribution(20, 4.0))


# The noise.


def added(noise, size, multiplier, count=4000):
    params = jax.tree.map(jnp.zeros_like, MODEL.init(jax.random.key(0)))

    @jax.jit
    def draw(keys):
        return jax.vmap(
            lambda k: noise.add(k, params, noise.contribution(size), jnp.float32(multiplier))
        )(keys)

    drawn = draw(jax.random.split(jax.random.key(5), count))
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(drawn)])


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "gamma_shares"])
def test_noise_has_its_law_and_scale(mechanism):
    noise, size, multiplier = noise_of(mechanism), 10, 2.0
    draws = added(noise, size, multiplier) / (multiplier * float(noise.contribution(size)))
    law = stats.norm if mechanism == "gaussian" else stats.laplace
    if mechanism == "gamma_shares":
        # Four clients' shares.
        draws = draws.reshape(4, -1).sum(axis=0)
    assert stats.kstest(draws, law.cdf).pvalue > 1e-3
    assert stats.kstest(draws * 1.15, law.cdf).pvalue < 1e-3


@pytest.mark.parametrize(
    "mechanism", later(["bounded_laplace", "staircase"], but=["bounded_laplace"], mark=telling)
)
def test_noise_by_entry_has_its_reach_and_mean(mechanism):
    noise, z = noise_of(mechanism, entry_delta=1e-3), 1.0
    draws = np.abs(added(noise, 10, z)) / float(noise.contribution(10))
    if mechanism == "staircase":
        # Geng and others 2015: E|X| = Δ·e^(ε/2)/(e^ε − 1), .9595 at ε = 1.
        assert draws.mean() == pytest.approx(0.9595, abs=4 * draws.std() / np.sqrt(draws.size))
        return
    reach = np.log(1 + (np.e - 1) / 2e-3)
    assert draws.max() <= reach * (1 + 1e-5) and draws.max() > 0.8 * reach
    cut = stats.truncexpon(b=reach)
    assert draws.mean() == pytest.approx(cut.mean(), abs=4 * draws.std() / np.sqrt(draws.size))


# The events.


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        # ε of a vector of 8: √8/z of Laplace noise, 8/z by entries.
        ("laplace", dpa.LaplaceDpEvent(3.0 / np.sqrt(8))),
        ("gaussian", dpa.GaussianDpEvent(3.0)),
        ("gamma_shares", GammaSharesDpEvent(2.0 / np.sqrt(8), 4)),
        ("staircase", StaircaseDpEvent(3.0, 8)),
        ("bounded_laplace", BoundedLaplaceDpEvent(3.0, 8, 1e-4)),
    ],
)
@pytest.mark.parametrize("calibration", ["corrected", "paper"])
def test_events_say_what_holds(mechanism, expected, calibration):
    noise = noise_of(mechanism, calibration=calibration, entry_delta=1e-4)
    found = noise.event(7, LocalConfig(noise_multiplier=3.0))
    # Shares sum to one Laplace of the least multiplier, 2. The printed noise is 4 times too small.
    of = 1 if calibration == "corrected" else 4
    assert type(found) is type(expected)
    assert found.noise_multiplier == pytest.approx(expected.noise_multiplier / of)
    assert isinstance(noise.event(0, LocalConfig(noise_multiplier=3.0)), dpa.NoOpDpEvent)


RELEASED = {"calibration": "released", "noise_regularizer": 1.0}
# Weak enough for rounding to matter: 2E of it is about a tenth of B/k at 20 records.
WEAK = {"regularizer": 1e-3, **RELEASED}


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "gamma_shares"])
def test_released_noise_is_that_of_the_source_and_its_event_that_of_training(mechanism):
    """Scale z·B/(k·1)/n beside training with 1e-3, by hand; the ratio is what the event has."""
    noise = noise_of(mechanism, **WEAK)
    for size in (1, 20, 500):
        assert float(noise.scale(size)) == pytest.approx(1 / size, rel=1e-6)
        # B = 1, β = 1/4 of rows of 1/√2, n = 4 inputs and 1, C = 2, R = B/α; u = 6e-8.
        error = 6e-8 * (1e3 / 4 * (4 + np.sqrt(2) + 2) + (2 + 64 + 32) + 12)
        bound = (1 / size + 2 * error) / 1e-3
        found = noise.event(size, LocalConfig(noise_multiplier=2.0)).noise_multiplier
        z = 2.0 / 4 * (1 / size) / bound / (1 if mechanism == "gaussian" else np.sqrt(ENTRIES))
        assert found == pytest.approx(z, rel=3e-3) and found < z
    # One record of a client of 500 moves training as the bound says, a thousand times the noise.
    assert float(noise.contribution(20)) > 1000 * float(noise.scale(20))


def test_released_noise_covers_what_far_starts_and_smaller_clients_add_to_it():
    """Noise is for the smallest client, of start norms that the event does not know."""
    noise, z = noise_of("gaussian", **WEAK), LocalConfig(noise_multiplier=2.0)
    for smallest, own, start in ((5, 5, 0.0), (5, 300, 0.0), (5, 300, 1e5), (40, 40, 1e6)):
        worth = noise.event(300, z).noise_multiplier
        assert float(noise.scale(smallest, start)) * 2.0 / 4 >= worth * float(
            noise.contribution(own, start)
        ) * (1 - 1e-6)
    assert float(noise.scale(5, 1e6)) > 1.01 * float(noise.scale(5))


def test_released_noise_covers_split_products_too():
    """An event does not know how rounds are computed: noise grows where they round more."""
    noise, z = noise_of("gaussian", **WEAK), LocalConfig(noise_multiplier=2.0)
    worth = noise.event(50, z).noise_multiplier
    usual = float(noise.scale(50))
    with computed_with(Arithmetic("split")):
        assert noise.event(50, z).noise_multiplier == worth
        scale, bound = float(noise.scale(50)), float(noise.contribution(50))
    assert scale * 2.0 / 4 >= worth * bound * (1 - 1e-6) and scale > 1.5 * usual


@pytest.mark.parametrize(
    ("change", "why"),
    [({"regularizer": 0.0}, "no regulariser"), ({"model": FREE}, "have no known bound")],
)
def test_released_noise_without_a_bound_guarantees_nothing(change, why):
    noise = noise_of(**{**WEAK, **change})
    assert isinstance(noise.event(7, LocalConfig(noise_multiplier=99.0)), dpa.NonPrivateDpEvent)
    assert isinstance(noise.event(0, LocalConfig(noise_multiplier=99.0)), dpa.NoOpDpEvent)
    assert "unknown" in noise.in_words(True) and why in noise.in_words(True)
    # For gradients of clip_norm = 1, of which none is clipped.
    assert float(noise.scale(20)) == pytest.approx(1 / 20)
    found = noise.training_numbers(LocalConfig(learning_rate=9.0, clip_norm=0.01))
    assert float(found.learning_rate) == 9.0 and float(found.clip_norm) > 1e19


def test_shares_with_less_noise_than_they_were_built_with_are_refused():
    noise = noise_of("gamma_shares", noise_multiplier=np.array([3.0, 2.0, 2.5, 9.0]))
    assert noise.least_multiplier == 2.0
    with pytest.raises(ValueError, match="noise_multiplier must be at least 2"):
        noise.event(7, LocalConfig(noise_multiplier=1.9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model=models.logistic_regression(X, 2)), "model must be logistic_regression with"),
        (
            dict(model=MODEL._replace(loss_fn=lambda outputs, batch: 9 * outputs[:, 0])),
            "model must be logistic_regression with",
        ),
        (dict(trainer=trainer(clip_norm=0.9)), "clip_norm must be at least 1"),
        (dict(trainer=trainer(sampler=sampling.poisson())), "trainer must take steps on all"),
        *(
            (dict(trainer=trainer(sampler=sampler, batch_size=size)), "trainer must take steps on")
            for size in (1, 10)
            for sampler in (
                sampling.poisson(),
                sampling.fixed_size(),
                sampling.cyclic(),
                sampling.min_separated(2),
            )
        ),
        (
            dict(mechanism="staircase", trainer=trainer(noise_multiplier=1e5)),
            "noise_multiplier must be at most 65536 for staircase",
        ),
        (dict(trainer=trainer(learning_rate=3.0)), "learning_rate must be at most"),
        (dict(trainer=trainer(learning_rate=1e-7)), "learning_rate must be 0 or at least"),
        # The same parameters, of rows that are longer than the noise is for.
        *((dict(trainer=made), "trainer must train a model with the bounds") for made in UNLIKE),
        (dict(regularizer=0.0), "regularizer must be above 0"),
        (dict(calibration="paper", regularizer=0.0), "regularizer must be above 0"),
        (dict(calibration="released"), "noise_regularizer must be given for calibration"),
        (dict(noise_regularizer=1.0), "noise_regularizer must be given for calibration"),
        (dict(mechanism="staircase", **RELEASED), "mechanism must be one of laplace, gaussian"),
        (dict(trainer=trainer(learning_rate=3.0), **RELEASED), "learning_rate must be at most"),
        (dict(mechanism="cauchy"), "mechanism must be"),
        (dict(mechanism="gamma_shares", num_clients=1), "num_clients must be"),
        (dict(entry_delta=0.5), "entry_delta must be"),
    ],
)
def test_training_of_unknown_sensitivity_is_refused(change, message):
    usual = {
        "model": MODEL,
        "trainer": trainer(),
        "regularizer": 0.25,
        "mechanism": "laplace",
        "num_clients": 4,
    }
    chosen = {**usual, **change}
    with pytest.raises(ValueError, match=message):
        minimizer_noise(chosen.pop("model"), chosen.pop("trainer"), **chosen)


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_sweep_cannot_leave_the_numbers_for_which_the_bound_holds(per_layer):
    """Too large steps are shortened, and no gradient is clipped, of whatever clip norm."""
    noise = noise_of()
    swept = LocalConfig(learning_rate=9.0, clip_norm=0.01, noise_multiplier=2.0, num_steps=3)
    found = noise.training_numbers(swept)
    assert float(found.learning_rate) == pytest.approx(noise.max_learning_rate)
    assert float(found.noise_multiplier) == 0 and found.num_steps == 3
    clip = clipping.clip_per_layer if per_layer else clipping.clip_by_global_norm
    # All of the longest gradient in one layer.
    longest = {"bias": jnp.zeros(2), "kernel": jnp.zeros((3, 2)).at[0, 0].set(1.0)}
    np.testing.assert_array_equal(clip(longest, found.clip_norm)[0]["kernel"], longest["kernel"])


@pytest.mark.slow
def test_staircase_noise_of_too_small_a_multiplier_is_the_least_that_can_be_drawn():
    noise, bound = noise_of("staircase"), float(noise_of("staircase").contribution(10))
    params = jax.tree.map(jnp.ones_like, MODEL.init(jax.random.key(0)))
    low, least = (
        noise.add(jax.random.key(3), params, noise.contribution(10), z) for z in (1 / 50, 1 / 16)
    )
    chex.assert_trees_all_equal(low, least)
    assert all(np.all(np.abs(np.asarray(x) - 1) < 3 * bound) for x in jax.tree.leaves(low))


def test_a_model_that_is_built_again_has_the_same_bounds():
    again = models.logistic_regression(X, 2, gradient_bound=1.0)
    found = minimizer_noise(again, trainer(), regularizer=0.25, mechanism="laplace", num_clients=4)
    assert found == noise_of()


def test_open_training_has_no_noise_to_calibrate():
    plain = local_trainer(MODEL, LocalConfig(learning_rate=0.5))
    with pytest.raises(ValueError, match="trainer must clip and noise"):
        minimizer_noise(MODEL, plain, regularizer=1.0, mechanism="laplace", num_clients=3)


# Growing data.


class Records:
    """A client, as far as growing data read it."""

    def __init__(self, index, size, round, start=100):
        self.index, self.size, self.round = jnp.int32(index), jnp.int32(size), round
        self.start = jnp.int32(start)

    def replace(self, *, start, size):
        return int(start), int(size)


@pytest.mark.parametrize(
    ("form", "round", "expected"),
    [
        ("disjoint", 0, (100, 30)),
        ("disjoint", 2, (160, 30)),
        ("disjoint", 3, (100, 0)),
        ("cumulative", 0, (100, 30)),
        ("cumulative", 2, (100, 90)),
        ("cumulative", 3, (100, 0)),
        ("cumulative", 2**30, (100, 0)),
    ],
)
def test_growing_data(form, round, expected):
    growth = growing([20, 30], 2, form)
    # 119 records: the fourth 30 are not all there.
    assert growth.view(Records(1, 119, round)) == expected
    active = jnp.array([False, True])
    times = round + 1 if form == "cumulative" else 1
    assert float(growth.smallest(active, round)) == pytest.approx(30 * times)
    assert float(growth.smallest(jnp.array([True, True]), 0)) == 20


@pytest.mark.parametrize("rows", [0, -3, [10, 20, 30], [10, 0]])
def test_growth_of_no_records_is_refused(rows):
    with pytest.raises(ValueError, match="rows_per_round must"):
        growing(rows, 2, "disjoint")
