"""Clipping, noise, mechanisms, and the accounting of what they cost."""

from fedjax_dp.privacy import accounting, claims, events, mechanisms, reports
from fedjax_dp.privacy.accounting import *  # noqa: F403
from fedjax_dp.privacy.mechanisms import *  # noqa: F403
from fedjax_dp.privacy.reports import *  # noqa: F403
from fedjax_dp.privacy.sensitivities import Sensitivity, noise_stddev, sensitivity_of_sum

__all__ = ["Sensitivity", "claims", "events", "noise_stddev", "sensitivity_of_sum"]
__all__ += accounting.__all__
__all__ += mechanisms.__all__
__all__ += reports.__all__
