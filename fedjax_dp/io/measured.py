"""Reads the speeds of a device, which `fedjax-dp measure` has measured."""

import os
from pathlib import Path
from typing import Any

from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.choices import Measured, Speed

_RULE = "be a file that `fedjax-dp measure` wrote"
_FIELDS = ("form", "precision", "clients", "seconds", "clients_per_second", "gflops")


@checked
def read_measured(path: str | os.PathLike[str]) -> Measured:
    """Reads the speeds of clients side by side.

    Args:
      path: the file that `fedjax-dp measure` wrote.

    Returns:
      The name of the device, and the speeds of the steps "layouts" that were measured whole.

    Raises:
      ValueError: if the file does not exist, or has another form.
    """
    path = Path(path)
    checks.require(path.is_file(), "measured", _RULE, str(path))
    found: Any = files.parse_json(files.read_text(path), path)
    try:
        device, steps = str(found["machine"]["device"]), found["steps"].values()
        whole = [s for s in steps if s["group"] == "layouts" and s["status"] == "done"]
        # What did not fit into memory has an error instead of a speed.
        rows = (row for step in whole for row in step["rows"] if "error" not in row)
        speeds = tuple(map(_speed, rows))
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        raise ValueError(f"measured must {_RULE}, got {path}") from None
    return Measured(device, speeds)


def _speed(row: dict[str, Any]) -> Speed:
    form, precision, clients, seconds, rate, gflops = (row[field] for field in _FIELDS)
    operations = float(gflops) * 1e9 * float(seconds) / int(clients)
    return Speed(str(form), str(precision), int(clients), float(rate), operations)
