"""Parameters in safetensors files, NumPy archives and Orbax folders; checkpoints of Llama type."""

import pathlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from fedjax_dp.core import checks, files, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.record_file import bytes_of

Format = Literal["safetensors", "npz", "orbax"]
FORMATS = ("safetensors", "npz", "orbax")
# In the header of a safetensors file.
DIGEST = "sha256"
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


def write_params(path: str | pathlib.Path, params: PyTree, form: Format | None = None) -> None:
    """Writes parameters to a new file, each leaf under its path: "params/Dense_0/kernel"."""
    path = pathlib.Path(path).absolute()
    form = form_of(path, form)
    checks.require(not path.exists(), "path", "be new", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    named = by_path(params)
    if form == "orbax":
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, jax.tree.map(np.asarray, params))
        return
    unfinished = path.with_name(f"{path.name}.tmp")
    if form == "npz":
        for name, array in named.items():
            fits = array.dtype.kind in "biufc"
            checks.require(fits, f"params {name}", "have a NumPy type for npz", array.dtype)
        with unfinished.open("wb") as file:
            np.savez(file, **named)  # type: ignore[arg-type]
        with zipfile.ZipFile(unfinished, "a") as archive:
            archive.comment = digest_of_arrays(named).encode()
    else:
        from safetensors.flax import save_file

        arrays = {name: jnp.asarray(array) for name, array in named.items()}
        digest = digest_of_arrays({name: np.asarray(array) for name, array in arrays.items()})
        save_file(arrays, str(unfinished), metadata={DIGEST: digest})
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
            with zipfile.ZipFile(path) as whole:
                _require(named, whole.comment.decode() or None)
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
    path: str | pathlib.Path, named: Mapping[str, np.ndarray], about: str = ""
) -> None:
    """Requires the arrays of a safetensors file to be those of its digest, if it has one."""
    with safe_open(str(path), "np") as file:
        _require(named, (file.metadata() or {}).get(DIGEST), about)


def _require(named: Mapping[str, np.ndarray], digest: str | None, about: str = "") -> None:
    if digest is not None and digest != digest_of_arrays(named, about):
        raise ValueError("it was damaged after it was written")


def by_path(params: PyTree) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree by path, on the host."""
    leaves = jax.tree.leaves(params)
    return {n: np.asarray(x) for n, x in zip(trees.paths(params), leaves, strict=True)}


_CONFIG, _TENSORS, _INDEX = "config.json", "*.safetensors", "model.safetensors.index.json"
# Options of `models.llama` by the key of config.json; a key that is absent or null is left out.
_OPTIONS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_size",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "is_tied",
}
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# What `models.llama` computes; a checkpoint of anything else would give other outputs.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", None),
    "rope_scaling": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}
# Where Transformers writes the rotary embeddings from version 5 on.
_ROTARY, _ROTARY_KEYS = "rope_parameters", ("rope_theta", "rope_type")


def llama_options(folder: str | pathlib.Path) -> dict[str, Any]:
    """Reads the options of `models.llama` from config.json; refuses what that model lacks."""
    path = pathlib.Path(folder) / _CONFIG
    files.require_file(path, _CONFIG)
    config = files.parse_json(files.read_text(path), path)
    checks.require(isinstance(config, dict), str(path), "hold an object", config)
    for key, allowed in _FIXED.items():
        rule = f"be {' or '.join('absent' if each is None else repr(each) for each in allowed)}"
        checks.require(config.get(key) in allowed, f"{path}, {key!r},", rule, config.get(key))
    rotary = config.get(_ROTARY) or {}
    rule = f"hold {' and '.join(_ROTARY_KEYS)} alone, of the type 'default'"
    is_plain = isinstance(rotary, dict) and rotary.get("rope_type", "default") == "default"
    checks.require(
        is_plain and set(rotary) <= set(_ROTARY_KEYS), f"{path}, {_ROTARY!r},", rule, rotary
    )
    config = {**config, **rotary}
    for key in _NEEDED:
        checks.require(config.get(key) is not None, f"{path}, {key!r},", "be given", None)
    return {ours: config[key] for key, ours in _OPTIONS.items() if config.get(key) is not None}


def read_llama(folder: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the parameters of `models.llama`, by path, from all safetensors files of a folder."""
    is_tied = llama_options(folder).get("is_tied", False)
    parts = sorted(pathlib.Path(folder).glob(_TENSORS))
    checks.require(bool(parts), str(folder), f"hold a file {_TENSORS}", "none")
    _require_parts(pathlib.Path(folder), parts)
    arrays: dict[str, np.ndarray] = {}
    for part in parts:
        for name, array in _tensors(part):
            is_head = name.startswith("lm_head.")
            if name.endswith("rotary_emb.inv_freq") or (is_tied and is_head):
                # Both follow from other values.
                continue
            path = _path_of(name, part)
            checks.require(path not in arrays, f"{part}, {name!r},", "be in one file alone", "two")
            arrays[path] = array.T if path.endswith("/kernel") else array
    return arrays


def _require_parts(folder: pathlib.Path, parts: Sequence[pathlib.Path]) -> None:
    """Requires the files that an index names, where there is one."""
    path = folder / _INDEX
    if not path.exists():
        return
    index = files.parse_json(files.read_text(path), path)
    of_arrays: Any = index.get("weight_map") if isinstance(index, dict) else None
    is_map = isinstance(of_arrays, dict) and all(isinstance(x, str) for x in of_arrays.values())
    checks.require(is_map, f"{path}, 'weight_map',", "be files by array", of_arrays)
    missing = sorted(set(of_arrays.values()) - {part.name for part in parts})
    checks.require(not missing, str(folder), f"hold all files of {_INDEX}", f"none of {missing}")


def _tensors(part: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    from safetensors.flax import load_file

    # The reader raises many types of errors for damaged files.
    with files.reading(part, "be an intact safetensors file", Exception):
        arrays = load_file(str(part))
    for name, array in arrays.items():
        yield name, np.asarray(array)


def _path_of(name: str, part: pathlib.Path) -> str:
    """Translates model.layers.0.mlp.up_proj.weight to params/layers_0/mlp/up_proj/kernel."""
    *modules, last = name.removeprefix("model.").split(".")
    rule = "be the weight of a module; models.llama has no others"
    checks.require(last == "weight" and bool(modules), f"{part}, {name!r},", rule, last)
    if modules[0] == "layers" and len(modules) > 1:
        modules[:2] = [f"layers_{modules[1]}"]
    is_norm, is_table = modules[-1].endswith("norm"), modules[-1] == "embed_tokens"
    leaf = "scale" if is_norm else "embedding" if is_table else "kernel"
    return "/".join(["params", *modules, leaf])
