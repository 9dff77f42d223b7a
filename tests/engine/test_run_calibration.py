"""One calibration for all algorithms: as fast as the formula where there is one, and as right."""

import dp_accounting
import jax.numpy as jnp
import numpy as np
from dp_accounting import rdp

from fedjax_dp.algorithms import dp_sgd
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer
from fedjax_dp.data import sampling
from fedjax_dp.engine.accounts import calibration
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.accounting.calibration import rounded_up

SIZES = np.array([40, 7, 0, 100, 40])
ROUNDS, BATCH, DELTA = 6, 8.0, 1e-5


def declared(config=LocalConfig(0.1, BATCH, 2, clip_norm=1.0, noise_multiplier=1.0)):
    model = Model.from_functions(
        init=lambda key: {"w": jnp.zeros(3)},
        apply=lambda params, x: x @ params["w"],
        loss="squared_error",
    )
    return dp_sgd(model, dp_sgd_trainer(model, config, sampler=sampling.poisson()))


def spent(noise_multiplier, size, rounds=ROUNDS):
    rate, steps = min(1.0, BATCH / size), 2 * np.ceil(size / BATCH)
    event = dp_accounting.GaussianDpEvent(float(noise_multiplier))
    account = rdp.RdpAccountant()
    account.compose(dp_accounting.PoissonSampledDpEvent(rate, event), int(rounds * steps))
    return account.get_epsilon(DELTA)


def test_every_client_spends_its_budget_and_no_more():
    budgets = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    noise = calibration.calibrate(declared(), SIZES, budgets, DELTA, ROUNDS).local.noise_multiplier
    for size, z, budget in zip(SIZES, noise, budgets, strict=True):
        if size > 0:
            assert budget * (1 - 1e-4) < spent(z, size) <= budget
    assert noise[2] == 1.0, "a client without records pays nothing"
    assert noise.dtype == np.float32


def test_a_factor_of_all_rounds_is_calibrated_for():
    factors = {"local.noise_multiplier": np.array([0.5], np.float32)}
    hyper = calibration.calibrate(declared(), SIZES, 2.0, DELTA, ROUNDS, factors=factors)
    for size, z in zip(SIZES, hyper.local.noise_multiplier * np.float32(0.5), strict=True):
        assert size == 0 or 2.0 * (1 - 1e-4) < spent(z, size) <= 2.0


def test_a_factor_that_some_clients_pay_for_is_calibrated_for():
    sizes, factors = np.array([100, 40]), np.array([1, 2, 3, 0.5, 1, 1], np.float32)
    epochs = np.array([0.0, 2.0])
    algorithm = declared(LocalConfig(0.1, BATCH, epochs, clip_norm=1.0, noise_multiplier=1.0))
    # The number of a wrapper, which the algorithm does not have, sets no price.
    tables = {"local.num_epochs": factors, "algorithm.leaving_tolerance": factors}
    assert list(calibration.priced_factors(algorithm, sizes, tables)) == ["local.num_epochs"]
    hyper = calibration.calibrate(algorithm, sizes, 2.0, DELTA, ROUNDS, factors=tables)
    assert 2.0 * (1 - 1e-4) < spent(hyper.local.noise_multiplier[1], 40, factors.sum()) <= 2.0


def test_alike_clients_share_a_search_and_poisson_runs_are_searched_side_by_side(monkeypatch):
    asked = []
    together = calibration.calibrate_poisson

    def counted(epsilon, *others, **promise):
        asked.append(len(epsilon))
        return together(epsilon, *others, **promise)

    def never(*_args, **_promise):
        raise AssertionError("a search of its own")

    monkeypatch.setattr(calibration, "calibrate_poisson", counted)
    monkeypatch.setattr(calibration, "calibrate_noise_multiplier", never)
    noise = calibration.calibrate(declared(), SIZES, 4.0, DELTA, ROUNDS).local.noise_multiplier
    # Two of the five are alike, and one has no records.
    assert asked == [3] and noise[0] == noise[4] != noise[1]


def test_both_ways_of_searching_agree(monkeypatch):
    """With the formula taken away, the search over events finds the same."""
    quick = calibration.calibrate(declared(), SIZES, 4.0, DELTA, ROUNDS).local.noise_multiplier
    monkeypatch.setattr(calibration, "_poisson_steps", lambda *event: None)
    slow = calibration.calibrate(declared(), SIZES, 4.0, DELTA, ROUNDS).local.noise_multiplier
    np.testing.assert_allclose(slow, quick, rtol=1e-5)


def test_only_plain_runs_of_the_probed_noise_are_taken_for_such():
    def gaussian(z):
        return dp_accounting.GaussianDpEvent(z)

    probe, poisson = gaussian(calibration._PROBE), dp_accounting.PoissonSampledDpEvent
    run = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(poisson(0.5, probe), 3),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.ComposedDpEvent([poisson(0.5, probe), dp_accounting.NoOpDpEvent()]), 2
            ),
            probe,
        ]
    )
    assert calibration._poisson_steps(run) == {0.5: 5, 1.0: 1}
    others = [
        gaussian(1.0),
        poisson(0.5, gaussian(1.0)),
        poisson(0.5, poisson(0.5, probe)),
        dp_accounting.LaplaceDpEvent(calibration._PROBE),
        dp_accounting.SampledWithoutReplacementDpEvent(10, 5, probe),
    ]
    for event in others:
        assert calibration._poisson_steps(dp_accounting.ComposedDpEvent([probe, event])) is None


def test_noise_is_rounded_up_and_never_down():
    noise = calibration.calibrate(declared(), SIZES, 4.0, DELTA, ROUNDS).local.noise_multiplier
    assert np.all(spent(noise[0], SIZES[0]) <= 4.0)
    rng = np.random.default_rng(0)
    exact = rng.uniform(0.3, 30.0, 1000)
    together, alone = rounded_up(exact), np.array([rounded_up(float(z)) for z in exact])
    for rounded in (together, alone):
        assert rounded.dtype == np.float32
        assert np.all(rounded.astype(np.float64) >= exact)
        assert np.all(np.nextafter(rounded, np.float32(0)).astype(np.float64) < exact)
    assert rounded_up(1.5) == 1.5
