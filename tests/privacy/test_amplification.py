"""What a sampler makes of a mechanism is what really runs, or nothing."""

import dp_accounting as dpa
import pytest

from fedjax_dp.data import sampling
from fedjax_dp.privacy.accounting.amplification import sampled_event
from fedjax_dp.privacy.accounting.ledger import Ledger, UnsupportedEvent

BASE = dpa.GaussianDpEvent(1.5)


@pytest.mark.parametrize("base", [BASE, dpa.LaplaceDpEvent(2.0)])
def test_shuffled_epochs_never_get_an_epsilon(base):
    with pytest.raises(UnsupportedEvent, match="not that of Poisson sampling; nearest valid"):
        sampled_event("shuffled", base, sampling_rate=0.1, population=100)


def test_each_sampler_gets_its_own_event():
    assert sampled_event("poisson", BASE, sampling_rate=0.25) == dpa.PoissonSampledDpEvent(
        0.25, BASE
    )
    assert sampled_event("poisson", BASE, sampling_rate=1) == BASE
    assert sampled_event(
        "truncated_poisson", BASE, sampling_rate=0.1, population=50, capacity=9
    ) == dpa.TruncatedSubsampledGaussianDpEvent(50, 0.1, 9, 1.5)
    assert sampled_event(
        "fixed_size", BASE, population=50, sample_size=5, relation="replace_one"
    ) == dpa.SampledWithoutReplacementDpEvent(50, 5, BASE)
    for sampler in ("everybody", "cyclic", "min_separated"):
        assert sampled_event(sampler, BASE) == BASE
    roomy = sampled_event("truncated_poisson", BASE, sampling_rate=0.1, population=50, capacity=50)
    assert roomy == dpa.PoissonSampledDpEvent(0.1, BASE)
    full = sampled_event("fixed_size", BASE, population=50, sample_size=50)
    assert full == BASE


@pytest.mark.parametrize(
    "call,nearest",
    [
        (
            lambda: sampled_event("fixed_size", BASE, population=50, sample_size=5),
            "relation 'replace_one'",
        ),
        (
            lambda: sampled_event(
                "truncated_poisson",
                dpa.LaplaceDpEvent(1.0),
                sampling_rate=0.1,
                population=50,
                capacity=9,
            ),
            "sampler 'poisson' without a capacity",
        ),
        (
            lambda: sampled_event(
                "poisson", dpa.LaplaceDpEvent(1.0), sampling_rate=0.1, relation="replace_one"
            ),
            "relation 'add_remove'",
        ),
    ],
)
def test_combinations_without_an_analysis_are_refused(call, nearest):
    with pytest.raises(UnsupportedEvent, match="nearest valid choice") as error:
        call()
    assert nearest in str(error.value)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: sampled_event("bernoulli", BASE), "sampler must be one of"),
        (lambda: sampled_event("poisson", BASE), "sampling_rate must be given for sampler"),
        (lambda: sampled_event("poisson", BASE, sampling_rate=0.0), "sampling_rate must lie in"),
        (
            lambda: sampled_event("fixed_size", BASE, population=5, sample_size=6),
            "sample_size must be at most the population",
        ),
        (lambda: sampled_event("poisson", BASE, sampling_rate=0.1, relation="x"), "relation must"),
    ],
)
def test_bad_facts_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_samplers_that_run_state_the_same_events():
    # The samplers of `data` write their own events; both tables must stay one.
    rate = {"sampling_rate": 0.1, "population": 50}
    for sampler, facts in [
        (sampling.poisson(), rate),
        (sampling.poisson(9), {**rate, "capacity": 9}),
        (sampling.everybody(), {}),
        (sampling.cyclic(), {}),
        (sampling.min_separated(3), {}),
    ]:
        assert sampler.event(BASE, 50, 5) == sampled_event(sampler.name, BASE, **facts)
    fixed = sampling.fixed_size()
    assert fixed.event(BASE, 50, 5) == sampled_event(
        fixed.name, BASE, population=50, sample_size=5, relation="replace_one"
    )
    for event in (
        lambda: sampling.shuffled().event(BASE, 50, 5),
        lambda: sampled_event("shuffled", BASE),
    ):
        with pytest.raises(ValueError, match="poisson"):
            event()


def test_sampling_never_costs_more_than_taking_everybody():
    for sampler, relation, facts, accountant in [
        ("poisson", "add_remove", {"sampling_rate": 0.2}, "rdp"),
        ("fixed_size", "replace_one", {"population": 50, "sample_size": 10}, "rdp"),
    ]:
        sampled, full = Ledger(relation=relation), Ledger(relation=relation)
        sampled.charge(sampled_event(sampler, BASE, relation=relation, **facts))
        full.charge(BASE)
        assert sampled.epsilon(1e-6, accountant)[0] < full.epsilon(1e-6, accountant)[0]
