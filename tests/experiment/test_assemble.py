"""An assembled experiment: its noise, composed by dp-accounting alone, spends its budget."""

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from marks import telling
from run_folders import SMALL, assemble_once

from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.privacy.mechanisms.distributed import choose_bits

ROUNDS = 5


def spent(noise_multiplier, count, rate=1.0, dp_delta=1e-5):
    event = dp_accounting.GaussianDpEvent(float(noise_multiplier))
    if rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(float(rate), event)
    account = rdp.RdpAccountant()
    account.compose(event, int(count))
    return account.get_epsilon(dp_delta)


def assembled(*words):
    return assemble_once(load_config(None, (*SMALL, f"--run.rounds={ROUNDS}", *words)))


def record_noise(experiment):
    """Noise, sampling rate and steps a round of each client."""
    sizes = experiment.population.train.sizes
    noise = np.asarray(experiment.simulation.hyper.local.noise_multiplier)
    return zip(noise, np.minimum(1, 64 / sizes), np.ceil(sizes / 64), strict=True)


@telling
@pytest.mark.parametrize("unit", ["record", "both"])
def test_every_client_has_the_noise_of_its_own_budget(unit):
    """Own ε and own δ; whether clients are protected too changes nothing for their records."""
    budgets, deltas = [1.0, 4.0, 8.0], [1e-3, 1e-7, 1e-5]
    words = (f"--privacy.record.epsilon={budgets}", f"--privacy.record.dp_delta={deltas}")
    words = (*words, f"--privacy.unit={unit}")
    words = (*words, "--privacy.client.epsilon=3") if unit == "both" else words
    experiment = assembled(*words)
    assert experiment.budget["record"] == budgets and experiment.dp_delta["record"] == deltas
    facts = record_noise(experiment)
    for (z, rate, steps), budget, delta in zip(facts, budgets, deltas, strict=True):
        epsilon = spent(z, ROUNDS * steps, rate, delta)
        assert epsilon <= budget and epsilon == pytest.approx(budget, rel=1e-5)


@telling
def test_clients_that_take_turns_pay_for_their_turns_alone():
    """Two of three clients a round: the cycle has two rounds, so that 5 rounds cost at most 3."""
    cyclic = ("--participation.sampler=cyclic", "--participation.cohort_size=2")
    for z, rate, steps in record_noise(assembled(*cyclic)):
        assert spent(z, 3 * steps, rate) == pytest.approx(8, rel=1e-5)
    words = ("--privacy.unit=client", "--algorithm.name=dp_fedavg")
    simulation = assembled(*cyclic, *words).simulation
    event = simulation.algorithm.claims.client.event(simulation.hyper.aggregator)
    epsilon = spent(event.noise_multiplier, 3)
    assert epsilon <= 8 and epsilon == pytest.approx(8, rel=1e-5)


def test_cohorts_drawn_by_coins_amplify_for_clients():
    words = ("--participation.sampler=poisson", "--participation.cohort_size=1.5")
    words = (*words, "--privacy.unit=client", "--algorithm.name=dp_fedavg")
    experiment = assembled(*words)
    simulation = experiment.simulation
    z = simulation.algorithm.claims.client.event(simulation.hyper.aggregator).noise_multiplier
    epsilon = spent(z, ROUNDS, rate=0.5)
    assert epsilon <= 8 and epsilon == pytest.approx(8, rel=1e-5)
    assert list(experiment.budget) == ["client"] and experiment.client_clip_norm == 1.0


@pytest.mark.parametrize("bits", [12, "auto"])
def test_the_lattice_holds_as_many_deviations_as_are_asked_for(bits):
    """Equation (61) of DDGauss for a share of the noise, in units of the lattice."""
    size, clients, deviations, z = 64 * 10 + 10, 3, 40.0, 1.5
    words = ("--privacy.unit=client", "--algorithm.name=dp_fedavg", f"--privacy.client.bits={bits}")
    words = (
        *words,
        "--privacy.client.mechanism=discrete_gaussian",
        "--privacy.client.epsilon=none",
    )
    words = (*words, f"--privacy.client.noise_multiplier={z}")
    words = (*words, f"--privacy.client.num_deviations={deviations}")
    simulation = assembled(*words).simulation
    event = simulation.algorithm.claims.client.event(simulation.hyper.aggregator)
    if bits == "auto":
        bits = choose_bits(size, 1.0, z, num_clients=clients, num_deviations=deviations)
        assert bits > choose_bits(size, 1.0, z, num_clients=clients)
    places = (2**bits / (2 * deviations)) ** 2 - clients / 4
    width = np.sqrt((clients**2 / 1024 + z**2) / places)
    assert event.noise_scale == pytest.approx(z / width / np.sqrt(clients), rel=1e-6)


def test_given_noise_is_taken_as_it_is():
    words = ("--privacy.record.noise_multiplier=[1.0, 2.0, 3.0]", "--privacy.record.epsilon=none")
    experiment = assembled(*words)
    noise = experiment.simulation.hyper.local.noise_multiplier
    assert np.asarray(noise).tolist() == [1.0, 2.0, 3.0] and experiment.budget == {}


def test_an_experiment_holds_the_layout_that_was_found():
    experiment = assembled("--execution.devices=auto")
    assert isinstance(experiment.config.execution.devices, int)
    assert experiment.num_parameters == 64 * 10 + 10


@telling
def test_a_mask_wraps_the_mechanism_at_no_further_cost():
    words = ("--privacy.unit=client", "--algorithm.name=dp_fedavg")
    plain = assembled(*words).simulation.algorithm
    masked = assembled(*words, "--algorithm.aggregator=gradient_mask").simulation.algorithm
    events = [a.claims.client.event(a.hyper.aggregator) for a in (plain, masked)]
    assert events[0] == events[1]
    assert set(masked.hyper.aggregator) - set(plain.hyper.aggregator) == {"threshold", "vote_share"}
