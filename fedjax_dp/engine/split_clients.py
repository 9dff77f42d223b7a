"""Refuses to split clients over devices where that is not possible."""

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core import checks
from fedjax_dp.server.base import Stacked


def require_split(condition: bool, rule: str) -> None:
    """Requires a condition of splitting clients."""
    checks.require(condition, "split_clients", f"be False {rule}", True)


def require_on_each_device(algorithm: FederatedAlgorithm, *, is_resident: bool) -> None:
    """Requires that each device has all that a share of any client's batches needs."""
    name, has_state = algorithm.name, algorithm.client_state is not None
    where = "unless examples are in device memory, as a device gets those of its own slots"
    require_split(is_resident, where)
    require_split(not has_state, f"for {name}, whose clients have states, each on one device")
    is_stacked = isinstance(algorithm.aggregator, Stacked)
    require_split(not is_stacked, f"for {name}, which holds all updates of a cohort side by side")
