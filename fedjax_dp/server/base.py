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
      init: `(server) -> state` of the aggregator before the first round.
      contribute: `(state, update, weight) -> contribution` of one client; clipping happens here.
      combine: `(state, total, key) -> (state, aggregate, info)`; `total` is the masked sum in
        float32, or `(stacked, is_real)` where `is_stacked`. Noise is added here, once.
      encode: `(state, contribution, round_key, client_key) -> message`, what a client makes of its
        contribution before it leaves (rotation, rounding, a share of noise); `round_key` is that of
        `combine`. A client whose update is not finite encodes zeros. None sends it as it is.
      is_stacked: whether `combine` reads the contributions one by one.
      sensitivity: `(state) -> Sensitivity` of the sum, or None where nothing bounds it.
      event: `(state) -> DpEvent` of one release on a given cohort, or None where no noise is added.
      min_separation: rounds that must lie between two participations of a client for the event to
        hold, from one to its next; 1 for noise that is drawn afresh each round.
      min_participants: how many clients must take part in every round for the event to hold, since
        each adds its share of the noise.
      adds_noise: whether noise is added though no event claims anything for it.
    """

    init: Callable[[PyTree], PyTree]
    contribute: Callable[[PyTree, PyTree, Any], PyTree]
    combine: Callable[[PyTree, Any, Any], tuple[PyTree, PyTree, dict[str, Any]]]
    encode: Callable[[PyTree, PyTree, Any, Any], PyTree] | None = None
    is_stacked: bool = False
    sensitivity: Callable[[PyTree], Any] | None = None
    event: Callable[[PyTree], Any] | None = None
    min_separation: int = 1
    min_participants: int = 0
    adds_noise: bool = False

    @property
    def is_noised(self) -> bool:
        """Tells whether noise lands on what clients send, whatever is claimed for it."""
        return self.event is not None or self.adds_noise


def stateless(server: PyTree) -> tuple[()]:
    """Gives the state of an aggregator that keeps none.

    Args:
      server: the server's state; not read.

    Returns:
      An empty tuple.
    """
    del server
    return ()
