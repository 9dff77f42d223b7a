"""Anderson acceleration (type II) of any federation."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import Iterate, SharedModel
from fedjax_dp.clients.regularizers import mixing_weights
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Fraction, NonNegative, Size
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.round import ByClient
from fedjax_dp.engine.wrapping import ANDERSON, ANDERSON_OF_CLIENTS

Of = Literal["shared", "clients"]
NormWeights = Literal["federation", "equal"] | Sequence[NonNegative]

# Numbers of `Hyper.algorithm`, beside those of the algorithm itself.
_RANGES: dict[str, Any] = {
    "anderson_ridge": NonNegative,
    "anderson_damping": Fraction,
    "anderson_growth": Size,
}


@flax.struct.dataclass
class Memory:
    """The points after the last rounds, and those before minus these; each leaf `[places, ...]`."""

    images: PyTree
    residuals: PyTree


@flax.struct.dataclass
class Gram:
    """Products of residuals, `[places, places]`, float32, and how many of the newest are valid."""

    products: jax.Array
    num_valid: jax.Array


@flax.struct.dataclass
class Accelerated:
    """The wrapper's state: products, and the memory, by client for the clients' points."""

    gram: Gram
    memory: Any


@checked
def anderson(
    federation: Federation,
    *,
    memory: Count,
    of: Of = "shared",
    first: Count | None = None,
    ridge: NonNegative = 1e-10,
    damping: Fraction = 0.0,
    growth: Size = 1e4,
    weights: NormWeights | None = None,
    num_rounds: Count | None = None,
    is_buffer: Callable[[PyTree], PyTree] | None = None,
) -> Federation:
    """Accelerates a federation: each round's point is replaced by a mix of those of several rounds.

    A round maps a point u to T(u). With the residuals u − T(u) of the last τ + 1 rounds, weights of
    sum 1 are found that minimise the norm of their mix, and the next round starts from the same mix
    of the T(u). Messages are unchanged; the server, or the simulation, holds 2 (τ + 1) copies of
    the point.

    Where the solution is not finite, its residual is not shorter, or the newest residual is
    `growth` times the shortest in memory, the round stays plain; in the last case the memory is
    reset.

    Guarantee: that of the federation, whose claims are unchanged: the shared model is what rounds
    release, and the clients' points are refused where an aggregator protects clients, since these
    are not released.

    Args:
      federation: the federation to accelerate; the method is made for deterministic rounds with
        full participation.
      memory: τ, the number of earlier rounds besides the newest, at least 1.
      of: the server's shared model alone, or the points of all clients as one long vector, as in
        the centralised form of `splitting`.
      first: the number of plain rounds at the start, at least τ; τ + 1 if not given.
      ridge: strength of the regularisation of the small system over its trace, at least 0.
      damping: share of the plain round in the mix, in [0, 1]; 1 changes nothing.
      growth: how much longer a residual may be than the shortest in memory, at least 1.
      weights: of the clients in the norm of a residual of their points: "federation", those of the
        mean z̄, or "equal", or `[num_clients]` numbers; "federation" if not given. For
        `of="clients"` alone.
      num_rounds: rounds of the run if known, so that a longer memory is refused.
      is_buffer: marks buffers, such as `Model.is_buffer`: statistics of batch norm stay as rounds
        leave them, and have no residuals. None if there are no buffers.

    Returns:
      The federation; its server info has `residual` too, the norm of the newest, and `is_mixed`,
      whether the round was accelerated. `ridge`, `damping` and `growth` are numbers of
      `hyper.algorithm`, with `anderson_` before their names.

    Raises:
      ValueError: for a number out of its range, weights for the shared model, or a federation
        without such a point, with steps on the host, or without full participation where clients'
        points are mixed.

    Source: Anderson 1965; Malekmohammadi 2025, section 2.5, the least-squares problem under
    "Acceleration", with the weighted norm of the product space (equation 2.2).
    """
    check_memory(memory, of, first, weights, num_rounds)
    first = memory + 1 if first is None else first
    numbers = {"anderson_ridge": ridge, "anderson_damping": damping, "anderson_growth": growth}
    point = _point_of(federation, of)
    norm = _norm_weights(federation, point, weights)

    scheme = _Scheme(federation, of, memory + 1, first, point, norm, is_buffer)
    own = ANDERSON if of == "shared" else ANDERSON_OF_CLIENTS
    accelerated = federation.wrapped(own, init=scheme.init, step=scheme.step)
    return accelerated.with_numbers(numbers, _RANGES)


def check_memory(
    memory: int, of: Of, first: int | None, weights: NormWeights | None, num_rounds: int | None
) -> None:
    """Refuses arguments of `anderson` that do not go together, whatever the federation."""
    if num_rounds is not None:
        checks.require(memory < num_rounds, "memory", f"be below the {num_rounds} rounds", memory)
    rule = f"be at least the memory, {memory}"
    checks.require(first is None or first >= memory, "first", rule, first)
    rule = "be left out for of='shared', which has one point"
    checks.require(weights is None or of == "clients", "weights", rule, weights)


def check_weights(weights: NormWeights | None, num_clients: int) -> None:
    """Refuses weights of clients that are not one number for each."""
    if weights is None or isinstance(weights, str):
        return
    found = np.asarray(weights, np.float64)
    rule = f"be one number of at least 0 for each of the {num_clients} clients, not all 0"
    fits = found.shape == (num_clients,) and bool(np.all(found >= 0) and found.sum() > 0)
    checks.require(fits, "weights", rule, weights)


class _Scheme(NamedTuple):
    """The extrapolated point and its memory, whose places are axis 0, or 1 of clients' points."""

    federation: Federation
    of: Of
    places: int
    first: int
    point: SharedModel | Iterate
    weights: np.ndarray | None
    is_buffer: Callable[[PyTree], PyTree] | None

    @property
    def axis(self) -> int:
        """The axis of places."""
        return 0 if self.of == "shared" else 1

    def empty(self, point: PyTree) -> Memory:
        """Makes the empty memory of a point."""

        def zeros(x):
            shape = (*x.shape[: self.axis], self.places, *x.shape[self.axis :])
            return jnp.zeros(shape, trees.at_least_float32(x).dtype)

        return Memory(*(jax.tree.map(lambda x: zeros(jnp.asarray(x)), point) for _ in range(2)))

    def init(self, key: Any, layout: Layout = Layout()) -> Any:
        """Makes the first state."""
        state = self.federation.init(key, layout)
        none = Gram(jnp.zeros((self.places, self.places)), jnp.int32(0))
        return self.with_outer(state, none, self.empty(self.point_in(state)))

    def point_in(self, state: Any) -> PyTree:
        """Reads the extrapolated point."""
        return self.point.read(state.server if self.of == "shared" else state.clients)

    def with_point(self, state: Any, point: PyTree) -> Any:
        """Replaces that point."""
        if self.of == "shared":
            return state._replace(server=self.point.write(state.server, point))
        return state._replace(clients=self.point.write(state.clients, point))

    def with_outer(self, state: Any, gram: Gram, memory: Memory) -> Any:
        """Adds the wrapper's state."""
        held = memory if self.of == "shared" else ByClient(memory)
        return state._replace(outer=(Accelerated(gram, held), *state.outer))

    def step(self, state, hyper, examples, cohort, key, layout=Layout()):
        """Runs a round and mixes its point with those of earlier rounds."""
        own, *others = state.outer
        before = state._replace(outer=tuple(others))
        memory = own.memory if self.of == "shared" else own.memory.values
        after, record, info = self.federation.step(before, hyper, examples, cohort, key, layout)
        start, image = self.point_in(before), self.point_in(after)
        place = before.round % self.places
        memory, gram = self._remembered(memory, own.gram, start, image, place)
        numbers = hyper.algorithm
        squares = jnp.diagonal(gram.products)
        counts = (place - jnp.arange(self.places)) % self.places < gram.num_valid
        shortest = jnp.min(jnp.where(counts, squares, jnp.inf))
        is_wild = squares[place] > numbers["anderson_growth"] ** 2 * shortest
        weights = mixing_weights(
            gram.products, counts, place, numbers["anderson_ridge"], numbers["anderson_damping"]
        )
        is_shorter = weights @ gram.products @ weights <= squares[place]
        mixed = self.for_buffers(self._mixed(memory.images, image, weights), image)
        is_mixed = (before.round >= self.first) & is_shorter & ~is_wild & trees.is_finite(mixed)
        point = trees.where(is_mixed, mixed, image)
        gram = Gram(gram.products, jnp.where(is_wild, 1, gram.num_valid))
        metrics = {
            "residual": jnp.sqrt(jnp.maximum(squares[place], 0)),
            "is_mixed": is_mixed.astype(jnp.float32),
        }
        info = info._replace(server={**info.server, **metrics})
        return self.with_outer(self.with_point(after, point), gram, memory), record, info

    def for_buffers(self, point: PyTree, other: PyTree) -> PyTree:
        """Takes the buffers of another point."""
        if self.is_buffer is None:
            return point
        return jax.tree.map(
            lambda flag, x, y: y if flag else x, self.is_buffer(point), point, other
        )

    def _remembered(
        self, memory: Memory, gram: Gram, start: PyTree, image: PyTree, place: Any
    ) -> tuple[Memory, Gram]:
        """Writes a round to its place, and its products with all others."""
        at = (slice(None), place) if self.axis else (place,)

        def written(all_rounds, one):
            return jax.tree.map(lambda a, x: a.at[at].set(x.astype(a.dtype)), all_rounds, one)

        widened = [jax.tree.map(trees.at_least_float32, x) for x in (start, image)]
        residual = trees.subtract(*widened)
        residual = self.for_buffers(residual, trees.zeros_like(residual))
        images, residuals = written(memory.images, image), written(memory.residuals, residual)
        newest = sum(
            jax.tree.leaves(jax.tree.map(self._products, residuals, residual)),
            start=jnp.zeros(self.places),
        )
        products = gram.products.at[place, :].set(newest).at[:, place].set(newest)
        num_valid = jnp.minimum(gram.num_valid + 1, self.places)
        return Memory(images, residuals), Gram(products, num_valid)

    def _products(self, all_rounds: jax.Array, one: jax.Array) -> jax.Array:
        """Multiplies one leaf of all residuals with that of the newest, `[places]`."""
        if self.axis == 0:
            # A matrix product would take ten times as long here; axis by axis little is rounded.
            products = all_rounds * one
            while products.ndim > 1:
                products = jnp.sum(products, axis=-1)
            return products
        num_clients = len(one)
        assert self.weights is not None
        # Padding up to a multiple of the devices has no weight.
        weights = jnp.zeros(num_clients).at[: len(self.weights)].set(self.weights)
        weighted = weights[:, None] * one.reshape(num_clients, -1)
        flat = all_rounds.reshape(num_clients, self.places, -1)
        exact = jax.lax.Precision.HIGHEST
        return jnp.einsum("ikp,ip->k", flat, weighted, precision=exact)

    def _mixed(self, images: PyTree, newest: PyTree, found: jax.Array) -> PyTree:
        """Mixes images; weights of sum 1 go to differences, which lose less to rounding."""

        def of_leaf(all_rounds, one):
            def moved(k, so_far):
                image = jax.lax.dynamic_index_in_dim(all_rounds, k, self.axis, keepdims=False)
                return so_far + found[k] * (image - one)

            start = jnp.zeros(one.shape, jnp.result_type(all_rounds, one, found))
            return (one + jax.lax.fori_loop(0, self.places, moved, start)).astype(one.dtype)

        return jax.tree.map(of_leaf, images, newest)


def _point_of(federation: Federation, of: Of) -> SharedModel | Iterate:
    """Finds the point to extrapolate, or refuses a federation without one."""
    algorithm, cohorts = federation.algorithm, federation.cohorts
    name, num_clients = algorithm.name, federation.population.num_clients
    rule = f"have no steps on the host between rounds, as {name} has"
    steps = algorithm.stages.host_steps
    checks.require(not steps, "federation", rule, len(steps))
    own = None if algorithm.client_state is None else algorithm.client_state.iterate
    own = own if isinstance(own, Iterate) else None
    is_full = cohorts.participation.min_drawn >= num_clients
    if of == "shared":
        rule = f"be 'clients' for {name}, whose rounds start from points of clients"
        checks.require(own is None, "of", rule, of)
        rule = f"be of an algorithm with a shared model, which {name} does not have"
        checks.require(algorithm.views.shared is not None, "federation", rule, name)
        assert algorithm.views.shared is not None
        rule = f"start its rounds from its model, and that of {name} is an average of many"
        checks.require(algorithm.views.shared.is_start, "federation", rule, "is_averaged=True")
        if not is_full:
            warnings.warn(
                f"acceleration is a heuristic where {cohorts.name} draws a part of "
                "the clients: residuals of different cohorts are compared",
                stacklevel=4,
            )
        return algorithm.views.shared
    rule = f"be 'shared' for {name}, which keeps no point for each client"
    checks.require(own is not None, "of", rule, of)
    rule = "be 'shared' where an aggregator protects clients: their points are not released"
    checks.require(federation.claims.client is None, "of", rule, of)
    rule = "be full where clients' points are mixed, as with full_participation()"
    checks.require(is_full, "participation", rule, cohorts.name)
    assert own is not None
    return own


def _norm_weights(
    federation: Federation, point: SharedModel | Iterate, weights: NormWeights | None
) -> np.ndarray | None:
    """Finds the clients' weights in the norm, `[num_clients]` of sum 1; None if shared."""
    if isinstance(point, SharedModel):
        return None
    sizes = np.asarray(federation.population.sizes)
    by_name = {"federation": point.weigh(sizes), "equal": np.ones(len(sizes))}
    if weights is None or isinstance(weights, str):
        weights = by_name[weights or "federation"]
    check_weights(weights, len(sizes))
    numbers = np.asarray(weights, np.float64)
    return (numbers / numbers.sum()).astype(np.float32)
