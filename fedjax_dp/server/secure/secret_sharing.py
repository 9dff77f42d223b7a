"""Shamir's secret sharing of mask seeds, and the rule by which clients give shares back."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count

# A prime that holds keys of 32 bytes, and of 64.
PRIME = 2**521 - 1

Seed = Literal["pair", "own"]


@checked
def share_secret(
    secret: int,
    holders: Sequence[int],
    threshold: Count,
    *,
    prime: int = PRIME,
    draw: Callable[[int], int] = secrets.randbelow,
) -> dict[int, int]:
    """Divides a secret among holders, any `threshold` of whom can recover it.

    Guarantee: fewer than `threshold` shares have the same distribution whatever the secret, if
    `draw` is uniform.

    Args:
      secret: an integer, at least 0 and below `prime`.
      holders: indices of the clients that get a share, at least 0, no two alike.
      threshold: how many shares recover the secret, at most the number of holders.
      prime: the order of the field, above all holders.
      draw: `(n) -> integer` in [0, n); from the operating system by default.

    Returns:
      The share of each holder, in [0, prime).

    Raises:
      ValueError: if holders repeat, or are fewer than the threshold.

    Source: Shamir 1979.
    """
    rule = f"be at least 0 and below the prime of {prime.bit_length()} bits"
    checks.require(0 <= secret < prime, "secret", rule, secret.bit_length())
    checks.require(len(set(holders)) == len(holders), "holders", "differ", list(holders))
    fits = all(0 <= h < prime - 1 for h in holders)
    checks.require(fits, "holders", "be at least 0 and below the prime", list(holders))
    rule = f"be at most the {len(holders)} holders"
    checks.require(threshold <= len(holders), "threshold", rule, threshold)
    coefficients = [secret, *(draw(prime) for _ in range(threshold - 1))]

    def at(x: int) -> int:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % prime
        return value

    # The secret is the value at 0, so that holder 0 gets that at 1.
    return {holder: at(holder + 1) for holder in holders}


@checked
def recover_secret(shares: Mapping[int, int], threshold: Count, *, prime: int = PRIME) -> int:
    """Recovers a secret from shares.

    Args:
      shares: by holder; the first `threshold` of them are used.
      threshold: how many shares the secret needs.
      prime: the order of the field.

    Returns:
      The secret.

    Raises:
      ValueError: if there are fewer shares than the threshold.

    Source: Shamir 1979.
    """
    rule = f"be at least the threshold of {threshold}"
    checks.require(len(shares) >= threshold, "the number of shares", rule, len(shares))
    points = [(holder + 1, share) for holder, share in list(shares.items())[:threshold]]
    secret = 0
    for x, share in points:
        above = below = 1
        for other, _ in points:
            if other != x:
                above, below = above * other % prime, below * (other - x) % prime
        secret += share * above * pow(below, -1, prime)
    return secret % prime


class HeldShares(NamedTuple):
    """The shares of one round that a client holds for its neighbours, and what it gave back.

    Attributes:
      pair: shares of seeds of pair masks, by neighbour.
      own: shares of seeds of own masks, by neighbour.
      threshold: the fewest neighbours that must have sent, see `MaskGraph`.
      given: which of a neighbour's two seeds was asked for, by neighbour.
    """

    pair: Mapping[int, int]
    own: Mapping[int, int]
    threshold: int
    given: Mapping[int, Seed] = {}

    @checked
    def give(
        self, dropped: Iterable[int], sent: Iterable[int]
    ) -> tuple["HeldShares", dict[int, int], dict[int, int]]:
        """Gives back shares for the end of a round, of one seed for each neighbour at most.

        Guarantee: whatever is asked, and however often, an honest client never gives shares of both
        seeds of a neighbour: the pair masks of a client that is said to have dropped out stay
        behind its own mask, so that a message that comes late says nothing.

        Args:
          dropped: neighbours whose pair masks are left in the sum.
          sent: neighbours whose own masks are in the sum.

        Returns:
          What is held then; shares of pair seeds, and of own seeds, by neighbour.

        Raises:
          ValueError: if both seeds of a client are asked for, now or with an earlier request, if it
            is no neighbour, or if fewer than `threshold` neighbours sent.

        Source: Bonawitz and others 2017, figure 4, round 4.
        """
        wanted: dict[int, Seed] = dict.fromkeys(dropped, "pair")
        asked_own = set(sent)
        both = sorted(asked_own & set(wanted))
        rule = "name no client that sent: only one of a client's two seeds may be recovered"
        checks.require(not both, "dropped", rule, both)
        rule = f"name at least {self.threshold} neighbours"
        checks.require(len(asked_own) >= self.threshold, "sent", rule, sorted(asked_own))
        wanted |= dict.fromkeys(asked_own, "own")
        for client, seed in wanted.items():
            checks.require(client in self.pair, "dropped and sent", "name neighbours", client)
            before = self.given.get(client, seed)
            rule = f"not ask for the {seed} seed of a client whose {before} seed was given"
            checks.require(before == seed, "dropped and sent", rule, client)
        held = self._replace(given={**self.given, **wanted})
        pair = {c: self.pair[c] for c, seed in wanted.items() if seed == "pair"}
        own = {c: self.own[c] for c, seed in wanted.items() if seed == "own"}
        return held, pair, own
