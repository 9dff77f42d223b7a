"""Checkpoints of Llama-type models as Hugging Face lays them out: config.json and safetensors."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_dp.core import checks, files

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
