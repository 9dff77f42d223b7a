"""How the updates of a cohort become one: aggregators, summed or stacked."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_dp.core.trees import PyTree


class Aggregator(NamedTuple):
    """Turns the updates of a cohort into one aggregate.

    A *summed* aggregator lets each client contribute a pytree; the engine adds the contributions
    while it streams over the cohort, so that memory does not grow with it. A *stacked* one reads
    all contributions at once, `[slots, ...]`, with a mask of those that are real.

    Attributes:
      init: `(params) -> state` of the aggregator before the first round.
      contribute: `(state, update, weight) -> contribution` of one client; clipping happens here.
      combine: `(state, total, key) -> (state, aggregate, info)`; `total` is the masked sum in
        float32, or `(stacked, is_real)` where `is_stacked`. Noise is added here, once.
      is_stacked: whether `combine` reads the contributions one by one.
      sensitivity: `(state) -> float`, the L2 norm that one client can add to or remove from the
        sum, or None where nothing bounds it.
      event: `(state) -> DpEvent` of one release on a given cohort, or None where no noise is added.
    """

    init: Callable[[PyTree], PyTree]
    contribute: Callable[[PyTree, PyTree, Any], PyTree]
    combine: Callable[[PyTree, Any, Any], tuple[PyTree, PyTree, dict[str, Any]]]
    is_stacked: bool = False
    sensitivity: Callable[[PyTree], Any] | None = None
    event: Callable[[PyTree], Any] | None = None


def stateless(params: PyTree) -> tuple[()]:
    """Gives the state of an aggregator that keeps none.

    Args:
      params: the parameters; not read.

    Returns:
      An empty tuple.
    """
    del params
    return ()
