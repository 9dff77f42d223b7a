"""The bag of tokens against its formulas in float64: outputs, and clipped gradients of examples."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from fedjax_dp.clients import LocalConfig
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.models import bag_of_tokens
from fedjax_dp.models.per_example import _plan

# A token twice, filled up, full, without tokens, and one whose fill is in the middle.
X = np.array([[1, 4, 1, -1, -1], [6, 0, 2, 3, 5], [-1] * 5, [4, -1, -1, 1, 1]], np.int32)
Y = np.array([2, 0, 1, 2], np.int32)
TEXT = jax.ShapeDtypeStruct((5,), jnp.int32)
MODEL = bag_of_tokens(TEXT, 3, vocabulary_size=7, embedding_size=2, hidden_sizes=(4,))


def drawn():
    """Parameters in float64 and float32, without zeros."""
    params = jax.tree.map(
        lambda a: np.random.default_rng(a.size).normal(size=a.shape).astype(np.float32),
        jax.eval_shape(MODEL.init, jax.random.key(0)),
    )
    return params, jax.tree.map(np.float64, params["params"])


def of_text(tree, row, label):
    """Logits of one text, and the gradient of its cross entropy, by hand."""
    tokens = [token for token in row if token >= 0]
    table = tree["embedding"]["kernel"]
    mean = sum((table[token] for token in tokens), np.zeros(2)) / max(1, len(tokens))
    before = mean @ tree["Dense_0"]["kernel"] + tree["Dense_0"]["bias"]
    hidden = np.maximum(before, 0)
    logits = hidden @ tree["head"]["kernel"] + tree["head"]["bias"]
    of_logits = special.softmax(logits) - np.eye(3)[label]
    of_hidden = (tree["head"]["kernel"] @ of_logits) * (before > 0)
    of_table = np.zeros_like(table)
    for token in tokens:
        of_table[token] += tree["Dense_0"]["kernel"] @ of_hidden / len(tokens)
    gradient = {
        "embedding": {"kernel": of_table},
        "Dense_0": {"kernel": np.outer(mean, of_hidden), "bias": of_hidden},
        "head": {"kernel": np.outer(hidden, of_logits), "bias": of_logits},
    }
    return logits, gradient


def test_outputs_are_those_of_the_formulas_and_padding_has_no_part_in_them():
    params, tree = drawn()
    predict = jax.jit(MODEL.predict)
    outputs = predict(params, X)
    expected = [of_text(tree, row, 0)[0] for row in X]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    # Texts of the same tokens, in any order and however filled up, have the same outputs.
    np.testing.assert_array_equal(outputs[0], outputs[3])
    longer = np.concatenate([X, np.full((4, 6), -1, np.int32)], axis=1)
    np.testing.assert_array_equal(MODEL.predict(params, longer), MODEL.predict(params, X))
    # Beyond the vocabulary is its last token, and any negative number fills up.
    wild = np.array([[7, 2**31 - 1, -(2**31), -2, 3]], np.int32)
    np.testing.assert_array_equal(
        predict(params, wild), predict(params, np.array([[6, 6, -1, -1, 3]], np.int32))
    )


def test_clipped_gradients_are_those_of_single_texts_and_are_not_formed():
    params, tree = drawn()
    rule = clipped(MODEL)

    @jax.jit
    def ours(batch, is_real):
        config = LocalConfig(clip_norm=0.7, noise_multiplier=0.0, batch_size=4)
        return rule.micro_batch(params, batch, is_real, None, config).gradient

    def by_hand(rows):
        total = jax.tree.map(np.zeros_like, tree)
        for i in rows:
            gradient = of_text(tree, X[i], Y[i])[1]
            norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
            norms.append(norm)
            factor = min(1, 0.7 / norm)
            total = jax.tree.map(lambda a, g, factor=factor: a + factor * g, total, gradient)
        return total

    norms, batch = [], {"x": X, "y": Y}
    for rows in (range(4), [0], [1], [2], [3]):
        found = ours(batch, np.isin(np.arange(4), rows))["params"]
        jax.tree.map(
            # Norms are bounds that exceed the norm by at most a thousandth.
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5),
            found,
            by_hand(rows),
        )
    assert min(norms) < 0.7 < max(norms)

    def loss(leaves, example):
        tree = jax.tree.unflatten(jax.tree.structure(params), leaves)
        one = jax.tree.map(lambda a: a[None], example)
        return MODEL.losses(tree, one, is_training=True)[0][0]

    shapes = {"x": TEXT, "y": jax.ShapeDtypeStruct((), jnp.int32)}
    plan = _plan(loss, jax.tree.leaves(params), shapes)
    names = [plan.closed.jaxpr.eqns[site.equation].primitive.name for site in plan.sites]
    assert sorted(names) == ["add"] * 2 + ["dot_general"] * 3 and plan.direct == ()
