"""A language model and a table of a user, as a configuration may name them."""

import pathlib

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from fedjax_dp.data.datasets import Dataset
from fedjax_dp.models import Model


class Bigrams(nn.Module):
    """Says the next token from the mean of the tokens so far that the mask lets through."""

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, x):
        mask = x["attention_mask"][..., None].astype(jnp.float32)
        embedded = nn.Embed(self.vocabulary, self.width)(x["input_ids"]) * mask
        mean = jnp.cumsum(embedded, axis=1) / jnp.maximum(jnp.cumsum(mask, axis=1), 1.0)
        return nn.Dense(self.vocabulary)(jnp.concatenate([embedded, mean], axis=-1))


def model(example_x, num_classes, *, width: int = 8):
    return Model.from_flax(Bigrams(num_classes, width), example_x, loss="softmax_cross_entropy")


def table(data_dir, *, path: str, length: int = 8, vocabulary: int = 12):
    """Reads lines of `user<TAB>text`; a fifth of them, every fifth line, are for testing."""
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    users = np.array([user for user, _ in rows])
    ids = np.zeros((len(rows), length + 1), np.int32)
    mask = np.zeros((len(rows), length), np.int8)
    for i, (_, text) in enumerate(rows):
        codes = [ord(c) - ord("a") for c in text[: length + 1]]
        ids[i, : len(codes)] = codes
        mask[i, : len(codes) - 1] = 1
    inputs = {"input_ids": ids[:, :-1], "attention_mask": mask}
    targets = np.where(mask == 1, ids[:, 1:], -1)
    is_test = np.arange(len(rows)) % 5 == 4

    def part(chosen):
        return {"x": {k: v[chosen] for k, v in inputs.items()}, "y": targets[chosen]}

    return Dataset(
        "table", part(~is_test), part(is_test), vocabulary, "next_token", users[~is_test]
    )
