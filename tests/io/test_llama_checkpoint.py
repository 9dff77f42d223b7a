"""Checkpoints of Llama-type models: names, shapes and outputs, beside NumPy in float64."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from fedjax_dp.core import trees
from fedjax_dp.experiment.assembly.build import _require_whole, build_model
from fedjax_dp.experiment.schema.config import AdaptersSection, ModelSection
from fedjax_dp.io.hugging_face import LAYOUTS
from fedjax_dp.models import llama

VOCABULARY, HIDDEN, WIDTH, LAYERS, HEADS, GROUPS, THETA, EPSILON = 13, 16, 20, 2, 4, 2, 500.0, 1e-3
CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "rope_theta": THETA,
    "rms_norm_eps": EPSILON,
    "rope_scaling": None,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
LLAMA = LAYOUTS["llama"]
TEXT = jax.ShapeDtypeStruct((7,), jnp.int32)
TOKENS = np.random.default_rng(1).integers(VOCABULARY, size=(2, 7)).astype(np.int32)


def tensors():
    """Random values under the names of such a checkpoint, `[outputs, inputs]`."""
    rng, size = np.random.default_rng(0), HIDDEN // HEADS
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    shapes["lm_head"] = (VOCABULARY, HIDDEN)
    for i in range(LAYERS):
        of_layer = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (GROUPS * size, HIDDEN),
            "self_attn.v_proj": (GROUPS * size, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (WIDTH, HIDDEN),
            "mlp.up_proj": (WIDTH, HIDDEN),
            "mlp.down_proj": (HIDDEN, WIDTH),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    return {f"{n}.weight": rng.normal(0, 0.4, s).astype(np.float32) for n, s in shapes.items()}


def write(folder, arrays, **changes):
    """Writes a checkpoint in two files."""
    names = sorted(arrays)
    for number, part in enumerate((names[::2], names[1::2])):
        whole = {name: np.ascontiguousarray(arrays[name]) for name in part}
        save_file(whole, folder / f"model-{number + 1:05d}-of-00002.safetensors")
    config = {k: v for k, v in (CONFIG | changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def oracle(arrays, tokens):
    """The logits of one sequence, head by head and position by position."""
    value = {name: array.astype(np.float64) for name, array in arrays.items()}
    size = HIDDEN // HEADS

    def norm(x, name):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPSILON) * value[f"{name}.weight"]

    def turned(vector, position):
        # Entries i and i + size/2 are the parts of a complex number.
        angles = position * THETA ** (-2 * np.arange(size // 2) / size)
        z = (vector[: size // 2] + 1j * vector[size // 2 :]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag])

    x = value["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        name = f"model.layers.{i}"
        y = norm(x, f"{name}.input_layernorm")
        query, key, held = (
            (y @ value[f"{name}.self_attn.{part}_proj.weight"].T).reshape(len(tokens), -1, size)
            for part in "qkv"
        )
        mixed = np.zeros((len(tokens), HEADS, size))
        for head in range(HEADS):
            of = head * GROUPS // HEADS
            for t in range(len(tokens)):
                own = turned(query[t, head], t)
                scores = [own @ turned(key[s, of], s) / np.sqrt(size) for s in range(t + 1)]
                shares = np.exp(scores) / np.sum(np.exp(scores))
                mixed[t, head] = shares @ held[: t + 1, of]
        x = x + mixed.reshape(len(tokens), -1) @ value[f"{name}.self_attn.o_proj.weight"].T
        y = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (y @ value[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ value[f"{name}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ value["lm_head.weight"].T


def built(folder, **options):
    return llama(TEXT, VOCABULARY, **LLAMA.options(folder, VOCABULARY), **options)


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_of_a_checkpoint_are_those_of_numpy(tmp_path, is_tied):
    arrays = tensors()
    folder = write(tmp_path, arrays, tie_word_embeddings=is_tied)
    model = built(folder)
    given = LLAMA.params(folder)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    # Every parameter is in the file, in its shape; others would be refused.
    assert {
        n: x.shape for n, x in zip(trees.paths(shapes), jax.tree.leaves(shapes), strict=True)
    } == {name: array.shape for name, array in given.items()}
    params = jax.tree.unflatten(jax.tree.structure(shapes), [given[n] for n in trees.paths(shapes)])
    if is_tied:
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    expected = np.stack([oracle(arrays, row) for row in TOKENS])
    found = jax.jit(model.predict)(params, TOKENS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_a_configuration_names_the_folder_and_its_adapters(tmp_path):
    folder = write(tmp_path, tensors())

    class Population:
        has_class_labels = False
        num_classes = VOCABULARY
        train = None

    adapters = AdaptersSection(rank=2, targets=["params/*/q_proj/kernel", "params/*/v_proj/kernel"])
    section = ModelSection(name="llama", pretrained=folder, adapters=adapters)
    with pytest.MonkeyPatch.context() as patched:
        name = "fedjax_dp.experiment.assembly.build.example_structure"
        patched.setattr(name, lambda train: {"x": TEXT})
        model = build_model(section, Population, 0)
    own = model.init(jax.random.key(0))
    size = HIDDEN // HEADS
    each = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + GROUPS * size)
    assert trees.num_parameters(own) == LAYERS * each
    expected = np.stack([oracle(tensors(), row) for row in TOKENS])
    np.testing.assert_allclose(
        jax.jit(model.predict)(own, TOKENS), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model_type": "gpt2"}, "'model_type', must be 'llama'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'rope_scaling', must be absent"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "of the type 'default'"),
        ({"rope_parameters": {"rope_theta": 5e5, "factor": 8.0}}, "rope_theta and rope_type alone"),
        ({"attention_bias": True}, "'attention_bias', must be False or absent"),
        ({"hidden_size": ...}, "'hidden_size', must be given"),
        ({"vocab_size": 14}, "'vocab_size', must be 13, the number of tokens of the data"),
    ],
)
def test_checkpoints_of_other_models_are_refused(tmp_path, changes, rule):
    with pytest.raises(ValueError, match=rule):
        LLAMA.options(write(tmp_path, {}, **changes), VOCABULARY)


def test_rotary_embeddings_are_read_as_transformers_5_writes_them(tmp_path):
    rotary = {"rope_type": "default", "rope_theta": 7.0}
    folder = write(tmp_path, {}, rope_theta=..., rope_scaling=..., rope_parameters=rotary)
    expected = LLAMA.options(write(tmp_path, {}, rope_theta=7.0), VOCABULARY)
    assert expected["rope_theta"] == 7.0
    write(tmp_path, {}, rope_theta=..., rope_scaling=..., rope_parameters=rotary)
    assert LLAMA.options(folder, VOCABULARY) == expected


def test_arrays_that_no_such_model_has_are_refused(tmp_path):
    strange = {"model.layers.0.self_attn.q_proj.bias": np.zeros(HIDDEN, np.float32)}
    with pytest.raises(ValueError, match=r"q_proj\.bias.*must be the weight of a module"):
        LLAMA.params(write(tmp_path, strange))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match="intact"):
        LLAMA.params(tmp_path)


def test_a_folder_without_one_of_its_files_is_refused(tmp_path):
    folder = write(tmp_path, tensors())
    last = "model-00002-of-00002.safetensors"
    index = {"weight_map": {"model.norm.weight": last}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert LLAMA.params(folder)
    (tmp_path / last).unlink()
    with pytest.raises(ValueError, match=f"hold all files of model.safetensors.index.json.*{last}"):
        LLAMA.params(folder)
    (tmp_path / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="'weight_map', must be files by array"):
        LLAMA.params(folder)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, "params/head"),
        ({"adapters": AdaptersSection(rank=1, targets=["params/body"])}, "params/head"),
        ({"adapters": AdaptersSection(rank=1, trained=["params/head"])}, None),
        ({"frozen": ["params/body"]}, None),
        ({"frozen": ["params/head"]}, "params/head"),
    ],
)
def test_a_folder_holds_all_but_what_is_trained_from_its_initial_values(options, missing):
    section = ModelSection(name="llama", pretrained="folder", **options)
    shapes = {"params": {"body": TEXT, "head": TEXT}}
    if missing is None:
        _require_whole(section, shapes, {"params/body": TOKENS})
    else:
        with pytest.raises(ValueError, match=f"folder must hold '{missing}' of the model"):
            _require_whole(section, shapes, {"params/body": TOKENS})


def test_no_part_of_a_damaged_folder_is_that_of_the_seed(tmp_path):
    arrays = tensors()
    del arrays["model.layers.1.mlp.up_proj.weight"]
    section = ModelSection(name="llama", pretrained=write(tmp_path, arrays))
    population = SimpleNamespace(num_classes=VOCABULARY, train=None, has_class_labels=False)
    with pytest.MonkeyPatch.context() as patched:
        name = "fedjax_dp.experiment.assembly.build.example_structure"
        patched.setattr(name, lambda train: {"x": TEXT})
        with pytest.raises(ValueError, match="hold 'params/layers_1/mlp/up_proj/kernel' of the"):
            build_model(section, population, 0)
