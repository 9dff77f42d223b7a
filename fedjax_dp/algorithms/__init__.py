"""Algorithms: one file for each method or family, each a declaration of pure functions."""

from fedjax_dp.algorithms import schedules
from fedjax_dp.algorithms.ae_dpfl import ae_dpfl
from fedjax_dp.algorithms.afl import afl
from fedjax_dp.algorithms.base import (
    Averaged,
    ClientOutput,
    ClientState,
    ClusterModel,
    FederatedAlgorithm,
    Finish,
    FinishForAll,
    HostStep,
    Hyper,
    Iterate,
    Needs,
    Numbers,
    Round,
    SharedModel,
    Stages,
    Training,
    Views,
    field,
    training_of,
)
from fedjax_dp.algorithms.blur_lus import blur_lus
from fedjax_dp.algorithms.ditto import ditto
from fedjax_dp.algorithms.dp_sgd import (
    dp_sgd,
    minimum_epsilon,
    noise_oracle,
    record_dp_fedavg,
    smallest_budget,
    weiavg,
)
from fedjax_dp.algorithms.fed_ltn import Tickets, fed_ltn
from fedjax_dp.algorithms.fedavg import dp_fedavg, fedavg
from fedjax_dp.algorithms.fedbn import fedbn, fedper, fedrep
from fedjax_dp.algorithms.feddyn import feddyn
from fedjax_dp.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_dp.algorithms.fedprox import fedprox
from fedjax_dp.algorithms.ifca import f_cdpfl, ifca, o_dpcfl
from fedjax_dp.algorithms.jump_start import jump_start
from fedjax_dp.algorithms.km_cdpfl import km_cdpfl
from fedjax_dp.algorithms.lottery_fl import lottery_fl
from fedjax_dp.algorithms.model_averaging import (
    OutputPerturbation,
    retrained_averaging,
    warm_start_averaging,
)
from fedjax_dp.algorithms.mr_mtl import mr_mtl
from fedjax_dp.algorithms.pfa import pfa, public_clients
from fedjax_dp.algorithms.propfair import propfair
from fedjax_dp.algorithms.q_ffl import q_ffl
from fedjax_dp.algorithms.r_dpcfl import (
    ClusterCount,
    FirstRound,
    SelectionRule,
    SoftClusters,
    SoftPhase,
    r_dpcfl,
    rc_dpfl,
)
from fedjax_dp.algorithms.references import centralized, local_only, pool
from fedjax_dp.algorithms.registry import ALGORITHMS, Entry, build
from fedjax_dp.algorithms.robust_hdp import robust_hdp
from fedjax_dp.algorithms.scaffold import scaffold
from fedjax_dp.algorithms.splitting import (
    ProximalStep,
    fedpi,
    fedrp,
    fedsplit,
    reflected_fedavg,
    reflected_fedprox,
    splitting,
)
from fedjax_dp.algorithms.term import term

__all__ = [
    "ALGORITHMS",
    "Averaged",
    "ClientOutput",
    "ClientState",
    "ClusterCount",
    "ClusterModel",
    "Entry",
    "FederatedAlgorithm",
    "Finish",
    "FinishForAll",
    "FirstRound",
    "HostStep",
    "Hyper",
    "Iterate",
    "Needs",
    "Numbers",
    "OutputPerturbation",
    "ProximalStep",
    "Round",
    "SelectionRule",
    "SharedModel",
    "SoftClusters",
    "SoftPhase",
    "Stages",
    "Tickets",
    "Training",
    "Views",
    "ae_dpfl",
    "afl",
    "blur_lus",
    "build",
    "centralized",
    "ditto",
    "dp_fedavg",
    "dp_sgd",
    "f_cdpfl",
    "fed_ltn",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedbn",
    "feddyn",
    "fedper",
    "fedpi",
    "fedprox",
    "fedrep",
    "fedrp",
    "fedsplit",
    "fedyogi",
    "field",
    "ifca",
    "jump_start",
    "km_cdpfl",
    "local_only",
    "lottery_fl",
    "minimum_epsilon",
    "mr_mtl",
    "noise_oracle",
    "o_dpcfl",
    "pfa",
    "pool",
    "propfair",
    "public_clients",
    "q_ffl",
    "r_dpcfl",
    "rc_dpfl",
    "record_dp_fedavg",
    "reflected_fedavg",
    "reflected_fedprox",
    "retrained_averaging",
    "robust_hdp",
    "scaffold",
    "schedules",
    "smallest_budget",
    "splitting",
    "term",
    "training_of",
    "warm_start_averaging",
    "weiavg",
]
