"""`fedjax-dp doctor`: checks the installation, with the command that mends what is broken."""

import os
import pathlib
import platform
import shutil
import sys
from importlib import metadata
from typing import Any, NamedTuple

from fedjax_dp.cli.output import Answer, DataDir, Output, answering, application
from fedjax_dp.core.packages import PACKAGE, extras, installer, installing, libraries, unmet

app = application()


class Problem(NamedTuple):
    """What is broken; `is_needed` if nothing, or nothing of this kind, runs without it."""

    subject: str
    why: str
    command: str
    is_needed: bool


@answering(app)
def command(out: Output, data_dir: DataDir = None) -> Answer:
    """Check the installation: versions, devices, data, and what is missing.

    The exit status is 1 if something that every run needs is broken. Extras and data sets that are
    missing are listed with the command that gets them.
    """
    packages, problems = _packages()
    machine, of_machine = _machine()
    data, of_data = _data(data_dir)
    problems += [*of_machine, *of_data]
    document = packages | machine | {"data": data, "problems": [p._asdict() for p in problems]}
    needed = [problem for problem in problems if problem.is_needed]
    shortest = "\n".join(f"{each.subject}: {each.why}" for each in needed) or "ok"
    return Answer(document, lambda out: _show(out, document), shortest, int(bool(needed)))


def _packages() -> tuple[dict[str, Any], list[Problem]]:
    """Lists versions and extras, and the requirements that are not met."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "libraries": libraries(),
        "extras": [],
    }
    try:
        missing, of_extras = unmet(PACKAGE), extras()
        wanted = metadata.metadata(PACKAGE)["Requires-Python"]
    except metadata.PackageNotFoundError:
        why = "it runs from a folder, so that its requirements cannot be checked"
        return found, [Problem(PACKAGE, why, installing("cli"), False)]
    problems = [
        Problem(each, f"{PACKAGE} needs it", f'{installer()} "{each.partition(" ")[0]}"', True)
        for each in missing
    ]
    from packaging.specifiers import SpecifierSet

    if wanted and not SpecifierSet(wanted).contains(found["python"], prereleases=True):
        why = f"{PACKAGE} needs Python {wanted}, and this is {found['python']}"
        problems.append(Problem("python", why, "", True))
    found["extras"] = [
        {"name": name, "missing": each, "command": installing(name) if each else ""}
        for name, each in of_extras.items()
    ]
    return found, problems


def _machine() -> tuple[dict[str, Any], list[Problem]]:
    """Lists devices, memory and the cache of programs, once JAX has computed something."""
    try:
        import jax

        from fedjax_dp.core.backend import programs_folder, require_backend
        from fedjax_dp.core.devices import memory_of_host, num_cores
        from fedjax_dp.experiment.running.environment import cache_folder

        require_backend()
        float(jax.jit(lambda x: x + 1)(1.0))
    # Broken packages fail in any way.
    except Exception as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        nothing: dict[str, Any] = {
            "devices": [],
            "cores": os.cpu_count(),
            "memory_bytes": None,
            "cache": None,
        }
        return nothing, [Problem(getattr(error, "name", None) or "jax", why, "", True)]
    problems = []
    devices = [
        {
            "kind": device.device_kind,
            "platform": device.platform,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for device in jax.local_devices()
    ]
    if shutil.which("nvidia-smi") and jax.default_backend() == "cpu":
        why = "this machine has an NVIDIA driver, but JAX computes on the CPU"
        problems.append(Problem("gpu", why, installing("cuda"), False))
    folder = programs_folder() or str(cache_folder())
    cache: dict[str, Any] = {"folder": folder, "programs": 0, "bytes": 0}
    path = pathlib.Path(folder)
    if "://" not in folder:
        there = next(each for each in (path, *path.parents) if os.path.exists(each))
        if not os.path.isdir(there) or not os.access(there, os.R_OK | os.W_OK | os.X_OK):
            why = f"{there} cannot be used, so that every run compiles its programs again"
            mend = "fedjax-dp run --execution.compilation_cache FOLDER"
            problems.append(Problem("cache of programs", why, mend, False))
        elif there == path:
            sizes = [_size_of(each) for each in path.iterdir() if "-cache" in each.name]
            cache |= {"programs": len(sizes), "bytes": sum(sizes)}
    found = {"devices": devices, "cores": num_cores(), "memory_bytes": memory_of_host()}
    return found | {"cache": cache}, problems


def _size_of(file: pathlib.Path) -> int:
    # Another process may remove it meanwhile.
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _data(data_dir: pathlib.Path | None) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Lists the data sets with files: where they are, or where missing ones belong."""
    try:
        from fedjax_dp.data import datasets
        from fedjax_dp.data.datasets.catalog import DATA_DIR_VARIABLE

        folder = datasets.resolve_data_dir(data_dir)
    except ImportError:
        # Of a package that is reported already.
        return [], []
    except ValueError as error:
        return [], [Problem("folder of data", str(error), f"unset {DATA_DIR_VARIABLE}", True)]
    found = []
    for state in (datasets.status(name, folder) for name in datasets.available()):
        get = f"fedjax-dp data fetch {state.name}" if state.can_fetch else "fedjax-dp data list"
        if state.folder is not None:
            found.append(
                {
                    "name": state.name,
                    "is_present": state.is_present,
                    "folder": str(state.folder),
                    "missing": list(state.missing),
                    "command": "" if state.is_present else get,
                }
            )
    return found, []


def _rows_of_machine(found: dict[str, Any]) -> list[tuple[str, Any]]:
    # Needs NumPy, as JAX does.
    from fedjax_dp.core.decimals import in_bytes

    rows = [("memory", in_bytes(found["memory_bytes"]))]
    for each in found["devices"]:
        size = each["memory_bytes"]
        rows.append(("device", each["kind"] + ("" if size is None else f", {in_bytes(size)}")))
    cache = found["cache"]
    text = f"{cache['folder']}, {cache['programs']} programs, {in_bytes(cache['bytes'])}"
    return [*rows, ("cache of programs", text)]


def _show(out: Output, found: dict[str, Any]) -> None:
    rows = [(name, found[name]) for name in ("python", "executable", "system", "cores")]
    rows += _rows_of_machine(found) if found["devices"] else []
    out.table(("part", "found"), [*rows, *found["libraries"].items()])
    for heads, key in (("extra", "extras"), ("data set", "data")):
        lines = [
            (
                each["name"],
                "no" if each["missing"] else "yes",
                each.get("folder", ", ".join(each["missing"])),
                each["command"],
            )
            for each in found[key]
        ]
        third = "missing" if key == "extras" else "folder"
        out.table((heads, "here", third, "how to get it"), lines)
    for each in found["problems"]:
        kind = "broken" if each["is_needed"] else "note"
        mend = f"; to mend it: {each['command']}" if each["command"] else ""
        out.say(f"{kind}: {each['subject']}: {each['why']}{mend}")
    if not any(each["is_needed"] for each in found["problems"]):
        out.say("everything that a run needs is in order")
