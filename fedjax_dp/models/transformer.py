"""A small decoder-only transformer that predicts the next character."""

import flax.linen as nn
import jax

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Decay
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import TOKENS


class _Block(nn.Module):
    num_heads: int
    intermediate_size: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool) -> jax.Array:
        width = x.shape[-1]
        drop = nn.Dropout(self.dropout, deterministic=not is_training)
        y = nn.LayerNorm(name="attention_norm")(x)
        query, key, value = (
            nn.Dense(width, name=name)(y).reshape(*y.shape[:2], self.num_heads, -1)
            for name in ("query", "key", "value")
        )
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
        x = x + drop(nn.Dense(width, name="attention_out")(y))
        y = nn.LayerNorm(name="dense_norm")(x)
        y = nn.gelu(nn.Dense(self.intermediate_size, name="dense_in")(y))
        return x + drop(nn.Dense(width, name="dense_out")(y))


class _Transformer(nn.Module):
    vocabulary_size: int
    max_length: int
    width: int
    num_heads: int
    num_layers: int
    intermediate_size: int
    dropout: float
    is_tied: bool

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool = False) -> jax.Array:
        length = x.shape[1]
        checks.require(
            length <= self.max_length, "x", f"have at most {self.max_length} tokens", length
        )
        init = nn.initializers.normal(0.02)
        x = inputs.tokens(x, self.vocabulary_size)
        table = nn.Embed(self.vocabulary_size, self.width, embedding_init=init, name="embedding")
        x = table(x)
        positions = self.param("positions", init, (self.max_length, self.width))
        x = x + positions[:length]
        x = nn.Dropout(self.dropout, deterministic=not is_training)(x)
        for i in range(self.num_layers):
            name = f"block{i + 1}"
            block = _Block(self.num_heads, self.intermediate_size, self.dropout, name=name)
            x = block(x, is_training=is_training)
        x = nn.LayerNorm(name="final_norm")(x)
        if self.is_tied:
            return table.attend(x)
        return nn.Dense(self.vocabulary_size, name="head")(x)


@checked
def char_transformer(
    example_x: jax.ShapeDtypeStruct,
    num_classes: int,
    *,
    width: Count = 64,
    num_heads: Count = 4,
    num_layers: Count = 2,
    intermediate_size: Count | None = None,
    is_tied: bool = False,
    dropout: Decay = 0.0,
) -> Model:
    """Builds a decoder-only transformer with pre-normalisation and learned positions.

    With v characters, t positions, width d, intermediate size m and L layers it has v·d + t·d +
    L(4d² + 2dm + 9d + m) + 2d parameters, and (d + 1)·v more unless tied: 115,536 for 80
    characters, 80 positions and the default options.

    Args:
      example_x: shape and type of one sequence, `[tokens]`, integers; its length is the longest
        that the model takes, and tokens outside the vocabulary are read as the nearest inside it.
      num_classes: the number of characters, at least 2.
      width: size of a token's vector, a multiple of `num_heads`.
      num_heads: attention heads of each layer, at least 1.
      num_layers: the number of layers, at least 1.
      intermediate_size: size of the hidden layer of each feed-forward block; 4 `width` if None.
      is_tied: whether the embedding is the last layer too, which then has no bias.
      dropout: share dropped in training after the embedding and inside each layer, in [0, 1).

    Returns:
      The model; outputs are logits of the next character at every position,
      `[examples, tokens, classes]`, and targets are `[examples, tokens]`, -1 for none.

    Raises:
      ValueError: if an argument is out of its range.

    Source: Radford and others 2019 (GPT-2) for the layout.
    """
    inputs.check_tokens(example_x)
    checks.whole("num_classes", num_classes, at_least=2)
    checks.require(width % num_heads == 0, "width", f"be a multiple of {num_heads} heads", width)
    inputs.check_dropout("dropout", dropout)
    module = _Transformer(
        vocabulary_size=num_classes,
        max_length=example_x.shape[0],
        width=width,
        num_heads=num_heads,
        num_layers=num_layers,
        intermediate_size=4 * width if intermediate_size is None else intermediate_size,
        dropout=dropout,
        is_tied=is_tied,
    )
    return Model.from_flax(module, example_x, loss=TOKENS, name="char_transformer")
