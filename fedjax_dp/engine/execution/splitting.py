"""Refuses to split clients where nothing, or not the same, would come of it."""

from fedjax_dp.core import checks
from fedjax_dp.core.devices import is_distributed
from fedjax_dp.engine.execution.placement import Placement
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import AXIS, Layout


def require_divisible(federation: Federation, layout: Layout, place: Placement) -> None:
    """Requires clients whose batches devices can divide, if the layout splits any.

    Raises a ValueError before any work; one client's round is traced on the devices' axis for it.
    """
    if not layout.splits_longest:
        return
    algorithm, facts = federation.algorithm, federation.facts

    def require(condition: bool, rule: str) -> None:
        checks.require(condition, "split_clients", f"be False {rule}", True)

    require(not is_distributed(), "for several processes")
    where = "unless examples are in device memory, as a device gets those of its own slots"
    require(place.is_resident, where)
    name = algorithm.name
    has_state = algorithm.client_state is not None
    require(not has_state, f"for {name}, whose clients have states, each on one device")
    require(not facts.is_stacked, f"for {name}, which holds all updates of a cohort side by side")
    divides = facts.divides_batches(AXIS, layout.num_devices)
    require(divides, f"for {name}, whose clients sum no gradients over batches")
