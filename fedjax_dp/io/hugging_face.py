"""Checkpoints in the layout of Hugging Face Transformers: a config.json and safetensors files."""

import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks, files

Folder = str | pathlib.Path

_CONFIG, _TENSORS, _INDEX = "config.json", "*.safetensors", "model.safetensors.index.json"
# Files of pickles, which run code when they are read.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_VOCABULARY = "vocab_size"
# Where Transformers writes the rotary embeddings from version 5 on.
_ROTARY, _ROTARY_KEYS = "rope_parameters", ("rope_theta", "rope_type")
_NORMS, _TABLES = re.compile(r".*norm|ln_.*"), ("embed_tokens", "wte", "wpe")


class Layout(NamedTuple):
    """The names of one type of checkpoint, and what a model of this library computes of it."""

    # Options of the model by the key of config.json; one that is absent or null is left out.
    names: Mapping[str, str]
    needed: Sequence[str]
    # The values of further keys; a checkpoint with others would give other outputs.
    fixed: Mapping[str, tuple[Any, ...]]
    # What the names of arrays may begin with, and what layers are called in them.
    prefix: str
    layers: str
    # The last part of a name.
    leaves: Sequence[str]
    # Arrays that follow from other values.
    derived: re.Pattern
    # Kernels that are `[outputs, inputs]`.
    transposed: re.Pattern
    is_tied: bool

    def options(self, folder: Folder, num_classes: int) -> dict[str, Any]:
        """Reads the model's options from config.json; refuses what the model does not compute."""
        path = pathlib.Path(folder) / _CONFIG
        config = self._config(path)
        for key in (_VOCABULARY, *self.needed):
            checks.require(config.get(key) is not None, f"{path}, {key!r},", "be given", None)
        rule = f"be {num_classes}, the number of tokens of the data, as its tokenizer has them"
        own = config[_VOCABULARY]
        checks.require(own == num_classes, f"{path}, {_VOCABULARY!r},", rule, own)
        return {
            ours: config[key] for key, ours in self.names.items() if config.get(key) is not None
        }

    def params(self, folder: Folder) -> dict[str, np.ndarray]:
        """Reads the model's parameters, by path, from all safetensors files of a folder."""
        stated = self._config(pathlib.Path(folder) / _CONFIG).get("tie_word_embeddings")
        is_tied = self.is_tied if stated is None else stated
        arrays: dict[str, np.ndarray] = {}
        for part in _parts_of(pathlib.Path(folder)):
            for name, array in _tensors(part):
                short = name.removeprefix(self.prefix)
                if self.derived.fullmatch(short) or (is_tied and short.startswith("lm_head.")):
                    continue
                path = self._path_of(short, f"{part}, {name!r},")
                rule = "be in one file alone, once"
                checks.require(path not in arrays, f"{part}, {name!r},", rule, "two")
                is_turned = path.endswith("/kernel") and self.transposed.fullmatch(short)
                arrays[path] = array.T if is_turned else array
        return arrays

    def _config(self, path: pathlib.Path) -> Mapping[str, Any]:
        """Reads config.json; refuses what the model does not compute."""
        files.require_file(path, _CONFIG)
        config = files.parse_json(files.read_text(path), path)
        checks.require(isinstance(config, dict), str(path), "hold an object", config)
        for key, allowed in self.fixed.items():
            rule = f"be {' or '.join('absent' if each is None else repr(each) for each in allowed)}"
            checks.require(config.get(key) in allowed, f"{path}, {key!r},", rule, config.get(key))
        rotary = config.get(_ROTARY) or {}
        rule = f"hold {' and '.join(_ROTARY_KEYS)} alone, of the type 'default'"
        is_plain = isinstance(rotary, dict) and rotary.get("rope_type", "default") == "default"
        fits = is_plain and set(rotary) <= set(_ROTARY_KEYS)
        checks.require(fits, f"{path}, {_ROTARY!r},", rule, rotary)
        return {**config, **rotary}

    def _path_of(self, short: str, what: str) -> str:
        """Translates layers.0.mlp.up_proj.weight to params/layers_0/mlp/up_proj/kernel."""
        *modules, last = short.split(".")
        rule = f"be the {' or '.join(self.leaves)} of a module; the model has no others"
        checks.require(last in self.leaves and bool(modules), what, rule, last)
        if modules[0] == self.layers and len(modules) > 1:
            modules[:2] = [f"{self.layers}_{modules[1]}"]
        if last == "weight":
            is_norm, is_table = _NORMS.fullmatch(modules[-1]), modules[-1] in _TABLES
            last = "scale" if is_norm else "embedding" if is_table else "kernel"
        return "/".join(["params", *modules, last])


# By the model that reads it.
LAYOUTS = {
    "llama": Layout(
        names={
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_kv_heads",
            "head_dim": "head_size",
            "rope_theta": "rope_theta",
            "rms_norm_eps": "norm_epsilon",
            "tie_word_embeddings": "is_tied",
            "max_position_embeddings": "num_positions",
        },
        needed=("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        fixed={
            "model_type": ("llama",),
            "hidden_act": ("silu", None),
            "rope_scaling": (None,),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
        },
        prefix="model.",
        layers="layers",
        leaves=("weight",),
        derived=re.compile(r".*rotary_emb\.inv_freq"),
        transposed=re.compile(r".*"),
        is_tied=False,
    ),
    "gpt2": Layout(
        names={
            "n_embd": "hidden_size",
            "n_inner": "intermediate_size",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "n_positions": "num_positions",
            "layer_norm_epsilon": "norm_epsilon",
            "tie_word_embeddings": "is_tied",
        },
        needed=("n_embd", "n_layer", "n_head", "n_positions"),
        fixed={
            "model_type": ("gpt2",),
            # Two names of one function.
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
        },
        prefix="transformer.",
        layers="h",
        leaves=("weight", "bias"),
        # Masks of causal attention.
        derived=re.compile(r"h\.\d+\.attn\.(masked_)?bias"),
        transposed=re.compile(r"lm_head\..*"),
        is_tied=True,
    ),
}


def _parts_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Finds the safetensors files of a folder, which must be those of its index, if it has one."""
    parts = sorted(folder.glob(_TENSORS))
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    rule = f"hold a file {_TENSORS}" + (
        " (pickles, which run code when they are read, are not read; `save_pretrained` of "
        "Transformers writes safetensors)" * bool(pickles)
    )
    checks.require(bool(parts), str(folder), rule, ", ".join(pickles) or "none")
    path = folder / _INDEX
    if not path.exists():
        return parts
    index = files.parse_json(files.read_text(path), path)
    of_arrays: Any = index.get("weight_map") if isinstance(index, dict) else None
    is_map = isinstance(of_arrays, dict) and all(isinstance(x, str) for x in of_arrays.values())
    checks.require(is_map, f"{path}, 'weight_map',", "be files by array", of_arrays)
    missing = sorted(set(of_arrays.values()) - {part.name for part in parts})
    checks.require(not missing, str(folder), f"hold all files of {_INDEX}", f"none of {missing}")
    return parts


def _tensors(part: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    from safetensors.flax import load_file

    # The reader raises many types of errors for damaged files.
    with files.reading(part, "be an intact safetensors file", Exception):
        arrays = load_file(str(part))
    for name, array in arrays.items():
        yield name, np.asarray(array)
