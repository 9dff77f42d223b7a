"""Repeats the package's random draws on the host: who joins, which examples, which noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.privacy.mechanisms import random_bits


@functools.partial(jax.jit, static_argnames=("draw", "limit", "capacity"))
def _draw(draw, state, key, step, size, batch_size, limit, capacity):
    return draw(state, key, step, size, batch_size, limit, capacity)


def batches(sampler, key, size, batch, num_steps, limit, capacity):
    """The rows of each local step of the client that trains with `key`."""
    key = fold(key, Purpose.BATCH)
    batch = jnp.float32(batch) if sampler.varies else jnp.int32(batch)
    state, found = sampler.init(limit), []
    for step in range(num_steps):
        arguments = (state, key, step, jnp.int32(size), batch, limit, capacity)
        state, drawn = _draw(sampler.draw, *arguments)
        found.append(np.asarray(drawn.indices)[np.asarray(drawn.is_real)])
    return found


class Replay:
    """The draws of one run, by round, client and step."""

    def __init__(self, key, participation, sampler, sizes, batch_sizes, theta_shapes):
        self.key, self.participation, self.sampler = key, participation, sampler
        self.sizes, self.batch_sizes = sizes, np.asarray(batch_sizes)
        self.limit = max(1, int(max(sizes)))
        self.capacity = sampler.capacity(self.limit, int(np.ceil(self.batch_sizes.max())))
        self.theta_shapes = theta_shapes

    def cohort(self, round_index):
        drawn = self.participation.draw(fold(self.key, Purpose.PARTICIPATION), round_index)
        return sorted(np.asarray(drawn.indices)[np.asarray(drawn.is_real)].tolist())

    def server_key(self, round_index):
        """The key that the server's step draws with."""
        return fold(self.key, Purpose.SERVER_STEP, round_index)

    def _client_key(self, round_index, client):
        return fold(self.key, Purpose.CLIENT, round_index, client)

    def batches(self, round_index, client, num_steps, purpose=None):
        """The rows of each local step, positions within the client; of a second training too."""
        batch = np.broadcast_to(self.batch_sizes, len(self.sizes))[client]
        key, size = self._client_key(round_index, client), self.sizes[client]
        key = key if purpose is None else fold(key, purpose)
        return batches(self.sampler, key, size, batch, num_steps, self.limit, self.capacity)

    def _normal(self, key):
        """One standard normal draw for each parameter, leaf after leaf."""
        leaves = [np.zeros(shape) for shape in self.theta_shapes]
        drawn = random_bits.like(key, leaves, random_bits.normal)
        return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in drawn])

    def record_noise(self, round_index, client, num_steps):
        key = fold(self._client_key(round_index, client), Purpose.RECORD_NOISE)
        return [self._normal(fold(key, step)) for step in range(num_steps)]

    def central_noise(self, round_index):
        return self._normal(fold(self.key, Purpose.CENTRAL_NOISE, round_index))
