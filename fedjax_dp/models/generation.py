"""Text from models that predict the next token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax import lax

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Count, Index, NonNegative
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import IGNORE_LABEL


@checked
def generator(model: Model, num_tokens: Count, *, end: Index | None = None) -> Callable:
    """Builds a function that continues prompts, one token after another.

    Each token applies the model to the whole sequence, without a cache, so it works with any model
    of next tokens whose outputs depend on no later position. The function compiles one program for
    a shape of prompts.

    Guarantee: post-processing. What is generated from the model of a private training, and from
    prompts that hold none of its data, costs no further privacy.

    Args:
      model: its outputs are logits of the next token at every position, `[examples, tokens,
        classes]`, for as many tokens as prompts and continuations have together.
      num_tokens: tokens to generate, at least 1.
      end: the token that ends a text; -1 follows it. None if there is none.

    Returns:
      `(params, prompts, key, temperature) → tokens [examples, num_tokens]`, int32. `prompts` are
      integers `[examples, tokens]`, with -1 after the end of a shorter one, each of one token or
      more. Logits are divided by `temperature`, at least 0; at 0 the most likely token is taken,
      and nothing is drawn.

    Raises:
      ValueError: if an argument is out of its range; or, by the function, for other prompts or
        temperatures, or more tokens than the model has positions for.

    Example:
      `generator(model, 20)(params, jnp.array([[5, 2, -1]]), jax.random.key(0), 0.7)`
    """

    @jax.jit
    def run(params, constants, prompts, lengths, key, temperature):
        rows = jnp.arange(len(prompts))
        space = jnp.zeros((len(rows), num_tokens), jnp.int32)
        tokens = jnp.concatenate([jnp.maximum(prompts, 0).astype(jnp.int32), space], axis=1)

        def step(carry, i):
            tokens, is_over = carry
            at = lengths + i
            logits = model.predict(params, tokens)[rows, at - 1].astype(jnp.float32)
            keys = jax.vmap(lambda row: fold(key, Purpose.MODEL, i, row))(rows)
            scaled = logits / jnp.where(temperature > 0, temperature, 1)
            drawn = jax.vmap(jax.random.categorical)(keys, scaled)
            chosen = jnp.where(temperature > 0, drawn, jnp.argmax(logits, -1)).astype(jnp.int32)
            shown = jnp.where(is_over, IGNORE_LABEL, chosen)
            is_over = is_over if end is None else is_over | (chosen == end)
            return (tokens.at[rows, at].set(chosen), is_over), shown

        with model.given(constants):
            start = tokens, jnp.zeros(len(rows), bool)
            return lax.scan(step, start, jnp.arange(num_tokens))[1].T

    def generate(
        params: PyTree, prompts: jax.Array, key: PRNGKey, temperature: NonNegative
    ) -> jax.Array:
        prompts = jnp.asarray(prompts)
        is_table = prompts.ndim == 2 and jnp.issubdtype(prompts.dtype, jnp.integer)
        rule, form = "be integers [examples, tokens]", f"{prompts.dtype}{list(prompts.shape)}"
        checks.require(is_table, "prompts", rule, form)
        lengths = jnp.sum(jnp.cumprod(prompts >= 0, axis=1), axis=1)
        if not checks.is_traced(lengths):
            rule = "have one token or more in each"
            checks.require(bool(jnp.all(lengths > 0)), "prompts", rule, "an empty one")
        return run(params, model.constants, prompts, lengths, key, temperature)

    return checked(generate)
