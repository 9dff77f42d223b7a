"""A network that classifies texts."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model
from fedjax_dp.models.inputs import NumClasses


class _BagOfTokens(nn.Module):
    vocabulary_size: int
    embedding_size: int
    hidden_sizes: tuple[int, ...]
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The mean of embeddings is a product with shares of tokens, so that the gradient of an
        # example is one outer product, which clipping need not form. Counts are exact in any order.
        places = jnp.where(x < 0, self.vocabulary_size, inputs.tokens(x, self.vocabulary_size))
        empty = jnp.zeros((x.shape[0], self.vocabulary_size), jnp.float32)
        counts = jax.vmap(lambda row, at: row.at[at].add(1, mode="drop"))(empty, places)
        shares = counts / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1)
        init = nn.linear.default_embed_init
        table = nn.Dense(self.embedding_size, use_bias=False, kernel_init=init, name="embedding")
        x = table(shares)
        for size in self.hidden_sizes:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(self.num_classes, name="head")(x)


@checked
def bag_of_tokens(
    example_x: jax.ShapeDtypeStruct,
    num_classes: NumClasses,
    *,
    vocabulary_size: Count = 257,
    embedding_size: Count = 16,
    hidden_sizes: Sequence[Count] = (),
) -> Model:
    """Builds a classifier of the mean of the embeddings of a text's tokens, in any order.

    Negative tokens, which fill up short texts, have no part in the mean; that of a text without
    tokens is zero. With v tokens, an embedding of e and sizes n₀ = e, n₁, …, n_L (classes) it has
    v·e + Σ (nᵢ + 1) · nᵢ₊₁ parameters: 4,146 for bytes and 2 classes.

    Args:
      example_x: shape and type of one text, `[tokens]`, integers; tokens beyond the vocabulary are
        read as its last one, and a configuration refuses data that have any.
      num_classes: the number of classes, at least 2.
      vocabulary_size: the number of tokens, such as `size` of the tokenizer; 257 is that of bytes.
      embedding_size: size of a token's vector.
      hidden_sizes: units of each hidden layer between mean and classes, with ReLU; none by default.

    Returns:
      The model; outputs are logits `[examples, classes]`.

    Raises:
      ValueError: if an argument is out of its range.

    Source: Joulin and others 2017 (fastText), section 2, without n-grams.
    """
    inputs.check_tokens(example_x)
    module = _BagOfTokens(vocabulary_size, embedding_size, tuple(hidden_sizes), num_classes)
    return Model.from_flax(module, example_x, loss="softmax_cross_entropy", name="bag_of_tokens")
