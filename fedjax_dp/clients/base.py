"""What a client is in a compiled round: its data, its numbers, and what it returns."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt, Le

from fedjax_dp.core import checks, ranges
from fedjax_dp.core.dependence import mark
from fedjax_dp.core.messages import Form
from fedjax_dp.core.ranges import Amount, NonNegative, Size
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import RecordClaim, RecordEvent

RANGES: Mapping[str, Any] = {
    "learning_rate": NonNegative,
    "batch_size": Size,
    "num_epochs": Amount,
    "num_steps": Amount,
    "clip_norm": Annotated[float, Gt(0), Le(math.inf)],
    "noise_multiplier": NonNegative,
}


class LocalConfig(NamedTuple):
    """The numbers of local training, each one scalar for everybody or `[num_clients]`.

    They are traced: a sweep over them never recompiles. A batch can become smaller than the largest
    that a trainer was built with, not larger.

    Attributes:
      learning_rate: step size, at least 0; given to the optimiser factory.
      batch_size: examples a step (the expected number under Poisson sampling), at least 1; where a
        sampler draws a fixed number, a fraction is refused when training is built, and rounded down
        where it is swept.
      num_epochs: passes over the client's data, at least 0; used where `num_steps` is None.
      num_steps: local steps a round, at least 0, whatever the client's size.
      clip_norm: bound on each example's gradient under record-level privacy, above 0; infinity
        bounds nothing, and goes with a noise multiplier of 0 alone.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      optimizer: further numbers that the optimiser factory takes, such as `{"momentum": 0.9}`.
    """

    learning_rate: Any = 0.1
    batch_size: Any = 32
    num_epochs: Any = 1
    num_steps: Any = None
    clip_norm: Any = None
    noise_multiplier: Any = None
    optimizer: Any = ()

    def validate(self, num_clients: int | None = None) -> None:
        """Checks every number on the host; traced ones cannot be looked at.

        Args:
          num_clients: the population that the arrays must match, where it is known.

        Raises:
          ValueError: naming the field, the rule and the value.
        """
        ranges.check(self._asdict(), RANGES)
        bound, noise = self.clip_norm, self.noise_multiplier
        if not any(x is None or isinstance(x, jax.core.Tracer) for x in (bound, noise)):
            is_endless = bool(np.any(np.isinf(bound) & (np.asarray(noise) > 0)))
            rule = "be finite where noise is to be in proportion to it"
            checks.require(not is_endless, "clip_norm", rule, bound)
        if num_clients is None:
            return
        rule = f"be a scalar or have one entry for each of the {num_clients} clients"
        for name, value in self._asdict().items():
            for number in jax.tree.leaves(value):
                shape = np.shape(number)
                checks.require(shape in ((), (num_clients,)), name, rule, shape)

    def row(self, client: jax.typing.ArrayLike) -> "LocalConfig":
        """Reads one client's numbers.

        Args:
          client: the client's index; static or traced.

        Returns:
          The configuration with scalar leaves.
        """
        return jax.tree.map(lambda x: x if jnp.ndim(x) == 0 else jnp.asarray(x)[client], self)

    def max_batch_size(self) -> int:
        """Finds the largest batch that any client may ask for, on the host."""
        return int(np.ceil(np.max(np.asarray(self.batch_size))))


@flax.struct.dataclass
class Exact:
    """A number that no noise protects: it is for people, and nothing is computed with it.

    Under a claim for records the metrics of local training are such, so that an algorithm can
    return them as metrics and use them for nothing else. The engine follows the number through the
    round: an update, a weight or a client state that is computed from it is refused.

    Attributes:
      value: the number.
    """

    value: jax.Array


class _SideBySide:
    """A client that others of its chunk are computed beside."""

    chunk_axis: str | None

    def widest(self, count: jax.Array) -> jax.Array:
        """Finds the largest of a count over the clients that are computed side by side.

        Args:
          count: this client's number of passes through a loop body.

        Returns:
          The number of passes that the compiled loop makes.
        """
        return count if self.chunk_axis is None else jax.lax.pmax(count, self.chunk_axis)


@flax.struct.dataclass
class PublicClient(_SideBySide):
    """What may be known of a client without its records: who it is and how much it holds.

    What promises to read no records is handed this, so that it cannot. An algorithm that claims
    privacy for records is handed it too, with an `opener`: what is charged may read, all else not.

    Attributes:
      size: how many records it owns, int32; 0 for a client without data; taken as public.
      index: the client's index in the population, int32.
      limit: the largest size in the population; static.
      chunk_axis: the name of the vmapped client axis, or None where clients run one by one; static.
      round: rounds done before this one, int32.
      stage: the stage of the round, int32.
      opener: `(reader, event) -> ClientData`, or a refusal; None where nothing may be read; static.
    """

    size: jax.Array
    index: jax.Array
    limit: int = flax.struct.field(pytree_node=False)
    chunk_axis: str | None = flax.struct.field(pytree_node=False, default=None)
    round: jax.typing.ArrayLike = 0
    stage: jax.typing.ArrayLike = 0
    opener: Callable[..., "ClientData"] | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def examples(self) -> PyTree:
        """Refuses: there are no records here."""
        raise _unread("client.examples")

    def gather(self, indices: jax.Array) -> PyTree:
        """Refuses: there are no records here.

        Args:
          indices: as for `ClientData.gather`.

        Returns:
          Nothing.

        Raises:
          ValueError: always.
        """
        raise _unread("client.gather")

    def public(self) -> "PublicClient":
        """Gives the same without its opener."""
        return self.replace(opener=None)  # type: ignore[attr-defined]

    def read_by(self, reader: str, event: RecordEvent | None) -> "ClientData":
        """Opens the records to what states its price.

        Args:
          reader: what is about to read, in words.
          event: `(size, config) -> DpEvent` of what it reveals, or None where it has none.

        Returns:
          The client with its records.

        Raises:
          ValueError: if that is not covered by what is claimed for records.
        """
        if self.opener is None:
            raise _unread(reader)
        return self.opener(reader, event)

    def for_people(self, metrics: "TrainingMetrics") -> "TrainingMetrics":
        """Marks what was computed from records without noise.

        Args:
          metrics: scalars.

        Returns:
          The same, each `Exact`.
        """
        exact: dict[str, Any] = {
            name: Exact(mark(m)) for name, m in metrics._asdict().items() if name != "form"
        }
        return metrics._replace(**exact)


def _unread(what: str) -> ValueError:
    return ValueError(
        "client must be asked for what is public where no records may be read: its size, its index "
        f"and the round, got {what}"
    )


@flax.struct.dataclass
class ClientData(_SideBySide):
    """One client's view of the flat store, inside a compiled round.

    Attributes:
      examples: the whole store, each array `[num_examples, ...]`.
      start: the client's first row, int32.
      size: as in `PublicClient`.
      index: as in `PublicClient`.
      limit: as in `PublicClient`.
      chunk_axis: as in `PublicClient`.
      round: as in `PublicClient`.
      stage: as in `PublicClient`.
      validation: a second split of the client's own data, or None where the population has none.
    """

    examples: PyTree
    start: jax.Array
    size: jax.Array
    index: jax.Array
    limit: int = flax.struct.field(pytree_node=False)
    chunk_axis: str | None = flax.struct.field(pytree_node=False, default=None)
    round: jax.typing.ArrayLike = 0
    stage: jax.typing.ArrayLike = 0
    validation: "ClientData | None" = None

    def gather(self, indices: jax.Array) -> PyTree:
        """Reads some of the client's examples.

        Args:
          indices: positions within the client, from 0 to `size - 1`; padding may hold anything.

        Returns:
          The examples, each array `[*indices.shape, ...]`.
        """
        return jax.tree.map(
            lambda a: a[jnp.clip(self.start + indices, 0, a.shape[0] - 1)], self.examples
        )

    def public(self, opener: Callable[..., "ClientData"] | None = None) -> PublicClient:
        """Leaves the records away.

        Args:
          opener: who may read them nevertheless, see `PublicClient`; nobody where it is None.

        Returns:
          What remains.
        """
        return PublicClient(
            self.size, self.index, self.limit, self.chunk_axis, self.round, self.stage, opener
        )

    def read_by(self, reader: str, event: RecordEvent | None) -> "ClientData":
        """Gives the client itself: its records are open to whoever holds it.

        Args:
          reader: as for `PublicClient.read_by`.
          event: as for `PublicClient.read_by`.

        Returns:
          The client.
        """
        del reader, event
        return self

    def for_people(self, metrics: "TrainingMetrics") -> "TrainingMetrics":
        """Gives metrics as they are: whoever holds the records may compute with them.

        Args:
          metrics: as for `PublicClient.for_people`.

        Returns:
          The same.
        """
        return metrics


class TrainingMetrics(NamedTuple):
    """What local training tells people, computed exactly and therefore not private.

    Each is a scalar, `Exact` where an algorithm claims privacy for records.

    Attributes:
      loss_sum: sum of the losses of all examples read, float32.
      num_read: examples read, with repetition, int32.
      num_clipped: of these, how many had their gradient clipped, float32.
      num_computed: examples that were computed, padding included, int32.
      num_overflow: examples that were drawn and found no slot, int32.
      update_norm: L2 norm of what is sent, float32.
      form: in which form the update leaves, as update transforms say; None where they say nothing.
        It is static, and computed from no record.
    """

    loss_sum: Any
    num_read: Any
    num_clipped: Any
    num_computed: Any
    num_overflow: Any
    update_norm: Any
    form: Form | None = None

    def of_changed_update(self) -> "TrainingMetrics":
        """Gives the same for an algorithm that sends the delta scaled or moved.

        Returns:
          The metrics, for an update that is in no narrower type any more.
        """
        return self if self.form is None else self._replace(form=self.form.of_type(None))


class LocalResult(NamedTuple):
    """What local training returns.

    Attributes:
      delta: local minus start parameters, the structure of the parameters.
      params: the local parameters at the end.
      weight: the client's number of examples, float32.
      num_steps: optimiser steps taken, int32.
      metrics: for people.
    """

    delta: PyTree
    params: PyTree
    weight: jax.Array
    num_steps: jax.Array
    metrics: TrainingMetrics


class LocalTrainer(NamedTuple):
    """One client's work as a pure function, with what the accounting must know of it.

    Attributes:
      train: `(start, client, config, key, *, gradient_transform, update_transform, penalty,
        objective, until, mask) -> LocalResult`; the optional Optax transform sees every gradient
        before the optimiser does, noised where training is private, the optional update transform
        comes behind those of the trainer and is refused as they are, the optional penalty,
        `(params) -> scalar`, is added to the loss of every example and clipped with it; the
        optional objective, `(loss) -> value`, is minimised in place of the mean loss of a batch or,
        where training is private, in place of each example's; the optional `until`, `(state of the
        gradient transform) -> bool`, ends training early, which costs no more than all its steps;
        the optional mask, bools of the structure of the parameters with None for what is trained
        whole, marks the entries that are trained, and all others stay as they were, bit for bit.
      config: the numbers of training for the population.
      num_steps: `(size, config) -> steps` of a client of that size.
      claim: what one run of `train` promises to a record, its numbers being a `LocalConfig`; None
        where nothing is promised.
      is_plain_sgd: whether a step is the learning rate times the gradient, and the delta leaves the
        client as it is; what control variates are computed from.
      has_transforms: whether deltas pass through update transforms before they leave.
      check_noised: `(is_sent)` raises a ValueError if noise on the delta would move what training
        leaves alone; of parameters that are not sent it asks nothing, all are where it is left out.
      reading_whole: `(whole_batches) -> LocalTrainer` of the same training, which takes an infinite
        batch size for a step on all records of the client; None where that is not offered.
    """

    train: Callable[..., LocalResult]
    config: LocalConfig
    num_steps: Callable[[Any, LocalConfig], Any]
    claim: RecordClaim | None
    is_plain_sgd: bool = False
    has_transforms: bool = False
    check_noised: Callable[..., None] = lambda is_sent=None: None
    reading_whole: Callable[..., "LocalTrainer"] | None = None

    @property
    def is_private(self) -> bool:
        """Tells whether every gradient is clipped by record and noised."""
        return self.claim is not None

    def require_open(self, reason: str) -> None:
        """Refuses private training, for algorithms that read records in other ways.

        Args:
          reason: what they do, in words.

        Raises:
          ValueError: if training is private.
        """
        checks.require(not self.is_private, "trainer", f"be non-private: {reason}", "a private one")

    def require_plain_sgd(self, reason: str) -> None:
        """Refuses training whose delta does not tell its gradients.

        Args:
          reason: what the algorithm does with them, in words.

        Raises:
          ValueError: if training does not take plain steps of `optax.sgd`, or transforms its delta.
        """
        rule = f"take plain steps of `optax.sgd` and send its delta unchanged, since {reason}"
        checks.require(
            self.is_plain_sgd, "trainer", rule, "another optimiser or an update transform"
        )

    def require_untransformed(self, reason: str) -> None:
        """Refuses update transforms, for algorithms that send no delta.

        Args:
          reason: what they send, in words.

        Raises:
          ValueError: if deltas pass through transforms.
        """
        rule = f"have no update transforms: {reason}"
        checks.require(not self.has_transforms, "trainer", rule, "one that transforms its delta")

    def private_claim(self) -> RecordClaim:
        """Gives the claim, for algorithms that promise privacy for records.

        Returns:
          What one run of `train` promises.

        Raises:
          ValueError: if nothing is claimed.
        """
        if self.claim is None:
            raise ValueError(
                "trainer must clip and noise every record's gradient, got none that does"
            )
        return self.claim
