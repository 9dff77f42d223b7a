"""Canaries in runs on augmented records: quiet where copies are one record, loud otherwise."""

import audit_cases as cases
import jax
import jax.numpy as jnp
import pytest
from marks import floats, later, telling

from fedjax_dp.audit.canaries import plant_records
from fedjax_dp.audit.runs import audit, run_audit
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.data import augmentation

pytestmark = [pytest.mark.xdist_group("augmented runs"), floats]

COPIES = 4


def rolled(example, key):
    shift = jax.random.randint(key, (), 0, cases.NUM_FEATURES)
    return {**example, "x": jnp.roll(example["x"], shift)}


def apart(rule):
    """A rule that clips the copies of a record as records of their own, and adds them."""

    def micro_batch(params, batch, is_real, key, config, *, value=None):
        each = jnp.repeat(is_real, batch.num_copies)
        return rule.micro_batch(params, batch.flat(), each, key, config, value=value)

    return rule._replace(micro_batch=micro_batch)


def planted(rule_of, noise_multiplier):
    numbers = cases.NUMBERS._replace(noise_multiplier=noise_multiplier)

    def make(model):
        trainer = local_trainer(
            model,
            numbers,
            sampler=cases.FULL,
            gradient_rule=rule_of(clipped(model)),
            augmentation=augmentation.compose(rolled, num_copies=COPIES),
        )
        return cases.build("dp_sgd", model, "record", trainer)

    return cases.plant_in(plant_records, make)


@telling
@pytest.mark.parametrize(
    ("rule_of", "noise_multiplier"),
    # With more noise, so few runs would prove nothing of an honest rule.
    later([(apart, 2.0), (lambda rule: rule, 0.7)], but=[(apart, 2.0)]),
)
def test_canaries_find_copies_that_count_as_records(rule_of, noise_multiplier):
    runs = run_audit(
        planted(rule_of, noise_multiplier),
        jax.random.key(2),
        num_runs=400,
        num_rounds=2,
        execution=cases.EXECUTION,
    )
    results = audit(runs, cases.DP_DELTA, accountant="pld")
    found = {result.method for result in results if result.is_violated}
    assert found >= {"threshold", "gaussian"} if rule_of is apart else not found
    # There is something to find where nothing exceeds the claim.
    assert max(result.epsilon_lower for result in results) > 0.5
