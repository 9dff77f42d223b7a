"""Whether a resumed run has the data that it started with, by sizes, types and digests."""

import pathlib
from typing import Any

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data.disk_arrays import is_on_disk
from fedjax_dp.data.federated import FederatedData, flat
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.io.logbook import write_json

# Of larger arrays, and of those on disk, so many rows are read, spread evenly.
_WHOLE_BYTES, _SAMPLED_ROWS = 1 << 28, 256
_DIGEST = "SHA-256 "


def write_fingerprint(population: Population, file: pathlib.Path) -> None:
    """Writes the fingerprint of data that are on this machine; their digests are not private."""
    if not population.is_elsewhere:
        write_json(file, fingerprint(population))


def require_same_data(population: Population, file: pathlib.Path) -> None:
    """Requires data of the same fingerprint, if there is one; an error names the difference."""
    if population.is_elsewhere or not file.is_file():
        return
    saved = files.parse_json(files.read_text(file), file)
    is_known = isinstance(saved, dict) and all(isinstance(each, dict) for each in saved.values())
    checks.require(is_known, str(file), "hold an object of objects", saved)
    found = fingerprint(population)
    for part in dict.fromkeys((*saved, *found)):
        before, now = saved.get(part, {}), found.get(part, {})
        for fact in dict.fromkeys((*before, *now)):
            then = before.get(fact, "none")
            rule = f"be as when the run started, {then}, or {file} be removed if they are the same"
            value = now.get(fact, "none")
            checks.require(then == value, f"{fact} of the {part} data", rule, value)


def fingerprint(population: Population) -> dict[str, dict[str, Any]]:
    """Describes each part of the data: sizes, names and types, and digests of the values."""
    parts = {
        "training": population.train,
        "validation": population.validation,
        "clients' test": population.client_test,
        "test": population.test,
    }
    found = {name: _facts(part) for name, part in parts.items() if part is not None}
    if population.public_x is not None:
        found["public"] = _arrays({"x": population.public_x})
    return found


def _facts(data: FederatedData) -> dict[str, Any]:
    """Describes one part."""
    names = [name.encode() + b"\0" for name in data.client_names]
    return {
        "the number of clients": data.num_clients,
        "the number of examples": data.num_examples,
        "the examples by client": _DIGEST + files.digest_of([data.offsets]).hex(),
        "the names of clients": _DIGEST + files.digest_of(names).hex(),
        **_arrays(data.examples),
    }


def _arrays(examples: Any) -> dict[str, str]:
    """Describes types and values of arrays `[examples, ...]`, which may be on disk."""
    found = {}
    for name, array in sorted(flat(examples).items()):
        found[f"the type of {name}"] = f"{array.dtype} {list(array.shape[1:])}"
        if is_on_disk(array) or array.nbytes > _WHOLE_BYTES:
            count = min(len(array), _SAMPLED_ROWS)
            array = array[np.linspace(0, len(array) - 1, count).astype(np.int64)]
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        found[f"the values of {name}"] = _DIGEST + files.digest_of([values]).hex()
    return found
