"""The contract of an aggregator: how the updates of a cohort become one aggregate."""

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import ClientClaim, UnclaimedNoise


class Fate(enum.IntEnum):
    """The outcome of a slot of the cohort.

    Attributes:
      EMPTY: no client was drawn into it.
      CONTRIBUTED: the client's message is in the sum.
      NOT_FINITE: the client's update was not finite, or too large to be summed, and it sent zeros;
        or the aggregate of the round was not finite.
      UNANNOUNCED: drawn, but not notified; the client sent nothing.
      DROPPED: drawn and notified, but no message arrived.
      LATE: the message arrived after the sum was closed.
    """

    EMPTY = 0
    CONTRIBUTED = 1
    NOT_FINITE = 2
    UNANNOUNCED = 3
    DROPPED = 4
    LATE = 5


@flax.struct.dataclass
class Roster:
    """The cohort as known to clients and server while messages are made.

    Attributes:
      clients: the client of each slot, `[slots]`, int32; arbitrary in unannounced slots.
      is_announced: which slots hold a client that was notified, `[slots]`, bool; some of these may
        drop out later.
    """

    clients: jax.Array
    is_announced: jax.Array

    @classmethod
    def of_one(cls) -> "Roster":
        """Makes the cohort of client 0 alone, for shapes, audits and traces."""
        return cls(jnp.zeros(1, jnp.int32), jnp.ones(1, bool))


@flax.struct.dataclass
class Sender:
    """A contributing client, and all that it may use besides its update.

    A client that reads the roster learns the cohort. Amplification by sampling requires a secret
    cohort, so it then holds against outsiders only.

    Attributes:
      index: the client's index in the population, int32.
      weight: its weight, float32, at least 0.
      key: the client's own key for this round's message.
      public_key: the key shared by all clients and the server, such as that of a rotation.
      roster: the cohort.
    """

    index: jax.Array
    weight: jax.Array
    key: PRNGKey
    public_key: PRNGKey
    roster: Roster


@flax.struct.dataclass
class Diagnostic:
    """An exact figure in a message, for the experimenter; no claim covers it.

    A simulation adds such figures up with the messages. `secure.masked` does not send them: `None`
    is in their place in the sum.
    """

    value: jax.Array


@flax.struct.dataclass
class Close:
    """The end of a round's aggregation, as the server knows it.

    Attributes:
      roster: the cohort.
      fates: what became of each slot, a `Fate`, `[slots]`, int8.
      public_key: the key shared with all clients.
      private_key: the server's own key, such as that of its noise.
    """

    roster: Roster
    fates: jax.Array
    public_key: PRNGKey
    private_key: PRNGKey

    @property
    def contributes(self) -> jax.Array:
        """The slots whose contribution counts, `[slots]`, bool."""
        return self.fates == Fate.CONTRIBUTED


class Encode(Protocol):
    """Makes the message that leaves a client: rotation, rounding, masks, a share of noise."""

    def __call__(
        self, state: PyTree, numbers: Any, contribution: PyTree, sender: Sender, /
    ) -> PyTree:
        """Returns the message; a client whose update is not finite encodes zeros."""


# The other functions of an aggregator, as `Summed` describes them. Clipping happens in
# `Contribute`, whose results that are not finite the engine replaces by zeros; noise of the server
# is added in `Combine`, once.
Init: TypeAlias = Callable[[PyTree], PyTree]
Contribute: TypeAlias = Callable[[PyTree, Any, PyTree, Sender], PyTree]
Combine: TypeAlias = Callable[[PyTree, Any, PyTree, Close], tuple[PyTree, PyTree, dict[str, Any]]]
Broadcast: TypeAlias = Callable[[PyTree], PyTree]
Message: TypeAlias = Callable[[PyTree, jax.Array], PyTree]


def nothing(state: PyTree, /) -> tuple[()]:
    """Sends clients nothing."""
    del state
    return ()


def update_and_weight(update: PyTree, weight: jax.Array, /) -> PyTree:
    """Sends the update and its weight.

    Args:
      update: of a client.
      weight: of the client.

    Returns:
      The message.
    """
    return update, weight


def update_alone(update: PyTree, weight: jax.Array, /) -> PyTree:
    """Sends the update, for an aggregator with equal weights.

    Args:
      update: of a client.
      weight: of the client, which is not sent.

    Returns:
      The message.
    """
    del weight
    return update


class _Fields(NamedTuple):
    init: Init
    contribute: Contribute
    combine: Combine
    encode: Encode | None = None
    numbers: Mapping[str, Any] = {}
    ranges: Mapping[str, Any] = {}
    claim: ClientClaim | UnclaimedNoise | None = None
    broadcast: Broadcast = nothing
    message: Message = update_and_weight


class Summed(_Fields):
    """Turns the sum of a cohort's messages into an aggregate.

    The engine adds messages while it streams over the cohort, so that memory does not grow with it.

    Attributes:
      init: `(structure) -> state` before the first round; `structure` has the shapes of an update.
      contribute: `(state, numbers, update, sender) -> contribution` of one client, see `Sender`.
      combine: `(state, numbers, total, close) -> (state, aggregate, info)`, see `Close`; `total`
        is the sum, in float32, over the clients that sent a message.
      encode: `(state, numbers, contribution, sender) -> message`, what the client sends; None to
        send the contribution itself.
      numbers: initial values by name, such as clip norms and noise multipliers; a run uses those of
        `Hyper.aggregator`.
      ranges: of these numbers, see `core.ranges`.
      claim: the guarantee for a client, `UnclaimedNoise` for noise without a guarantee, None
        without noise.
      broadcast: `(state) -> message`, the part of the state that is sent to clients. `contribute`
        and `encode` get this message instead of the state.
      message: `(update, weight) -> message`, what a client sends, for counting bytes:
        `update_and_weight`, `update_alone`, or the form that `encode` makes.
    """


class Stacked(_Fields):
    """Turns the stacked messages of a cohort into an aggregate.

    Attributes:
      init: as in `Summed`.
      contribute: as in `Summed`.
      combine: as in `Summed`, but `total` holds the messages, each leaf `[slots, ...]`, in the
        order of `close.roster`; zeros where `close.contributes` is false.
      encode: as in `Summed`.
      numbers: as in `Summed`.
      ranges: as in `Summed`.
      claim: as in `Summed`.
      broadcast: as in `Summed`.
      message: as in `Summed`.
    """


Aggregator: TypeAlias = Summed | Stacked


def bound_of(aggregator: Aggregator | None, structure: PyTree, numbers: Any) -> Any:
    """Returns the L2 norm that an aggregator clips updates to, at the start if it adapts."""
    claim = None if aggregator is None else aggregator.claim
    if not isinstance(claim, ClientClaim):
        raise ValueError("aggregator must bound an update, got one that claims no sensitivity")
    assert aggregator is not None
    return claim.sensitivity(aggregator.init(structure), numbers).l2


def stateless(structure: PyTree) -> tuple[()]:
    """Returns an empty state.

    Args:
      structure: the shapes of an update; not read.

    Returns:
      An empty tuple.
    """
    del structure
    return ()
