"""Clients that never take part: how many there are, and which."""

from collections.abc import Sequence

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.synonyms import nearest
from fedjax_dp.experiment.schema.config import DataSection

# The purpose of the draw from a seed; those of `assembly.population` are 1, 3, 4 and 6.
_UNSEEN = 5
_SHARE, _NAMES = "data.unseen_client_share", "data.unseen_clients"


def key_of(section: DataSection) -> str:
    """Returns the key that holds clients out."""
    return _NAMES if section.unseen_clients else _SHARE


def check_unseen(section: DataSection) -> None:
    """Refuses two choices of the clients, and a name that occurs twice."""
    names, share = section.unseen_clients, section.unseen_client_share
    rule = f"be 0 with {_NAMES}, which names these clients"
    checks.require(not (share and names), _SHARE, rule, share)
    checks.require(len(set(names)) == len(names), _NAMES, "name each client once", names)


def num_unseen(section: DataSection, num_clients: int) -> int:
    """Counts the clients that never take part, so that some of `num_clients` are left to train."""
    share = section.unseen_client_share
    count = len(section.unseen_clients) or int(np.floor(num_clients * share + 0.5))
    rule = f"hold out at least one of the {num_clients} clients, and leave at least one to train"
    is_asked = share > 0 or section.unseen_clients
    fits = not is_asked or 0 < count < num_clients
    checks.require(fits, key_of(section), rule, section.unseen_clients or share)
    return count


def unseen_of(section: DataSection, names: Sequence[str], seed: int) -> np.ndarray:
    """Chooses the clients that never take part, by name or by the seed; ascending positions."""
    count = num_unseen(section, len(names))
    if not section.unseen_clients:
        order = np.random.default_rng([seed, _UNSEEN]).permutation(len(names))
        return np.sort(order[:count])
    place = {name: i for i, name in enumerate(names)}
    for name in section.unseen_clients:
        rule = f"name clients of the data, such as {next(iter(nearest(name, names)), names[0])!r}"
        checks.require(name in place, _NAMES, rule, name)
    return np.sort([place[name] for name in section.unseen_clients])
