"""Parameters in safetensors files, NumPy archives and Orbax folders."""

import json
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from fedjax_dp.core import checks, files, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.record_file import bytes_of
from fedjax_dp.io.logbook import to_json

Format = Literal["safetensors", "npz", "orbax"]
FORMATS = ("safetensors", "npz", "orbax")
# In the header of a safetensors file, or in what it says about its parameters.
DIGEST = "sha256"
# In that header and, as an array of text, in an .npz file: JSON about the parameters.
ABOUT = "fedjax_dp"
# Endings of files; a folder of Orbax has none of these.
_FORMS: dict[str, Format] = {".safetensors": "safetensors", ".npz": "npz"}


def form_of(path: pathlib.Path, form: str | None) -> Format:
    """Returns the format of a file: the one that is given, or that of its ending."""
    by_ending = _FORMS.get(path.suffix)
    if form is None:
        rule = f"end in {' or '.join(_FORMS)} unless a format is given"
        checks.require(by_ending is not None, "path", rule, str(path))
        return by_ending  # type: ignore[return-value]
    checks.one_of("form", form, FORMATS)
    rule = f"end as a file of the format {form} does, or have no ending of another"
    checks.require(by_ending in (None, form), "path", rule, str(path))
    return form  # type: ignore[return-value]


def write_params(
    path: str | pathlib.Path,
    params: PyTree,
    form: Format | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes parameters to a new file, each leaf under its path: "params/Dense_0/kernel".

    What is said `about` them is JSON beside the arrays, under the name `ABOUT`; not in orbax.
    """
    path = pathlib.Path(path).absolute()
    form = form_of(path, form)
    files.require_new(path, "path", ("",))
    path.parent.mkdir(parents=True, exist_ok=True)
    named = by_path(params)
    if form == "orbax":
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, jax.tree.map(np.asarray, params))
        return
    unfinished = path.with_name(f"{path.name}.tmp")
    text = "" if about is None else json.dumps(to_json(about), default=str)
    rule = f"not be named {ABOUT!r}, which is what is said about them"
    checks.require(ABOUT not in named, "params", rule, ABOUT)
    if form == "npz":
        for name, array in named.items():
            fits = array.dtype.kind in "biufc"
            checks.require(fits, f"params {name}", "have a NumPy type for npz", array.dtype)
        with unfinished.open("wb") as file:
            np.savez(file, **named, **({ABOUT: np.array(text)} if text else {}))  # type: ignore[arg-type]
        with zipfile.ZipFile(unfinished, "a") as archive:
            archive.comment = digest_of_arrays(named, text).encode()
    else:
        from safetensors.flax import save_file

        arrays = {name: jnp.asarray(array) for name, array in named.items()}
        on_host = {name: np.asarray(array) for name, array in arrays.items()}
        header = {DIGEST: digest_of_arrays(on_host, text)}
        # One entry alone: safetensors writes several in an order that differs by process.
        if text:
            header = {ABOUT: json.dumps(json.loads(text) | header)}
        save_file(arrays, str(unfinished), metadata=header)
    unfinished.replace(path)


def read_params(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Reads arrays by path from a .safetensors or .npz file."""
    path = pathlib.Path(path)
    kinds = (".safetensors", ".npz")
    checks.require(path.suffix in kinds, "path", f"end in {' or '.join(kinds)}", str(path))
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    # The readers raise many types of errors for damaged files.
    with files.reading(path, f"be an intact {path.suffix} file of arrays", Exception):
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                named = {name: archive[name] for name in archive.files}
            text = str(named.pop(ABOUT, ""))
            with zipfile.ZipFile(path) as whole:
                _require(named, whole.comment.decode() or None, text)
        else:
            from safetensors.flax import load_file

            named = {name: np.asarray(array) for name, array in load_file(str(path)).items()}
            require_undamaged(path, named)
    for name, array in named.items():
        is_array = isinstance(array, np.ndarray)
        checks.require(is_array, f"{path}, {name!r},", "be an array", type(array))
    return named


def digest_of_arrays(named: Mapping[str, np.ndarray], about: str = "") -> str:
    """Computes the SHA-256 of arrays by name, and of what they are."""
    parts: list[Any] = [about.encode()]
    for name in sorted(named):
        array = np.ascontiguousarray(named[name])
        parts += [f"{name} {array.dtype} {array.shape} ".encode(), bytes_of(array)]
    return files.digest_of(parts).hex()


def require_undamaged(
    path: str | pathlib.Path, named: Mapping[str, np.ndarray], about: str | None = None
) -> None:
    """Requires the arrays of a safetensors file to be those of its digest, if it has one.

    The digest is also that of `about`, by default of what the file says about its arrays.
    """
    with safe_open(str(path), "np") as file:
        header = file.metadata() or {}
    facts = files.parse_json(header.get(ABOUT, "{}"), path)
    digest = facts.pop(DIGEST, header.get(DIGEST))
    if about is None:
        about = json.dumps(facts) if facts else ""
    _require(named, digest, about)


def _require(named: Mapping[str, np.ndarray], digest: str | None, about: str = "") -> None:
    if digest is not None and digest != digest_of_arrays(named, about):
        raise ValueError("it was damaged after it was written")


def by_path(params: PyTree) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree by path, on the host."""
    leaves = jax.tree.leaves(params)
    return {n: np.asarray(x) for n, x in zip(trees.paths(params), leaves, strict=True)}
