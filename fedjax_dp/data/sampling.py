"""Samplers: of clients for a round, or of records for a local step, in one interface."""

from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import fold
from fedjax_dp.core.made import changed, exchanged, made
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import promoted
from fedjax_dp.data import draw_laws, sparse

# A Poisson draw compares 32 random bits with the rate. The rate is lowered by this factor, so that
# rounding in float32 can only make the drawn rate smaller than the accounted one.
_RATE_MARGIN = 1.0 - 2.0**-22
# Draws ahead hold up to so many numbers of one client at once.
_MOST_AHEAD = 2**16


class Draw(NamedTuple):
    """One drawn subset of a population, in a fixed number of slots.

    Attributes:
      indices: members of the population, the drawn ones first, `[capacity]`, int32.
      is_real: which slots hold a drawn member, `[capacity]`, bool.
      overflow: how many drawn members found no slot, int32; 0 unless a capacity was set.
    """

    indices: jax.Array
    is_real: jax.Array
    overflow: jax.Array


class Sampler(NamedTuple):
    """A way to draw subsets of a population, with its event for the accounting.

    The same sampler draws the clients of a round (population: all clients) and the records of a
    local step (population: the examples of one client, whose number may differ by client).

    Attributes:
      name: the term used in reports.
      init: `(limit) -> state` before the first draw; `limit` is the largest population.
      draw: `(state, key, step, size, batch_size, limit, capacity, any_of) -> (state, Draw)`;
        `key` is the same at every step, `size` and `batch_size` (the expected count) may be
        traced. `any_of` reduces a flag over all draws that are vmapped with this one; it may be
        left out.
      capacity: `(limit, max_batch_size) -> int`, the number of slots that a draw needs.
      analysis: `(base, size, batch_size) -> DpEvent`, as `event` of the sampler as it was made.
      nominal_size: `(size, batch_size) -> count`, the public expected size of a draw.
      num_steps_per_epoch: `(size, batch_size) -> steps` that read each member once on average.
      charges_all: whether a draw costs every member of the population, drawn or not, as
        amplification by sampling requires; if false, only those drawn are charged.
      varies: whether the number drawn is random.
      separation: `(size, batch_size) -> steps`, at least, from one draw of a member to its next.
      min_drawn: `(size, batch_size) -> count`, the fewest members that a draw may hold.
      law: `(steps, size, batch_size) -> probabilities` that so many draws hold a member at most 0,
        1, … `steps` times, `[steps + 1]`, float64; None if it is not known.
      made: the sampler as it was made; one of another draw has no event.
    """

    name: str
    init: Callable[[int], Any]
    draw: Callable[..., tuple[Any, Draw]]
    capacity: Callable[[int, int], int]
    analysis: Callable[[Any, int, float], Any]
    nominal_size: Callable[[Any, Any], Any]
    num_steps_per_epoch: Callable[[Any, Any], Any]
    charges_all: bool
    varies: bool
    separation: Callable[[int, float], int] = lambda size, batch_size: 1
    min_drawn: Callable[[int, float], int] = lambda size, batch_size: min(int(batch_size), size)
    law: Callable[[int, int, float], np.ndarray] | None = None
    made: Any = None

    def event(self, base: Any, size: int, batch_size: float) -> Any:
        """Returns the event of one draw.

        Args:
          base: the event of a release on a given draw.
          size: the population.
          batch_size: the expected number drawn.

        Returns:
          The event, amplified if the sampler amplifies.

        Raises:
          ValueError: if the combination has no valid analysis, or parts were exchanged.
        """
        rule = (
            "be as it was made where privacy is claimed, since its event is that of its own draw; "
            "clients may be drawn by the draw of a wrapper, which amplifies nothing"
        )
        foreign = f"{self.name}, which this package did not make"
        checks.require(self.made is not None, "sampler", rule, foreign)
        parts = exchanged(self)
        checks.require(not parts, "sampler", rule, f"{self.name} with another {', '.join(parts)}")
        return self.analysis(base, size, batch_size)

    def draws_ahead(
        self, key: Any, num_steps: int, size: int, batch_size: Any, limit: int, capacity: int
    ) -> "Draw | None":
        """Draws for the first steps at once, as they are drawn one by one.

        A step of an accelerator waits for each small operation of its draw. The sampler has to be
        as it was made: its state at the beginning of an epoch does not depend on earlier ones.

        Args:
          key: as for `draw`.
          num_steps: the number of steps.
          size: the population.
          batch_size: the expected number drawn.
          limit: the largest population.
          capacity: the number of slots.

        Returns:
          The draws, `[num_steps, ...]`; None if there is none, or if they would take much memory.
        """
        if num_steps == 0 or limit > sparse.DENSE or num_steps * limit > _MOST_AHEAD:
            return None
        with jax.ensure_compile_time_eval():
            per_epoch = max(1, int(self.num_steps_per_epoch(np.int32(size), batch_size)))
        fixed = jnp.int32(size), batch_size, limit, capacity

        def state_of(first):
            return self.draw(self.init(limit), key, first, *fixed, jnp.ones_like)[0]

        states = jax.vmap(state_of)(jnp.arange(0, num_steps, per_epoch))

        def one(step):
            state = jax.tree.map(lambda x: x[step // per_epoch], states)
            return self.draw(state, key, step, *fixed, jnp.zeros_like)[1]

        return jax.vmap(one)(jnp.arange(num_steps))


def _sampler(**parts: Any) -> Sampler:
    """Makes a sampler whose analysis is that of its draw, by default of a fixed number."""
    usual: dict[str, Any] = {
        "init": _no_state,
        "capacity": lambda limit, batch_size: min(limit, batch_size),
        "nominal_size": lambda size, batch_size: batch_size,
        "num_steps_per_epoch": _ceil_div,
        "varies": False,
    }
    return made(Sampler(**usual | parts))


def _of_given_draw(base: Any, size: int, batch_size: float) -> Any:
    """Returns the event of a release on a given draw, which nothing amplifies."""
    del size, batch_size
    return base


def _ceil_div(size: Any, batch_size: Any) -> Any:
    size, batch_size = promoted(size, batch_size)
    return -(-size // batch_size)


def _itself(flag: jax.Array) -> jax.Array:
    return flag


def _last_block(size: int, batch_size: float) -> int:
    batch = min(int(batch_size), size)
    return size % batch or batch


def _of_equal_rates(steps: int, size: int, batch_size: float) -> np.ndarray:
    """Returns the law of draws that hold each member at the same rate, independently."""
    return draw_laws.binomial(steps, batch_size / size)


def _no_state(limit: int) -> tuple[()]:
    del limit
    return ()


def _slots(indices: jax.Array, count: jax.Array, capacity: int) -> Draw:
    kept = jnp.minimum(count, capacity)
    is_real = jnp.arange(capacity) < kept
    indices = jnp.where(is_real, indices[:capacity], 0).astype(jnp.int32)
    return Draw(indices, is_real, (count - kept).astype(jnp.int32))


@checked
def poisson(capacity: Count | None = None) -> Sampler:
    """Draws each member independently with probability `batch_size / size`.

    Without a capacity the draw is exact, and compiled loops run only over slots that are filled.
    The slots hold the whole population if that is small, else a number that a draw exceeds with
    probability at most 2^-100; its cost then follows the draw, not the population. With a capacity,
    a larger draw is cut to a uniformly random subset and accounted as truncated sampling.

    Guarantee: given all others, no member is drawn at more than the accounted rate: 32-bit
    comparisons, with rates rounded down by more than their possible error.

    Args:
      capacity: the number of slots, or None for the exact draw.

    Returns:
      The sampler.

    Raises:
      ValueError: if the capacity is not a positive integer.

    Source: Abadi and others 2016, section 3.1; Ganesh 2025 for truncation.
    """
    is_cut = capacity is not None

    def dense(key, size, batch_size, limit, capacity):
        bits = jax.random.bits(key, (limit,), jnp.uint32)
        rate = trees.ratio(batch_size, jnp.maximum(size, 1))
        threshold = (jnp.minimum(rate, 0.999) * _RATE_MARGIN * 2.0**32).astype(jnp.uint32)
        exists = jnp.arange(limit) < size
        drawn = exists & ((bits < threshold) | (rate >= 1.0))
        count = jnp.sum(drawn)
        if not is_cut or capacity >= limit:
            indices = jnp.nonzero(drawn, size=capacity, fill_value=0)[0]
        else:
            # The smallest random numbers among the drawn: a uniformly random subset of them.
            order = jnp.where(drawn, (bits >> 1).astype(jnp.int32), jnp.iinfo(jnp.int32).max)
            indices = jax.lax.top_k(-order, capacity)[1]
        return _slots(indices, count, capacity)

    def draw(state, key, step, size, batch_size, limit, capacity, any_of=_itself):
        own = fold(key, step)
        if is_cut or limit <= sparse.DENSE:
            return state, dense(own, size, batch_size, limit, capacity)
        size, batch_size = jnp.asarray(size), jnp.asarray(batch_size, jnp.float32)

        def of_all():
            width = sparse.num_dense(limit, sparse.mean_of(capacity))
            return dense(own, size, batch_size, width, capacity)

        def of_few():
            rate = jnp.minimum(trees.ratio(batch_size, jnp.maximum(size, 1)), 1 / 32)
            indices, count, more = sparse.coins(own, size, rate, limit, capacity)
            drawn = _slots(indices, count, capacity)
            return drawn._replace(overflow=more.astype(jnp.int32))

        return state, jax.lax.cond(sparse.is_sparse(size, batch_size), of_few, of_all)

    def slots(limit, batch_size):
        if is_cut:
            return min(capacity, limit)
        return limit if limit <= sparse.DENSE else min(limit, sparse.tail(batch_size))

    def event(base, size, batch_size):
        rate = min(1.0, batch_size / size)
        # The draw compares in float32, where a rate this close to 1 draws every member.
        rate = 1.0 if rate > _RATE_MARGIN else rate
        if capacity is None or capacity >= size:
            return base if rate >= 1.0 else dp_accounting.PoissonSampledDpEvent(rate, base)
        if not isinstance(base, dp_accounting.GaussianDpEvent):
            raise ValueError(
                "a Poisson sampler with a capacity has a known analysis for Gaussian noise only, "
                f"got {base!r}; the nearest valid choice is poisson() without a capacity"
            )
        return dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=int(size),
            sampling_probability=rate,
            truncated_batch_size=int(capacity),
            noise_multiplier=base.noise_multiplier,
        )

    def law(steps, size, batch_size):
        rate = batch_size / size
        if capacity is not None and capacity < size:
            rate = draw_laws.cut_rate(size, rate, capacity)
        return draw_laws.binomial(steps, rate)

    return _sampler(
        name="poisson" if capacity is None else "truncated_poisson",
        draw=draw,
        charges_all=True,
        capacity=slots,
        analysis=event,
        varies=True,
        min_drawn=lambda size, batch_size: 0,
        law=law,
    )


def fixed_size() -> Sampler:
    """Draws exactly `batch_size` members uniformly without replacement.

    Guarantee: accounted as sampling without replacement, which is known for the replace-one
    relation only.

    Returns:
      The sampler.

    Source: Wang, Balle and Kasiviswanathan 2019.
    """

    def draw(state, key, step, size, batch_size, limit, capacity, any_of=_itself):
        own, count = fold(key, step), jnp.minimum(batch_size, size)
        width = sparse.num_dense(limit, capacity)

        def of_all():
            bits = jax.random.bits(own, (width,), jnp.uint32)
            exists = jnp.arange(width) < size
            order = jnp.where(exists, (bits >> 1).astype(jnp.int32), jnp.iinfo(jnp.int32).max)
            return jax.lax.top_k(-order, min(capacity, width))[1].astype(jnp.int32)

        if limit <= sparse.DENSE:
            return state, _slots(of_all(), count, capacity)
        indices = jax.lax.cond(
            sparse.is_sparse(jnp.asarray(size), batch_size),
            lambda: sparse.distinct(own, jnp.asarray(size), count, capacity),
            of_all,
        )
        return state, _slots(indices, count, capacity)

    def event(base, size, batch_size):
        if batch_size >= size:
            return base
        return dp_accounting.SampledWithoutReplacementDpEvent(int(size), int(batch_size), base)

    return _sampler(
        name="fixed_size", draw=draw, charges_all=True, analysis=event, law=_of_equal_rates
    )


def full_participation() -> Sampler:
    """Draws the whole population every time: full participation, or full-batch steps.

    Returns:
      The sampler; its event is the base event, without amplification.
    """

    def draw(state, key, step, size, batch_size, limit, capacity, any_of=_itself):
        del key, step, batch_size
        return state, _slots(jnp.arange(limit), jnp.minimum(size, limit), capacity)

    return _sampler(
        name="full_participation",
        draw=draw,
        analysis=_of_given_draw,
        charges_all=True,
        capacity=lambda limit, batch_size: limit,
        nominal_size=lambda size, batch_size: size,
        num_steps_per_epoch=lambda size, batch_size: jnp.ones_like(size),
        min_drawn=lambda size, batch_size: size,
        law=lambda steps, size, batch_size: draw_laws.binomial(steps, 1.0),
    )


@checked
def full_participation_first(steps: Count, then: Sampler) -> Sampler:
    """Draws the whole population at first, and uses another sampler after that.

    It has no amplification analysis, so privacy claims for its members refuse it.

    Args:
      steps: how many of the first draws hold the whole population, at least 1.
      then: the sampler of the later draws.

    Returns:
      The sampler.

    Raises:
      ValueError: if the number is not a positive integer; from `event`, always.
    """

    def draw(state, key, step, size, batch_size, limit, capacity, any_of=_itself):
        state, later = then.draw(state, key, step, size, batch_size, limit, capacity, any_of)
        whole = _slots(jnp.arange(limit), jnp.asarray(size, jnp.int32), capacity)
        return state, jax.tree.map(lambda a, b: jnp.where(step < steps, a, b), whole, later)

    def event(base, size, batch_size):
        raise ValueError(
            "sampler must have a privacy analysis for the members it draws, got full participation "
            f"in the first {steps} draws and {then.name} later"
        )

    def law(num_steps, size, batch_size):
        assert then.law is not None
        first = min(steps, num_steps)
        return np.pad(then.law(num_steps - first, size, batch_size), (first, 0))

    return changed(
        then,
        name=f"full_participation_first({steps}, {then.name})",
        draw=draw,
        capacity=lambda limit, max_batch_size: limit,
        analysis=event,
        separation=lambda size, batch_size: 1,
        law=None if then.law is None else law,
    )


def cyclic() -> Sampler:
    """Draws consecutive blocks of `batch_size` members, over and over, without randomness.

    Returns:
      The sampler; only those drawn are charged, each with the base event, without amplification.
    """

    def draw(state, key, step, size, batch_size, limit, capacity, any_of=_itself):
        del key
        blocks = _ceil_div(jnp.maximum(size, 1), batch_size)
        first = (step % blocks) * batch_size
        count = jnp.clip(size - first, 0, batch_size)
        return state, _slots(first + jnp.arange(capacity), count, capacity)

    def law(steps, size, batch_size):
        firsts = np.arange(0, size, int(batch_size))
        turns = np.maximum(-(-(steps - np.arange(len(firsts))) // len(firsts)), 0)
        shares = np.diff(firsts, append=size) / size
        return np.cumsum(np.bincount(turns, weights=shares, minlength=steps + 1))

    return _sampler(
        name="cyclic",
        draw=draw,
        law=law,
        analysis=_of_given_draw,
        charges_all=False,
        separation=lambda size, batch_size: _ceil_div(size, int(batch_size)),
        min_drawn=_last_block,
    )


@checked
def min_separated(separation: Count) -> Sampler:
    """Draws `batch_size` members at random, each at most once in `separation` steps.

    The population is dealt into `separation` groups at random, once for a run; a step draws from
    the group whose turn it is.

    Args:
      separation: steps from one draw of a member to its next, at least 1.

    Returns:
      The sampler; only those drawn are charged, each with the base event, without amplification.

    Raises:
      ValueError: if the separation is not a positive integer.
    """

    def draw(state, key, step, size, batch_size, limit, capacity, any_of=_itself):
        exists = jnp.arange(limit) < size
        last = jnp.iinfo(jnp.int32).max

        def order_of(key):
            bits = (jax.random.bits(key, (limit,), jnp.uint32) >> 1).astype(jnp.int32)
            return jnp.where(exists, bits, last)

        dealt = jnp.argsort(jnp.argsort(order_of(fold(key, 0)))) % separation
        has_turn = exists & (dealt == step % separation)
        order = jnp.where(has_turn, order_of(fold(key, 1, step)), last)
        indices = jax.lax.top_k(-order, min(capacity, limit))[1]
        return state, _slots(indices, jnp.minimum(batch_size, jnp.sum(has_turn)), capacity)

    def law(steps, size, batch_size):
        # The groups, dealt in turn, differ by one member, and in how often they have their turn.
        groups = np.arange(separation)
        sizes = -(-(size - groups) // separation)
        turns = np.maximum(-(-(steps - groups) // separation), 0)
        laws = [
            held / size * draw_laws.binomial(steps, batch_size / held, int(count))
            for held, count in zip(sizes, turns, strict=True)
            if held > 0
        ]
        return np.sum(laws, axis=0)

    return _sampler(
        name="min_separated",
        draw=draw,
        law=law,
        analysis=_of_given_draw,
        charges_all=False,
        separation=lambda size, batch_size: separation,
        min_drawn=lambda size, batch_size: min(int(batch_size), size // separation),
    )


@checked
def without_amplification(sampler: Sampler) -> Sampler:
    """Draws as a random sampler does, and charges those drawn alone, without amplification.

    For draws that are no secret: a server that is not trusted knows the cohort, and a round that is
    lost shows how many clients were drawn. Draws do not depend on the data, so that the event of a
    given cohort covers each of its members.

    Args:
      sampler: `poisson`, with a capacity or without, or `fixed_size`.

    Returns:
      The sampler; only those drawn are charged, each with the base event.

    Raises:
      ValueError: for a sampler that amplifies nothing.
    """
    rule = "be poisson() or fixed_size(), which amplify"
    fits = sampler.name in ("poisson", "truncated_poisson", "fixed_size")
    checks.require(fits, "sampler", rule, sampler.name)
    return changed(
        sampler,
        name=f"{sampler.name}_without_amplification",
        analysis=_of_given_draw,
        charges_all=False,
    )


@checked
def shuffled(*, only_whole: bool = False) -> Sampler:
    """Reads the population in a fresh random order every epoch, in blocks of `batch_size`.

    The last block of an epoch holds the rest. This is the batch rule of non-private training;
    it has no amplification analysis here, so that privacy accounting refuses it.

    Args:
      only_whole: leave out an incomplete last block, as batch norm requires: the variance of two
        examples may be nearly 0, and the gradient through it unbounded. A population below one
        block is read in one.

    Returns:
      The sampler.

    Raises:
      ValueError: for a value that is not of its type.
    """

    def blocks(size, batch_size):
        return jnp.maximum(size // batch_size, 1) if only_whole else _ceil_div(size, batch_size)

    def draw(order, key, step, size, batch_size, limit, capacity, any_of=_itself):
        steps = blocks(jnp.maximum(size, 1), batch_size)
        own, width = fold(key, step // steps), min(limit, sparse.DENSE)

        def reshuffle():
            bits = jax.random.bits(own, (width,), jnp.uint32) >> 1
            last = jnp.uint32(0xFFFFFFFF)
            return jnp.argsort(jnp.where(jnp.arange(width) < size, bits, last)).astype(jnp.int32)

        # For vmapped clients the sort runs if any of them starts an epoch:
        # an unbatched condition stays a branch.
        is_start = step % steps == 0
        fresh = jax.lax.cond(any_of(is_start), reshuffle, lambda: order)
        order = jnp.where(is_start, fresh, order)
        first = (step % steps) * batch_size
        places = first + jnp.arange(capacity)
        indices = order[jnp.minimum(places, width - 1)]
        if limit > sparse.DENSE:
            large = jnp.maximum(size, sparse.DENSE)
            indices = jax.lax.cond(
                size > sparse.DENSE, lambda: sparse.permuted(own, places, large), lambda: indices
            )
        return order, _slots(indices, jnp.clip(size - first, 0, batch_size), capacity)

    def event(base, size, batch_size):
        raise ValueError(
            "shuffled epochs have no privacy amplification that is accounted here, and are never "
            "reported with a Poisson epsilon; the nearest valid sampler is poisson()"
        )

    return _sampler(
        name="shuffled_whole" if only_whole else "shuffled",
        init=lambda limit: jnp.arange(min(limit, sparse.DENSE), dtype=jnp.int32),
        draw=draw,
        charges_all=True,
        analysis=event,
        num_steps_per_epoch=blocks,
        **({} if only_whole else {"min_drawn": _last_block}),
    )
