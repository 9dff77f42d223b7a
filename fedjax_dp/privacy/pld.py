"""Privacy loss distributions of dp-accounting, for events of this package too."""

from typing import Any

from dp_accounting import pld as dpa_pld
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.privacy_accountant import NeighboringRelation

from fedjax_dp.privacy.events import CurveDpEvent


class LossAccountant(dpa_pld.PLDAccountant):
    """The PLD accountant of dp-accounting, which takes events with `loss_masses` as well."""

    # Its own default; named here since the masses lie on the lattice of this width.
    _INTERVAL = 1e-4
    _pld: privacy_loss_distribution.PrivacyLossDistribution

    def __init__(self, relation: NeighboringRelation):
        """Opens an account.

        Args:
          relation: which data are neighbours.
        """
        super().__init__(relation, self._INTERVAL)

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        if not isinstance(event, CurveDpEvent) or not event.has_loss_masses:
            return super()._maybe_compose(event, count, do_compose)
        if do_compose and count > 0:
            one = privacy_loss_distribution.PrivacyLossDistribution.create_from_rounded_probability(
                event.loss_masses(self._INTERVAL), 0.0, self._INTERVAL
            )
            self._pld = self._pld.compose(one.self_compose(count))
        return None
