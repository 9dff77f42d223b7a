"""Generation beside one token at a time in NumPy, from models whose logits are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling

from fedjax_dp.models import Model, generator, gpt2, lora

WORDS, NUM = jax.ShapeDtypeStruct((9,), jnp.int32), 5
KEY = jax.random.key(3)
PROMPTS = np.array([[1, 2, 0], [4, -1, -1]], np.int32)


def chain():
    """Logits of the next token that depend on the running sum of tokens and their number."""

    def apply(params, x):
        return params["table"][jnp.cumsum(x + 1, axis=1) % NUM]

    table = np.random.default_rng(0).normal(size=(NUM, NUM)).astype(np.float32)
    model = Model.from_functions(
        lambda key: {"table": jnp.asarray(table)},
        apply,
        loss="softmax_cross_entropy",
        mixes_examples=False,
        name="chain",
    )
    return model, {"table": jnp.asarray(table)}, table.astype(np.float64)


def test_greedy_continuations_are_those_of_one_token_at_a_time():
    model, params, table = chain()
    found = np.asarray(generator(model, 6)(params, PROMPTS, KEY, 0.0))
    for row, prompt in zip(found, PROMPTS, strict=True):
        text = prompt[prompt >= 0].tolist()
        for token in row:
            assert token == np.argmax(table[(sum(text) + len(text)) % NUM])
            text.append(token)


def test_nothing_follows_the_end_and_keys_decide_the_draws():
    model, params, _ = chain()
    free = np.asarray(generator(model, 30)(params, PROMPTS, KEY, 1.0))
    ended = np.asarray(generator(model, 30, end=2)(params, PROMPTS, KEY, 1.0))
    for whole, cut in zip(free, ended, strict=True):
        first = np.flatnonzero(whole == 2)[0]
        np.testing.assert_array_equal(cut[: first + 1], whole[: first + 1])
        assert set(cut[first + 1 :]) == {-1}
    other = np.asarray(generator(model, 30)(params, PROMPTS, jax.random.key(4), 1.0))
    assert np.any(other != free)


def test_draws_have_the_probabilities_of_the_temperature():
    model, params, table = chain()
    many, temperature = 4000, 0.5
    draws = generator(model, 1)(params, np.full((many, 1), 3, np.int32), KEY, temperature)
    weights = np.exp(table[4] / temperature)
    expected = many * weights / weights.sum()
    found = np.bincount(np.asarray(draws)[:, 0], minlength=NUM)
    # Pearson's statistic with 4 degrees of freedom: above 23.5 once in 10,000.
    assert np.sum((found - expected) ** 2 / expected) < 23.5
    plain = np.exp(table[4]) / np.exp(table[4]).sum() * many
    assert np.sum((found - plain) ** 2 / plain) > 23.5


@telling
def test_shorter_prompts_and_adapters_change_nothing_but_their_own_text():
    model = gpt2(WORDS, NUM, hidden_size=8, num_heads=2, num_layers=1)
    base = model.init(jax.random.key(0))
    low = lora(model, base, rank=2, targets="params/*/c_attn/kernel")
    own = jax.tree.map(lambda x: x + 0.5, low.init(jax.random.key(1)))
    together = np.asarray(generator(low, 6)(own, PROMPTS, KEY, 0.0))
    full, predict = low.full_params(own), jax.jit(model.predict)
    for row, prompt in zip(together, PROMPTS, strict=True):
        text = prompt[prompt >= 0].tolist()
        for token in row:
            whole = np.pad(text, (0, 9 - len(text)))[None]
            assert token == np.argmax(predict(full, whole)[0, len(text) - 1])
            text.append(int(token))
    with pytest.raises(ValueError, match="x must have at most 9 tokens, the positions"):
        generator(low, 7)(own, PROMPTS, KEY, 0.0)


@pytest.mark.parametrize(
    ("prompts", "temperature", "rule"),
    [
        (np.zeros((2, 3)), 0.0, r"prompts must be integers \[examples, tokens\]"),
        (np.zeros(3, np.int32), 0.0, r"prompts must be integers \[examples, tokens\]"),
        (np.array([[1], [-1]]), 0.0, "have one token or more in each"),
        (np.array([[1]]), -1.0, "temperature must be"),
    ],
)
def test_prompts_and_temperatures_that_cannot_be_are_refused(prompts, temperature, rule):
    model, params, _ = chain()
    with pytest.raises(ValueError, match=rule):
        generator(model, 2)(params, prompts, KEY, temperature)
