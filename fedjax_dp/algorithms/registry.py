"""All algorithms by name, for configurations and for tests that must cover each of them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.algorithms.ae_dpfl import ae_dpfl
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.blur_lus import blur_lus, declared_transforms
from fedjax_dp.algorithms.centralized import centralized
from fedjax_dp.algorithms.dp_sgd import dp_sgd
from fedjax_dp.algorithms.f_cdpfl import f_cdpfl
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.algorithms.feddyn import feddyn
from fedjax_dp.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_dp.algorithms.fedprox import fedprox
from fedjax_dp.algorithms.ifca import ifca
from fedjax_dp.algorithms.km_cdpfl import km_cdpfl
from fedjax_dp.algorithms.local_only import local_only
from fedjax_dp.algorithms.minimum_epsilon import minimum_epsilon, smallest_budget
from fedjax_dp.algorithms.mr_mtl import mr_mtl
from fedjax_dp.algorithms.noise_oracle import noise_oracle
from fedjax_dp.algorithms.o_dpcfl import o_dpcfl
from fedjax_dp.algorithms.pfa import pfa
from fedjax_dp.algorithms.r_dpcfl import r_dpcfl
from fedjax_dp.algorithms.rc_dpfl import rc_dpfl
from fedjax_dp.algorithms.record_dp_fedavg import record_dp_fedavg
from fedjax_dp.algorithms.robust_hdp import robust_hdp
from fedjax_dp.algorithms.scaffold import scaffold
from fedjax_dp.algorithms.weiavg import weiavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.transforms import UpdateTransform
from fedjax_dp.core import checks
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator


class Entry(NamedTuple):
    """What a configuration needs to know of an algorithm.

    Attributes:
      factory: `(model, trainer, …) -> FederatedAlgorithm`.
      units: the choices of privacy that it can be given, of "none", "record", "client", "both".
      budgets: from the clients' own budgets of ε, `[clients]`, to those that their records' noise
        is calibrated to; None where these are the same.
      sends_model: whether an update has the structure of the model, which discrete and correlated
        noise are made for.
      transforms: `(options) -> declarations` of what updates pass through before they leave, for
        checks that have no model yet; all options are given.
    """

    factory: Callable[..., FederatedAlgorithm]
    units: tuple[str, ...]
    budgets: Callable[[np.ndarray], np.ndarray] | None = None
    sends_model: bool = True
    transforms: Callable[[Mapping[str, Any]], Sequence[UpdateTransform]] = lambda options: ()


_ANY = ("none", "record", "client", "both")

ALGORITHMS: Mapping[str, Entry] = {
    "fedavg": Entry(fedavg, _ANY),
    "fedavgm": Entry(fedavgm, _ANY),
    "fedadam": Entry(fedadam, _ANY),
    "fedyogi": Entry(fedyogi, _ANY),
    "fedadagrad": Entry(fedadagrad, _ANY),
    "fedprox": Entry(fedprox, _ANY),
    "feddyn": Entry(feddyn, ("none", "record")),
    "scaffold": Entry(scaffold, ("none", "record")),
    "ifca": Entry(ifca, ("none",)),
    # By name the private mean is built from the configuration; this is what `dp_fedavg` is.
    "dp_fedavg": Entry(partial(fedavg, name="dp_fedavg"), ("client", "both")),
    "blur_lus": Entry(blur_lus, _ANY, transforms=declared_transforms),
    "ae_dpfl": Entry(ae_dpfl, _ANY, sends_model=False),
    "dp_sgd": Entry(dp_sgd, ("record", "both")),
    "record_dp_fedavg": Entry(record_dp_fedavg, ("record",)),
    "minimum_epsilon": Entry(minimum_epsilon, ("record",), budgets=smallest_budget),
    "weiavg": Entry(weiavg, ("record",)),
    "pfa": Entry(pfa, ("record",)),
    "robust_hdp": Entry(robust_hdp, ("record",)),
    "noise_oracle": Entry(noise_oracle, ("record",)),
    "local_only": Entry(local_only, ("none", "record")),
    "r_dpcfl": Entry(r_dpcfl, ("record",)),
    "rc_dpfl": Entry(rc_dpfl, ("record",)),
    "f_cdpfl": Entry(f_cdpfl, ("record",)),
    "km_cdpfl": Entry(km_cdpfl, ("none", "record")),
    "o_dpcfl": Entry(o_dpcfl, ("none", "record")),
    "mr_mtl": Entry(mr_mtl, ("none", "record")),
    "centralized": Entry(centralized, ("none", "record")),
}

# Set by the run, or values that a configuration file cannot hold.
_NOT_OPTIONS = {
    "name",
    "aggregator",
    "server_optimizer",
    "num_clients",
    "num_rounds",
    "weight_of",
    "public_x",
}


def options_of(name: str) -> dict[str, Any]:
    """Lists the options of an algorithm with their defaults.

    Args:
      name: the algorithm.

    Returns:
      For each option its default; `inspect.Parameter.empty` where one must be given.
    """
    checks.one_of("algorithm.name", name, ALGORITHMS)
    parameters = list(inspect.signature(ALGORITHMS[name].factory).parameters.values())
    return {
        p.name: p.default
        for p in parameters[2:]
        if p.kind is not p.VAR_KEYWORD and p.name not in _NOT_OPTIONS
    }


def build(
    name: str,
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: int,
    num_rounds: int = 1,
    unit: str = "none",
    aggregator: Aggregator | None = None,
    epsilon: np.ndarray | None = None,
    public_x: np.ndarray | None = None,
    options: Mapping[str, Any] | None = None,
) -> FederatedAlgorithm:
    """Builds an algorithm by name.

    Args:
      name: a key of `ALGORITHMS`.
      model: what is trained.
      trainer: local training; private exactly if the unit is "record" or "both".
      num_clients: the population.
      num_rounds: rounds of the whole run, for algorithms whose ways depend on it.
      unit: what is to be protected: "none", "record", "client" or "both".
      aggregator: the private mean, if clients are protected; the algorithm's own where None.
      epsilon: the budgets that clients declare, `[num_clients]`, where records are protected to
        some; the option `declared_epsilon` comes first.
      public_x: public inputs without labels, `[queries, ...]`, for algorithms that ask about them.
      options: options of the algorithm, see `options_of`.

    Returns:
      The algorithm.

    Raises:
      ValueError: for an unknown name or option, a missing option, or a unit of privacy that the
        algorithm does not offer.
    """
    known = options_of(name)
    entry, options = ALGORITHMS[name], dict(options or {})
    checks.require(unit in entry.units, "privacy.unit", f"be one of {entry.units} for {name}", unit)
    for option in options:
        checks.one_of(f"option of {name}", option, known)
    missing = [
        option
        for option, default in known.items()
        if default is inspect.Parameter.empty and option not in options
    ]
    checks.require(not missing, "algorithm.options", f"give {missing} for {name}", options)
    parameters = inspect.signature(entry.factory).parameters
    if "num_clients" in parameters:
        options["num_clients"] = num_clients
    if "declared_epsilon" in parameters:
        options.setdefault("declared_epsilon", epsilon)
    if "num_rounds" in parameters:
        options["num_rounds"] = num_rounds
    if "public_x" in parameters:
        rule = f"be given for {name}, which asks about public inputs"
        checks.require(public_x is not None, "data.public_examples", rule, None)
        options["public_x"] = public_x
    if aggregator is not None:
        options["aggregator"] = aggregator
    return entry.factory(model, trainer, **options)
