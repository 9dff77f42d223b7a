"""Networks that predict the next token: an LSTM, a transformer, decoders of the Llama type."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Decay, Positive
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model
from fedjax_dp.models.inputs import NumClasses
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
    num_classes: NumClasses,
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
    module = _CharLstm(num_classes, embedding_size, num_units, num_layers)
    return Model.from_flax(module, example_x, loss=TOKENS, name="char_lstm")


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
        inputs.require_positions(x, self.max_length)
        length = x.shape[1]
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
    num_classes: NumClasses,
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
    inputs.require_heads("width", width, num_heads)
    module = _Transformer(
        vocabulary_size=num_classes,
        max_length=example_x.shape[0],
        width=width,
        num_heads=num_heads,
        num_layers=num_layers,
        intermediate_size=4 * width if intermediate_size is None else intermediate_size,
        dropout=inputs.dropout_rate(dropout),
        is_tied=is_tied,
    )
    return Model.from_flax(module, example_x, loss=TOKENS, name="char_transformer")


class _Norm(nn.Module):
    """Divides by the root mean square, in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + self.epsilon) * scale


def _rotated(x: jax.Array, theta: float) -> jax.Array:
    """Turns entry i and entry i + d/2 of `[examples, tokens, heads, d]` by t·θ^(-2i/d)."""
    length, half = x.shape[1], x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class _Attention(nn.Module):
    num_heads: int
    num_kv_heads: int
    head_size: int
    theta: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def heads(count: int, name: str) -> jax.Array:
            y = nn.Dense(count * self.head_size, use_bias=False, name=name)(x)
            return y.reshape(*x.shape[:2], count, self.head_size)

        query, key = heads(self.num_heads, "q_proj"), heads(self.num_kv_heads, "k_proj")
        value = heads(self.num_kv_heads, "v_proj")
        query, key = _rotated(query, self.theta), _rotated(key, self.theta)
        # Consecutive heads of queries share one of keys and values.
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        y = y.reshape(*x.shape[:2], self.num_heads * self.head_size)
        return nn.Dense(x.shape[-1], use_bias=False, name="o_proj")(y)


class _MLP(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.Dense(self.width, use_bias=False, name="gate_proj")(x)
        up = nn.Dense(self.width, use_bias=False, name="up_proj")(x)
        return nn.Dense(x.shape[-1], use_bias=False, name="down_proj")(nn.silu(gate) * up)


class _Layer(nn.Module):
    attention: tuple[int, int, int, float]
    width: int
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = _Norm(self.epsilon, name="input_layernorm")(x)
        x = x + _Attention(*self.attention, name="self_attn")(y)
        y = _Norm(self.epsilon, name="post_attention_layernorm")(x)
        return x + _MLP(self.width, name="mlp")(y)


class _Llama(nn.Module):
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: tuple[int, int, int, float]
    epsilon: float
    is_tied: bool
    num_positions: int | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.num_positions is not None:
            inputs.require_positions(x, self.num_positions)
        init = nn.initializers.normal(0.02)
        table = nn.Embed(
            self.vocabulary_size, self.hidden_size, embedding_init=init, name="embed_tokens"
        )
        x = table(inputs.tokens(x, self.vocabulary_size))
        for i in range(self.num_layers):
            layer = _Layer(self.attention, self.intermediate_size, self.epsilon, name=f"layers_{i}")
            x = layer(x)
        x = _Norm(self.epsilon, name="norm")(x)
        if self.is_tied:
            return table.attend(x)
        return nn.Dense(self.vocabulary_size, use_bias=False, name="lm_head")(x)


@checked
def llama(
    example_x: jax.ShapeDtypeStruct,
    num_classes: NumClasses,
    *,
    hidden_size: Count = 64,
    intermediate_size: Count = 172,
    num_layers: Count = 2,
    num_heads: Count = 4,
    num_kv_heads: Count | None = None,
    head_size: Count | None = None,
    rope_theta: Positive = 10_000.0,
    norm_epsilon: Positive = 1e-5,
    is_tied: bool = False,
    num_positions: Count | None = None,
) -> Model:
    """Builds a decoder of the Llama type, as published checkpoints of these models have it.

    In a configuration, a folder as `model.pretrained` has the values and all options. Its
    parameters have the names of such checkpoints, as `params/layers_0/self_attn/q_proj/kernel`.

    Args:
      example_x: shape and type of one sequence, `[tokens]`, integers; tokens outside the vocabulary
        are read as the nearest inside it.
      num_classes: the number of tokens of the vocabulary, at least 2.
      hidden_size: size of a token's vector.
      intermediate_size: width of the gated network of a layer.
      num_layers: the number of layers.
      num_heads: heads of queries in a layer.
      num_kv_heads: heads of keys and values, which divide `num_heads`; as many if None.
      head_size: size of a head, even; `hidden_size` over `num_heads` if None.
      rope_theta: base of the rotary embeddings' wavelengths.
      norm_epsilon: added to mean squares.
      is_tied: whether the embedding is the last layer too.
      num_positions: the longest sequence that the model takes; any if None.

    Returns:
      The model; outputs are logits of the next token at every position, `[examples, tokens,
      classes]`, and targets are `[examples, tokens]`, -1 for none.

    Raises:
      ValueError: if an argument is out of its range, or the sequence longer than the positions.

    Source: Touvron and others 2023 (LLaMA), section 2.2; Ainslie and others 2023 (GQA) for grouped
    queries.
    """
    inputs.check_tokens(example_x)
    own_heads = num_heads if num_kv_heads is None else num_kv_heads
    rule = f"divide the {num_heads} heads of queries"
    checks.require(num_heads % own_heads == 0, "num_kv_heads", rule, own_heads)
    rule = f"be a multiple of {num_heads} heads, if no head_size is given"
    is_given = head_size is not None
    checks.require(is_given or hidden_size % num_heads == 0, "hidden_size", rule, hidden_size)
    size = head_size if head_size is not None else hidden_size // num_heads
    checks.require(size % 2 == 0, "head_size", "be even", size)
    module = _Llama(
        vocabulary_size=num_classes,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        attention=(num_heads, own_heads, size, float(rope_theta)),
        epsilon=float(norm_epsilon),
        is_tied=is_tied,
        num_positions=num_positions,
    )
    return Model.from_flax(module, example_x, loss=TOKENS, name="llama")
