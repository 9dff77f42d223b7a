"""Numbers of a federation that change from round to round."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.algorithms.schedules import Curve, table_of
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.synonyms import suggestion
from fedjax_dp.engine.federation import Federation


@checked
def scheduled(
    federation: Federation,
    schedules: Mapping[str, Curve | Sequence[float] | np.ndarray],
    num_rounds: Count,
) -> Federation:
    """Lets numbers of a federation follow curves over rounds.

    In each round a number is what `hyper` has, times the factor of its curve. Factors are computed
    here, and are an argument of the compiled round: a run compiles once, and runs whose curves
    alone differ share a program. Later calls add numbers, or replace their curves.

    Guarantee: that of the federation: the ledger charges each round by the numbers that it ran
    with.

    Args:
      federation: the federation, with all wrappers that add numbers of their own.
      schedules: by dotted name in `hyper`, such as "local.learning_rate", "algorithm.mu" or
        "aggregator.noise_multiplier", the curve of a number, see `algorithms.schedules`, or a list
        of factors.
      num_rounds: the rounds for which curves are computed, at least 1; later rounds have the last
        factor.

    Returns:
      The federation, whose `hyper.factors` holds the tables.

    Raises:
      ValueError: for a name that is not that of a number, a whole number, a factor that is negative
        or not finite, or a number that some round would have out of its range.
    """
    factors = dict(federation.hyper.factors)
    for name, curve in schedules.items():
        require_scheduled(federation, name)
        factors[name] = table_of(curve, num_rounds, name)
    other = federation._replace(hyper=federation.hyper._replace(factors=factors))
    for t in sorted(set(other.hyper.alike())):
        try:
            other.check_numbers(other.hyper.at(t))
        except ValueError as error:
            text = f"schedules must keep every number in its range; in round {t}, {error}"
            raise ValueError(text) from error
    return other


def require_scheduled(federation: Federation, name: str) -> None:
    """Requires the name of a number that may take any value of a range."""
    hyper = federation.hyper._replace(factors={})
    value = hyper.number(name)
    if value is None or isinstance(value, Hyper | Mapping | tuple):
        known = names_of(hyper)
        hint = suggestion(name, known)
        raise ValueError(f"schedules must name numbers of hyper, got {name!r}{hint}")
    algorithm = federation.algorithm
    part, _, rest = name.partition(".")
    kind: Any = {
        "local": algorithm.training.ranges,
        "algorithm": algorithm.numbers.ranges,
        "aggregator": algorithm.aggregator.ranges,
    }[part]
    for word in rest.split("."):
        kind = kind.get(word) if isinstance(kind, Mapping) else None
    rule = "name numbers that need not be whole"
    is_whole = kind is not None and get_args(kind)[0] is int
    checks.require(not is_whole, "schedules", rule, name)


def names_of(hyper: Hyper) -> list[str]:
    """Lists the dotted names of all numbers."""
    return sorted(path.replace("/", ".") for path in trees.paths(hyper))
