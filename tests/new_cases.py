"""Cases of FedDyn and of the trimmed mean, to be folded into `cases`."""

import numpy as np
from cases import (
    NUM_CLIENTS,
    ROUNDS,
    SETTINGS,
    Case,
    Run,
    _params,
    plain_trainer,
    theta_of,
)
from oracles import federated
from oracles.feddyn import feddyn
from oracles.trimmed_mean import trimmed_mean

from fedjax_dp import algorithms, server


def _feddyn(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS, mu=0.4)
    theta = theta_of(run.initial.server.params)
    theta, h, g = feddyn(theta, NUM_CLIENTS, run.replay, ROUNDS, train, 0.4)
    return {"params": theta, "correction": h, "corrections": g}


def _trimmed_mean(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    for r in range(ROUNDS):
        deltas = [train(theta, r, i) - theta for i in run.replay.cohort(r)]
        theta = theta + trimmed_mean(np.array(deltas), 0.4) if deltas else theta
    return {"params": theta}


NEW_CASES = (
    Case(
        "feddyn",
        algorithms.feddyn,
        lambda m: algorithms.feddyn(m, plain_trainer(m), num_clients=NUM_CLIENTS, alpha=0.4),
        _feddyn,
        lambda state: {
            "params": theta_of(state.server.params),
            "correction": theta_of(state.server.correction),
            "corrections": theta_of(state.clients),
        },
    ),
    Case(
        "trimmed_mean",
        algorithms.fedavg,
        lambda m: algorithms.fedavg(m, plain_trainer(m), aggregator=server.trimmed_mean(0.4)),
        _trimmed_mean,
        _params,
    ),
)
