"""Every refusal of a privacy without an analysis names a configuration that is accepted."""

import itertools

import jax
import numpy as np
import pytest

from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.components.mechanism import Setting, client_aggregator
from fedjax_dp.experiment.components.participation import participation_of
from fedjax_dp.experiment.reading import analysis
from fedjax_dp.experiment.schema import config
from fedjax_dp.privacy.accounting.ledger import UnsupportedEvent

SIZES = np.array([40, 7, 0, 100])
PARTICIPATION = [
    config.FullParticipation(),
    config.PoissonCohort(cohort_size=2.0),
    config.PoissonCohort(cohort_size=2.0, capacity=3),
    config.FixedSizeCohort(cohort_size=2.0),
    config.CyclicCohort(cohort_size=2.0),
    config.MinSeparatedCohort(cohort_size=1.0, separation=2),
]
MECHANISMS = [
    *(config.GaussianLevel, config.LaplaceLevel, config.StaircaseLevel),
    *(config.BoundedLaplaceLevel, config.DiscreteGaussianLevel, config.CentralDiscreteLevel),
    config.CorrelatedGaussianLevel,
]
BATCHES = ["auto", "shuffled", "shuffled_whole", "poisson", "fixed_size", "full_batch"]
PROMISES = list(itertools.product(["zero_out", "replace_one"], ["rdp", "pld", "rdp-classic-64"]))
ONE_UNIT = [
    *itertools.product(["client"], PARTICIPATION, MECHANISMS, ["auto"], PROMISES),
    *itertools.product(["record"], PARTICIPATION[:1], MECHANISMS[:1], BATCHES, PROMISES),
]
BOTH = [*itertools.product(["both"], PARTICIPATION, MECHANISMS, BATCHES, PROMISES)]


def configured(unit, participation, mechanism, batches, promise):
    relation, accountant = promise
    # What protects clients is not given where clients are not protected.
    of_clients = {} if unit == "record" else {"client": mechanism()}
    privacy = config.PrivacySection(
        unit=unit, relation=relation, accountant=accountant, **of_clients
    )
    return analysis.Sections(privacy, participation, config.TrainingSection(sampler=batches))


def refusal(sections):
    try:
        analysis.require_analysis(sections, len(SIZES), SIZES)
    except UnsupportedEvent as error:
        return error
    return None


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_what_is_analysed_without_numbers_is_what_a_mechanism_claims(mechanism):
    level, structure = mechanism(noise_multiplier=1.0), jax.ShapeDtypeStruct((1,), "float32")
    everyone = participation_of(config.FullParticipation(), 2)
    mean = client_aggregator(level, Setting(everyone, structure, 1, {"relation": "zero_out"}))
    assert type(mean.claim.event(mean.numbers)) is type(analysis.EVENTS[level.mechanism])


@pytest.mark.parametrize(
    "combinations", [ONE_UNIT, pytest.param(BOTH, marks=pytest.mark.slow)], ids=["one", "both"]
)
def test_following_the_advice_of_a_refusal_is_accepted(combinations):
    refused = 0
    for combination in combinations:
        sections = configured(*combination)
        error = refusal(sections)
        if error is not None:
            refused += 1
            assert error.advice is not None and any(error.advice), combination
            assert str(error.advice) in str(error)
            assert error.advice.relation != "add_remove"
            assert refusal(analysis.follow(sections, error.advice)) is None, combination
    # Some are refused and some are not.
    assert len(combinations) / 4 < refused < len(combinations)


def test_advice_for_one_unit_is_no_refusal_of_the_other():
    sections = configured(
        "both", PARTICIPATION[3], config.GaussianLevel, "poisson", ("replace_one", "rdp")
    )
    error = refusal(sections)
    # By "pld" alone cohorts of a fixed size would be refused, by "rdp" batches are.
    assert error.advice.accountant == "pld" and error.advice.sampler == "poisson"


@pytest.mark.slow
def test_what_is_accepted_is_assembled():
    """A whole experiment is built, noise calibrated, for what every refusal of one unit advises."""
    seen = set()
    for combination in ONE_UNIT:
        sections = configured(*combination)
        error = refusal(sections)
        if error is None:
            continue
        privacy, participation, training = analysis.follow(sections, error.advice)
        if "client" in privacy.units:
            client = privacy.client.model_copy(update={"epsilon": 50.0})
            privacy = privacy.model_copy(update={"client": client})
        name = "dp_sgd" if combination[0] == "record" else "dp_fedavg"
        followed = config.Config(
            data=config.DataSection(num_clients=4),
            run=config.RunSection(rounds=2),
            algorithm=config.AlgorithmSection(name=name),
            privacy=privacy,
            participation=participation,
            training=training,
        )
        if repr(followed) not in seen:
            seen.add(repr(followed))
            assemble(followed)
    assert len(seen) > 10
