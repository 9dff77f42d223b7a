"""Sequence models: causal, equal to float64 NumPy, defined for every token."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from scipy import special

from fedjax_dp import models

WORDS = jax.ShapeDtypeStruct((6,), jnp.int32)
SMALL = {
    "char_lstm": lambda: models.char_lstm(WORDS, 9, num_units=8),
    "char_transformer": lambda: models.char_transformer(WORDS, 9, width=8, num_heads=2),
}
TOKENS = np.random.default_rng(0).integers(9, size=(2, 6)).astype(np.int32)


@telling
@pytest.mark.parametrize("name", SMALL)
def test_a_later_token_never_changes_an_earlier_output(name):
    model = SMALL[name]()
    params = model.init(jax.random.key(2))
    x = np.array([[1, 2, 3, 4, 5, 6]], np.int32)
    predict = jax.jit(model.predict)
    before = predict(params, x)
    assert before.shape == (1, 6, 9)
    for position in range(1, 6):
        changed = x.copy()
        changed[0, position] = 8
        after = predict(params, changed)
        np.testing.assert_array_equal(after[0, :position], before[0, :position])
        assert np.all(np.any(after[0, position:] != before[0, position:], axis=-1))


@telling
@pytest.mark.parametrize("name", SMALL)
def test_tokens_outside_the_vocabulary_have_a_defined_output(name):
    model = SMALL[name]()
    params = model.init(jax.random.key(2))
    wild = model.predict(params, np.array([[-1, 9, 2**31 - 1, -(2**31), 3, 100]], np.int32))
    tame = model.predict(params, np.array([[0, 8, 8, 0, 3, 8]], np.int32))
    np.testing.assert_array_equal(wild, tame)


@telling
def test_lstm_equals_numpy():
    model = models.char_lstm(WORDS, 9, embedding_size=3, num_units=4, num_layers=2)
    params = model.init(jax.random.key(3))
    tree = jax.tree.map(np.float64, params["params"])
    sequence = tree["Embed_0"]["embedding"][TOKENS]
    for layer in ("_Lstm_0", "_Lstm_1"):
        weights = tree[layer]
        np.testing.assert_array_equal(weights["bias"], [0] * 4 + [1] * 4 + [0] * 8)
        hidden, cell, outputs = np.zeros((2, 4)), np.zeros((2, 4)), []
        for t in range(6):
            gates = sequence[:, t] @ weights["input_kernel"] + hidden @ weights["kernel"]
            i, f, g, o = np.split(gates + weights["bias"], 4, axis=1)
            cell = special.expit(f) * cell + special.expit(i) * np.tanh(g)
            hidden = special.expit(o) * np.tanh(cell)
            outputs.append(hidden)
        sequence = np.stack(outputs, axis=1)
    oracle = sequence @ tree["Dense_0"]["kernel"] + tree["Dense_0"]["bias"]
    np.testing.assert_allclose(model.predict(params, TOKENS), oracle, rtol=1e-5, atol=1e-6)


@telling
def test_transformer_equals_numpy():
    model = SMALL["char_transformer"]()
    params = model.init(jax.random.key(4))
    tree = jax.tree.map(np.float64, params["params"])

    def norm(y, weights):
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
        return y * weights["scale"] + weights["bias"]

    def dense(y, weights):
        return y @ weights["kernel"] + weights["bias"]

    y = tree["embedding"]["embedding"][TOKENS] + tree["positions"]
    for block in (tree["block1"], tree["block2"]):
        z = norm(y, block["attention_norm"])
        query, key, value = (dense(z, block[name]) for name in ("query", "key", "value"))
        mixed = np.zeros_like(y)
        for head in (slice(0, 4), slice(4, 8)):
            for t in range(6):
                past = slice(0, t + 1)
                scores = np.einsum("nd,nsd->ns", query[:, t, head], key[:, past, head])
                shares = special.softmax(scores / math.sqrt(4), axis=1)
                mixed[:, t, head] = np.einsum("ns,nsd->nd", shares, value[:, past, head])
        y = y + dense(mixed, block["attention_out"])
        z = dense(norm(y, block["dense_norm"]), block["dense_in"])
        gelu = 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        y = y + dense(gelu, block["dense_out"])
    oracle = dense(norm(y, tree["final_norm"]), tree["head"])
    np.testing.assert_allclose(model.predict(params, TOKENS), oracle, rtol=1e-4, atol=1e-5)


@telling
def test_a_sequence_longer_than_the_transformer_has_positions_is_an_error():
    model = SMALL["char_transformer"]()
    params = model.init(jax.random.key(0))
    with pytest.raises(ValueError, match="at most 6 tokens, got 7"):
        model.predict(params, np.zeros((1, 7), np.int32))
