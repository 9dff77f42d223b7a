"""Clipped gradients, plans and accountants of jax-privacy, and Optax's private aggregate."""

import functools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import batch_selection, clipping, noise_addition
from jax_privacy.accounting import accountants, analysis
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig

LAYERS = (6, 2)
BATCH = 4
RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def _shaped(flat):
    first, last = np.split(np.asarray(flat, np.float32), [LAYERS[0]], axis=-1)
    return {"a": first, "b": last}


def _flat(tree):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


ZEROS = _shaped(np.zeros(sum(LAYERS)))


def _loss(params, batch):
    return sum(jnp.sum(batch[name] * params[name]) for name in params)


def _summed(gradient, records):
    """The sum of clipped gradients; of an empty batch, zeros, as no function of it is called."""
    return gradient(ZEROS, _shaped(records)) if len(records) else ZEROS


@functools.cache
def _clipped():
    gradient = clipping.clipped_grad(
        _loss, l2_clip_norm=1.0, batch_argnums=1, normalize_by=float(BATCH)
    )
    stddev = float(gradient.sensitivity(RELATION))
    return jax.jit(gradient), stddev


def clipped_step(records, seed):
    """The README's step: a clipped gradient, and Gaussian noise of its sensitivity."""
    gradient, stddev = _clipped()
    privatizer = noise_addition.gaussian_privatizer(stddev=stddev, prng_key=jax.random.key(seed))
    noised, _ = privatizer.update(_summed(gradient, records), privatizer.init(ZEROS))
    return _flat(noised)


def _plan(seed, iterations=4, sampling_prob=0.125):
    return BandMFExecutionPlanConfig(
        strategy=np.ones(1),
        iterations=iterations,
        epsilon=None,
        delta=None,
        noise_multiplier=1.0,
        sampling_prob=sampling_prob,
        normalize_by=float(BATCH),
        accountant=dp_accounting.pld.PLDAccountant(RELATION),
        partition_type=batch_selection.PartitionType.INDEPENDENT,
        noise_seed=seed,
    ).plan


@functools.cache
def _planned():
    return jax.jit(_plan(0).clipped_grad(_loss, batch_argnums=1))


def plan_step(records, seed):
    transform = _plan(seed).noise_addition_transform
    noised, _ = transform.update(_summed(_planned(), records), transform.init(ZEROS))
    return _flat(noised)


def plan_sampling(rounds, seed):
    return list(_plan(0, rounds).batch_selection_strategy.batch_iterator(32, rng=seed))


def plan_run(contributions, seed):
    """Two rounds of a plan: its batches, its gradient and its noise."""
    plan = _plan(seed, 2)
    state = plan.noise_addition_transform.init(ZEROS)
    releases = []
    for indices in plan.batch_selection_strategy.batch_iterator(len(contributions), rng=seed):
        # A fixed shape, as padded batches have in jitted code.
        batch = np.zeros_like(contributions)
        batch[: len(indices)] = contributions[indices]
        noised, state = plan.noise_addition_transform.update(_summed(_planned(), batch), state)
        releases.append(_flat(noised))
    return np.stack(releases)


def plan_epsilon(rounds, dp_delta):
    accountant = dp_accounting.pld.PLDAccountant(RELATION)
    accountant.compose(_plan(0, rounds, 0.05).dp_event)
    return accountant.get_epsilon(dp_delta)


def _epsilon(config, rounds, dp_delta):
    params = analysis.DpParams(
        noise_multipliers=1.0, num_samples=1000, delta=dp_delta, batch_size=50
    )
    return analysis.DpsgdTrainingAccountant(config).compute_epsilon(rounds, params)


def epsilon_pld(rounds, dp_delta):
    return _epsilon(accountants.PldAccountantConfig(), rounds, dp_delta)


def epsilon_rdp(rounds, dp_delta):
    return _epsilon(accountants.RdpAccountantConfig(), rounds, dp_delta)


def fixed_sampling(rounds, seed):
    strategy = batch_selection.FixedBatchSampling(batch_size=BATCH, iterations=rounds)
    return list(strategy.batch_iterator(32, rng=seed))


@jax.jit
def _aggregated(records, seed):
    transform = optax.contrib.differentially_private_aggregate(1.0, 1.0, jax.random.key(seed))
    return transform.update(records, transform.init(ZEROS))[0]


def optax_aggregate(records, seed):
    return _flat(_aggregated(_shaped(records), seed))
