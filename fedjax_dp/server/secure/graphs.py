"""Which clients share masks, all pairs or few random neighbours of each, and the bytes it costs."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from scipy import stats

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.decimals import rounded_down, rounded_up
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.messages import Exchange
from fedjax_dp.core.ranges import Index, ProperFraction
from fedjax_dp.server.base import Roster
from fedjax_dp.server.fixed_point import Several
from fedjax_dp.server.secure.secret_sharing import PRIME

# Bytes of a public key of X25519; of a share, an element of the field; of an encryption's tag.
_KEY, _SHARE, _TAG = 32, -(-PRIME.bit_length() // 8), 16


class MaskGraph(NamedTuple):
    """Which pairs of a round's clients share masks, and what that survives.

    A round is lost where fewer than `num_clients` clients are notified, where more than `dropouts`
    of those that are do not send, or where some client has fewer than `threshold` neighbours that
    do.

    Attributes:
      num_clients: n, how many clients are notified in a round, at least.
      num_neighbors: k, with how many others each client shares masks; None for all others.
      threshold: how many neighbours must give their shares of a seed to recover it.
      colluders: t, how many clients may collude with the server.
      dropouts: d, how many clients may drop out after masks were agreed.
      failure: bound on the probability, over the random graph, that t colluders break the secrecy
        or d drop-outs lose the round; 0 for all pairs.
    """

    num_clients: int
    num_neighbors: int | None
    threshold: int
    colluders: int
    dropouts: int
    failure: float

    @property
    def min_senders(self) -> int:
        """The fewest messages from which a sum is recovered."""
        return self.num_clients - self.dropouts

    @property
    def secrecy_failure(self) -> float:
        """The part of `failure` that breaks secrecy: more than a sum is learned in a round."""
        if self.num_neighbors is None:
            return 0.0
        exposed, _ = _failures(
            self.num_clients, self.num_neighbors, self.colluders, self.dropouts, self.threshold
        )
        return float(min(1.0, exposed))


@checked
def all_pairs(num_clients: Several, *, colluders: Index = 0, dropouts: Index = 0) -> MaskGraph:
    """Builds the complete graph, in which all pairs share masks.

    Guarantee: the server and any t colluders learn the sum over the other clients that send, of
    which there are two at least, and nothing else; the round is recovered with d drop-outs.

    Args:
      num_clients: n, how many clients are notified in a round, at least 2.
      colluders: t, at least 0.
      dropouts: d, at least 0; t + d is at most n - 2.

    Returns:
      The graph, whose cost grows with n².

    Raises:
      ValueError: if fewer than two clients would be left.

    Source: Bonawitz and others 2017, section 4.
    """
    _check_numbers(num_clients, colluders, dropouts)
    return MaskGraph(num_clients, None, num_clients - 1 - dropouts, colluders, dropouts, 0.0)


@checked
def random_neighbors(
    num_clients: Several,
    *,
    colluders: Index = 0,
    dropouts: Index = 0,
    failure: ProperFraction = 2.0**-40,
    num_neighbors: int | None = None,
) -> MaskGraph:
    """Builds the rule for a random graph in which each client has k neighbours.

    Each round, its public key puts the clients on a circle in random order, and each shares masks
    with the k/2 clients on either side. With h the threshold of recovery, the graph fails

    - if some client has h colluders or more among its neighbours: at most
      n P[H(n-1, t, k) ≥ h], H(N, g, k) being hypergeometric, k draws of N of which g are marked;
    - if some client has fewer than h neighbours that send: at most n P[H(n-1, d, k) > k - h];
    - if the honest clients that send are not connected, for which k/2 clients in a row must all
      collude or drop out: at most n P[H(n, t+d, k/2) = k/2].

    The bound is the sum of these probabilities, for the threshold at which it is smallest.

    Guarantee: as for `all_pairs`, except for rounds of that probability, if colluders and drop-outs
    do not depend on the graph. The first and the last of the three break secrecy: times the number
    of rounds, `MaskGraph.secrecy_failure` is a part of δ where clients add noise, see
    `masking_facts`.
    Cost grows with n k.

    Args:
      num_clients: n, how many clients are notified in a round, at least 2.
      colluders: t, at least 0.
      dropouts: d, at least 0; t + d is at most n - 2.
      failure: the largest probability of failure of a round, in (0, 1).
      num_neighbors: k, even and below n; where None the fewest that keep the bound below `failure`.

    Returns:
      The graph; all pairs where no k below n - 1 suffices.

    Raises:
      ValueError: if k is odd, not below n, or too small for `failure`.

    Source: Bell, Bonawitz, Gascón, Lepoint, Raykova 2020, section 3, with tails in place of their
    closed bounds.
    """
    _check_numbers(num_clients, colluders, dropouts)
    if num_neighbors is not None:
        rule = f"be even, at least 2 and below the {num_clients} clients"
        fits = num_neighbors % 2 == 0 and 2 <= num_neighbors < num_clients
        checks.require(fits, "num_neighbors", rule, num_neighbors)
        bound, threshold = failure_bound(num_clients, num_neighbors, colluders, dropouts)
        exposed, most = rounded_up(bound, 2), rounded_down(failure, 2)
        rule = f"keep the probability of failure, {exposed}, at most {most}"
        checks.require(bound <= failure, "num_neighbors", rule, num_neighbors)
        return MaskGraph(num_clients, num_neighbors, threshold, colluders, dropouts, bound)
    for k in range(2, num_clients - 1, 2):
        bound, threshold = failure_bound(num_clients, k, colluders, dropouts)
        if bound <= failure:
            return MaskGraph(num_clients, k, threshold, colluders, dropouts, bound)
    return all_pairs(num_clients, colluders=colluders, dropouts=dropouts)


def failure_bound(
    num_clients: int, num_neighbors: int, colluders: int, dropouts: int
) -> tuple[float, int]:
    """Computes the bound of `random_neighbors`, and the threshold at which it is smallest."""
    thresholds = np.arange(1, num_neighbors + 1)
    exposed, stuck = _failures(num_clients, num_neighbors, colluders, dropouts, thresholds)
    bounds = exposed + stuck
    # The last of equal ones: the more shares are needed, the more colluders are too few.
    best = num_neighbors - 1 - int(np.argmin(bounds[::-1]))
    return float(min(1.0, bounds[best])), int(thresholds[best])


def _failures(n: int, k: int, t: int, d: int, threshold: Any) -> tuple[Any, Any]:
    """Bounds the probabilities that secrecy breaks, and that a seed cannot be recovered."""
    betrayed = stats.hypergeom.sf(threshold - 1, n - 1, t, k)
    stuck = stats.hypergeom.sf(k - threshold, n - 1, d, k)
    split = stats.hypergeom.pmf(k // 2, n, t + d, k // 2)
    return n * (betrayed + split), n * stuck


def _check_numbers(num_clients: int, colluders: int, dropouts: int) -> None:
    rule = f"be at most {num_clients - 2}, so that 2 of the {num_clients} clients do not collude"
    checks.require(colluders <= num_clients - 2, "colluders", rule, colluders)
    rule = f"leave 2 of {num_clients} clients in addition to {colluders} colluders"
    checks.require(dropouts + colluders <= num_clients - 2, "dropouts", rule, dropouts)


@flax.struct.dataclass
class Circle:
    """The notified clients of a round in a circle; each shares masks with those within reach."""

    clients: jax.Array  # By position, `[slots]`, int32; the first `count` are real.
    slots: jax.Array  # The slot of each, `[slots]`.
    count: jax.Array  # How many were notified, int32.
    reach: jax.Array  # To how many clients on either side edges go, int32.

    def position_of(self, client: jax.Array) -> jax.Array:
        """Finds the position of a client."""
        is_real = jnp.arange(len(self.clients)) < self.count
        return jnp.argmax((self.clients == client) & is_real)

    def neighbor(self, position: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finds a neighbour's position, for steps below twice the reach, and whether there is one.

        Even steps go forward and odd ones back; the opposite position is one and counts once.
        """
        distance, goes_back = step // 2 + 1, step % 2
        neighbor = (position + jnp.where(goes_back, -distance, distance)) % jnp.maximum(
            self.count, 1
        )
        return neighbor, 2 * distance + goes_back <= self.count

    def num_sending(self, has_sent: jax.Array) -> jax.Array:
        """Counts the neighbours of each position that have sent, by position, `[slots]`."""
        positions = jnp.arange(len(self.clients))

        def add(step, counts):
            neighbor, is_there = self.neighbor(positions, step)
            return counts + (has_sent[neighbor] & is_there).astype(jnp.int32)

        return jax.lax.fori_loop(0, 2 * self.reach, add, jnp.zeros(len(positions), jnp.int32))


def arranged(graph: MaskGraph, public_key: PRNGKey, roster: Roster) -> Circle:
    """Puts the notified clients of a round in the order that its public key gives."""
    is_there = roster.is_announced.astype(bool)
    count = jnp.sum(is_there, dtype=jnp.int32)
    if graph.num_neighbors is None:
        # All others are within half a circle, whatever the order.
        slots = jnp.argsort(~is_there, stable=True)
        return Circle(roster.clients[slots], slots, count, count // 2)
    # Drawn by client, so that the graph does not depend on the order of slots.
    key = fold(public_key, Purpose.MASK, 2)
    draws = jax.vmap(lambda c: jax.random.bits(fold(key, c), (), jnp.uint32))(roster.clients)
    slots = jnp.lexsort((roster.clients, draws, ~is_there))
    reach = jnp.minimum(count // 2, graph.num_neighbors // 2)
    return Circle(roster.clients[slots], slots, count, reach)


def neighbors_of(graph: MaskGraph, public_key: PRNGKey, roster: Roster) -> dict[int, list[int]]:
    """Lists the neighbours of each notified client of a round, in order, on the host."""
    circle = jax.device_get(arranged(graph, public_key, roster))
    clients, reach = circle.clients[: circle.count].tolist(), int(circle.reach)
    steps = [step for i in range(1, reach + 1) for step in (-i, i)]
    # The opposite position may be reached both ways.
    near = (
        {(position + step) % len(clients) for step in steps} for position in range(len(clients))
    )
    return {
        c: sorted(clients[p] for p in positions) for c, positions in zip(clients, near, strict=True)
    }


@checked
def mask_messages(graph: MaskGraph) -> Exchange:
    """Counts the keys and shares of a round under masks, for the communication meter.

    Every client sends two public keys, which the server forwards to its k neighbours, and to each
    neighbour an encrypted share of each of its two seeds, through the server. At the end those that
    sent are sent one bit for each neighbour, whether it sent too, and return one share for each.
    All of that is sent again in every round. Headers and signatures are not counted.

    Args:
      graph: as given to `masked`.

    Returns:
      Bytes of types "keys", "shares" and "bool", for `communication(..., exchange=...)`.

    Source: Bonawitz and others 2017, figure 4; Bell and others 2020, algorithm 2.
    """

    def neighbors(num_notified: np.ndarray) -> np.ndarray:
        others = np.maximum(num_notified - 1, 0)
        return others if graph.num_neighbors is None else np.minimum(others, graph.num_neighbors)

    def up(
        rounds: np.ndarray, num_notified: np.ndarray, num_sent: np.ndarray
    ) -> dict[str, np.ndarray]:
        k = neighbors(num_notified)
        encrypted = num_notified * k * (2 * _SHARE + _TAG)
        return {"keys": num_notified * 2 * _KEY, "shares": encrypted + num_sent * k * _SHARE}

    def down(
        rounds: np.ndarray, num_notified: np.ndarray, num_sent: np.ndarray
    ) -> dict[str, np.ndarray]:
        k = neighbors(num_notified)
        pairs = num_notified * k
        shares = pairs * (2 * _SHARE + _TAG)
        return {"keys": pairs * 2 * _KEY, "shares": shares, "bool": num_sent * -(-k // 8)}

    return Exchange(up, down)
