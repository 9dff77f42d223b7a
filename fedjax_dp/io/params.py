"""Parameters in files that other libraries read: safetensors, NumPy archives, Orbax folders."""

import pathlib
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, files, trees
from fedjax_dp.core.trees import PyTree

Format = Literal["safetensors", "npz", "orbax"]
FORMATS = ("safetensors", "npz", "orbax")


def write_params(path: str | pathlib.Path, params: PyTree, form: Format = "safetensors") -> None:
    """Writes parameters, each leaf under its path, such as "params/Dense_0/kernel".

    Args:
      path: the file, or the folder for "orbax"; nothing may be there.
      params: the parameters.
      form: "safetensors", "npz" or "orbax", which keeps the tree as it is.

    Raises:
      ValueError: if something is there, or for a form that does not exist; for "npz" also for a
        type that NumPy does not have, such as bfloat16.
    """
    checks.one_of("form", form, FORMATS)
    path = pathlib.Path(path).absolute()
    checks.require(not path.exists(), "path", "be new", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    named = by_path(params)
    if form == "orbax":
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, jax.tree.map(np.asarray, params))
    elif form == "npz":
        for name, array in named.items():
            fits = array.dtype.kind in "biufc"
            checks.require(fits, f"params {name}", "be of a type of NumPy's for npz", array.dtype)
        with path.open("wb") as file:
            np.savez(file, **named)  # type: ignore[arg-type]
    else:
        from safetensors.flax import save_file

        save_file({name: jnp.asarray(array) for name, array in named.items()}, str(path))


def read_params(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Reads parameters by path from a safetensors file or a NumPy archive.

    Args:
      path: a file whose name ends in .safetensors or .npz.

    Returns:
      Arrays by path, as `Model.with_params` takes them.

    Raises:
      ValueError: for another kind of file, or one that is damaged.
      FileNotFoundError: if there is no such file.
    """
    path = pathlib.Path(path)
    kinds = (".safetensors", ".npz")
    checks.require(path.suffix in kinds, "path", f"end in {' or '.join(kinds)}", str(path))
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    # The readers raise errors of many kinds for files that are cut off or no such files.
    with files.reading(path, f"be a whole {path.suffix} file of arrays", Exception):
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                named = {name: archive[name] for name in archive.files}
        else:
            from safetensors.flax import load_file

            named = {name: np.asarray(array) for name, array in load_file(str(path)).items()}
    for name, array in named.items():
        is_array = isinstance(array, np.ndarray)
        checks.require(is_array, f"{path}, {name!r},", "be an array", type(array))
    return named


def by_path(params: PyTree) -> dict[str, np.ndarray]:
    """Names the leaves of a tree by their paths.

    Args:
      params: the tree.

    Returns:
      The leaves on the host.
    """
    leaves = jax.tree.leaves(params)
    return {n: np.asarray(x) for n, x in zip(trees.paths(params), leaves, strict=True)}
