"""Every refusal of a privacy without an analysis names a configuration that is accepted."""

import dataclasses
import itertools

import numpy as np
import pytest

from fedjax_dp.experiment import analysis
from fedjax_dp.experiment.assemble import assemble
from fedjax_dp.experiment.config import (
    ClientLevelSection,
    Config,
    DataSection,
    ParticipationSection,
    PrivacySection,
    TrainingSection,
)
from fedjax_dp.privacy.accounting import UnsupportedEvent

SIZES = np.array([40, 7, 0, 100])
PARTICIPATION = [
    ParticipationSection(),
    ParticipationSection(sampler="poisson", cohort_size=2.0),
    ParticipationSection(sampler="poisson", cohort_size=2.0, capacity=3),
    ParticipationSection(sampler="fixed_size", cohort_size=2.0),
    ParticipationSection(sampler="cyclic", cohort_size=2.0),
    ParticipationSection(sampler="min_separated", cohort_size=1.0, separation=2),
]
MECHANISMS = [
    "gaussian",
    "laplace",
    "staircase",
    "bounded_laplace",
    "discrete_gaussian",
    "central_discrete_gaussian",
    "correlated_gaussian",
]
BATCHES = ["auto", "shuffled", "poisson", "fixed_size", "everybody"]
PROMISES = list(itertools.product(["zero_out", "replace_one"], ["rdp", "pld", "rdp-classic-64"]))
COMBINATIONS = [
    *itertools.product(["client"], PARTICIPATION, MECHANISMS, ["auto"], PROMISES),
    *itertools.product(["record"], PARTICIPATION[:1], MECHANISMS[:1], BATCHES, PROMISES),
    *itertools.product(["both"], PARTICIPATION, MECHANISMS, BATCHES, PROMISES),
]


def configured(unit, participation, mechanism, batches, promise):
    relation, accountant = promise
    client = ClientLevelSection(mechanism=mechanism)
    return Config(
        participation=participation,
        training=TrainingSection(sampler=batches),
        privacy=PrivacySection(unit=unit, relation=relation, accountant=accountant, client=client),
    )


def refusal(config):
    try:
        analysis.require_analysis(config, SIZES)
    except UnsupportedEvent as error:
        return error
    return None


def test_following_the_advice_of_a_refusal_is_accepted():
    refused = 0
    for combination in COMBINATIONS:
        config = configured(*combination)
        error = refusal(config)
        if error is not None:
            refused += 1
            assert error.advice is not None and any(error.advice), combination
            assert str(error.advice) in str(error)
            assert error.advice.relation != "add_remove"
            assert refusal(analysis.follow(config, error.advice)) is None, combination
    # Some are refused and some are not.
    assert len(COMBINATIONS) / 4 < refused < len(COMBINATIONS)


def test_advice_for_one_unit_is_no_refusal_of_the_other():
    config = configured("both", PARTICIPATION[3], "gaussian", "poisson", ("replace_one", "rdp"))
    error = refusal(config)
    # By "pld" alone cohorts of a fixed size would be refused, by "rdp" batches are.
    assert error.advice.accountant == "pld" and error.advice.sampler == "poisson"


@pytest.mark.slow
def test_what_is_accepted_is_assembled():
    """A whole experiment is built, noise calibrated, for what every refusal of one unit advises."""
    seen = set()
    for combination in COMBINATIONS:
        config = configured(*combination)
        error = None if combination[0] == "both" else refusal(config)
        if error is None:
            continue
        followed = analysis.follow(config, error.advice)
        client = dataclasses.replace(followed.privacy.client, epsilon=50.0)
        followed = dataclasses.replace(
            followed,
            data=DataSection(num_clients=4),
            run=dataclasses.replace(followed.run, rounds=2),
            algorithm=dataclasses.replace(
                followed.algorithm, name="dp_sgd" if combination[0] == "record" else "dp_fedavg"
            ),
            privacy=dataclasses.replace(followed.privacy, client=client),
        )
        if repr(followed) not in seen:
            seen.add(repr(followed))
            assemble(followed)
    assert len(seen) > 10
