"""How a round is laid out: chunk, devices, placement. Speed and memory, never results."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_dp.core import argument_checks, checks
from fedjax_dp.core.devices import memory_per_device
from fedjax_dp.core.ranges import Count, Index
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation
from fedjax_dp.data.record_file import Folder
from fedjax_dp.models.cost import Cost

# The mesh axis that clients are shared out over, and the one of a chunk that is vmapped.
AXIS = "clients"
CHUNK_AXIS = "chunk"
# Clients share a chunk until a pass through its loop body does this many floating-point operations:
# small models gain from wide chunks, large ones fill the machine alone.
_OPERATIONS_PER_CHUNK = {"cpu": 5e7, "gpu": 1e11, "tpu": 1e11}
_WIDEST_CHUNK = {"cpu": 256, "gpu": 1024, "tpu": 1024}
# A chunk may take this share of a device's memory, if so many values as large as a client's largest
# live side by side.
_CHUNK_SHARE = 0.25
_LIVE_VALUES = 8
# A client alone takes up to so many times the work that it takes among others, and a second program
# has to save so much.
_ALONE_COST, _WORTHWHILE = 16, 0.5
# With fewer clients for each, devices wait for one another longer than they gain.
_CLIENTS_PER_DEVICE = 4
# A population up to this share of a device's memory is kept there whole.
_RESIDENT_BYTES = 2 * 2**30
# What clients keep is there too, up to this share of it.
_STATE_SHARE = 0.25


class Layout(NamedTuple):
    """The static choices of a round.

    Attributes:
      chunk: clients that are computed side by side.
      mesh: devices that share the cohort, or None for one device.
      is_roomy: whether devices have twice the slots that an even number of clients needs, so that
        work can be shared out by its length; not where the whole stack of updates is kept.
      alone_above: clients that take more local steps than this are computed one by one, ahead of
        the chunks, which so wait for none of them; None where nobody is.
    """

    chunk: Count = 1
    mesh: Mesh | None = None
    is_roomy: bool = False
    alone_above: Index | None = None

    @property
    def num_devices(self) -> int:
        """Counts the devices."""
        return 1 if self.mesh is None else self.mesh.size

    def clients_per_device(self, num_clients: int) -> int:
        """Counts the clients whose state a device holds.

        Args:
          num_clients: the population.

        Returns:
          The number; the last device may hold fewer.
        """
        return -(-num_clients // self.num_devices)

    def slots_per_device(self, participation: Participation, is_owned: bool = False) -> int:
        """Counts the slots of a device.

        Args:
          participation: who joins a round.
          is_owned: whether each client goes to the device that holds its state.

        Returns:
          A multiple of the chunk.
        """
        slots = -(-participation.capacity // self.num_devices)
        if is_owned:
            owned = self.clients_per_device(participation.num_clients)
            slots = min(participation.capacity, owned)
        elif self.is_roomy:
            slots = min(participation.capacity, 2 * slots)
        if self.alone_above is not None:
            # Chunks begin at a multiple of their width, behind those that are computed alone.
            slots += self.chunk
        return -(-slots // self.chunk) * self.chunk

    def usual_slots(self, participation: Participation) -> int:
        """Counts the slots of a device that nearly every cohort fits into.

        Args:
          participation: who joins a round.

        Returns:
          A multiple of the chunk, with room for twice the clients that are expected.
        """
        usual = power_of_two(2 * participation.cohort_size / self.num_devices)
        usual = -(-usual // self.chunk) * self.chunk
        return min(usual, self.slots_per_device(participation, is_owned=True))

    def is_alone(self, steps: jax.Array) -> jax.Array:
        """Tells which clients are computed one by one.

        Args:
          steps: local steps of each.

        Returns:
          Flags of the same shape.
        """
        if self.alone_above is None:
            return jnp.zeros(jnp.shape(steps), bool)
        return steps > self.alone_above


def alone_above(steps: np.ndarray, chunk: int, share: float) -> int | None:
    """Chooses who is computed one by one, so that chunks hold clients of like work.

    Args:
      steps: local steps of all clients, `[num_clients]`.
      chunk: clients that are computed side by side.
      share: the share of the population that a round draws, in (0, 1].

    Returns:
      Steps above which a client is computed alone; None where that is not worth a second program.
    """
    ordered = np.sort(np.asarray(steps, np.int64))[::-1]
    # A chunk of a cohort spans so many clients of the population.
    width = max(1, round(chunk / share))
    alone = min(chunk, _ALONE_COST)

    def cost(count: int) -> float:
        return share * (alone * ordered[:count].sum() + width * ordered[count::width].sum())

    counts = [0, *(2**i for i in range(len(ordered).bit_length()) if 2**i < len(ordered))]
    best = min(counts, key=cost)
    if chunk == 1 or best == 0 or cost(best) > _WORTHWHILE * cost(0):
        return None
    return int(ordered[best])


class ExecutionConfig(NamedTuple):
    """Says how rounds are laid out. No choice here changes a result beyond rounding.

    Attributes:
      clients_per_chunk: clients that are computed side by side; memory follows it. "auto" chooses
        by backend, by the operations that a client does and the memory that it takes, "tuned" by
        two rounds of a trial with that choice and its neighbours, once for each kind of work in a
        process.
      devices: how many devices share the cohort, or the devices themselves; one where it is None.
        "auto" takes all that there are if each of them gets a few clients, else one.
      placement: "device" keeps all examples, and what clients keep, in device memory; "host"
        gathers each cohort on the host ahead of its round; "disk" does, and what clients keep lies
        in a file, where those who never took part take no room; "auto" is the first where examples
        are not on disk and both fit, else the second.
      rounds_per_call: rounds that run inside one compiled call, between two looks from outside.
      folder: where the file of rows on the disk is; None where `stored_in` names it later. A state
        that begins there writes over the rows of any other.
    """

    clients_per_chunk: Count | str = "auto"
    devices: int | str | Sequence[jax.Device] | None = "auto"
    placement: str = "auto"
    rounds_per_call: int = 10
    folder: Folder | None = None

    def validate(self) -> None:
        """Checks every choice.

        Raises:
          ValueError: naming the field, the rule and the value.
        """
        argument_checks.check_fields(self)
        if isinstance(self.clients_per_chunk, str):
            checks.one_of("clients_per_chunk", self.clients_per_chunk, ("auto", "tuned"))
        else:
            checks.whole("clients_per_chunk", self.clients_per_chunk)
        checks.one_of("placement", self.placement, ("auto", "device", "host", "disk"))
        checks.whole("rounds_per_call", self.rounds_per_call)
        self.device_list()

    def device_list(self) -> list[Any]:
        """Names the devices that share the cohort.

        Returns:
          One or more JAX devices.

        Raises:
          ValueError: if more devices are asked for than there are.
        """
        if self.devices is None:
            return jax.devices()[:1]
        if isinstance(self.devices, str):
            checks.one_of("devices", self.devices, ("auto",))
            return jax.devices()
        if isinstance(self.devices, int):
            checks.whole("devices", self.devices)
            checks.require(
                self.devices <= jax.device_count(),
                "devices",
                f"be at most {jax.device_count()}, the number of {jax.default_backend()} devices",
                self.devices,
            )
            return jax.devices()[: self.devices]
        checks.require(len(self.devices) > 0, "devices", "name a device", self.devices)
        return list(self.devices)

    def for_cohort(self, cohort_size: float) -> "ExecutionConfig":
        """Settles which devices share a cohort, where that was left open.

        Args:
          cohort_size: the expected number of clients in a round.

        Returns:
          The configuration with `devices` decided.
        """
        if not isinstance(self.devices, str):
            return self
        count = len(self.device_list())
        is_worthwhile = cohort_size >= _CLIENTS_PER_DEVICE * count
        return self._replace(devices=count if is_worthwhile else None)

    def chunk(self, cost: Callable[[], Cost], clients_per_device: int) -> int:
        """Chooses the clients per chunk.

        Args:
          cost: counts what one pass through a client's loop body takes; asked only where there is
            something to choose.
          clients_per_device: expected clients of one device; a chunk is never wider.

        Returns:
          The number of clients that are vmapped together.
        """
        if not isinstance(self.clients_per_chunk, str):
            return min(int(self.clients_per_chunk), clients_per_device)
        backend = jax.default_backend()
        of_one = cost()
        busy = _OPERATIONS_PER_CHUNK.get(backend, 1e9) / max(1.0, of_one.operations)
        room = _CHUNK_SHARE * memory_per_device() / max(1, _LIVE_VALUES * of_one.largest_bytes)
        widest = min(_WIDEST_CHUNK.get(backend, 256), clients_per_device)
        return int(np.clip(min(busy, room), 1, widest))

    def is_resident(self, data: FederatedData, state_bytes: int = 0) -> bool:
        """Decides whether all examples, and what all clients keep, live in device memory.

        Args:
          data: the population's store.
          state_bytes: what the clients of one device keep.

        Returns:
          True to keep them there, False to stream cohorts from the host.
        """
        if self.placement != "auto":
            return self.placement == "device"
        on_disk = any(isinstance(array, np.memmap) for array in data.examples.values())
        is_small = data.num_bytes <= _RESIDENT_BYTES
        return not on_disk and is_small and state_bytes <= _STATE_SHARE * memory_per_device()


def power_of_two(count: float) -> int:
    """Rounds a number up to a power of two.

    Args:
      count: the number.

    Returns:
      The power, at least 1.
    """
    return 1 << max(int(np.ceil(count)) - 1, 0).bit_length()
