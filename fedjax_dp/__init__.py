"""Federated learning under differential privacy, simulated in JAX.

All clients of a round are one batch dimension of one compiled program. Algorithms are declarations
of pure functions; the engine compiles them; a ledger records what ran and reports ε at δ.

The names on top are those of `__init__.pyi`, each imported when it is first used; all others are in
their sub-packages, such as `fedjax_dp.algorithms`.
"""

import importlib as _importlib
import warnings as _warnings

import lazy_loader as _lazy

# Notes a fork wherever it happens.
from fedjax_dp.core import forks as _forks  # noqa: F401

__version__ = "0.1.0"

_attached, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)

# Names that were on top, by the sub-package that has them; to be removed after one minor version.
_MOVED = {
    "algorithms": """
        ALGORITHMS ClientOutput ClientState Hyper Round SharedModel ae_dpfl afl
        blur_lus centralized f_cdpfl fed_ltn fedadagrad fedavgm fedbn feddyn fedper
        fedpi fedrep fedrp fedsplit fedyogi ifca jump_start km_cdpfl local_only
        lottery_fl minimum_epsilon mr_mtl noise_oracle o_dpcfl pfa pool propfair q_ffl
        r_dpcfl rc_dpfl record_dp_fedavg reflected_fedavg reflected_fedprox
        retrained_averaging robust_hdp splitting term warm_start_averaging weiavg
    """,
    "clients": """
        proximal_norm prune pruned_share
    """,
    "data": """
        full_participation_first
    """,
    "engine": """
        Communication ModelAxis as_metrics
    """,
    "server": """
        Close Sender Stacked Summed gradient_mask oblivious_mean sparse_mean
    """,
    "server.secure": """
        all_pairs fixed_point masked random_neighbors
    """,
}
_ROOMS = {name: room for room, names in _MOVED.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used; warns of one that has moved."""
    room = _ROOMS.get(name)
    if room is None:
        return _attached(name)
    home = f"{__name__}.{room}"
    text = f"{__name__}.{name} is {home}.{name} now, and will not be on top in the next version"
    _warnings.warn(text, DeprecationWarning, stacklevel=2)
    return getattr(_importlib.import_module(home), name)
