"""Speeds that were measured before, in files: of a device, and of layouts on one machine."""

import json
import logging
import math
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import Measured, Speed
from fedjax_dp.core.devices import num_cores
from fedjax_dp.core.packages import PACKAGE, libraries
from fedjax_dp.engine.layout import Trial

_RULE = "be a file that `fedjax-dp measure` wrote"
_OF_SPEED = ("form", "precision", "clients", "seconds", "clients_per_second", "gflops")


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
    try:
        found: Any = files.parse_json(files.read_text(path), path)
        device, steps = str(found["machine"]["device"]), found["steps"].values()
        whole = [s for s in steps if s["group"] == "layouts" and s["status"] == "done"]
        # What did not fit into memory has an error instead of a speed.
        rows = (row for step in whole for row in step["rows"] if "error" not in row)
        speeds = tuple(map(_speed, rows))
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        raise ValueError(f"measured must {_RULE}, got {path}") from None
    return Measured(device, speeds)


def _speed(row: dict[str, Any]) -> Speed:
    form, precision, clients, seconds, rate, gflops = (row[field] for field in _OF_SPEED)
    operations = float(gflops) * 1e9 * float(seconds) / int(clients)
    return Speed(str(form), str(precision), int(clients), float(rate), operations)


_LOG = logging.getLogger(__name__)
_FIELDS = Trial._fields


class TrialFiles:
    """Keeps trials in a folder, see `engine.Tuned`.

    The name of a file is a digest of the machine (backend, device, processor, cores), the versions
    of the package and of jaxlib, the work and the candidates, all of which the file shows. Files
    are replaced as a whole, so that several processes may use one folder. A file that is damaged is
    ignored, with a line in the log, and so is a folder that cannot be used.
    """

    @checked
    def __init__(self, folder: str | os.PathLike[str]):
        """Names the folder, which need not exist yet."""
        self._folder = pathlib.Path(folder)

    def read(self, work: Mapping[str, str], chunks: Sequence[int]) -> tuple[Trial, ...] | None:
        """Reads trials.

        Args:
          work: all that speed depends on besides machine and versions.
          chunks: the candidates.

        Returns:
          A trial for each of the candidates, fastest first; None if there are none.
        """
        of, path = self._place(work, chunks)
        try:
            return _trials(files.parse_json(files.read_text(path), path), of, chunks)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _LOG.warning("%s is ignored, and layouts are timed again: %s", path, error)
            return None

    def write(self, work: Mapping[str, str], trials: Sequence[Trial]) -> None:
        """Writes trials, in place of earlier ones.

        Args:
          work: as for `read`.
          trials: a trial for each candidate.
        """
        of, path = self._place(work, [trial.clients_per_chunk for trial in trials])
        content = {"of": of, "trials": [trial._asdict() for trial in trials]}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.write_private(path, (json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            _LOG.warning("times of layouts are not kept: %s", error)

    def _place(
        self, work: Mapping[str, str], chunks: Sequence[int]
    ) -> tuple[dict[str, str], pathlib.Path]:
        """Returns all that the trials hold for, and their file."""
        facts = {**_machine(), **work, "candidates": ", ".join(map(str, sorted(chunks)))}
        text = json.dumps(facts, sort_keys=True)
        return facts, self._folder / f"{files.digest_of([text.encode()]).hex()[:32]}.json"


def _trials(content: Any, of: dict[str, str], chunks: Sequence[int]) -> tuple[Trial, ...]:
    """Reads the content of a file; a ValueError if it is not what was written."""
    try:
        rows = [[row[name] for name in _FIELDS] for row in content["trials"]]
        trials = sorted((Trial(*row) for row in rows), key=lambda trial: trial.seconds)
        is_whole = content["of"] == of and sorted(t[0] for t in trials) == sorted(chunks)
        is_whole &= all(math.isfinite(s) and s >= 0 for trial in trials for s in trial[1:])
    except (KeyError, TypeError):
        is_whole, trials = False, []
    if not is_whole:
        raise ValueError("it does not hold the times of these layouts")
    return tuple(trials)


def _machine() -> dict[str, str]:
    here, versions = facts(), libraries()
    return {
        "backend": here.backend,
        "device": here.device,
        "processor": _processor(),
        "cores": str(num_cores()),
        "devices of this process": str(jax.local_device_count()),
        **{name: versions.get(name, "") for name in (PACKAGE, "jaxlib")},
    }


def _processor() -> str:
    """Names the processor, as far as the system says."""
    lines = pathlib.Path("/proc/cpuinfo")
    if lines.is_file():
        for line in lines.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
