"""What a round leaves behind: a record for the ledger, and info for people."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.server.base import Fate


class RoundRecord(NamedTuple):
    """All that the ledger reads of a round.

    Attributes:
      clients: who was drawn, `[slots]`, int32; -1 in empty slots. A run keeps as many slots as its
        largest cohort has clients.
      fate: what became of each slot, a `Fate`, `[slots]`, int8.
      overflow: clients that were drawn and found no slot, int32.
      stage: the stage of the round, int32.
      is_released: whether the round's aggregate left the server, bool.
      digest: of the numbers that the round ran with and prices may depend on, `[2]`, uint32, see
        `digest_of`; None in a record that no round has made, which is charged at its word.
    """

    clients: jax.Array
    fate: jax.Array
    overflow: jax.Array
    stage: jax.Array
    is_released: jax.Array
    digest: jax.Array | None = None

    def count(self, *fates: Fate) -> Any:
        """Counts the slots that came to one of some ends.

        Args:
          *fates: the ends.

        Returns:
          The number of slots, of each round where there are several.
        """
        return np.sum(np.isin(np.asarray(self.fate), fates), axis=-1)

    @property
    def num_drawn(self) -> Any:
        """Counts the clients that were drawn into a slot."""
        return np.sum(np.asarray(self.fate) != Fate.EMPTY, axis=-1)

    @property
    def num_announced(self) -> Any:
        """Counts the clients that were told that they take part."""
        return self.num_drawn - self.count(Fate.UNANNOUNCED)


def digest_of(hyper: Hyper) -> Any:
    """Computes a digest of the numbers that prices may depend on.

    These are all but learning rates and what an optimiser takes beside them, which are never
    priced. Numbers are read as float32, so that 1 and 1.0 are one; a change of any of them is
    missed with a chance of about 2^-64.

    Args:
      hyper: the numbers; traced ones, or arrays on the host, of which the digest is one too.

    Returns:
      Two words, `[2]`, uint32.
    """
    priced = hyper._replace(local=hyper.local._replace(learning_rate=None, optimizer=()))
    found = jax.tree.leaves_with_path(priced)
    facts = [(jax.tree_util.keystr(path), np.shape(x)) for path, x in found]
    is_traced = any(isinstance(x, jax.Array) for _, x in found)
    words = _words([x for _, x in found], jnp if is_traced else np)
    lanes = np.array([[zlib.crc32(f"{lane}{facts}".encode()) for lane in "ab"]], np.uint32)
    places = (jnp if is_traced else np).arange(len(words), dtype=np.uint32)
    each = _mixed(words[:, None] ^ (places[:, None] * np.uint32(0x9E3779B9) + lanes))
    return lanes[0] ^ each.sum(axis=0, dtype=np.uint32)


def _words(numbers: Sequence[Any], xp: Any) -> Any:
    """Puts the bits of numbers into one row, `[all]`, uint32; what is below 2^-126 is zero."""
    rows = [xp.ravel(xp.asarray(x)).astype(np.float32) for x in numbers]
    row = xp.concatenate([*rows, np.zeros(1, np.float32)])
    return xp.where(abs(row) < np.finfo(np.float32).tiny, np.float32(0), row).view(np.uint32)


def _mixed(x: Any) -> Any:
    """Lets every bit of a word change about half of all bits (Appleby, MurmurHash3)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


class TrainingInfo(NamedTuple):
    """What local training of a round came to; computed exactly and therefore not private.

    Attributes:
      train_loss: mean loss over all examples read, float32.
      clipped_example_share: share of these whose gradient was clipped, float32.
      num_examples: examples read, with repetition, float32.
      padding_share: share of the examples computed that were padding, float32.
      num_record_overflow: examples that were drawn and found no slot, int32.
      update_norm_quantiles: of what clients sent: smallest, 10 %, median, 90 %, largest, `[5]`;
        not finite where a norm exceeds float32, 0 where nobody contributed.
    """

    train_loss: jax.Array
    clipped_example_share: jax.Array
    num_examples: jax.Array
    padding_share: jax.Array
    num_record_overflow: jax.Array
    update_norm_quantiles: jax.Array


class MessageCounts(NamedTuple):
    """What is not known of a round's messages before it is played, for whoever counts bytes.

    Attributes:
      is_counted: which slots' messages were made, `[slots]`, bool.
      up: the counts of messages from clients, as `core.messages.counts_of` orders them, each
        `[slots]`, int32.
      down: those of messages to clients.
    """

    is_counted: jax.Array
    up: tuple[jax.Array, ...]
    down: tuple[jax.Array, ...]


class RoundInfo(NamedTuple):
    """What people may want to see of a round; nothing is computed with it.

    Attributes:
      training: of local training; None where nothing is trained.
      clients: means over the cohort of what clients tell by name.
      aggregator: what the aggregator tells by name.
      server: what the server step tells by name.
      messages: what messages hold; None where all of them are known by their shapes.
    """

    training: TrainingInfo | None
    clients: Mapping[str, jax.Array]
    aggregator: Mapping[str, jax.Array]
    server: Mapping[str, jax.Array]
    messages: MessageCounts | None = None


def training_info(
    metrics: Any, contributes: jax.Array, chunk: int, is_alone: jax.Array
) -> TrainingInfo:
    """Adds up what the slots of a round tell of local training.

    Args:
      metrics: `TrainingMetrics`, `[slots]`; zeros where nobody contributes.
      contributes: whose update counts, `[slots]`, bool.
      chunk: slots that were computed side by side.
      is_alone: slots that were not, `[slots]`, bool.

    Returns:
      The info.
    """
    read = jnp.sum(metrics.num_read.astype(jnp.float32))
    each = metrics.num_computed.astype(jnp.float32)
    together = jnp.where(is_alone, 0.0, each).reshape(-1, chunk)
    computed = jnp.sum(jnp.max(together, axis=1) * chunk) + jnp.sum(jnp.where(is_alone, each, 0.0))
    norms = jnp.where(contributes, metrics.update_norm, jnp.nan)
    quantiles = jnp.nanquantile(norms, jnp.array([0.0, 0.1, 0.5, 0.9, 1.0]))
    return TrainingInfo(
        train_loss=jnp.sum(metrics.loss_sum) / jnp.maximum(read, 1.0),
        clipped_example_share=jnp.sum(metrics.num_clipped) / jnp.maximum(read, 1.0),
        num_examples=read,
        padding_share=jnp.where(computed > 0, 1.0 - read / computed, 0.0),
        num_record_overflow=jnp.sum(metrics.num_overflow),
        update_norm_quantiles=jnp.where(jnp.any(contributes), quantiles, 0.0),
    )


def compact(record: RoundRecord) -> RoundRecord:
    """Drops slots that nobody was drawn into.

    An exact Poisson draw has a slot for every client; what a run keeps is who was drawn.

    Args:
      record: of one or more rounds, on the host, `[rounds, slots]`.

    Returns:
      The record with as many slots as the largest cohort has clients, at least 1, in their order.
    """
    is_empty = np.asarray(record.fate) == Fate.EMPTY
    width = max(1, int(np.max(np.sum(~is_empty, axis=-1), initial=0)))
    order = np.argsort(is_empty, axis=-1, kind="stable")[..., :width]

    def drawn(x: Any) -> Any:
        return np.take_along_axis(x, order, -1)

    return record._replace(clients=drawn(record.clients), fate=drawn(record.fate))


def joined(records: Sequence[RoundRecord]) -> RoundRecord:
    """Puts the rounds of several records one after the other.

    Args:
      records: on the host, of any numbers of slots.

    Returns:
      One record; slots that a record lacks are empty.
    """
    width = max(np.shape(record.clients)[-1] for record in records)

    def wide(x: Any, filler: int) -> Any:
        missing = width - np.shape(x)[-1]
        return np.pad(np.asarray(x), ((0, 0), (0, missing)), constant_values=filler)

    of_one_width = [
        r._replace(clients=wide(r.clients, -1), fate=wide(r.fate, Fate.EMPTY)) for r in records
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *of_one_width)


def joined_info(infos: Sequence[RoundInfo]) -> RoundInfo:
    """Concatenates the info of several blocks of rounds.

    Args:
      infos: on the host, of any numbers of slots.

    Returns:
      One info; slots that a block lacks count no message.
    """
    counts = [info.messages for info in infos if info.messages is not None]
    width = max((np.shape(m.is_counted)[-1] for m in counts), default=0)

    def wide(x: Any) -> Any:
        return np.pad(np.asarray(x), ((0, 0), (0, width - np.shape(x)[-1])))

    of_one_width = [info._replace(messages=jax.tree.map(wide, info.messages)) for info in infos]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *of_one_width)


@checked
def as_metrics(record: RoundRecord, info: RoundInfo) -> dict[str, np.ndarray]:
    """Returns the figures of some rounds by name, for logbooks, tables and plots.

    Args:
      record: of one or more rounds, on the host.
      info: of the same rounds.

    Returns:
      Arrays by name, `[rounds, ...]`: counts of clients, all of the info, each under its own name,
      and the stage.
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
