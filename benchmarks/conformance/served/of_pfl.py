"""The mechanisms and accountants of pfl-research, as functions of arrays."""

import functools
import os
import tempfile

import numpy as np
import torch
from pfl.common_types import Population
from pfl.context import CentralContext, UserContext
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics
from pfl.privacy import privacy_accountant as accountants
from pfl.privacy.adaptive_clipping import AdaptiveClippingGaussianMechanism
from pfl.privacy.ftrl_mechanism import BandedMatrixFactorizationMechanism, ForwardSubstitution
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.laplace_mechanism import LaplaceMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.stats import MappedVectorStatistics

set_framework_module(pytorch_ops)
torch.set_num_threads(1)

LAYERS = (6, 2)
CLIENTS = 4
ROUNDS = 8
SEPARATION = 4


def _statistics(row):
    parts = torch.split(torch.tensor(row, dtype=torch.float32), LAYERS)
    return MappedVectorStatistics({f"layer{i}": part for i, part in enumerate(parts)}, 1.0)


def _sum(mechanism, rows, seed, number=0):
    """The sum of a cohort after both postprocessing steps."""
    total = MappedVectorStatistics(
        {f"layer{i}": torch.zeros(size) for i, size in enumerate(LAYERS)}, 0.0
    )
    if isinstance(mechanism, AdaptiveClippingGaussianMechanism):
        total["adaptive_clipping/clipping_indicator"] = torch.zeros(1)
    for i, row in enumerate(rows):
        user = UserContext(num_datapoints=1, seed=seed + i)
        sent, _ = mechanism.postprocess_one_user(stats=_statistics(row), user_context=user)
        total = total + sent
    context = CentralContext(number, False, CLIENTS, Population.TRAIN, None, None, None, seed)
    noised, _ = mechanism.postprocess_server(
        stats=total, central_context=context, aggregate_metrics=Metrics()
    )
    return np.concatenate([noised[f"layer{i}"].numpy() for i in range(len(LAYERS))])


def gaussian(rows, seed):
    return _sum(CentrallyAppliedPrivacyMechanism(GaussianMechanism(1.0, 1.0)), rows, seed)


def laplace(rows, seed):
    mechanism = LaplaceMechanism(clipping_bound=1.0, epsilon=1.0)
    return _sum(CentrallyAppliedPrivacyMechanism(mechanism), rows, seed)


def _accountant(kind, rounds, dp_delta=1e-5, **options):
    return kind(
        num_compositions=rounds,
        sampling_probability=0.05,
        mechanism="gaussian",
        delta=dp_delta,
        noise_parameter=1.0,
        **options,
    )


@functools.cache
def _scaled():
    accountant = _accountant(accountants.PLDPrivacyAccountant, 1, noise_scale=0.1)
    return GaussianMechanism.from_privacy_accountant(accountant, 1.0)


def gaussian_scaled(rows, seed):
    """With the noise of an accountant that simulates a cohort ten times as large."""
    return _sum(CentrallyAppliedPrivacyMechanism(_scaled()), rows, seed)


def adaptive(rounds, seed):
    mechanism = AdaptiveClippingGaussianMechanism(
        lambda bound: GaussianMechanism(bound, 1.0),
        initial_clipping_bound=1.0,
        clipping_indicator_noise_stddev=2.0,
        adaptive_clipping_norm_quantile=0.5,
    )
    aggregates, norms = [], []
    for i, rows in enumerate(rounds):
        norms.append(mechanism.mutable_clipping_bound.value())
        aggregates.append(_sum(mechanism, rows, seed + 1000 * i, i))
    return np.stack(aggregates), np.array(norms)


@functools.cache
def _banded():
    os.chdir(tempfile.gettempdir())
    return BandedMatrixFactorizationMechanism(
        1.0,
        ROUNDS,
        SEPARATION,
        lambda rounds: accountants.PLDPrivacyAccountant(
            num_compositions=rounds,
            sampling_probability=1.0,
            mechanism="gaussian",
            delta=1e-5,
            noise_parameter=1.0,
        ),
    )


def _of_round(number, rows, seed):
    """All rounds, of which one has clients, as whoever knows the round looks at them.

    Releases times the strategy matrix are the sums times it, plus independent noise; along the
    column of the round, nothing that the releases tell about its sum is lost.
    """
    mechanism = _banded()
    # As its constructor does, which would factorise again.
    mechanism._C_inv_noise = ForwardSubstitution(mechanism.query_matrix, SEPARATION - 1)
    central = CentrallyAppliedPrivacyMechanism(mechanism)
    releases = np.stack(
        [
            _sum(central, rows if i == number else rows[:0], (seed + 7919 * i) % 2**31, i)
            for i in range(ROUNDS)
        ]
    )
    column = mechanism.query_matrix[:, number]
    return column / np.linalg.norm(column) @ (mechanism.query_matrix @ releases)


def banded_first(rows, seed):
    return _of_round(0, rows, seed)


def banded_last(rows, seed):
    return _of_round(ROUNDS - 1, rows, seed)


def _epsilon(kind, rounds, dp_delta):
    return float(_accountant(kind, rounds, dp_delta).epsilon)


def epsilon_pld(rounds, dp_delta):
    return _epsilon(accountants.PLDPrivacyAccountant, rounds, dp_delta)


def epsilon_prv(rounds, dp_delta):
    return _epsilon(accountants.PRVPrivacyAccountant, rounds, dp_delta)


def epsilon_rdp(rounds, dp_delta):
    return _epsilon(accountants.RDPPrivacyAccountant, rounds, dp_delta)
