"""Any summed aggregator under masks: the server sees the sum of a cohort and no message of it."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, messages
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Coded
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.privacy.mechanisms.distributed import Plan
from fedjax_dp.server.base import Aggregator, Close, Diagnostic, Fate, Roster, Sender, Summed
from fedjax_dp.server.fixed_point import FixedPoint
from fedjax_dp.server.secure import masks, words
from fedjax_dp.server.secure.graphs import Circle, MaskGraph, arranged
from fedjax_dp.server.secure.key_agreement import MaskKeys, simulated_keys

Form = Literal["masked", "cancelled"]


@checked
def masked(
    aggregator: Summed,
    encoding: FixedPoint,
    graph: MaskGraph,
    *,
    keys: MaskKeys | None = None,
    form: str = "masked",
) -> Summed:
    """Sums a cohort's messages under masks that cancel.

    A client's message becomes words, to which it adds one mask for each neighbour and one of its
    own, modulo 2^32 or 2^64. In the sum the masks of pairs cancel; those of a neighbour that
    dropped out, and the own masks of the clients that sent, are removed as shares of their seeds
    allow. The wrapped aggregator then combines the decoded sum. A round is lost, and a sum of zeros
    is combined, if seeds cannot be recovered, more than `graph.dropouts` clients dropped out, fewer
    than `graph.num_clients` were notified, or more than `encoding.max_clients`.

    Guarantee: against an honest but curious server and at most `graph.colluders` clients, each
    message is uniform, and the server learns the sum over the clients that sent; with simulated
    keys that is simulated. The sum holds all that is sent: `Diagnostic` figures are not, such as
    whether an entry was cut. Integers are added modulo 2^32, in words of 32 bits whatever the
    encoding, so that the sum holds nothing beyond that modulus; a claim about a sum modulo less
    needs messages in the highest bits, as `discrete_mean` makes them. The wrapped aggregator's
    claim stays: where it bounds contributions, entries are rounded toward zero, which makes no norm
    larger. Where it counts on noise that clients add as floats, that noise is refused: cut to the
    range and rounded, it would not have the law that was accounted. Noise in models, of a claim for
    records, is encoded with them, as Π_PPFL has it: the event covers no rounding, and the claim of
    noise in shares names what it does not cover. The claim holds against colluders as far as the
    noise was calibrated for them, see `masking_facts`. A lost round shows that few took part: a
    federation whose secret cohorts amplify the claim has to draw enough clients in every round;
    one whose claim is not amplified need not, see `data.without_amplification`.

    Args:
      aggregator: any summed aggregator; leaves of its messages are floats, or integers of at most
        32 bits.
      encoding: from `fixed_point`; an entry out of its range is cut to it, and the client counted.
        Words of 64 bits are for at most 65,536 clients.
      graph: from `all_pairs` or `random_neighbors`.
      keys: the seeds of masks; simulated ones where None.
      form: "masked" makes and removes all masks; "cancelled" leaves them away, which gives the same
        sums, bit for bit, at the cost of the plain aggregator.

    Returns:
      The aggregator; its info also holds `num_recovered`, drop-outs whose masks were removed,
      `num_lost`, 1 for a lost round, and `num_out_of_range`, clients of whose message some entry
      was cut, for the experimenter.

    Raises:
      ValueError: if the aggregator is not summed, the encoding is for fewer clients than the graph
        or, with words of 64 bits, for more than 65,536, or the graph lets more clients drop out
        than the noise of the aggregator allows; when a message is first traced, if clients add the
        noise and the message has leaves of floats.

    Source: Bonawitz and others 2017, figure 4; Bell and others 2020, section 3.
    """
    checks.require(isinstance(aggregator, Summed), "aggregator", "be Summed", type(aggregator))
    checks.one_of("form", form, get_args(Form))
    words.check_words("encoding.word_bits", encoding.word_bits, encoding.max_clients)
    rule = f"hold the {graph.num_clients} clients of the graph"
    fits = encoding.max_clients >= graph.num_clients
    checks.require(fits, "encoding.max_clients", rule, encoding.max_clients)
    seeds = simulated_keys() if keys is None else keys
    is_masked = form == "masked"
    is_bounded = isinstance(aggregator.claim, ClientClaim)
    has_shares = False
    if isinstance(aggregator.claim, ClientClaim):
        has_shares = aggregator.claim.min_participants > 0
        needed = aggregator.claim.min_participants
        rule = f"let no round be summed of fewer than the {needed} clients whose noise is counted"
        checks.require(graph.min_senders >= needed, "graph", rule, graph)
    rounding: words.Rounding = "toward_zero" if is_bounded else "nearest"
    encode = Masks(aggregator, encoding, graph, seeds, is_masked, has_shares, rounding)

    def combine(state, numbers, total, close):
        circle = arranged(graph, close.public_key, close.roster)
        has_joined = jnp.arange(len(circle.clients)) < circle.count
        has_sent = has_joined & jnp.isin(
            close.fates[circle.slots],
            jnp.array([Fate.CONTRIBUTED, Fate.NOT_FINITE], close.fates.dtype),
        )
        coded, was_cut = total
        if is_masked:
            coded = _unmasked(coded, circle, has_sent, seeds, close)
        is_lost = _is_lost(graph, encoding, circle, has_sent, has_joined)
        coded = jax.tree.map(lambda w: jnp.where(is_lost, jnp.zeros_like(w), w), coded)
        decoded = words.decode(encoding, coded)
        state, aggregate, info = aggregator.combine(state, numbers, decoded, close)
        of_masks = {
            "num_recovered": jnp.sum(has_joined & ~has_sent & ~is_lost, dtype=jnp.int32),
            "num_lost": info.get("num_lost", 0) + is_lost.astype(jnp.int32),
            "num_out_of_range": was_cut.value,
        }
        return state, aggregate, info | of_masks

    def message(update, weight):
        return _coded_shapes(aggregator, encoding, update, weight)

    return aggregator._replace(encode=encode, combine=combine, message=message)


class Masks(NamedTuple):
    """What a client does to its message under masks: the `encode` of `masked`."""

    aggregator: Summed
    encoding: FixedPoint
    graph: MaskGraph
    seeds: MaskKeys
    is_masked: bool
    has_shares: bool
    rounding: words.Rounding

    def __call__(self, state: PyTree, numbers: Any, contribution: PyTree, sender: Sender) -> PyTree:
        """Encodes a message as words, and adds the client's masks to them."""
        message = _sent(self.aggregator, state, numbers, contribution, sender)
        if self.has_shares:
            _check_integers(message)
        coded, is_cut = words.encode(self.encoding, message, self.rounding)
        # An exact flag, which no claim covers.
        was_cut = Diagnostic(is_cut.astype(jnp.int32))
        if not self.is_masked:
            return coded, was_cut
        circle = arranged(self.graph, sender.public_key, sender.roster)
        position = circle.position_of(sender.index)
        every = jnp.ones(len(circle.clients), bool)
        line = masks.flat(coded)
        line += masks.mask(self.seeds.of_client(sender.public_key, sender.index), line)
        line = masks.with_pair_masks(line, circle, position, self.seeds, sender.public_key, every)
        return masks.shaped(line, coded), was_cut


def masks_of(aggregator: Aggregator) -> Masks | None:
    """Returns the masks of an aggregator; None without any."""
    return aggregator.encode if isinstance(aggregator.encode, Masks) else None


@checked
def masking_facts(
    graph: MaskGraph,
    plan: Plan | None = None,
    *,
    keys: MaskKeys | None = None,
    form: str = "masked",
) -> dict[str, Any]:
    """Collects what a privacy statement says of secure aggregation.

    Guarantee: the colluders that are named are no more than the graph's, nor more than those that
    the noise is calibrated for; without a plan there are none.

    Args:
      graph: as given to `masked`.
      plan: of the noise that clients add, as given to `discrete_mean`; None for other noise, which
        is calibrated for no colluders.
      keys: as given to `masked`.
      form: as given to `masked`.

    Returns:
      Plain data, for `privacy.reports.statement(..., secure_aggregation=...)`; its `trust` is
      "honest_but_curious" if clients add the noise and the plan is given. `secrecy_failure`, times
      the number of rounds, enters δ there.

    Raises:
      ValueError: for an unknown form, or a plan for fewer colluders than the graph's.
    """
    checks.one_of("form", form, get_args(Form))
    if plan is not None:
        rule = f"be at least the {graph.colluders} of the graph"
        fits = plan.colluders >= graph.colluders
        checks.require(fits, "plan.colluders", rule, plan.colluders)
    is_simulated = keys is None or keys.is_simulated
    return {
        "form": form,
        "num_neighbors": graph.num_neighbors,
        "colluders": 0 if plan is None else graph.colluders,
        "dropouts": graph.dropouts,
        "failure": graph.failure,
        "secrecy_failure": graph.secrecy_failure,
        "keys": "simulated" if is_simulated else "agreed",
    }


def _unmasked(
    total: PyTree, circle: Circle, has_sent: jax.Array, seeds: MaskKeys, close: Close
) -> PyTree:
    """Removes what is left of masks: those of senders' own, and of pairs with drop-outs."""

    def one(position, line):
        def without_own(line):
            seed = seeds.of_client(close.public_key, circle.clients[position])
            return line - masks.mask(seed, line)

        def without_pairs(line):
            # What the drop-out would have sent for these pairs cancels what they sent for it.
            return masks.with_pair_masks(line, circle, position, seeds, close.public_key, has_sent)

        return jax.lax.cond(has_sent[position], without_own, without_pairs, line)

    return masks.shaped(jax.lax.fori_loop(0, circle.count, one, masks.flat(total)), total)


def _is_lost(
    graph: MaskGraph,
    encoding: FixedPoint,
    circle: Circle,
    has_sent: jax.Array,
    has_joined: jax.Array,
) -> jax.Array:
    """Whether seeds cannot be recovered, sums might overflow, or the graph fits no such round."""
    num_sent = jnp.sum(has_sent, dtype=jnp.int32)
    is_complete = graph.num_neighbors is None
    others = num_sent - has_sent.astype(jnp.int32)
    helpers = others if is_complete else circle.num_sending(has_sent)
    has_few = jnp.any(has_joined & (helpers < graph.threshold))
    has_few |= num_sent < circle.count - graph.dropouts
    return has_few | (circle.count < graph.num_clients) | (circle.count > encoding.max_clients)


def _sent(
    aggregator: Summed, state: PyTree, numbers: Any, contribution: PyTree, sender: Sender
) -> PyTree:
    """Makes the message of the wrapped aggregator, without figures for the experimenter."""
    message = contribution
    if aggregator.encode is not None:
        message = aggregator.encode(state, numbers, contribution, sender)

    def is_figure(x):
        return isinstance(x, Diagnostic)

    return jax.tree.map(lambda x: None if is_figure(x) else x, message, is_leaf=is_figure)


def _check_integers(message: PyTree) -> None:
    """Refuses noise in floats: cut to a range and rounded, it has not the law of the claim."""
    for leaf in jax.tree.leaves(message):
        dtype = jnp.asarray(leaf).dtype
        rule = "send integers alone, since its clients add the noise"
        checks.require(not jnp.issubdtype(dtype, jnp.floating), "aggregator", rule, str(dtype))


def _coded_shapes(
    aggregator: Summed, encoding: FixedPoint, update: PyTree, weight: jax.Array
) -> PyTree:
    """Shapes of what the wrapped aggregator adds up, each of whose entries is sent as a word."""

    def message_of(update, weight):
        update = messages.received(update)
        state = aggregator.broadcast(aggregator.init(update))
        key, index = jax.random.key(0), jnp.zeros((), jnp.int32)
        weight = jnp.asarray(weight, jnp.float32)
        sender = Sender(index, weight, key, key, Roster.of_one())
        numbers = aggregator.numbers
        contribution = aggregator.contribute(state, numbers, update, sender)
        return _sent(aggregator, state, numbers, contribution, sender)

    def coded(x):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.uint32)
        return Coded(shape, words.bits_of(encoding, x.dtype))

    return jax.tree.map(coded, jax.eval_shape(message_of, update, weight))
