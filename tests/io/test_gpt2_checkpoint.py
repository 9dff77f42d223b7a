"""Checkpoints of GPT-2's type: names, shapes and outputs, beside NumPy in float64."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, telling
from safetensors.numpy import save_file

from fedjax_dp.core import trees
from fedjax_dp.experiment.assembly.build import build_model
from fedjax_dp.experiment.schema.config import AdaptersSection, ModelSection
from fedjax_dp.io.hugging_face import LAYOUTS
from fedjax_dp.models import gpt2

VOCABULARY, WIDTH, LAYERS, HEADS, POSITIONS, EPSILON = 13, 16, 2, 4, 9, 1e-3
GPT2 = LAYOUTS["gpt2"]
CONFIG = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": POSITIONS,
    "layer_norm_epsilon": EPSILON,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.1,
}
TEXT = jax.ShapeDtypeStruct((7,), jnp.int32)
TOKENS = np.random.default_rng(1).integers(VOCABULARY, size=(2, 7)).astype(np.int32)


def tensors(inner=4 * WIDTH):
    """Random values under the names of such a checkpoint, kernels as `[inputs, outputs]`."""
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (POSITIONS, WIDTH)}
    norms = ["ln_f", *(f"h.{i}.ln_{k}" for i in range(LAYERS) for k in (1, 2))]
    dense = {
        "attn.c_attn": (WIDTH, 3 * WIDTH),
        "attn.c_proj": (WIDTH, WIDTH),
        "mlp.c_fc": (WIDTH, inner),
        "mlp.c_proj": (inner, WIDTH),
    }
    for name in norms:
        shapes |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    for i in range(LAYERS):
        for name, shape in dense.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
    return {name: rng.normal(0, 0.4, s).astype(np.float32) for name, s in shapes.items()}


def write(folder, arrays, **changes):
    mask = {"h.0.attn.bias": np.tri(POSITIONS, dtype=np.float32)[None, None]}
    save_file({**arrays, **mask}, folder / "model.safetensors")
    config = {k: v for k, v in (CONFIG | changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def oracle(arrays, tokens, head=None):
    """The logits of one sequence, head by head and position by position."""
    value = {name: array.astype(np.float64) for name, array in arrays.items()}
    size = WIDTH // HEADS

    def norm(x, name):
        spread = np.sqrt(np.var(x, -1, keepdims=True) + EPSILON)
        return (x - x.mean(-1, keepdims=True)) / spread * value[f"{name}.weight"] + value[
            f"{name}.bias"
        ]

    def dense(x, name):
        return x @ value[f"{name}.weight"] + value[f"{name}.bias"]

    x = value["wte.weight"][tokens] + value["wpe.weight"][: len(tokens)]
    for i in range(LAYERS):
        whole = dense(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        mixed = np.zeros_like(x)
        for h in range(HEADS):
            own = slice(h * size, (h + 1) * size)
            query, key, held = (whole[:, k * WIDTH : (k + 1) * WIDTH][:, own] for k in range(3))
            for t in range(len(tokens)):
                scores = np.exp(key[: t + 1] @ query[t] / math.sqrt(size))
                mixed[t, own] = scores / scores.sum() @ held[: t + 1]
        x = x + dense(mixed, f"h.{i}.attn.c_proj")
        y = dense(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + dense(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ (value["wte.weight"].T if head is None else head.T)


def params_of(model, given):
    """Puts arrays by path into the tree of the model, which must name each of them."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = trees.paths(shapes)
    assert {n: x.shape for n, x in zip(paths, jax.tree.leaves(shapes), strict=True)} == {
        name: array.shape for name, array in given.items()
    }
    return jax.tree.unflatten(jax.tree.structure(shapes), [given[n] for n in paths])


@pytest.mark.parametrize(
    ("is_tied", "inner"), later([(True, None), (False, 20)], but=[(True, None)])
)
def test_logits_of_a_checkpoint_are_those_of_numpy(tmp_path, is_tied, inner):
    arrays = tensors(inner or 4 * WIDTH)
    written, head = {f"transformer.{name}": x for name, x in arrays.items()}, None
    if not is_tied:
        head = np.random.default_rng(2).normal(0, 0.4, (VOCABULARY, WIDTH)).astype(np.float32)
        written["lm_head.weight"] = head
    # Absent, it is true.
    changes = {} if is_tied else {"tie_word_embeddings": False}
    folder = write(tmp_path, written, n_inner=inner, **changes)
    model = gpt2(TEXT, VOCABULARY, **GPT2.options(folder, VOCABULARY))
    params = params_of(model, GPT2.params(folder))
    expected = np.stack([oracle(arrays, row, head) for row in TOKENS])
    found = jax.jit(model.predict)(params, TOKENS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@telling
def test_a_configuration_names_the_folder_and_its_adapters(tmp_path):
    folder = write(tmp_path, tensors())

    class Population:
        has_class_labels = False
        num_classes = VOCABULARY
        train = None

    adapters = AdaptersSection(rank=2, targets=["params/*/c_attn/kernel"])
    section = ModelSection(name="gpt2", pretrained=folder, adapters=adapters)
    with pytest.MonkeyPatch.context() as patched:
        name = "fedjax_dp.experiment.assembly.build.example_structure"
        patched.setattr(name, lambda train: {"x": TEXT})
        model = build_model(section, Population, 0)
    own = model.init(jax.random.key(0))
    assert trees.num_parameters(own) == LAYERS * 2 * (WIDTH + 3 * WIDTH)
    expected = np.stack([oracle(tensors(), row) for row in TOKENS])
    np.testing.assert_allclose(
        jax.jit(model.predict)(own, TOKENS), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model_type": "gpt_neo"}, "'model_type', must be 'gpt2'"),
        ({"activation_function": "relu"}, "'activation_function', must be 'gelu_new'"),
        ({"scale_attn_weights": False}, "'scale_attn_weights', must be True or absent"),
        ({"scale_attn_by_inverse_layer_idx": True}, "must be False or absent"),
        ({"n_positions": ...}, "'n_positions', must be given"),
        ({"vocab_size": 14}, "'vocab_size', must be 13, the number of tokens of the data"),
    ],
)
def test_checkpoints_of_other_models_are_refused(tmp_path, changes, rule):
    with pytest.raises(ValueError, match=rule):
        GPT2.options(write(tmp_path, {}, **changes), VOCABULARY)


def test_sequences_longer_than_the_positions_are_refused(tmp_path):
    options = GPT2.options(write(tmp_path, {}), VOCABULARY)
    gpt2(jax.ShapeDtypeStruct((POSITIONS,), jnp.int32), VOCABULARY, **options)
    with pytest.raises(ValueError, match="x must have at most 9 tokens, the positions of the mod"):
        gpt2(jax.ShapeDtypeStruct((POSITIONS + 1,), jnp.int32), VOCABULARY, **options)


def test_pickles_and_folders_without_a_configuration_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"config\.json"):
        GPT2.params(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with pytest.raises(ValueError, match=r"pickles.*got 'pytorch_model\.bin'"):
        GPT2.params(tmp_path)
