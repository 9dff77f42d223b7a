"""All algorithms by name, for configurations and for tests that cover each of them."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm, Needs, weighted
from fedjax_dp.algorithms.blur_lus import needs_of_blur_lus
from fedjax_dp.algorithms.dp_sgd import smallest_budget
from fedjax_dp.algorithms.fed_ltn import needs_of_tickets
from fedjax_dp.algorithms.ifca import update_of_ifca, update_of_oracle
from fedjax_dp.algorithms.propfair import needs_of_propfair
from fedjax_dp.algorithms.q_ffl import NEEDS
from fedjax_dp.algorithms.r_dpcfl import needs_of_copies
from fedjax_dp.algorithms.scaffold import needs_of_scaffold, update_of_scaffold
from fedjax_dp.algorithms.splitting import needs_of_splitting
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import checks, registry
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive
from fedjax_dp.core.registry import Registry
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import UnclaimedNoise
from fedjax_dp.server.base import Aggregator


class Problem(NamedTuple):
    """Facts of an experiment that an algorithm can be given."""

    num_clients: int  # The population.
    num_rounds: int = 1  # Rounds of the whole run.
    # Combines updates: the private mean if clients are protected, else the configured aggregator;
    # None for the algorithm's own.
    aggregator: Aggregator | None = None
    # The budgets that clients declare, `[num_clients]`; None if records have no budgets.
    declared_epsilon: np.ndarray | None = None
    # Public inputs without labels, `[queries, ...]`; None if absent.
    public_x: np.ndarray | None = None

    @property
    def private_mean(self) -> Aggregator | None:
        """The aggregator if clients are protected, for algorithms that take no other."""
        is_private = self.aggregator is not None and self.aggregator.claim is not None
        return self.aggregator if is_private else None


class Entry(NamedTuple):
    """The facts of an algorithm that a configuration needs before data are read.

    Attributes:
      factory: `(model, trainer, *, facts…, options…) -> FederatedAlgorithm`.
      units: the possible units of privacy, of "none", "record", "client", "both".
      given: fields of `Problem` that are passed by these names; they are not options.
      stand_in: fields of `Problem` that are passed if the option of that name is missing, with the
        type of the option.
      for_code: keywords that no configuration can hold, such as functions.
      budgets: maps the clients' budgets of ε, `[clients]`, to those that the noise on their records
        is calibrated to; None if these are the same.
      pools_clients: whether the data of all clients are pooled before a run.
      sends_model: whether an update has the structure of the model, as discrete and correlated
        noise require.
      update_of: `(parameters, options) -> update`, the shapes that an update has where a private
        mean combines it; None if they are those of the parameters.
      reason: why there are no other units; empty if the type of algorithm implies it.
      no_clients: why clients cannot be protected, to follow the algorithm's name; empty if they
        can.
      needs: `(options) -> Needs`, of all options; a ValueError that begins with an option's name
        refuses incompatible options.
    """

    factory: Callable[..., FederatedAlgorithm]
    units: tuple[str, ...]
    given: tuple[str, ...] = ()
    stand_in: Mapping[str, Any] = {}
    for_code: tuple[str, ...] = ()
    budgets: Callable[[np.ndarray], np.ndarray] | None = None
    pools_clients: bool = False
    sends_model: bool = True
    update_of: Callable[[PyTree, Mapping[str, Any]], PyTree] | None = None
    reason: str = ""
    no_clients: str = ""
    needs: Callable[[Mapping[str, Any]], Needs] = lambda options: Needs()

    @property
    def no_options(self) -> tuple[str, ...]:
        """The parameters of the factory that are not options of a configuration."""
        return "model", "trainer", *self.given, *self.for_code

    def noised(self, params: PyTree, options: Mapping[str, Any]) -> PyTree:
        """Returns the shapes of what a private mean combines.

        Args:
          params: those of the model's parameters.
          options: of the algorithm, all of them.

        Returns:
          The shapes; a dict of parts for an update of several.
        """
        return params if self.update_of is None else self.update_of(params, options)

    @property
    def has_own_mean(self) -> bool:
        """Whether updates differ where a private mean combines them."""
        return "private_mean" in self.given or self.update_of is not None

    @property
    def asks_public_inputs(self) -> bool:
        """Whether clients are queried on public inputs."""
        return "public_x" in self.given

    @property
    def takes_aggregator(self) -> bool:
        """Whether any aggregator may combine the updates."""
        return "aggregator" in self.given and self.sends_model


_ANY = ("none", "record", "client", "both")
_RECORD, _OPEN, _UNPROTECTED = ("record",), ("none", "record"), ("none",)
_BY_LOSS = "which weights clients by exact losses, which no noise covers"
_BY_CHOICE = "whose clients choose by exact losses, which no noise covers"
_BY_ACCURACY = "whose pruning depends on exact accuracies, which no noise covers"
_LOSSES = "whose server needs the loss of every single client"
_WEIGHTS = "whose server divides by a sum of weights by loss, which noise would bring near 0"
_MASKS = "whose clients send the masks of their tickets, by which the server divides each weight"
_SINGLE = "whose server computes on the updates of single clients"
_SIZES = "which weights clients by size, budget or noise; dp_sgd under both has equal weights"
_MODELS = "whose noise is on whole models, for records alone"
_MEAN, _CLIENTS, _PRIVATE_MEAN = ("aggregator",), ("num_clients",), ("private_mean",)
_BOTH_COUNTS = ("num_clients", "num_rounds")
_BUDGETS: Mapping[str, Any] = {"declared_epsilon": Sequence[Positive] | None}


def _in(module: str, units: tuple[str, ...], *names: str, **fields: Any) -> dict[str, Entry]:
    """Makes the entries of functions in one file, named after the file by default."""
    loaded = import_module(f"{__package__}.{module}")
    return {name: Entry(getattr(loaded, name), units, **fields) for name in names or (module,)}


def _needs_of_weights(options: Mapping[str, Any]) -> Needs:
    return weighted(options["is_weighted"])


def _adopted(part: Any) -> Entry:
    """Makes the entry of a user's own algorithm, which may be a function without facts."""
    if isinstance(part, Entry):
        return part
    checks.require(callable(part), "algorithm.name", "name a function or an Entry", part)
    return Entry(part, _OPEN)


_OF_TICKETS: Mapping[str, Any] = {
    "sends_model": False,
    "reason": _BY_ACCURACY,
    "no_clients": _MASKS,
}
_SPLITTINGS = ("fedsplit", "fedpi", "fedrp", "reflected_fedavg", "reflected_fedprox")

ALGORITHMS: Registry[Entry] = Registry(
    {
        **_in("fedavg", _ANY, given=_MEAN, for_code=("server_optimizer", "name")),
        **_in("fedopt", _ANY, "fedavgm", "fedadam", "fedyogi", "fedadagrad", given=_MEAN),
        **_in("fedprox", _ANY, given=_MEAN),
        **_in("propfair", _ANY, given=_MEAN, needs=needs_of_propfair),
        **_in("afl", _UNPROTECTED, given=_CLIENTS, reason=_BY_LOSS, no_clients=_LOSSES),
        **_in("term", _UNPROTECTED, reason=_BY_LOSS, no_clients=_WEIGHTS),
        **_in(
            "q_ffl", _UNPROTECTED, reason=_BY_LOSS, no_clients=_WEIGHTS, needs=lambda options: NEEDS
        ),
        **_in("feddyn", _ANY, given=(*_CLIENTS, *_PRIVATE_MEAN)),
        **_in(
            "splitting",
            _ANY,
            "splitting",
            *_SPLITTINGS,
            given=_PRIVATE_MEAN,
            needs=needs_of_splitting,
        ),
        **_in(
            "scaffold",
            _ANY,
            given=(*_CLIENTS, *_MEAN),
            update_of=update_of_scaffold,
            needs=needs_of_scaffold,
        ),
        **_in(
            "ifca",
            ("none", "client"),
            given=_PRIVATE_MEAN,
            update_of=update_of_ifca,
            reason=_BY_CHOICE,
            needs=_needs_of_weights,
        ),
        **_in("fedavg", ("client", "both"), "dp_fedavg", given=_MEAN),
        **_in("blur_lus", _ANY, given=_MEAN, needs=needs_of_blur_lus),
        **_in("ae_dpfl", _ANY, given=("public_x", "num_rounds", *_MEAN), sends_model=False),
        **_in("dp_sgd", ("record", "both"), given=_MEAN, for_code=("weight_of",)),
        **_in("dp_sgd", _RECORD, "record_dp_fedavg", given=_CLIENTS, no_clients=_SIZES),
        **_in(
            "dp_sgd",
            _RECORD,
            "minimum_epsilon",
            given=_CLIENTS,
            budgets=smallest_budget,
            no_clients=_SIZES,
        ),
        **_in("dp_sgd", _RECORD, "weiavg", given=_CLIENTS, stand_in=_BUDGETS, no_clients=_SIZES),
        **_in("pfa", _RECORD, given=_CLIENTS, stand_in=_BUDGETS, no_clients=_SINGLE),
        **_in("robust_hdp", _RECORD, given=_CLIENTS, no_clients=_SINGLE),
        **_in("dp_sgd", _RECORD, "noise_oracle", given=_CLIENTS, no_clients=_SIZES),
        **_in("references", _OPEN, "local_only", no_clients="which sends nothing"),
        **_in(
            "r_dpcfl",
            _RECORD,
            given=_BOTH_COUNTS,
            for_code=("perturb", "name"),
            no_clients=_SINGLE,
            needs=needs_of_copies,
        ),
        **_in(
            "r_dpcfl",
            _RECORD,
            "rc_dpfl",
            given=_BOTH_COUNTS,
            for_code=("first_batch_size", "perturb"),
            no_clients=_SINGLE,
            needs=needs_of_copies,
        ),
        **_in(
            "ifca",
            _RECORD,
            "f_cdpfl",
            given=("num_rounds",),
            no_clients="whose choices and noise are accounted for records alone",
        ),
        **_in("km_cdpfl", _OPEN, given=_CLIENTS, no_clients=_SINGLE),
        **_in(
            "ifca",
            _ANY,
            "o_dpcfl",
            given=(*_CLIENTS, *_PRIVATE_MEAN),
            update_of=update_of_oracle,
            needs=_needs_of_weights,
        ),
        **_in("fedbn", _ANY, given=_MEAN, for_code=("name",), sends_model=False),
        **_in("fedbn", _ANY, "fedper", "fedrep", given=_MEAN, sends_model=False),
        **_in("ditto", _ANY, given=_MEAN),
        **_in("lottery_fl", _UNPROTECTED, **_OF_TICKETS),
        **_in("fed_ltn", _UNPROTECTED, **_OF_TICKETS, needs=needs_of_tickets),
        **_in("jump_start", _UNPROTECTED, **_OF_TICKETS, needs=needs_of_tickets),
        **_in("mr_mtl", _ANY, given=(*_CLIENTS, *_PRIVATE_MEAN)),
        **_in(
            "model_averaging",
            _OPEN,
            "warm_start_averaging",
            "retrained_averaging",
            given=_CLIENTS,
            for_code=_MEAN,
            no_clients=_MODELS,
        ),
        **_in(
            "references",
            _OPEN,
            "centralized",
            pools_clients=True,
            no_clients="which pools the records of all clients",
        ),
    },
    _adopted,
)


def options_of(name: str) -> dict[str, Any]:
    """Returns an algorithm's options and defaults; `inspect.Parameter.empty` for required ones."""
    checks.one_of("algorithm.name", name, ALGORITHMS)
    entry = ALGORITHMS[name]
    return registry.options_of(entry.factory, entry.no_options)


# For whom an algorithm is taken instead, and which, by unit of privacy.
_INSTEAD = {
    "none": ("without privacy", "fedavg"),
    "record": ("to protect records", "dp_sgd"),
    "client": ("to protect clients", "dp_fedavg"),
    "both": ("to protect both", "dp_fedavg"),
}


def require_unit(name: str, unit: str) -> None:
    """Requires a unit of privacy that an algorithm offers."""
    entry = ALGORITHMS[name]
    rule = f"be {' or '.join(entry.units)} for the algorithm {name}"
    whom, other = _INSTEAD.get(unit, _INSTEAD["none"])
    hint = f"; {whom} take another algorithm.name, such as {other}"
    if registry.is_own(name):
        hint = "; an Entry states the units of an algorithm of your own"
    if entry.no_clients and unit in ("client", "both"):
        hint = f", {entry.no_clients}{hint}"
    rule += f", {entry.reason}" if entry.reason else hint
    checks.require(unit in entry.units, "privacy.unit", rule, unit)


def require_public_inputs(name: str, count: int) -> None:
    """Requires public inputs for an algorithm that queries clients on them."""
    rule = f"be at least 1 for {name}, which queries public inputs"
    fits = count > 0 or not ALGORITHMS[name].asks_public_inputs
    checks.require(fits, "data.public_examples", rule, count)


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
      model: the model to train.
      trainer: local training; private exactly if the unit is "record" or "both".
      problem: the facts that algorithms may need.
      unit: the unit of privacy: "none", "record", "client" or "both".
      options: options of the algorithm, see `options_of`.

    Returns:
      The algorithm.

    Raises:
      ValueError: for an unknown name, or a unit of privacy that the algorithm does not offer, or
        offers and does not claim.
      TypeError: for an unknown or a missing option.
    """
    checks.one_of("algorithm.name", name, ALGORITHMS)
    entry = ALGORITHMS[name]
    require_unit(name, unit)
    require_public_inputs(name, 0 if problem.public_x is None else len(problem.public_x))
    facts = {fact: getattr(problem, fact) for fact in (*entry.stand_in, *entry.given)}
    # An option may replace a fact, such as budgets that clients declare.
    options = {**facts, **registry.grouped(entry.factory, options)}
    algorithm = entry.factory(model, trainer, **options)
    wanted = {"none": (), "both": ("client", "record")}.get(unit, (unit,))
    # The mean over realised cohorts has noise and no claim, as its statement says.
    is_open = isinstance(getattr(problem.aggregator, "claim", None), UnclaimedNoise)
    claimed = {*algorithm.claims.units, *(["client"] if is_open else [])}
    left = [each for each in wanted if each not in claimed]
    if left:
        raise ValueError(
            f"the algorithm {name} claims no privacy for {' and '.join(left)}: its factory must "
            "pass on the aggregator and the trainer that it receives"
        )
    return algorithm
