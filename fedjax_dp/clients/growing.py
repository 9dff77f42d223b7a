"""Data that grow by round: a client trains on its new records, or on all that it has so far."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count

Form = Literal["cumulative", "disjoint"]


class Growth(NamedTuple):
    """How many of its records a client has in a round."""

    rows: np.ndarray  # Records that a round adds to each client, `[num_clients]`, int32.
    # "cumulative" if round r, from 0, reads the first `(r + 1)·rows` records of a client,
    # "disjoint" if it reads the `rows` records after those of earlier rounds.
    form: Form

    def view(self, client: ClientData) -> ClientData:
        """Restricts a client to its records of the round; none if it owns less than that needs."""
        rows, done = jnp.asarray(self.rows)[client.index], jnp.asarray(client.round, jnp.int32)
        # Before round 0 lie the records of another client.
        has_enough = (done >= 0) & (done < client.size // rows)
        first, size = (0, (done + 1) * rows) if self.form == "cumulative" else (done * rows, rows)
        first, size = (jnp.where(has_enough, number, 0) for number in (first, size))
        return client.replace(  # type: ignore[attr-defined]
            start=client.start + first, size=size
        )

    def smallest(self, is_active: jax.Array, round: jax.typing.ArrayLike) -> jax.Array:
        """Finds the size of the smallest active client in a round; of all if none is active."""
        rows = jnp.asarray(self.rows, jnp.float32)
        least = jnp.min(jnp.where(is_active | ~jnp.any(is_active), rows, jnp.inf))
        times = jnp.asarray(round, jnp.float32) + 1 if self.form == "cumulative" else 1.0
        return least * times


@checked
def growing(rows_per_round: Count | Sequence[Count], num_clients: Count, form: Form) -> Growth:
    """Lets the data of every client grow by `rows_per_round`, one number or one for each client.

    Records are taken in their order. A client without as many as a round needs has none in it.

    Source: Mugunthan and others 2020 (PrivacyFL); Mugunthan 2022, chapter 5, algorithms 2 and 3.
    """
    rows = rows_per_round if isinstance(rows_per_round, int) else list(rows_per_round)
    checks.one_for_each("rows_per_round", rows, num_clients)
    return Growth(np.broadcast_to(np.asarray(rows, np.int32), num_clients), form)
