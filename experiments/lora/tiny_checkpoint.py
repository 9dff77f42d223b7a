"""Prompts and responses of Shakespeare's roles, and tiny checkpoints in published layouts.

FEDJAX_DP_DATA=FOLDER python -m experiments.lora.tiny_checkpoint --output DIR
"""

import argparse
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.lora.plays import COMEDIES
from fedjax_dp.core import files
from fedjax_dp.data.datasets import resolve_data_dir
from fedjax_dp.data.datasets.formats import read_bytes
from fedjax_dp.experiment import load_config, load_run, run
from fedjax_dp.io.params import by_path

END, VOCABULARY, WIDTH, LAYERS, HEADS, POSITIONS = "<|endoftext|>", 512, 64, 2, 4, 128
# Of each layout the options of config.json, and those of the model that they stand for.
LAYOUTS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS},
        {"hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS},
    ),
    "llama": (
        {
            "hidden_size": WIDTH,
            "intermediate_size": 172,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "max_position_embeddings": POSITIONS,
        },
        {"hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS},
    ),
}


def rows(path: pathlib.Path, *, are_comedies: bool, at_least: int = 10) -> Iterator[dict[str, str]]:
    """Makes a row of each speech: its first line is the prompt, the second the response.

    A speech is in one row of one client, so that neither is in the record of another.
    """
    for number, line in files.lines(read_bytes(path).decode()):
        role = files.parse_json(line, files.at_line(path, number))
        if (role["play"] in COMEDIES) != are_comedies:
            continue
        speeches = [speech.split("\n") for speech in role["speeches"]]
        speeches = [lines for lines in speeches if len(lines) > 1 and all(lines[:2])]
        if len(speeches) < at_least:
            continue
        num_train = len(speeches) - max(1, len(speeches) // 5)
        for i, (prompt, response, *_) in enumerate(speeches):
            split = "train" if i < num_train else "test"
            row = {"client": role["client"], "instruction": prompt, "response": response}
            yield row | {"split": split}


def write_tokenizer(folder: pathlib.Path, texts: Iterator[str]) -> None:
    """Trains byte pairs on public text."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    own.save(str(folder / "tokenizer.json"))
    files.write_text(folder / "tokenizer_config.json", json.dumps({"eos_token": END}))


def write_checkpoint(folder: pathlib.Path, layout: str, params: Any) -> None:
    """Writes parameters under the names of a published checkpoint."""
    named, arrays = dict[str, np.ndarray](), by_path(params)
    table = arrays["params/wte/embedding" if layout == "gpt2" else "params/embed_tokens/embedding"]
    for path, array in arrays.items():
        _, *modules, leaf = path.split("/")
        name = re.sub(r"^(h|layers)_", r"\1.", ".".join(modules))
        prefix = "model." if layout == "llama" and modules[0] != "lm_head" else ""
        last = "bias" if leaf == "bias" else "weight"
        is_turned = layout == "llama" and leaf == "kernel"
        named[f"{prefix}{name}.{last}"] = np.ascontiguousarray(array.T if is_turned else array)
    save_file(named, folder / "model.safetensors")
    config = {"model_type": layout, "vocab_size": len(table), **LAYOUTS[layout][0]}
    files.write_text(folder / "config.json", json.dumps(config, indent=1))


def prepare(output: pathlib.Path, words: list[str]) -> None:
    """Writes private rows, and for each layout a tokenizer and a model of the comedies."""
    path = resolve_data_dir(None) / "shakespeare" / "plays_by_role.jsonl.gz"
    output.mkdir(parents=True, exist_ok=True)
    for name, are_comedies in (("rows", False), ("public", True)):
        lines = [json.dumps(row) for row in rows(path, are_comedies=are_comedies)]
        files.write_text(output / f"{name}.jsonl", "\n".join(lines) + "\n")
    public = [json.loads(line) for _, line in files.lines(files.read_text(output / "public.jsonl"))]
    texts = [f"{row['instruction']}\n{row['response']}" for row in public]
    for layout, (_, options) in LAYOUTS.items():
        folder = output / layout
        write_tokenizer(folder, iter(texts))
        given = {
            "data.options.path": output / "public.jsonl",
            "data.options.tokenizer": folder / "tokenizer.json",
            "model.name": layout,
        }
        positions = {"num_positions": POSITIONS}
        chosen = {f"model.options.{key}": value for key, value in {**options, **positions}.items()}
        configured = [f"--{key}={value}" for key, value in {**given, **chosen}.items()]
        config = load_config(pathlib.Path(__file__).with_name("tiny.toml"), [*configured, *words])
        trained = load_run(run(config, output / f"{layout}_run").folder)
        write_checkpoint(folder, layout, trained.model.full_params(trained.params))


def main() -> None:
    """Writes the folder; further words override the configuration of the models' training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    known, words = parser.parse_known_args()
    prepare(known.output, words)


if __name__ == "__main__":
    main()
