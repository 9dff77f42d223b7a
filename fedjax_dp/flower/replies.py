"""The replies of a round, as the server reads them: what does not fit counts as lost."""

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.flower.packets import Packet, counts_of, require_echo, tree_of
from fedjax_dp.flower.plan import Shapes
from fedjax_dp.server.base import Fate


class Gathered(NamedTuple):
    """What the nodes of a round have sent."""

    total: PyTree  # The sum of the messages, or all of them, `[slots, ...]`, if they are stacked.
    known: Mapping[int, PyTree]  # The part of its state that the server has, by client.
    fate: np.ndarray  # The fate of each slot, `[slots]`, int8.


class Replies:
    """Reads replies of the shapes of a plan."""

    def __init__(self, shapes: Shapes, *, is_stacked: bool) -> None:
        """Takes the shapes, and whether messages are stacked."""
        self._shapes, self._is_stacked = shapes, is_stacked

    def gathered(
        self,
        replies: Mapping[int, Packet],
        packets: Mapping[int, Packet],
        ids: np.ndarray,
        fate: np.ndarray,
    ) -> Gathered:
        """Adds up, or stacks, the replies that fit; a client without one has dropped out."""
        fate = fate.copy()
        slot_of = {int(c): s for s, c in enumerate(ids) if fate[s] == Fate.CONTRIBUTED}
        for slot in slot_of.values():
            fate[slot] = Fate.DROPPED
        like, num_slots = self._shapes.sent, len(ids)
        if self._is_stacked:
            total = jax.tree.map(lambda s: np.zeros((num_slots, *s.shape), s.dtype), like)
        else:
            total = sums.zeros_like(like)
        known: dict[int, PyTree] = {}
        for node, packet in sorted(packets.items()):
            if node not in replies:
                continue
            clients = packet.facts["clients"]
            try:
                sent, own, fates = self._read(replies[node], packet)
            except ValueError as error:
                warnings.warn(f"the reply of node {node} counts as lost: {error}", stacklevel=2)
                continue
            for place, client in enumerate(clients):
                slot = slot_of[client]
                fate[slot] = fates[place]
                if own is not None:
                    known[client] = trees.take(own, place)
                if self._is_stacked and fates[place] == Fate.CONTRIBUTED:
                    for all_slots, part in zip(
                        jax.tree.leaves(total), jax.tree.leaves(sent), strict=True
                    ):
                        all_slots[slot] = part[place]
            if not self._is_stacked:
                total = _added(total, sent)
        return Gathered(total if self._is_stacked else sums.value(total), known, fate)

    def _read(self, reply: Packet, packet: Packet) -> tuple[PyTree, PyTree, list[int]]:
        """Reads a reply, or raises a ValueError that says why it does not fit."""
        require_echo(reply.facts, packet.facts, ("digest", "round", "clients"))
        num = len(packet.facts["clients"])
        fates = counts_of(reply, "fates")
        known_fates = (Fate.CONTRIBUTED, Fate.NOT_FINITE, Fate.DROPPED)
        rule = f"hold {num} of {[int(fate) for fate in known_fates]}"
        fits = len(fates) == num and set(fates) <= {*known_fates}
        checks.require(fits, "fates", rule, fates)

        def by_client(shapes: PyTree) -> PyTree:
            return jax.tree.map(lambda s: jax.ShapeDtypeStruct((num, *s.shape), s.dtype), shapes)

        like = by_client(self._shapes.sent) if self._is_stacked else self._shapes.sent
        sent = tree_of(reply.arrays, "sent", like)
        checks.require(bool(trees.can_be_summed(sent)), "a sum", "be finite", "NaN or too large")
        known = None
        if self._shapes.known is not None:
            known = tree_of(reply.arrays, "known", by_client(self._shapes.known))
        prefixes = {name.partition("/")[0] for name in reply.arrays}
        expected = {"sent"} | ({"known"} if known is not None else set())
        checks.require(
            prefixes <= expected, "a reply", f"hold {sorted(expected)}", sorted(prefixes)
        )
        return sent, known, fates


@jax.jit
def _added(total: PyTree, part: PyTree) -> PyTree:
    return sums.add(total, jax.tree.map(jnp.asarray, part))
