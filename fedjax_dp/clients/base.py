"""The contract of local training: its numbers, objective and result, and a trainer as a value."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Gt, Le
from chex import PRNGKey

from fedjax_dp.clients.client_data import ClientData, Exact, PublicClient
from fedjax_dp.core import checks, ranges
from fedjax_dp.core.marks import mark
from fedjax_dp.core.messages import Form
from fedjax_dp.core.ranges import Amount, NonNegative, Size
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import RecordClaim

RANGES: Mapping[str, Any] = {
    "learning_rate": NonNegative,
    "batch_size": Size,
    "num_epochs": Amount,
    "num_steps": Amount,
    "clip_norm": Annotated[float, Gt(0), Le(math.inf)],
    "noise_multiplier": NonNegative,
}


class LocalConfig(NamedTuple):
    """The numbers of local training, each a scalar or `[num_clients]`.

    They are traced: a sweep over them never recompiles. A batch can become smaller than the largest
    that a trainer was built with, not larger.

    Attributes:
      learning_rate: step size, at least 0; given to the optimiser factory.
      batch_size: examples per step (the expected number under Poisson sampling), at least 1; if the
        sampler draws a fixed number, a fraction is refused when training is built, and rounded down
        in a sweep.
      num_epochs: passes over the client's data, at least 0; used if `num_steps` is None.
      num_steps: local steps a round, at least 0, whatever the client's size.
      clip_norm: bound on each example's gradient under record-level privacy, above 0; infinity
        means no bound, and requires a noise multiplier of 0.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      optimizer: further numbers for the optimiser factory, such as `{"momentum": 0.9}`.
    """

    learning_rate: Any = 0.1
    batch_size: Any = 32
    num_epochs: Any = 1
    num_steps: Any = None
    clip_norm: Any = None
    noise_multiplier: Any = None
    optimizer: Any = ()

    def validate(self, num_clients: int | None = None, limits: Mapping[str, Any] = RANGES) -> None:
        """Checks every number on the host, except traced ones.

        Args:
          num_clients: the population that the arrays must match, if known.
          limits: the ranges of the numbers, of an optimiser's too where it is known.

        Raises:
          ValueError: naming the field, the rule and the value.
        """
        ranges.check(self._asdict(), limits)
        bound, noise = self.clip_norm, self.noise_multiplier
        if not any(x is None or checks.is_traced(x) for x in (bound, noise)):
            is_endless = bool(np.any(np.isinf(bound) & (np.asarray(noise) > 0)))
            rule = "be finite if noise is proportional to it"
            checks.require(not is_endless, "clip_norm", rule, bound)
        if num_clients is None:
            return
        for name, value in self._asdict().items():
            for number in jax.tree.leaves(value):
                checks.one_for_each(name, number, num_clients)

    def row(self, client: jax.typing.ArrayLike) -> "LocalConfig":
        """Reads one client's numbers.

        Args:
          client: the client's index; static or traced.

        Returns:
          The configuration with scalar leaves.
        """
        return jax.tree.map(lambda x: x if jnp.ndim(x) == 0 else jnp.asarray(x)[client], self)

    def max_batch_size(self) -> int:
        """Finds the largest batch of any client, on the host."""
        return int(np.ceil(np.max(np.asarray(self.batch_size))))


class TrainingMetrics(NamedTuple):
    """Metrics of local training, computed exactly and therefore not private.

    Each is a scalar, `Exact` if an algorithm claims privacy for records.
    """

    # Sum of the losses of all examples read, float32; NaN or infinite if one of them is.
    loss_sum: Any
    num_read: Any  # Examples read, with repetition, int32.
    num_clipped: Any  # Of these, how many had their gradient clipped, float32.
    num_computed: Any  # Examples computed, padding included, int32.
    num_overflow: Any  # Examples drawn that found no slot, int32.
    update_norm: Any  # L2 norm of what is sent, float32.
    # The form in which the update is sent, as update transforms declare, or None; static.
    form: Form | None = None

    def of_changed_update(self) -> "TrainingMetrics":
        """Returns the metrics of an update that is scaled or moved, and in no narrower type."""
        return self if self.form is None else self._replace(form=self.form.of_type(None))

    def of_part(self, name: str) -> "TrainingMetrics":
        """Returns the metrics of an update that is a dict, one entry of which is the delta."""
        if self.form is None:
            return self
        return self._replace(form=dataclasses.replace(self.form, part=name))

    def reported_by(self, client: ClientData | PublicClient) -> "TrainingMetrics":
        """Returns the metrics, each `Exact` if only an opener gives the client's records."""
        if isinstance(client, ClientData):
            return self
        exact: dict[str, Any] = {
            name: Exact(mark(m)) for name, m in self._asdict().items() if name != "form"
        }
        return self._replace(**exact)


class LocalResult(NamedTuple):
    """What local training returns.

    Attributes:
      delta: local minus start parameters, the structure of the parameters.
      params: the local parameters at the end.
      weight: the client's number of examples, float32.
      num_steps: optimiser steps taken, int32.
      metrics: for reporting.
    """

    delta: PyTree
    params: PyTree
    weight: jax.Array
    num_steps: jax.Array
    metrics: TrainingMetrics


# `(loss, params) -> value`, scalars; smooth wherever a gradient is to flow.
Value: TypeAlias = Callable[[jax.Array, PyTree], jax.Array]


class Objective(NamedTuple):
    """What local training minimises, until when, and on which entries.

    Attributes:
      value: of the mean loss of a batch; if training is private, of the loss of each example, and
        clipped with it. None for the loss itself.
      until: `(state of the gradient transform) -> bool`, ends training early, which costs as much
        as all its steps; None for all steps.
      mask: the entries to train, bools of the structure of the parameters, None for what is trained
        whole; all others stay unchanged, bit for bit.
    """

    value: Value | None = None
    until: Callable[[Any], jax.Array] | None = None
    mask: PyTree = None


class Train(Protocol):
    """Trains one client, from `start` to a `LocalResult`."""

    def __call__(
        self,
        start: PyTree,
        client: ClientData | PublicClient,
        config: LocalConfig,
        key: PRNGKey,
        *,
        gradient_transform: optax.GradientTransformation | None = None,
        update_transform: Callable[[PyTree, Any], PyTree] | None = None,
        objective: Objective = Objective(),
    ) -> LocalResult:
        """Trains one client from `start`, with its own scalar numbers and a key of the round.

        `gradient_transform` is applied to every gradient before the optimiser, noised if training
        is private; `update_transform` after those of the trainer, refused under the same rules.
        """


# `(size, config) -> steps` of a client with this many records.
NumSteps: TypeAlias = Callable[[Any, LocalConfig], Any]


class CheckNoised(Protocol):
    """Refuses noise on parameters that training does not change."""

    def __call__(self, is_sent: PyTree | None = None) -> None:
        """Raises a ValueError; `is_sent` marks the parameters that are sent, None all of them."""


def check_plain_sgd(is_plain: bool, argument: str, reason: str, value: Any) -> None:
    """Refuses training whose delta is not a sum of gradients times learning rates."""
    rule = f"take plain steps of `optax.sgd` and send its delta unchanged, since {reason}"
    checks.require(is_plain, argument, rule, value)


class LocalTrainer(NamedTuple):
    """One client's work as a pure function, with its declarations for the accounting.

    Attributes:
      train: trains one client, see `Train`.
      config: the numbers of training for the population.
      num_steps: `(size, config) -> steps` of a client of that size.
      claim: the guarantee of one run of `train` to a record, its numbers being a `LocalConfig`;
        None if absent.
      sends: "gradients" if a step is the learning rate times the gradient and the delta is sent
        unchanged, which control variates need; "delta" with any other optimiser; "transformed" if
        update transforms change the delta.
      check_noised: raises a ValueError if noise on the delta would move what training leaves
        unchanged.
      reading_whole: `(whole_batches) -> LocalTrainer` for which an infinite batch size means all
        records of a client; None if not offered.
      ranges: of the numbers of `config`, see `core.ranges`.
    """

    train: Train
    config: LocalConfig
    num_steps: NumSteps
    claim: RecordClaim | None
    sends: Literal["gradients", "delta", "transformed"] = "delta"
    check_noised: CheckNoised = lambda is_sent=None: None
    reading_whole: Callable[[Any], "LocalTrainer"] | None = None
    ranges: Mapping[str, Any] = RANGES

    @property
    def is_private(self) -> bool:
        """Whether every gradient is clipped by record and noised."""
        return self.claim is not None

    @property
    def is_plain_sgd(self) -> bool:
        """Whether the delta is a sum of gradients times learning rates."""
        return self.sends == "gradients"

    def require_open(self, reason: str) -> None:
        """Refuses private training, for algorithms that read records in other ways.

        Args:
          reason: how they read records, for the error.

        Raises:
          ValueError: if training is private.
        """
        checks.require(not self.is_private, "trainer", f"be non-private: {reason}", "a private one")

    def require_plain_sgd(self, reason: str) -> None:
        """Refuses training from whose delta gradients cannot be computed.

        Args:
          reason: what the algorithm does with gradients, for the error.

        Raises:
          ValueError: if `sends` is not "gradients".
        """
        value = "another optimiser or an update transform"
        check_plain_sgd(self.is_plain_sgd, "trainer", reason, value)

    def require_untransformed(self, reason: str) -> None:
        """Refuses update transforms, for algorithms that send no delta.

        Args:
          reason: what they send, for the error.

        Raises:
          ValueError: if `sends` is "transformed".
        """
        rule = f"have no update transforms: {reason}"
        is_whole = self.sends != "transformed"
        checks.require(is_whole, "trainer", rule, "one that transforms its delta")

    def private_claim(self) -> RecordClaim:
        """Returns the claim; raises a ValueError without one."""
        if self.claim is None:
            raise ValueError(
                "trainer must clip and noise every record's gradient, got one that does not"
            )
        return self.claim
