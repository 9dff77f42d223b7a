"""Participation in rounds: a sampler and the population of clients that it draws from."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.made import changed, exchanged, made
from fedjax_dp.core.ranges import Count, Probability
from fedjax_dp.data.sampling import Draw, Sampler


def _constant(value: int, size: int, batch_size: float) -> int:
    """Returns the same for any population and cohort."""
    del size, batch_size
    return value


def _unchanged(base: Any, size: int, batch_size: float) -> Any:
    """Returns the event of a release on a given cohort."""
    del size, batch_size
    return base


class Participation(NamedTuple):
    """Participation in rounds: a sampler bound to a population of clients.

    Attributes:
      sampler: how the cohort is drawn.
      num_clients: the population.
      cohort_size: the (expected) number of clients a round.
      capacity: slots of a cohort.
      made: the participation as it was made; one of another draw has no event.
    """

    sampler: Sampler
    num_clients: int
    cohort_size: float
    capacity: int
    made: Any = None

    def draw(self, key: PRNGKey, round_index: jax.typing.ArrayLike, start: Any = None) -> Draw:
        """Draws the cohort of one round.

        Args:
          key: the participation key of the run, the same every round.
          round_index: the round, from 0.
          start: as for `draws`.

        Returns:
          The cohort; `indices` are client indices.
        """
        return self._drawn(self._first(start), key, round_index)[1]

    def draws(self, key: PRNGKey, rounds: jax.typing.ArrayLike, start: Any = None) -> Draw:
        """Draws the cohorts of several rounds, one after another.

        Args:
          key: as for `draw`.
          rounds: their indices, ascending, `[rounds]`.
          start: the sampler's state before them; that before round 0 if None.

        Returns:
          The cohorts, each array `[rounds, ...]`.
        """
        state = self._first(start)
        return jax.lax.scan(lambda s, r: self._drawn(s, key, r), state, jnp.asarray(rounds))[1]

    def _first(self, start: Any) -> Any:
        return self.sampler.init(self.num_clients) if start is None else start

    def _drawn(self, state: Any, key: PRNGKey, round_index: Any) -> tuple[Any, Draw]:
        batch = self.cohort_size if self.sampler.varies else int(self.cohort_size)
        size = self.num_clients
        return self.sampler.draw(state, key, round_index, size, batch, size, self.capacity)

    @property
    def min_drawn(self) -> int:
        """The fewest clients of a round."""
        return self.sampler.min_drawn(self.num_clients, self.cohort_size)

    def most_drawn(self, num_rounds: int) -> int:
        """Bounds the number of distinct clients that some rounds draw.

        Args:
          num_rounds: the number of rounds.

        Returns:
          An upper bound, which under Poisson sampling holds except with probability 1e-9.
        """
        most = min(self.num_clients, num_rounds * self.capacity)
        if not self.sampler.name.startswith(("poisson", "truncated_poisson")):
            return most
        stays = math.log1p(-min(self.cohort_size / self.num_clients, 1 - 1e-12))
        mean = self.num_clients * -math.expm1(num_rounds * stays)
        # Bernstein's inequality for a sum of independent draws.
        tail = math.log(1e9)
        return min(most, math.ceil(mean + math.sqrt(2 * mean * tail) + tail))

    @checked
    def quantile_of_draws(self, share: Probability, num_rounds: Count) -> int:
        """Computes how often a client is drawn at most, in a share of the cases.

        Args:
          share: the probability, in (0, 1]; over draws and clients.
          num_rounds: the number of rounds, at least 1.

        Returns:
          The smallest number of rounds of which a client is in no more with this probability.

        Raises:
          ValueError: for a number out of its range, or cohorts of which no law is known.
        """
        law, name = self.sampler.law, self.sampler.name
        rule = "draw cohorts of which it is known how often a client is in one"
        checks.require(law is not None, "participation", rule, name)
        assert law is not None
        found = law(num_rounds, self.num_clients, self.cohort_size)
        # Sums of rounded probabilities may miss the share by some ulps.
        return int(np.argmax(found >= share * (1 - 1e-12)))

    def of_at_least(self, min_drawn: int) -> "Participation":
        """Declares that rounds may have fewer clients.

        Args:
          min_drawn: the fewest clients of a round, at least 0.

        Returns:
          The participation, at the same price.
        """
        fewest = partial(_constant, min(min_drawn, self.min_drawn))
        return changed(self, sampler=changed(self.sampler, min_drawn=fewest))

    def of_any_draw(self, *, charges_all: bool) -> "Participation":
        """Declares that cohorts may be any clients, so that nothing is amplified.

        Args:
          charges_all: whether all clients pay for every round, and not those that are drawn.

        Returns:
          The participation; its sampler's own draws mean nothing.
        """
        sampler = changed(
            self.sampler,
            name="any_draw",
            analysis=_unchanged,
            charges_all=charges_all,
            separation=partial(_constant, 1),
            min_drawn=partial(_constant, 0),
            law=None,
        )
        return changed(self, sampler=sampler)

    @property
    def separation(self) -> int:
        """The fewest rounds from one participation of a client to its next."""
        return self.sampler.separation(self.num_clients, self.cohort_size)

    def event(self, base: Any) -> Any:
        """Returns the privacy event of a round whose release has the base event.

        Args:
          base: the event of the mechanism on a given cohort.

        Returns:
          The event, amplified if the sampler amplifies.

        Raises:
          ValueError: if the combination has no valid analysis, or parts were exchanged.
        """
        parts = exchanged(self)
        rule = "be as participation() made it where privacy is claimed: make another one"
        checks.require(not parts, "participation", rule, f"one with another {', '.join(parts)}")
        return self.sampler.event(base, self.num_clients, self.cohort_size)


@checked
def participation(
    sampler: Sampler, num_clients: Count, cohort_size: float | None = None
) -> Participation:
    """Binds a sampler to a population of clients.

    Args:
      sampler: of clients, such as `poisson()`, `fixed_size()` or `full_participation()`.
      num_clients: the population.
      cohort_size: the number of clients a round, the expected one under Poisson sampling, in (0,
        num_clients]; all of them if None.

    Returns:
      The participation.

    Raises:
      ValueError: if the cohort is larger than the population, or than separated draws allow, or
        fractional although the sampler draws a fixed number.
    """
    size = float(num_clients if cohort_size is None else cohort_size)
    checks.positive("cohort_size", size)
    rule = f"be at most the population of {num_clients} clients"
    checks.require(size <= num_clients, "cohort_size", rule, cohort_size)
    if sampler.name == "min_separated" and cohort_size is not None:
        separation = sampler.separation(num_clients, size)
        most = num_clients // separation
        rule = f"be at most {most}: each of {num_clients} clients joins once in {separation} rounds"
        checks.require(size <= most, "cohort_size", rule, cohort_size)
    if sampler.name == "full_participation":
        size = float(num_clients)
    rule = f"be an integer under the sampler {sampler.name!r}"
    checks.require(sampler.varies or size == int(size), "cohort_size", rule, cohort_size)
    fits = sampler.name not in ("shuffled", "shuffled_whole")
    rule = "draw clients independently of the past"
    checks.require(fits, "sampler", rule, sampler.name)
    capacity = sampler.capacity(num_clients, int(np.ceil(size)))
    return made(Participation(sampler, num_clients, size, capacity))
