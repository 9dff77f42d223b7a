"""NVFlare's privacy filters, as functions of arrays: what one site sends, summed over sites."""

import logging

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

logging.disable(logging.CRITICAL)

LAYERS = (6, 2)


def _sent(privacy_filter, row, scalars=False):
    """What a site sends of an update; with scalars, the last numbers have no axis."""
    row = np.array(row, np.float64)
    first = LAYERS[0]
    weights = {"layer0": row[:first], "layer1": row[first:]}
    if scalars:
        weights = {"layer0": row[:first]} | {f"layer{i}": row[i] for i in range(first, len(row))}
    dxo = DXO(DataKind.WEIGHT_DIFF, weights)
    data = privacy_filter.process_dxo(dxo, Shareable(), FLContext()).data
    return np.concatenate([np.atleast_1d(data[name]) for name in weights])


def _sum(make, rows, seed, scalars=False):
    np.random.seed(seed)  # noqa: NPY002 (of the filters)
    total = np.zeros(sum(LAYERS))
    for row in rows:
        total += _sent(make(), row, scalars)
    return total


def percentile(rows, seed):
    return _sum(PercentilePrivacy, rows, seed)


def percentile_scalars(rows, seed):
    return _sum(PercentilePrivacy, rows, seed, True)


def _svt():
    """All numbers are sent, each once, so that each has its noise."""
    return SVTPrivacy(
        fraction=1.0, epsilon=1.0, gamma=1.0, tau=0.1, replace=False, epsilon_release=1.0
    )


def _svt_run(contributions, seed, scalars):
    """One round of one site."""
    np.random.seed(seed)  # noqa: NPY002 (of the filters)
    # Parameters without an axis are the last ones of a model, and the first ones that are attacked.
    sent = _sent(_svt(), contributions[0][::-1], scalars)
    return sent[None, ::-1]


def svt(contributions, seed):
    return _svt_run(contributions, seed, False)


def svt_scalars(contributions, seed):
    return _svt_run(contributions, seed, True)


def svt_spent(rounds, dp_delta):
    """What the filter's accountant states after so many calls."""
    privacy_filter = _svt()
    for _ in range(rounds):
        _sent(privacy_filter, np.ones(sum(LAYERS)))
    return privacy_filter.get_privacy_spent()
