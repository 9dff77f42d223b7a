"""How the updates of a cohort become one: aggregators, summed or stacked."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
from chex import PRNGKey

from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import ClientClaim, UnclaimedNoise

# `(state, numbers, contribution, public_key, client_key) -> message`.
Encoder: TypeAlias = Callable[[PyTree, Any, PyTree, PRNGKey, PRNGKey], PyTree]
# `(state, numbers, update, weight, sender) -> contribution`.
Contribute: TypeAlias = Callable[[PyTree, Any, PyTree, Any, Any], PyTree]


class RoundKey(NamedTuple):
    """The key of a round's aggregation, in two halves.

    Attributes:
      public: what all clients and the server may know, such as the key of a rotation.
      private: what the server alone knows, such as the key of its noise.
    """

    public: PRNGKey
    private: PRNGKey


class Summed(NamedTuple):
    """Turns the sum of a cohort's contributions into an aggregate.

    The engine adds contributions while it streams over the cohort, so that memory does not grow
    with it.

    Attributes:
      init: `(structure) -> state` before the first round; `structure` are the shapes of an update.
      contribute: `(state, numbers, update, weight, sender) -> contribution` of the client `sender`;
        clipping happens here.
      combine: `(state, numbers, total, key) -> (state, aggregate, info)`; `total` is the sum in
        float32 over those who contribute, `key` a `RoundKey`. Noise is added here, once.
      encoders: what a client makes of its contribution before it leaves (rotation, rounding, a
        share of noise), in order: `(state, numbers, contribution, public_key, client_key) ->
        message`. A client whose update is not finite encodes zeros.
      numbers: what may be swept, by name, such as clip norms and noise multipliers; these are the
        values that a run starts with, `Hyper.aggregator` those that it uses.
      ranges: of these numbers, see `core.ranges`.
      claim: what is promised to a client, `UnclaimedNoise` where noise is added and nothing is
        promised, None where there is no noise.
      sent_up: `(update, weight) -> message`, what leaves the client, where that is other than what
        `contribute` reads of update and weight: for whoever counts bytes, see `core.messages`,
        in whose forms the update may be.
    """

    init: Callable[[PyTree], PyTree]
    contribute: Contribute
    combine: Callable[[PyTree, Any, Any, RoundKey], tuple[PyTree, PyTree, dict[str, Any]]]
    encoders: tuple[Encoder, ...] = ()
    numbers: Mapping[str, Any] = {}
    ranges: Mapping[str, Any] = {}
    claim: ClientClaim | UnclaimedNoise | None = None
    sent_up: Callable[[PyTree, Any], PyTree] | None = None


class Stack(NamedTuple):
    """All contributions of a cohort, one by one.

    Attributes:
      contributions: `[slots, ...]`; zeros where nobody contributes.
      senders: the client of each slot, `[slots]`, int32; anything where nobody contributes.
      is_real: which slots hold a contribution, `[slots]`, bool.
    """

    contributions: PyTree
    senders: jax.Array
    is_real: jax.Array


class Stacked(NamedTuple):
    """Turns all contributions of a cohort, side by side, into an aggregate.

    Attributes:
      init: as in `Summed`.
      contribute: as in `Summed`.
      combine: `(state, numbers, stack, key) -> (state, aggregate, info)`; `stack` is a `Stack`.
      numbers: as in `Summed`.
      ranges: as in `Summed`.
      claim: as in `Summed`.
      sent_up: as in `Summed`.
    """

    init: Callable[[PyTree], PyTree]
    contribute: Contribute
    combine: Callable[[PyTree, Any, Stack, RoundKey], tuple[PyTree, PyTree, dict[str, Any]]]
    numbers: Mapping[str, Any] = {}
    ranges: Mapping[str, Any] = {}
    claim: ClientClaim | UnclaimedNoise | None = None
    sent_up: Callable[[PyTree, Any], PyTree] | None = None


Aggregator: TypeAlias = Summed | Stacked


def bound_of(aggregator: Aggregator | None, structure: PyTree, numbers: Any) -> Any:
    """Finds how long an update may be before an aggregator shortens it.

    Args:
      aggregator: one that claims privacy for clients.
      structure: the shapes of an update.
      numbers: the aggregator's; may be traced.

    Returns:
      The L2 bound, at the start of the run where it adapts.

    Raises:
      ValueError: if nothing bounds an update.
    """
    claim = None if aggregator is None else aggregator.claim
    if not isinstance(claim, ClientClaim):
        raise ValueError("aggregator must bound an update, got one that claims no sensitivity")
    assert aggregator is not None
    return claim.sensitivity(aggregator.init(structure), numbers).l2


def stateless(structure: PyTree) -> tuple[()]:
    """Gives the state of an aggregator that keeps none.

    Args:
      structure: the shapes of an update; not read.

    Returns:
      An empty tuple.
    """
    del structure
    return ()
