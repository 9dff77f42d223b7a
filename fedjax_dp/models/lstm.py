"""A recurrent network that predicts the next character."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import TOKENS


class _Lstm(nn.Module):
    """One layer; gates in the order input, forget, candidate, output."""

    num_units: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = 4 * self.num_units
        input_kernel = self.param(
            "input_kernel", nn.initializers.glorot_uniform(), (x.shape[-1], width)
        )
        kernel = self.param("kernel", nn.initializers.orthogonal(), (self.num_units, width))
        bias = self.param("bias", _forget_ones, (width,))
        # Whatever does not depend on the previous token is one matrix product over all tokens.
        projected = jnp.moveaxis(x @ input_kernel + bias, 1, 0)

        def step(carry: tuple[jax.Array, jax.Array], from_input: jax.Array):
            hidden, cell = carry
            gates = from_input + hidden @ kernel
            enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
            cell = nn.sigmoid(forget) * cell + nn.sigmoid(enter) * jnp.tanh(candidate)
            hidden = nn.sigmoid(leave) * jnp.tanh(cell)
            return (hidden, cell), hidden

        start = jnp.zeros((x.shape[0], self.num_units), projected.dtype)
        _, hidden = jax.lax.scan(step, (start, start), projected)
        return jnp.moveaxis(hidden, 0, 1)


def _forget_ones(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    del key
    is_forget = jnp.arange(shape[0]) // (shape[0] // 4) == 1
    return is_forget.astype(jnp.float32)


class _CharLstm(nn.Module):
    vocabulary_size: int
    embedding_size: int
    num_units: int
    num_layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = inputs.tokens(x, self.vocabulary_size)
        x = nn.Embed(self.vocabulary_size, self.embedding_size)(x)
        for _ in range(self.num_layers):
            x = _Lstm(self.num_units)(x)
        return nn.Dense(self.vocabulary_size)(x)


@checked
def char_lstm(
    example_x: jax.ShapeDtypeStruct,
    num_classes: int,
    *,
    embedding_size: Count = 8,
    num_units: Count = 256,
    num_layers: Count = 2,
) -> Model:
    """Builds the network of LEAF's Shakespeare task: an embedding, LSTM layers and a dense layer.

    With v characters, an embedding of e and h units it has v·e + 4h(e + h + 1) for the first layer,
    4h(2h + 1) for each further one and (h + 1)·v parameters: 817,872 for 80 characters, 820,522 for
    90.

    Args:
      example_x: shape and type of one sequence, `[tokens]`, integers; tokens outside the vocabulary
        are read as the nearest inside it.
      num_classes: the number of characters, at least 2.
      embedding_size: size of a character's vector, at least 1.
      num_units: units of each LSTM layer, at least 1.
      num_layers: the number of LSTM layers, at least 1.

    Returns:
      The model; outputs are logits of the next character at every position,
      `[examples, tokens, classes]`, and targets are `[examples, tokens]`, -1 for none.

    Raises:
      ValueError: if an argument is out of its range.

    Source: Caldas and others 2018 (LEAF); Reddi and others 2021, appendix C, for a loss at every
    position.
    """
    inputs.check_tokens(example_x)
    checks.whole("num_classes", num_classes, at_least=2)
    module = _CharLstm(num_classes, embedding_size, num_units, num_layers)
    return Model.from_flax(module, example_x, loss=TOKENS, name="char_lstm")
