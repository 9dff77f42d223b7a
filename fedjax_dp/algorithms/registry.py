"""All algorithms by name, for configurations and for tests that must cover each of them."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.blur_lus import declared_transforms, option_for_bound
from fedjax_dp.algorithms.fed_ltn import check_momentum
from fedjax_dp.algorithms.minimum_epsilon import smallest_budget
from fedjax_dp.algorithms.propfair import check_options
from fedjax_dp.algorithms.scaffold import declared_transforms as declared_control
from fedjax_dp.algorithms.scaffold import steps_of
from fedjax_dp.algorithms.splitting import steps_of as of_splitting
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.transforms import UpdateTransform
from fedjax_dp.clients.whole_batches import check_copies
from fedjax_dp.core import checks, registry
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive
from fedjax_dp.core.registry import Registry
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator


class Problem(NamedTuple):
    """Facts of an experiment that an algorithm can be given.

    Attributes:
      num_clients: the population.
      num_rounds: rounds of the whole run.
      aggregator: how updates are combined: the private mean where clients are protected, else what
        was asked for; the algorithm's own where it is None.
      declared_epsilon: the budgets that clients declare, `[num_clients]`, where records are
        protected to some.
      public_x: public inputs without labels, `[queries, ...]`, where there are some.
    """

    num_clients: int
    num_rounds: int = 1
    aggregator: Aggregator | None = None
    declared_epsilon: np.ndarray | None = None
    public_x: np.ndarray | None = None


class Entry(NamedTuple):
    """What a configuration needs to know of an algorithm.

    Attributes:
      factory: `(model, trainer, *, facts…, options…) -> FederatedAlgorithm`.
      units: the choices of privacy that it can be given, of "none", "record", "client", "both".
      given: fields of `Problem` that it is handed, as keywords of these names; no options.
      stand_in: fields of `Problem` that it is handed where the option of that name is left out,
        with the kind of the option.
      for_code: keywords that no configuration can hold, such as functions.
      budgets: from the clients' own budgets of ε, `[clients]`, to those that their records' noise
        is calibrated to; None where these are the same.
      pools_clients: whether the data of all clients are put together before it runs.
      sends_model: whether an update has the structure of the model, which discrete and correlated
        noise are made for.
      reason: why it is given no other units, in words; empty where its kind says so.
      check_options: `(options, prefix)` raises a ValueError for options that do not go together;
        all options are given, and the prefix comes before a name.
      steps: `(options) -> word`, what it asks of local steps: "any", "plain", those of SGD without
        momentum, "moving", plain ones at learning rates above 0, or "none" where local steps are
        not taken; all options are given.
      transforms: `(options) -> declarations` of what updates pass through before they leave, for
        checks that have no model yet; all options are given.
      option_for_bound: `(options) -> name` of the option that must be given where no aggregator
        bounds an update; empty where none must. All options are given.
    """

    factory: Callable[..., FederatedAlgorithm]
    units: tuple[str, ...]
    given: tuple[str, ...] = ()
    stand_in: Mapping[str, Any] = {}
    for_code: tuple[str, ...] = ()
    budgets: Callable[[np.ndarray], np.ndarray] | None = None
    pools_clients: bool = False
    sends_model: bool = True
    reason: str = ""
    check_options: Callable[[Mapping[str, Any], str], None] = lambda options, prefix: None
    steps: Callable[[Mapping[str, Any]], Literal["any", "plain", "moving", "none"]] = (
        lambda options: "any"
    )
    transforms: Callable[[Mapping[str, Any]], Sequence[UpdateTransform]] = lambda options: ()
    option_for_bound: Callable[[Mapping[str, Any]], str] = lambda options: ""

    @property
    def no_options(self) -> tuple[str, ...]:
        """The parameters of the factory that are no options of a configuration."""
        return "model", "trainer", *self.given, *self.for_code

    @property
    def asks_public_inputs(self) -> bool:
        """Tells whether the algorithm asks clients about public inputs."""
        return "public_x" in self.given

    @property
    def takes_aggregator(self) -> bool:
        """Tells whether updates may be combined by any aggregator."""
        return "aggregator" in self.given and self.sends_model


_ANY = ("none", "record", "client", "both")
_RECORD, _OPEN, _UNPROTECTED = ("record",), ("none", "record"), ("none",)
_BY_LOSS = "which weighs clients by exact losses, and no noise covers those"
_BY_ACCURACY = "whose pruning waits for exact accuracies, and no noise covers those"
_MEAN, _CLIENTS = ("aggregator",), ("num_clients",)
_BOTH_COUNTS = ("num_clients", "num_rounds")
_BUDGETS: Mapping[str, Any] = {"declared_epsilon": Sequence[Positive] | None}


def _load(name: str, module: str | None = None) -> Callable[..., FederatedAlgorithm]:
    """Finds the function that a name stands for; its file is called so where none is given."""
    return getattr(import_module(f"{__package__}.{module or name}"), name)


def _adopted(own: Any) -> Entry:
    """Takes somebody's own algorithm: an `Entry`, or a function that needs no facts."""
    if isinstance(own, Entry):
        return own
    checks.require(callable(own), "algorithm.name", "name a function or an Entry", own)
    return Entry(own, _OPEN)


ALGORITHMS: Registry[Entry] = Registry(
    {
        "fedavg": Entry(_load("fedavg"), _ANY, _MEAN, for_code=("server_optimizer", "name")),
        "fedavgm": Entry(_load("fedavgm", "fedopt"), _ANY, _MEAN),
        "fedadam": Entry(_load("fedadam", "fedopt"), _ANY, _MEAN),
        "fedyogi": Entry(_load("fedyogi", "fedopt"), _ANY, _MEAN),
        "fedadagrad": Entry(_load("fedadagrad", "fedopt"), _ANY, _MEAN),
        "fedprox": Entry(_load("fedprox"), _ANY, _MEAN),
        "propfair": Entry(_load("propfair"), _ANY, _MEAN, check_options=check_options),
        "afl": Entry(_load("afl"), _UNPROTECTED, _CLIENTS, reason=_BY_LOSS),
        "term": Entry(_load("term"), _UNPROTECTED, reason=_BY_LOSS),
        "q_ffl": Entry(
            _load("q_ffl"), _UNPROTECTED, reason=_BY_LOSS, steps=lambda options: "moving"
        ),
        "feddyn": Entry(_load("feddyn"), _OPEN, _CLIENTS),
        "splitting": Entry(_load("splitting"), _OPEN, steps=of_splitting, for_code=("name",)),
        "fedsplit": Entry(_load("fedsplit", "splitting"), _OPEN, steps=of_splitting),
        "fedpi": Entry(_load("fedpi", "splitting"), _OPEN, steps=of_splitting),
        "fedrp": Entry(_load("fedrp", "splitting"), _OPEN, steps=of_splitting),
        "reflected_fedavg": Entry(
            _load("reflected_fedavg", "splitting"), _OPEN, steps=of_splitting
        ),
        "reflected_fedprox": Entry(
            _load("reflected_fedprox", "splitting"), _OPEN, steps=of_splitting
        ),
        "scaffold": Entry(
            _load("scaffold"),
            _OPEN,
            (*_CLIENTS, *_MEAN),
            steps=steps_of,
            transforms=declared_control,
        ),
        "ifca": Entry(_load("ifca"), ("none",)),
        "dp_fedavg": Entry(_load("dp_fedavg"), ("client", "both"), _MEAN),
        "blur_lus": Entry(
            _load("blur_lus"),
            _ANY,
            _MEAN,
            transforms=declared_transforms,
            option_for_bound=option_for_bound,
        ),
        "ae_dpfl": Entry(
            _load("ae_dpfl"), _ANY, ("public_x", "num_rounds", *_MEAN), sends_model=False
        ),
        "dp_sgd": Entry(_load("dp_sgd"), ("record", "both"), _MEAN, for_code=("weight_of",)),
        "record_dp_fedavg": Entry(_load("record_dp_fedavg"), _RECORD, _CLIENTS),
        "minimum_epsilon": Entry(
            _load("minimum_epsilon"), _RECORD, _CLIENTS, budgets=smallest_budget
        ),
        "weiavg": Entry(_load("weiavg"), _RECORD, _CLIENTS, _BUDGETS),
        "pfa": Entry(_load("pfa"), _RECORD, _CLIENTS, _BUDGETS),
        "robust_hdp": Entry(_load("robust_hdp"), _RECORD, _CLIENTS),
        "noise_oracle": Entry(_load("noise_oracle"), _RECORD, _CLIENTS),
        "local_only": Entry(_load("local_only"), _OPEN),
        "r_dpcfl": Entry(
            _load("r_dpcfl"),
            _RECORD,
            _BOTH_COUNTS,
            for_code=("perturb", "name"),
            check_options=check_copies,
        ),
        "rc_dpfl": Entry(_load("rc_dpfl"), _RECORD, _BOTH_COUNTS, check_options=check_copies),
        "f_cdpfl": Entry(_load("f_cdpfl"), _RECORD, ("num_rounds",)),
        "km_cdpfl": Entry(_load("km_cdpfl"), _OPEN, _CLIENTS),
        "o_dpcfl": Entry(_load("o_dpcfl"), _OPEN, _CLIENTS),
        "fedbn": Entry(_load("fedbn"), _ANY, _MEAN, for_code=("name",), sends_model=False),
        "fedper": Entry(_load("fedper", "fedbn"), _ANY, _MEAN, sends_model=False),
        "fedrep": Entry(_load("fedrep", "fedbn"), _ANY, _MEAN, sends_model=False),
        "ditto": Entry(_load("ditto"), _ANY, _MEAN),
        "lottery_fl": Entry(
            _load("lottery_fl"), _UNPROTECTED, sends_model=False, reason=_BY_ACCURACY
        ),
        "fed_ltn": Entry(
            _load("fed_ltn"),
            _UNPROTECTED,
            sends_model=False,
            reason=_BY_ACCURACY,
            check_options=check_momentum,
        ),
        "jump_start": Entry(
            _load("jump_start"),
            _UNPROTECTED,
            sends_model=False,
            reason=_BY_ACCURACY,
            check_options=check_momentum,
        ),
        "mr_mtl": Entry(_load("mr_mtl"), _OPEN, _CLIENTS),
        "centralized": Entry(_load("centralized"), _OPEN, pools_clients=True),
    },
    _adopted,
)


def options_of(name: str) -> dict[str, Any]:
    """Lists the options of an algorithm with their defaults.

    Args:
      name: the algorithm.

    Returns:
      For each option its default; `inspect.Parameter.empty` where one must be given.
    """
    checks.one_of("algorithm.name", name, ALGORITHMS)
    entry = ALGORITHMS[name]
    return registry.options_of(entry.factory, entry.no_options)


@checked
def build(
    name: str,
    model: Model,
    trainer: LocalTrainer,
    problem: Problem,
    *,
    unit: str = "none",
    options: Mapping[str, Any] = {},
) -> FederatedAlgorithm:
    """Builds an algorithm by name.

    Args:
      name: a key of `ALGORITHMS`.
      model: what is trained.
      trainer: local training; private exactly if the unit is "record" or "both".
      problem: the facts that algorithms can be given.
      unit: what is to be protected: "none", "record", "client" or "both".
      options: options of the algorithm, see `options_of`.

    Returns:
      The algorithm.

    Raises:
      ValueError: for an unknown name, or a unit of privacy that the algorithm does not offer.
      TypeError: for an unknown or a missing option.
    """
    checks.one_of("algorithm.name", name, ALGORITHMS)
    entry = ALGORITHMS[name]
    rule = ", ".join(filter(None, (f"be one of {entry.units} for {name}", entry.reason)))
    checks.require(unit in entry.units, "privacy.unit", rule, unit)
    if entry.asks_public_inputs:
        rule = f"be given for {name}, which asks about public inputs"
        checks.require(problem.public_x is not None, "data.public_examples", rule, None)
    facts = {fact: getattr(problem, fact) for fact in (*entry.stand_in, *entry.given)}
    return entry.factory(model, trainer, **{**facts, **options})
