"""A run that is resumed for more rounds keeps every noise that was drawn, or is refused."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aggregating import closed, sent_by
from marks import later

import fedjax_dp as fdp
from fedjax_dp.experiment.components.mechanism import Setting, client_aggregator
from fedjax_dp.experiment.running import run_folder as saved
from fedjax_dp.experiment.schema.config import (
    BoundedLaplaceLevel,
    ClientLevel,
    Config,
    CorrelatedGaussianLevel,
    GaussianLevel,
    LaplaceLevel,
    RecordLevel,
)

KINDS = typing.get_args(typing.get_args(ClientLevel)[0])
# The former ties rounds together; the latter cuts off what all planned rounds may spend of δ.
OF_PLANNED_ROUNDS = (CorrelatedGaussianLevel, BoundedLaplaceLevel)
CASES = [
    *[(kind, relation, False) for kind in KINDS for relation in ("zero_out", "replace_one")],
    (GaussianLevel, "zero_out", True),
]
QUICK = [case for case in CASES if case[0] in (LaplaceLevel, BoundedLaplaceLevel)]
STRUCTURE = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}


def first_release(level, relation, num_rounds):
    """What the first round of a run of some length releases for clients that send nothing."""
    cohorts = fdp.participation(fdp.fixed_size(), 10, cohort_size=2)
    setting = Setting(cohorts, STRUCTURE, num_rounds, {"accountant": "rdp", "relation": relation})
    mean = client_aggregator(level, setting)
    close = closed(keys=(jax.random.key(1), jax.random.key(2)))
    state, zeros = mean.init(STRUCTURE), {"w": jnp.zeros(3)}
    sent = mean.contribute(state, mean.numbers, zeros, sent_by())
    if mean.encode is not None:
        sender = sent_by(key=jax.random.key(3), public_key=close.public_key)
        sent = mean.encode(state, mean.numbers, sent, sender)
    return np.asarray(mean.combine(state, mean.numbers, sent, close)[1]["w"])


def may_be_extended(**levels):
    unit = "both" if len(levels) > 1 else next(iter(levels))
    own = {name: level.model_dump() for name, level in levels.items()}
    config = Config.model_validate(
        {
            "privacy": {"unit": unit, **own},
            "algorithm": {"name": "dp_sgd" if unit == "record" else "dp_fedavg"},
            "run": {"rounds": 40},
        }
    )
    try:
        saved._require_extensible(config, 4)
    except ValueError as refused:
        assert "run.rounds must be 4" in str(refused)
        return False
    return True


@pytest.mark.parametrize(("kind", "relation", "is_adaptive"), later(CASES, but=QUICK))
def test_extending_a_run_changes_no_noise_that_was_drawn(kind, relation, is_adaptive):
    options = {"adaptive_clipping": True} if is_adaptive else {}
    level = kind(noise_multiplier=1.0, epsilon=None, **options)
    short, long = (first_release(level, relation, num_rounds) for num_rounds in (4, 40))
    assert np.any(short != 0)
    if may_be_extended(client=level):
        np.testing.assert_array_equal(short, long)


RECORDS = RecordLevel(noise_multiplier=1.0, epsilon=None)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_extended_but_those_whose_noise_is_for_the_planned_rounds(kind):
    level = kind(noise_multiplier=1.0, epsilon=None)
    is_free = kind not in OF_PLANNED_ROUNDS
    assert may_be_extended(client=level) == is_free
    assert may_be_extended(client=level, record=RECORDS) == is_free


def test_runs_with_noise_on_records_are_extended():
    assert may_be_extended(record=RECORDS)


@pytest.mark.parametrize("kind", (*KINDS, RecordLevel))
def test_noise_that_was_calibrated_to_a_number_of_rounds_is_not_extended(kind):
    unit, level = ("record" if kind is RecordLevel else "client"), kind(epsilon=8.0)
    assert level.noise_multiplier is None
    assert not may_be_extended(**{unit: level})
    if kind is RecordLevel:
        client = GaussianLevel(noise_multiplier=1.0, epsilon=None)
        assert not may_be_extended(client=client, record=level)
