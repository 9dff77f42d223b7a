"""Laws of the zoo: examples, padding and clients; causality and values of sequence models."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, telling
from scipy import special

from fedjax_dp import models
from fedjax_dp.core import trees
from fedjax_dp.models import cnn

TABLE = jax.ShapeDtypeStruct((13,), jnp.float32)
SMALL_IMAGE = jax.ShapeDtypeStruct((8, 8), jnp.uint8)
WORDS = jax.ShapeDtypeStruct((6,), jnp.int32)


def small_resnet(norm="group", stem="cifar"):
    module = cnn._ResNet((1, 1), 4, norm, num_groups=2, stem=stem, widths=(4, 8))
    return models.Model.from_flax(module, SMALL_IMAGE, loss="softmax_cross_entropy")


SMALL = {
    "logistic_regression": lambda: models.logistic_regression(TABLE, 4),
    "single_logit": lambda: models.logistic_regression(TABLE, 2, single_logit=True),
    "linear_regression": lambda: models.linear_regression(TABLE),
    "poisson_regression": lambda: models.poisson_regression(TABLE),
    "ordinal_regression": lambda: models.ordinal_regression(TABLE, 4),
    "mlp": lambda: models.mlp(TABLE, 4, hidden_sizes=(8,)),
    "thesis_cnn": lambda: models.thesis_cnn(SMALL_IMAGE, 4),
    "emnist_cnn": lambda: models.emnist_cnn(SMALL_IMAGE, 4),
    "resnet": small_resnet,
    "char_lstm": lambda: models.char_lstm(WORDS, 9, num_units=8),
    "char_transformer": lambda: models.char_transformer(WORDS, 9, width=8, num_heads=2),
    "bag_of_tokens": lambda: models.bag_of_tokens(WORDS, 2, vocabulary_size=9, hidden_sizes=(4,)),
}
# A table, images.
QUICK = ("mlp",)
KEY = jax.random.key(1)
SEQUENCES = ("char_lstm", "char_transformer")
TOKENS = np.random.default_rng(0).integers(9, size=(2, 6)).astype(np.int32)


def batch_for(name, num_examples, seed=0):
    rng = np.random.default_rng(seed)
    if name in SEQUENCES:
        return {
            "x": rng.integers(9, size=(num_examples, 6)).astype(np.int32),
            "y": rng.integers(-1, 9, size=(num_examples, 6)).astype(np.int32),
        }
    if name == "bag_of_tokens":
        x = rng.integers(-1, 9, size=(num_examples, 6)).astype(np.int32)
        return {"x": x, "y": rng.integers(2, size=num_examples).astype(np.int32)}
    is_table = name in ("single_logit", "mlp") or name.endswith("_regression")
    x = (
        rng.normal(size=(num_examples, 13)).astype(np.float32)
        if is_table
        else rng.integers(256, size=(num_examples, 8, 8)).astype(np.uint8)
    )
    return {"x": x, "y": rng.integers(2, size=num_examples).astype(np.int32)}


@pytest.mark.parametrize("name", later(SMALL, but=QUICK))
def test_laws_of_examples_padding_and_clients(name):
    model = SMALL[name]()
    assert not model.mixes_examples

    def run(params, batch, mask):
        def total(p):
            losses, _ = model.losses(p, batch, is_training=True, key=KEY, mask=mask)
            return jnp.sum(losses), losses

        return jax.grad(total, has_aux=True)(params)

    first, second = (model.init(jax.random.key(seed)) for seed in (0, 1))
    batch, other = batch_for(name, 3), batch_for(name, 3, seed=5)
    changed = {key: np.stack([batch[key][0], other[key][1], batch[key][2]]) for key in batch}
    clients = [(first, batch), (second, batch), (first, changed)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(p for p, _ in clients))
    mask = np.array([True, False, True, True, False])
    padded = {key: np.stack([_with_junk(b[key]) for _, b in clients]) for key in batch}
    gradients, losses = jax.jit(jax.vmap(run, in_axes=(0, 0, None)))(params, padded, mask)
    alone = jax.jit(lambda p, b: run(p, b, None))

    # Padding, and a batch of clients with weights of their own, change nothing.
    for client in (0, 1):
        gradient, expected = alone(*clients[client])
        assert expected.shape == (3,) and expected.dtype == jnp.float32
        np.testing.assert_allclose(losses[client, mask], expected, rtol=1e-5, atol=1e-6)
        assert np.all(losses[client, ~mask] == 0)
        size = float(trees.l2_norm(gradient))
        error = trees.subtract(trees.take(gradients, client), gradient)
        assert 0 < size < math.inf
        assert float(trees.l2_norm(error)) < 1e-5 * size
    # One example of the last client is another than the first client's.
    is_same = losses[0, mask] == losses[2, mask]
    assert is_same.tolist() == [True, False, True]


def _with_junk(rows):
    junk = np.full_like(rows[0], np.nan if rows.dtype.kind == "f" else 77)
    return np.stack([rows[0], junk, rows[1], rows[2], junk])


@telling
def test_resnet_with_batch_norm_mixes_examples_and_obeys_the_mask():
    model = small_resnet(norm="batch")
    assert model.mixes_examples
    params = model.init(jax.random.key(0))
    batch = batch_for("resnet", 4)

    @jax.jit
    def run(p, b, mask):
        def total(p):
            losses, refreshed = model.losses(p, b, is_training=True, mask=mask)
            return jnp.sum(losses), refreshed

        return jax.grad(total, has_aux=True)(p)

    alone = {key: value[:3] for key, value in batch.items()}
    expected, stats = run(params, alone, None)
    got, masked_stats = run(params, batch, jnp.arange(4) < 3)
    _, all_stats = run(params, batch, jnp.ones(4, bool))
    for wanted, found in ((stats, masked_stats), (expected, got)):
        size = float(trees.l2_norm(wanted))
        assert float(trees.l2_norm(trees.subtract(found, wanted))) < 1e-4 * size
    assert float(trees.l2_norm(trees.subtract(all_stats, stats))) > 1e-2


@telling
@pytest.mark.parametrize("name", SEQUENCES)
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
@pytest.mark.parametrize("name", SEQUENCES)
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
@pytest.mark.parametrize("options", [{}, {"intermediate_size": 5, "is_tied": True}])
def test_transformer_equals_numpy(options):
    model = models.char_transformer(WORDS, 9, width=8, num_heads=2, **options)
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
    y = norm(y, tree["final_norm"])
    oracle = y @ tree["embedding"]["embedding"].T if options else dense(y, tree["head"])
    np.testing.assert_allclose(model.predict(params, TOKENS), oracle, rtol=1e-4, atol=1e-5)


@telling
def test_a_sequence_longer_than_the_transformer_has_positions_is_an_error():
    model = SMALL["char_transformer"]()
    params = model.init(jax.random.key(0))
    with pytest.raises(ValueError, match="at most 6 tokens, the positions of the model, got 7"):
        model.predict(params, np.zeros((1, 7), np.int32))
