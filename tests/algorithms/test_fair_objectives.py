"""Fair objectives against the numbered oracles of their description, limits, and bad input."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from marks import later, telling
from oracles import generalization
from small_problem import (
    ALONE,
    SETTINGS,
    make_data,
    make_model,
    plain_trainer,
    private_trainer,
    theta_of,
)

from fedjax_dp.algorithms import ALGORITHMS, afl, fedavg, propfair, q_ffl, registry, term
from fedjax_dp.algorithms.propfair import proportional
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.data import FederatedData, participants, sampling
from fedjax_dp.engine import Fate, simulation
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.reading import validate
from fedjax_dp.models import Model
from fedjax_dp.server import gaussian_mean, onto_simplex, uniform_mean

SIZES = (7, 4, 12, 5, 9, 3)


def joins(num_clients):
    return participants.participation(sampling.full_participation(), num_clients)


def run(algorithm, num_rounds=3, data=None, hyper=None, cohort=None):
    data = make_data(SIZES) if data is None else data
    sim = simulation(algorithm, data, cohort or joins(data.num_clients), ALONE)
    key = jax.random.key(0)
    state, _, info = sim.run(sim.init(key), key, num_rounds, hyper)
    return state, info


def params_of(*arguments, **options):
    return theta_of(run(*arguments, **options)[0].server.params)


# A model whose loss is a number of the client's own, and whose gradient is 1.


def given_losses(*losses):
    """Clients with one record each; client i has loss f_i at w = 0, and its update is -1."""
    model = Model.from_functions(
        lambda key: jnp.zeros(()),
        lambda params, x: x + params,
        loss=lambda outputs, batch: outputs,
        name="stated",
    )
    data = FederatedData.from_clients([{"x": np.float32([f])} for f in losses])
    trainer = local_trainer(model, LocalConfig(learning_rate=1.0, batch_size=1, num_steps=1))
    return model, trainer, data


# 10. The simplex.


def test_oracle_10_the_projection_onto_the_simplex():
    found = onto_simplex(jnp.array([0.5, 0.6, -0.2]))
    np.testing.assert_allclose(found, [0.45, 0.55, 0.0], atol=1e-6)
    inside = jnp.array([0.2, 0.5, 0.3])
    np.testing.assert_allclose(onto_simplex(inside), inside, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_projection_is_the_nearest_point(seed):
    y = np.random.default_rng(seed).normal(size=9)
    found = np.asarray(onto_simplex(jnp.asarray(y, jnp.float32)))
    np.testing.assert_allclose(found, generalization.onto_simplex(y), atol=1e-6)
    assert found.sum() == pytest.approx(1, abs=1e-6) and found.min() >= 0
    order = np.argsort(y)
    assert np.all(np.diff(found[order]) >= 0)


@pytest.mark.parametrize(
    "y, expected",
    [
        ([1e10, 0], [1, 0]),
        ([1e8, 1e8 + 8, 0], [0, 1, 0]),
        ([-3e38, 3e38, 3e38], [0, 0.5, 0.5]),
        ([-1e30, -1e30], [0.5, 0.5]),
    ],
)
def test_points_far_from_the_simplex_are_projected_onto_it(y, expected):
    np.testing.assert_array_equal(onto_simplex(jnp.asarray(y, jnp.float32)), expected)


@pytest.mark.parametrize("losses, expected", [((1e28, 1.0), (1, 0)), ((1e28, 1e28), (0.5, 0.5))])
def test_large_losses_leave_weights_on_the_simplex(losses, expected):
    model, trainer, data = given_losses(*losses)
    state, info = run(afl(model, trainer, num_clients=2, step_size=10.0), 2, data)
    np.testing.assert_array_equal(state.aggregator, expected)
    np.testing.assert_array_equal(info.aggregator["weights"], [expected] * 2)


@telling
def test_afl_uses_weights_that_have_just_climbed():
    """λ = 1/2 each, losses 0 and 1, γ = 0.2: (0.5, 0.7) projects to (0.4, 0.6)."""
    model, trainer, data = given_losses(0.0, 1.0)
    _, info = run(afl(model, trainer, num_clients=2, step_size=0.2), 1, data)
    np.testing.assert_allclose(info.aggregator["weights"][0], [0.4, 0.6], atol=1e-6)


@telling
def test_afl_comes_to_train_for_the_worst_client_alone():
    model, trainer, data = given_losses(0.0, 5.0, 1.0)
    _, info = run(afl(model, trainer, num_clients=3, step_size=0.2), 10, data)
    np.testing.assert_allclose(info.aggregator["weights"][-1], [0, 1, 0], atol=1e-6)


@telling
def test_afl_without_steps_is_the_plain_mean():
    model = make_model()
    still = afl(model, plain_trainer(model), num_clients=6, step_size=0.0)
    plain = fedavg(model, plain_trainer(model), aggregator=uniform_mean())
    np.testing.assert_allclose(params_of(still), params_of(plain), atol=1e-6)


# 11. The tilt.


def test_oracle_11_two_clients_tilted():
    """Updates are equal, so that weights are read off R and off an update of one client alone."""
    model, trainer, data = given_losses(0.0, 1.0)
    # The second client moves ten times as far.
    config = trainer.config._replace(learning_rate=np.array([1.0, 10.0]))
    tilted = term(model, local_trainer(model, config), tilt=1.0)
    state, info = run(tilted, 1, data)
    weights = np.array([0.26894142, 0.73105858])  # 1 / (1 + e), e / (1 + e)
    assert float(state.server.params) == pytest.approx(-(weights @ [1, 10]), rel=1e-5)
    expected = np.log(0.5 + 0.5 * np.e)
    assert expected == pytest.approx(0.6201, abs=5e-5)
    assert float(info.server["tilted_loss"][0]) == pytest.approx(expected, abs=1e-6)


@telling
def test_oracle_9_objectives_near_their_limit_are_fedavg():
    model = make_model()
    trainer = plain_trainer(model)
    weighted, uniform = (
        params_of(fedavg(model, trainer, aggregator=mean)) for mean in (None, uniform_mean())
    )
    np.testing.assert_allclose(params_of(term(model, trainer, tilt=1e-8)), weighted, atol=1e-6)
    np.testing.assert_allclose(params_of(q_ffl(model, trainer, q=0.0)), uniform, atol=1e-6)
    # The objective of a far baseline M is the loss over M.
    far = trainer.config._replace(learning_rate=SETTINGS.learning_rate * 1e6)
    far = propfair(model, local_trainer(model, far), baseline=1e6)
    np.testing.assert_allclose(params_of(far), weighted, atol=2e-6)


def test_a_tilt_beyond_floats_is_cut_off_and_said():
    """e^800 is beyond floats. Losses move along, and later rounds count from where they are."""
    model, trainer, data = given_losses(1.0, 2.0)
    config = trainer.config._replace(learning_rate=np.array([1e-4, 1e-3]))
    sim = simulation(term(model, local_trainer(model, config)), data, joins(2), ALONE)
    key = jax.random.key(0)
    for tilt, kept in ((800.0, 2.0), (-800.0, 1.0)):
        hyper = sim.hyper._replace(algorithm={**sim.hyper.algorithm, "tilt": tilt})
        state, _, info = sim.run(sim.init(key), key, 12, hyper)
        assert np.isfinite(float(state.server.params))
        assert float(info.server["num_limited"][0]) == 2
        # In the end R is the one loss that counts, and the step is that client's own.
        assert float(info.server["tilted_loss"][-1]) == pytest.approx(kept, abs=0.1)


@telling
@pytest.mark.parametrize(
    "tilt, losses, risk",
    [
        (1000.0, (2.3, 2.5), 2.5 - np.log(2) / 1000),
        (-1000.0, (2.3, 2.5), 2.3 + np.log(2) / 1000),
        # All far below where the first round counts from, which is 0.
        (100.0, (-5.0, -6.0), -5 - np.log(2) / 100),
        (1000.0, (2.0, 2.0, 2.0, 3.0), 3 - np.log(4) / 1000),
    ],
)
def test_a_large_tilt_is_on_its_way_after_a_round(tilt, losses, risk):
    """Losses stay where they are; the clients that count are alone from the second round on."""
    model, _, data = given_losses(*losses)
    rates = 1e-6 * (1 + np.arange(len(losses)))
    trainer = local_trainer(model, LocalConfig(learning_rate=rates, batch_size=1, num_steps=1))
    sim = simulation(term(model, trainer, tilt=tilt), data, joins(len(losses)), ALONE)
    key = jax.random.key(0)
    first, _, info = sim.run(sim.init(key), key, 1)
    assert info.server["num_limited"] == len(losses)
    assert float(info.server["tilted_loss"][0]) == pytest.approx(np.mean(losses), abs=1e-4)
    start = float(first.server.params)
    state, _, info = sim.run(first, key, 1)
    kept = np.argmax(losses) if tilt > 0 else np.argmin(losses)
    assert float(state.server.params) - start == pytest.approx(-rates[kept], rel=1e-3)
    *_, info = sim.run(state, key, 20)
    assert info.server["num_limited"][-1] == 0
    assert float(info.server["tilted_loss"][-1]) == pytest.approx(risk, abs=1e-4)


@telling
def test_tilts_of_either_sign_serve_the_worst_or_the_rest():
    """A larger tilt leaves a smaller largest loss; a negative one a larger."""
    model = make_model()
    sim = simulation(term(model, plain_trainer(model)), make_data(SIZES), joins(6), ALONE)
    key, largest = jax.random.key(0), {}
    for tilt in (-5.0, 0.0, 5.0):
        hyper = sim.hyper._replace(algorithm={**sim.hyper.algorithm, "tilt": tilt})
        state, *_ = sim.run(sim.init(key), key, 30, hyper)
        losses = [
            model.losses(state.server.params, make_data(SIZES).client(i))[0].mean()
            for i in range(6)
        ]
        largest[tilt] = float(max(losses))
    assert largest[5.0] < largest[0.0] < largest[-5.0]
    assert sim.num_traces() == 1


@telling
def test_q_ffl_steps_by_the_curvature_that_it_bounds():
    """L = 1, f = (1, 4), updates of 1: Δ = Σ f^q = 5, h = Σ q f^(q-1) + f^q = 7 for q = 1."""
    model, trainer, data = given_losses(1.0, 4.0)
    state, info = run(q_ffl(model, trainer, q=1.0), 1, data)
    assert float(state.server.params) == pytest.approx(-5 / 7, rel=1e-5)
    assert float(info.server["step_size"][0]) == pytest.approx(5 / 7, rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "q"),
    later(
        [((1.0, -1.0), 0.5), ((1.0, -1.0), 2.0), ((1.0, 90), 20)],
        but=[((1.0, -1.0), 0.5), ((1.0, 90), 20)],
        mark=telling,
    ),
)
def test_a_loss_without_a_power_counts_as_not_finite(losses, q):
    model, trainer, data = given_losses(*losses)
    sim = simulation(q_ffl(model, trainer, q=float(q)), data, joins(2), ALONE)
    key = jax.random.key(0)
    state, record, _ = sim.run(sim.init(key), key, 1)
    assert np.sum(np.asarray(record.fate) == Fate.NOT_FINITE) == 1
    # The other client's step by itself: f^q over q f^(q-1) + f^q.
    assert float(state.server.params) == pytest.approx(-1 / (1 + q), rel=1e-5)


def test_without_an_exponent_any_loss_is_fine():
    model, trainer, data = given_losses(1.0, -1.0)
    state, _ = run(q_ffl(model, trainer, q=0.0), 1, data)
    assert float(state.server.params) == pytest.approx(-1.0, rel=1e-6)


def test_q_ffl_is_finite_at_a_loss_of_zero():
    model, trainer, data = given_losses(0.0, 0.0)
    sim, key = simulation(q_ffl(model, trainer), data, joins(2), ALONE), jax.random.key(0)
    for q in (0.0, 0.1, 5.0):
        hyper = sim.hyper._replace(algorithm={**sim.hyper.algorithm, "q": q})
        state, *_ = sim.run(sim.init(key), key, 1, hyper)
        assert np.isfinite(float(state.server.params))


# PropFair.


@pytest.mark.parametrize("extension", ["smooth", "released", "released_huber"])
def test_the_objective_of_propfair(extension):
    objective = partial(proportional(3.0, 0.5, extension), params=None)
    for loss in (0.0, 0.7, 2.49):
        assert float(objective(jnp.float32(loss))) == pytest.approx(-np.log(1 - loss / 3), rel=1e-5)
        slope = float(jax.grad(objective)(jnp.float32(loss)))
        assert slope == pytest.approx(1 / (3 - loss), rel=1e-5)
    beyond = {
        "smooth": lambda f: -np.log(0.5 / 3) + (f - 2.5) / 0.5,
        "released": lambda f: f / 3,
        "released_huber": lambda f: f / 0.5,
    }[extension]
    for loss in (2.51, 3.0, 50.0):
        assert float(objective(jnp.float32(loss))) == pytest.approx(beyond(loss), rel=1e-5)
    if extension == "smooth":
        just_below, just_above = (float(objective(jnp.float32(2.5 + d))) for d in (-1e-4, 1e-4))
        assert just_above - just_below == pytest.approx(2e-4 / 0.5, rel=0.02)


def test_a_loss_above_the_baseline_is_said():
    model, trainer, data = given_losses(1.0, 9.0)
    state, info = run(propfair(model, trainer, baseline=3.0, margin=0.5), 1, data)
    assert float(info.clients["share_beyond"][0]) == 0.5
    # Slopes 1/(3 - 1) and 1/0.5, averaged.
    assert float(state.server.params) == pytest.approx(-(0.5 + 2.0) / 2, rel=1e-5)


@telling
@pytest.mark.parametrize("extension", ["smooth", "released_huber", "released"])
def test_behind_privacy_a_loss_above_the_baseline_is_said_where_it_can_be(extension):
    """The objective is reported; the released one falls at M - ε, from 1.8 to 0.8."""
    model, trainer, data = given_losses(2.4, 2.6, 9.0, 0.0)
    config = trainer.config._replace(clip_norm=1.0, noise_multiplier=1e-3)
    private = dp_sgd_trainer(model, config, sampler=sampling.full_participation())
    algorithm = propfair(model, private, baseline=3.0, margin=0.5, extension=extension)
    _, info = run(algorithm, 1, data)
    reported = {name: float(value[0]) for name, value in info.clients.items()}
    assert reported == ({} if extension == "released" else {"share_beyond": 0.5})


# Bad input, before any work.


def test_bad_numbers_are_refused_by_name():
    model = make_model()
    trainer = plain_trainer(model)
    heavy = local_trainer(model, LocalConfig(optimizer={"momentum": 0.9}))
    for build, rule in (
        (lambda: propfair(model, trainer, baseline=0.1), "margin must be above 0 and below"),
        (lambda: q_ffl(model, heavy), "trainer must take plain steps of `optax.sgd` .* curvature"),
    ):
        with pytest.raises(ValueError, match=rule):
            build()
    resting = local_trainer(model, LocalConfig(learning_rate=0.0))
    with pytest.raises(ValueError, match="learning_rate must be above 0, since q-FedAvg"):
        q_ffl(model, resting)


def test_a_margin_above_the_baseline_is_refused_in_a_sweep_too():
    model = make_model()
    sim = simulation(propfair(model, plain_trainer(model)), make_data(SIZES), joins(6), ALONE)
    numbers = {**sim.hyper.algorithm, "baseline": 0.1, "margin": 0.2}
    with pytest.raises(ValueError, match=r"^margin must be above 0 and below .*0.1"):
        sim.run(
            sim.init(jax.random.key(0)), jax.random.key(0), 1, sim.hyper._replace(algorithm=numbers)
        )


OPEN = "--privacy.unit=none"
MASKED = "--algorithm.aggregator=gradient_mask"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("--algorithm.name=propfair", "--algorithm.options.baseline=0.1"),
            "algorithm.options.margin must be above 0 and below the baseline 0.1, got 0.2",
        ),
        (
            (OPEN, "--algorithm.name=q_ffl", "--training.learning_rate=0"),
            "training.learning_rate must be above 0, since q-FedAvg divides by it, got 0.0",
        ),
        (
            (OPEN, "--algorithm.name=q_ffl", "--training.optimizer=adam"),
            "training.optimizer must take plain steps of `optax.sgd` and send its delta unchanged",
        ),
        (
            (OPEN, "--algorithm.name=scaffold", "--training.optimizer_options.momentum=0.9"),
            "training.optimizer_options must take plain steps of `optax.sgd` and send its delta",
        ),
        (
            (
                "--privacy.unit=record",
                "--algorithm.name=scaffold",
                "--algorithm.options.control=gradient",
            ),
            "algorithm.options must read no records, since the event of private training "
            "does not cover it; take control=steps, got 'control=gradient'",
        ),
        (
            (OPEN, MASKED, "--algorithm.name=scaffold", "--algorithm.options.is_weighted=true"),
            "algorithm.options.is_weighted must be False with an aggregator",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_data_are_read(words, message):
    with pytest.raises(ValueError) as error:
        validate.validate(load_config(None, words))
    assert message in str(error.value)


@pytest.mark.parametrize("name", [n for n, e in ALGORITHMS.items() if "num_clients" in e.given])
def test_an_algorithm_for_another_population_is_refused(name):
    model, is_private = make_model(), "none" not in ALGORITHMS[name].units
    config = LocalConfig(batch_size=4, clip_norm=1.0, noise_multiplier=1.0)
    trainer = (dp_sgd_trainer if is_private else local_trainer)(model, config)
    options = {"clusters": (0, 1, 0), "num_models": 2}
    options = {key: options[key] for key in options if key in registry.options_of(name)}
    problem = registry.Problem(num_clients=3, num_rounds=4, declared_epsilon=np.ones(3))
    unit = "record" if is_private else "none"
    algorithm = registry.build(name, model, trainer, problem, unit=unit, options=options)
    rule = f"num_clients must be the 6 clients of the data for {algorithm.name}, got 3"
    with pytest.raises(ValueError, match=rule):
        simulation(algorithm, make_data(SIZES), joins(6))


@pytest.mark.parametrize("name", ["afl", "term", "q_ffl"])
def test_what_reads_exact_losses_is_refused_under_privacy_with_the_reason(name):
    model = make_model()
    options = {"num_clients": 6} if name == "afl" else {}
    with pytest.raises(ValueError, match=r"non-private: .* by exact losses"):
        ALGORITHMS[name].factory(model, private_trainer(model), **options)
    problem = registry.Problem(num_clients=6)
    with pytest.raises(ValueError, match=r"privacy\.unit must be .*clients by exact losses"):
        registry.build(name, model, plain_trainer(model), problem, unit="client")
    words = (f"--algorithm.name={name}", "--privacy.unit=record")
    with pytest.raises(ValueError, match=r"privacy\.unit must be none .* exact losses"):
        validate.validate(load_config(None, words))


@pytest.mark.parametrize("unit", ["record", "client", "both"])
def test_propfair_is_charged_as_its_training_and_its_mean_are(unit):
    model = make_model()
    trainer = private_trainer(model) if unit != "client" else plain_trainer(model)
    mean = gaussian_mean(1.0, 0.8, 6.0)
    algorithm = propfair(model, trainer, aggregator=None if unit == "record" else mean)
    of_clients = algorithm.claims.client
    if unit == "record":
        assert of_clients is None
    else:
        assert of_clients.event(algorithm.hyper.aggregator) == GaussianDpEvent(0.8)
    if unit == "client":
        assert algorithm.training.record is None
    else:
        event = trainer.claim.events[0]
        (own,) = algorithm.training.record.events
        assert own(12, algorithm.hyper.of_client(2)) == event(12, trainer.config.row(2))
