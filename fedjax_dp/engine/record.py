"""The outputs of a round: a record for the ledger, and info for people."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.server.base import Fate

# In a slot of a record: a client that took part without being drawn.
OTHERS = -2


class RoundRecord(NamedTuple):
    """All that the ledger reads of a round.

    Attributes:
      clients: the drawn clients, `[slots]`, int32; -1 in empty slots, `OTHERS` where the step of a
        wrapper ran a client that was not drawn. A run stores as many slots as
        its largest cohort has clients.
      fate: what became of each slot, a `Fate`, `[slots]`, int8.
      overflow: the number of drawn clients without a slot, int32.
      stage: the stage of the round, int32.
      is_released: whether the round's aggregate left the server, bool.
      digest: of the numbers of the round that prices may depend on, `[2]`, uint32; None in a record
        that was made by hand, which is charged unchecked.
    """

    clients: jax.Array
    fate: jax.Array
    overflow: jax.Array
    stage: jax.Array
    is_released: jax.Array
    digest: jax.Array | None = None

    def count(self, *fates: Fate) -> Any:
        """Counts the slots of some fates.

        Args:
          *fates: the fates.

        Returns:
          The count, `[rounds]` for several rounds.
        """
        return np.sum(np.isin(np.asarray(self.fate), fates), axis=-1)

    @property
    def num_drawn(self) -> Any:
        """The number of clients that were drawn into a slot."""
        return np.sum(np.asarray(self.fate) != Fate.EMPTY, axis=-1)

    @property
    def num_announced(self) -> Any:
        """The number of clients that were informed of their participation."""
        return self.num_drawn - self.count(Fate.UNANNOUNCED)


def require_chargeable(record: RoundRecord, num_clients: int, num_stages: int | None) -> None:
    """Requires a record whose clients and stages can be charged, wherever it comes from.

    A client that is in one release twice moves it twice as far, which costs more than two releases.
    """
    checks.require(isinstance(record, RoundRecord), "record", "be a RoundRecord", record)
    priced = {name: getattr(record, name) for name in ("clients", "fate", "stage", "digest")}
    if record.digest is None:
        del priced["digest"]
    found = {name: _integers(f"{name} of a record", value) for name, value in priced.items()}
    clients, fates = found["clients"], found["fate"]
    rule = "be numbers by round and slot"
    checks.require(clients.ndim == 2, "clients of a record", rule, f"{clients.ndim} axes")
    rule = (
        "be those that were drawn, which is what is charged: the step of a wrapper ran others; let "
        "its `draw` choose them"
    )
    checks.require(not np.any(clients == OTHERS), "clients of a record", rule, "others")
    limit = checks.COUNT_LIMIT if num_stages is None else num_stages
    ends = {"clients": (-1, num_clients), "fate": (0, len(Fate)), "stage": (0, limit)}
    for name, (first, end) in ends.items():
        fits = bool(np.all((found[name] >= first) & (found[name] < end)))
        rule = f"be integers from {first} to {end - 1}"
        checks.require(fits, f"{name} of a record", rule, found[name])
    rounds = clients.shape[:1]
    wanted = {"stage": rounds, "fate": clients.shape, "digest": (*rounds, 2)}
    for name, array in found.items():
        shape = wanted.get(name, array.shape)
        rule = f"have the shape {shape} beside clients of the shape {clients.shape}"
        checks.require(array.shape == shape, f"{name} of a record", rule, array.shape)
    in_order = np.sort(clients, axis=1)
    is_twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    rule = "be in a round at most once"
    repeated = in_order[:, 1:][is_twice]
    checks.require(not repeated.size, "clients of a record", rule, f"{repeated[:3]} again")
    rule = "be named in each slot that is not empty"
    is_unnamed = (clients < 0) & (fates != Fate.EMPTY)
    checks.require(not np.any(is_unnamed), "clients of a record", rule, "one without a number")


def _integers(name: str, value: Any) -> np.ndarray:
    """Reads an array of integers of any origin."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    checks.require(array.dtype.kind in "iu", name, "be an array of integers", value)
    return array


def priced(hyper: Hyper) -> Hyper:
    """Leaves out learning rates and optimisers' numbers, which are never priced."""
    free = ("local.learning_rate", "local.optimizer")
    factors = {name: x for name, x in hyper.factors.items() if not name.startswith(free)}
    local = hyper.local._replace(learning_rate=None, optimizer=())
    return hyper._replace(local=local, factors=factors)


def digest_of(hyper: Hyper) -> Any:
    """Computes a digest of the numbers that prices may depend on, `[2]`, uint32."""
    # Float32 makes 1 and 1.0 equal; a change is missed with a probability of about 2^-64.
    found = jax.tree.leaves_with_path(priced(hyper))
    facts = [(jax.tree_util.keystr(path), np.shape(x)) for path, x in found]
    is_traced = any(isinstance(x, jax.Array) for _, x in found)
    words = _words([x for _, x in found], jnp if is_traced else np)
    lanes = np.array([[zlib.crc32(f"{lane}{facts}".encode()) for lane in "ab"]], np.uint32)
    places = (jnp if is_traced else np).arange(len(words), dtype=np.uint32)
    each = _mixed(words[:, None] ^ (places[:, None] * np.uint32(0x9E3779B9) + lanes))
    return lanes[0] ^ each.sum(axis=0, dtype=np.uint32)


def _words(numbers: Sequence[Any], xp: Any) -> Any:
    """Concatenates the bits of numbers, `[all]`, uint32; values below 2^-126 are zero."""
    flat = [xp.ravel(xp.asarray(x)).astype(np.float32) for x in numbers]
    whole = xp.concatenate([*flat, np.zeros(1, np.float32)])
    return xp.where(abs(whole) < np.finfo(np.float32).tiny, np.float32(0), whole).view(np.uint32)


def _mixed(x: Any) -> Any:
    """Mixes words, so that each bit changes about half of all bits (Appleby, MurmurHash3)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


class TrainingInfo(NamedTuple):
    """Exact metrics of a round's local training, which are therefore not private.

    Attributes:
      train_loss: mean loss over all examples read by clients whose updates are finite, float32; not
        finite if one of these losses is not, NaN if no update is, 0 where no client took part.
      clipped_example_share: share of these whose gradient was clipped, float32.
      num_examples: examples read, with repetition, float32.
      padding_share: share of padding among the computed examples, float32.
      num_record_overflow: the number of drawn examples without a slot, int32.
      update_norm_quantiles: of the updates sent: smallest, 10 %, median, 90 %, largest, `[5]`; not
        finite where a norm exceeds float32, 0 where no client contributed.
    """

    train_loss: jax.Array
    clipped_example_share: jax.Array
    num_examples: jax.Array
    padding_share: jax.Array
    num_record_overflow: jax.Array
    update_norm_quantiles: jax.Array


class MessageCounts(NamedTuple):
    """Which messages were made, `[slots]`, and the counts that determine the sizes of each."""

    is_counted: jax.Array
    up: tuple[jax.Array, ...]
    down: tuple[jax.Array, ...]


class RoundInfo(NamedTuple):
    """Metrics of a round for people; nothing is computed with them.

    Attributes:
      training: of local training; None if nothing is trained.
      clients: means over the cohort of the clients' metrics, by name.
      aggregator: the aggregator's metrics, by name.
      server: the server step's metrics, by name.
      messages: counts of messages; None if shapes determine all sizes.
    """

    training: TrainingInfo | None
    clients: Mapping[str, jax.Array]
    aggregator: Mapping[str, jax.Array]
    server: Mapping[str, jax.Array]
    messages: MessageCounts | None = None


def training_info(
    metrics: Any, contributes: jax.Array, chunk: int, is_alone: jax.Array, is_lost: jax.Array
) -> TrainingInfo:
    """Summarises local training over `[slots]`; metrics of a lost (not finite) client are zero."""
    read = jnp.sum(metrics.num_read.astype(jnp.float32))
    each = metrics.num_computed.astype(jnp.float32)
    together = jnp.where(is_alone, 0.0, each).reshape(-1, chunk)
    computed = jnp.sum(jnp.max(together, axis=1) * chunk) + jnp.sum(jnp.where(is_alone, each, 0.0))
    norms = jnp.where(contributes, metrics.update_norm, jnp.nan)
    quantiles = jnp.nanquantile(norms, jnp.array([0.0, 0.1, 0.5, 0.9, 1.0]))
    return TrainingInfo(
        train_loss=jnp.where(
            (read > 0) | ~is_lost, jnp.sum(metrics.loss_sum) / jnp.maximum(read, 1.0), jnp.nan
        ),
        clipped_example_share=jnp.sum(metrics.num_clipped) / jnp.maximum(read, 1.0),
        num_examples=read,
        padding_share=jnp.where(computed > 0, 1.0 - read / computed, 0.0),
        num_record_overflow=jnp.sum(metrics.num_overflow),
        update_norm_quantiles=jnp.where(jnp.any(contributes), quantiles, 0.0),
    )


def compact(record: RoundRecord) -> RoundRecord:
    """Drops empty slots: the largest cohort determines how many are left, at least 1, in order."""
    is_empty = np.asarray(record.fate) == Fate.EMPTY
    width = max(1, int(np.max(np.sum(~is_empty, axis=-1), initial=0)))
    order = np.argsort(is_empty, axis=-1, kind="stable")[..., :width]

    def drawn(x: Any) -> Any:
        return np.take_along_axis(x, order, -1)

    return record._replace(clients=drawn(record.clients), fate=drawn(record.fate))


def joined(records: Sequence[RoundRecord]) -> RoundRecord:
    """Concatenates the rounds of several records on the host; missing slots are empty."""
    width = max(np.shape(record.clients)[-1] for record in records)

    def wide(x: Any, filler: int) -> Any:
        missing = width - np.shape(x)[-1]
        return np.pad(np.asarray(x), ((0, 0), (0, missing)), constant_values=filler)

    of_one_width = [
        r._replace(clients=wide(r.clients, -1), fate=wide(r.fate, Fate.EMPTY)) for r in records
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *of_one_width)


def joined_info(infos: Sequence[RoundInfo]) -> RoundInfo:
    """Concatenates the info of several blocks of rounds; missing slots count no message."""
    counts = [info.messages for info in infos if info.messages is not None]
    width = max((np.shape(m.is_counted)[-1] for m in counts), default=0)

    def wide(x: Any) -> Any:
        return np.pad(np.asarray(x), ((0, 0), (0, width - np.shape(x)[-1])))

    of_one_width = [info._replace(messages=jax.tree.map(wide, info.messages)) for info in infos]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *of_one_width)


@checked
def as_metrics(record: RoundRecord, info: RoundInfo) -> dict[str, np.ndarray]:
    """Returns the metrics of some rounds by name, for logbooks, tables and plots.

    Args:
      record: of one or more rounds, on the host.
      info: of the same rounds.

    Returns:
      Counts of clients, all of the info, and the stage, by name, as arrays `[rounds, ...]`.
    """
    training = {} if info.training is None else info.training._asdict()
    counts = {
        "num_participants": record.num_drawn,
        "num_non_finite": record.count(Fate.NOT_FINITE),
        "num_dropped": record.count(Fate.UNANNOUNCED, Fate.DROPPED, Fate.LATE),
        "num_overflow": record.overflow,
        "stage": record.stage,
    }
    return {**training, **info.clients, **info.aggregator, **info.server, **counts}
