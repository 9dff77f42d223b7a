"""Decoders of the GPT-2 type, as published checkpoints have them."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model
from fedjax_dp.models.inputs import NumClasses
from fedjax_dp.models.losses import TOKENS

_INIT = nn.initializers.normal(0.02)


class _Attention(nn.Module):
    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        whole = nn.Dense(3 * width, kernel_init=_INIT, name="c_attn")(x)
        query, key, value = (
            part.reshape(*x.shape[:2], self.num_heads, -1) for part in jnp.split(whole, 3, axis=-1)
        )
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
        return nn.Dense(width, kernel_init=_INIT, name="c_proj")(y)


class _MLP(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.gelu(nn.Dense(self.width, kernel_init=_INIT, name="c_fc")(x), approximate=True)
        return nn.Dense(x.shape[-1], kernel_init=_INIT, name="c_proj")(y)


class _Layer(nn.Module):
    num_heads: int
    intermediate_size: int
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + _Attention(self.num_heads, name="attn")(_norm(self.epsilon, "ln_1")(x))
        return x + _MLP(self.intermediate_size, name="mlp")(_norm(self.epsilon, "ln_2")(x))


def _norm(epsilon: float, name: str) -> nn.LayerNorm:
    # Trained models of this type have activations whose mean is far from 0.
    return nn.LayerNorm(epsilon, use_fast_variance=False, name=name)


class _Gpt2(nn.Module):
    vocabulary_size: int
    num_positions: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    epsilon: float
    is_tied: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inputs.require_positions(x, self.num_positions)
        table, positions = (
            nn.Embed(count, self.hidden_size, embedding_init=_INIT, name=name)
            for count, name in ((self.vocabulary_size, "wte"), (self.num_positions, "wpe"))
        )
        x = table(inputs.tokens(x, self.vocabulary_size)) + positions(jnp.arange(x.shape[1]))
        for i in range(self.num_layers):
            x = _Layer(self.num_heads, self.intermediate_size, self.epsilon, name=f"h_{i}")(x)
        x = _norm(self.epsilon, "ln_f")(x)
        if self.is_tied:
            return table.attend(x)
        return nn.Dense(self.vocabulary_size, use_bias=False, kernel_init=_INIT, name="lm_head")(x)


@checked
def gpt2(
    example_x: jax.ShapeDtypeStruct,
    num_classes: NumClasses,
    *,
    hidden_size: Count = 64,
    intermediate_size: Count | None = None,
    num_layers: Count = 2,
    num_heads: Count = 4,
    num_positions: Count | None = None,
    norm_epsilon: Positive = 1e-5,
    is_tied: bool = True,
) -> Model:
    """Builds a decoder of the GPT-2 type, as published checkpoints of these models have it.

    In a configuration, a folder as `model.pretrained` has the values and all options. Its
    parameters have the names of such checkpoints, as `params/h_0/attn/c_attn/kernel`. There is no
    dropout.

    Args:
      example_x: shape and type of one sequence, `[tokens]`, integers; tokens outside the vocabulary
        are read as the nearest inside it.
      num_classes: the number of tokens of the vocabulary, at least 2.
      hidden_size: size of a token's vector, a multiple of `num_heads`.
      intermediate_size: width of the dense network of a layer; 4 `hidden_size` if None.
      num_layers: the number of layers.
      num_heads: attention heads of a layer.
      num_positions: the longest sequence that the model takes; that of `example_x` if None.
      norm_epsilon: added to variances.
      is_tied: whether the embedding is the last layer too.

    Returns:
      The model; outputs are logits of the next token at every position, `[examples, tokens,
      classes]`, and targets are `[examples, tokens]`, -1 for none.

    Raises:
      ValueError: if an argument is out of its range, or the sequence longer than the positions.

    Source: Radford and others 2019 (GPT-2), section 2.3.
    """
    inputs.check_tokens(example_x)
    inputs.require_heads("hidden_size", hidden_size, num_heads)
    module = _Gpt2(
        vocabulary_size=num_classes,
        num_positions=example_x.shape[0] if num_positions is None else num_positions,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size if intermediate_size is None else intermediate_size,
        epsilon=float(norm_epsilon),
        is_tied=is_tied,
    )
    return Model.from_flax(module, example_x, loss=TOKENS, name="gpt2")
