"""The placement of a simulation's state on devices, in host memory or on disk."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from fedjax_dp.core import checks
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.engine.layout import AXIS, Layout
from fedjax_dp.engine.round import ByClient, SimulationState


class Placement(NamedTuple):
    """The devices or shardings of a state's parts.

    Attributes:
      everywhere: of all that clients share.
      by_client: of what has an entry for each client, if it is in device memory.
      num_clients: the population.
      num_rows: the clients and the padding up to a multiple of the devices.
      is_resident: whether client states are in device memory.
      kind: as in `ExecutionConfig.placement`; "disk" holds client states in a file.
    """

    everywhere: Any
    by_client: Any
    num_clients: int
    num_rows: int
    is_resident: bool
    kind: str

    @property
    def is_on_disk(self) -> bool:
        """Whether client states are on disk."""
        return self.kind == "disk"

    def put(self, state: Any) -> SimulationState:
        """Converts and places every leaf as the program was traced for.

        A state from a checkpoint holds host arrays, that of a sweep may hold Python numbers;
        neither may cause a second trace.
        """
        clients, outer = state.clients, state.outer
        shared = jax.tree.map(_typed, state._replace(clients=None, outer=()))
        state = jax.device_put(shared, self.everywhere)
        state = state._replace(outer=by_part(self._put_wrapper, outer))
        if clients is None:
            return state
        rule = "be that of the state: client state is not moved between memory and disk"
        fits = isinstance(clients, ClientStore) == self.is_on_disk
        checks.require(fits, "placement", rule, self.kind)
        if not self.is_resident:
            return state._replace(clients=jax.tree.map(np.asarray, clients))
        return state._replace(clients=self._put_clients(clients))

    def _put_clients(self, table: PyTree) -> PyTree:
        wide = jax.tree.map(lambda x: _padded(_typed(x), self.num_rows), table)
        return jax.device_put(wide, self.by_client)

    def _put_wrapper(self, part: Any) -> Any:
        if isinstance(part, ByClient):
            return self._put_clients(part)
        return jax.device_put(_typed(part), self.everywhere)

    def portable(self, state: Any, *, copies: bool = True) -> SimulationState:
        """Copies a state to the host, as one device would hold it, see `Simulation.portable`."""
        if isinstance(state.clients, ClientStore):
            return jax.device_get(state)

        def of_clients(x: Any) -> np.ndarray:
            # Once written, a table in host memory is written in place by later rounds.
            is_written = isinstance(x, np.ndarray) and x.flags.writeable
            part = np.asarray(x)[: self.num_clients]
            return part.copy() if copies and is_written else part

        clients = jax.tree.map(of_clients, state.clients)
        outer = by_part(
            lambda x: jax.tree.map(of_clients, x) if isinstance(x, ByClient) else x, state.outer
        )
        return jax.device_get(state._replace(clients=clients, outer=outer))

    def of_state(self, outer: PyTree) -> SimulationState:
        """Returns the sharding of every part of a state in device memory."""
        of_wrappers = by_part(
            lambda x: self.by_client if isinstance(x, ByClient) else self.everywhere, outer
        )
        return SimulationState(
            self.everywhere, self.everywhere, self.by_client, self.everywhere, of_wrappers
        )


def placement_of(
    layout: Layout, device: Any, num_clients: int, *, is_resident: bool, kind: str
) -> Placement:
    """Returns the placement on the devices of a layout, or on one device."""
    everywhere: Any = SingleDeviceSharding(device)
    by_client: Any = everywhere
    if layout.mesh is not None:
        everywhere, by_client = (NamedSharding(layout.mesh, spec) for spec in (P(), P(AXIS)))
    num_rows = layout.clients_per_device(num_clients) * layout.num_devices
    return Placement(everywhere, by_client, num_clients, num_rows, is_resident, kind)


def by_part(function: Callable[[Any], Any], outer: PyTree) -> PyTree:
    """Maps a function over the arrays of wrappers' states, each `ByClient` as a whole."""
    return jax.tree.map(function, outer, is_leaf=lambda x: isinstance(x, ByClient))


def _typed(x: Any) -> Any:
    return jnp.asarray(x, jnp.result_type(x))


def _padded(x: Any, rows: int) -> Any:
    missing = rows - len(x)
    return x if missing <= 0 else jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)])
