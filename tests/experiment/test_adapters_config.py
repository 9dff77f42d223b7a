"""Low-rank adapters by configuration: what is trained, sent, stated, and refused."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from marks import telling
from run_folders import (
    NOT_PRIVATE,
    SMALL,
    execute,
    metrics,
    read_json,
    saved_arrays,
)
from safetensors.numpy import save_file

from fedjax_dp.engine.federation import init_key
from fedjax_dp.experiment import load_config, load_run, resume
from fedjax_dp.experiment.assembly.assemble import execution_of, population_of
from fedjax_dp.experiment.assembly.build import build_model, parameter_facts
from fedjax_dp.experiment.reading.config_files import to_toml
from fedjax_dp.experiment.reading.validate import validate
from fedjax_dp.experiment.running.release import public_config
from fedjax_dp.experiment.running.run_folder import _require_same_base
from fedjax_dp.models.kinds import digest, frozen

# The digits have 64 features and 10 classes.
MLP = (*SMALL, "--model.name=mlp", "--model.options.hidden_sizes=[16]")
ADAPTERS = ("--model.adapters.rank=2", "--model.adapters.targets=['params/*/kernel']")
TRAINED, WHOLE = 2 * (64 + 16) + 2 * (16 + 10), 64 * 16 + 16 + 16 * 10 + 10


@pytest.fixture
def base(tmp_path):
    """A file of a base: its path, and its arrays."""
    rng = np.random.default_rng(0)
    shapes = {"0/kernel": (64, 16), "0/bias": (16,), "1/kernel": (16, 10), "1/bias": (10,)}
    arrays = {
        f"params/Dense_{name}": rng.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(arrays, tmp_path / "base.safetensors")
    return str(tmp_path / "base.safetensors"), arrays


def built(*words):
    """A model, and what a statement says of its parameters."""
    config = load_config(None, (*MLP, *NOT_PRIVATE, *words))
    model = build_model(config.model, population_of(config), config.run.seed)
    return model, parameter_facts(config.model, model)


def test_a_model_starts_as_its_base_which_is_read_from_a_file(base):
    path, arrays = base
    model, facts = built(*ADAPTERS, "--model.adapters.alpha=3", f"--model.pretrained={path}")
    expected = {"num_trained": TRAINED, "num_frozen": WHOLE, "is_pretrained": True}
    assert facts == {"parameters": expected}
    own = model.init(jax.random.key(0))
    for pair in own["adapters"].values():
        assert np.all(np.asarray(pair["up"]) == 0)
        pair["up"] = pair["up"] + 1
    full = model.full_params(own)["params"]
    for name, pair in own["adapters"].items():
        _, layer, _ = name.split("/")
        added = 3 / 2 * np.asarray(pair["down"], np.float64) @ np.ones((2, 1))
        expected = arrays[name].astype(np.float64) + added
        np.testing.assert_allclose(full[layer]["kernel"], expected, atol=1e-6)
        np.testing.assert_array_equal(full[layer]["bias"], arrays[f"params/{layer}/bias"])


@telling
def test_without_a_file_the_base_is_that_of_the_seed():
    words = (*ADAPTERS, "--model.adapters.trained=['params/Dense_1/bias']")
    model, facts = built(*words)
    assert facts["parameters"]["num_trained"] == TRAINED + 10
    start = jax.jit(built()[0].init)(init_key(jax.random.key(0)))
    full = model.full_params(model.init(init_key(jax.random.key(0))))
    jax.tree.map(np.testing.assert_array_equal, full, start)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--model.adapters.alpha=8"], r"adapters\.alpha must be left out without"),
        (["--model.adapters.rank=2"], r"adapters\.targets must name at least one kernel"),
        ([*ADAPTERS, "--model.frozen=['params/Dense_0']"], r"model\.frozen must be left out with"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_before_data_are_read(no_data, words, rule):
    with pytest.raises(ValueError, match=rule):
        validate(load_config(None, [*MLP, *NOT_PRIVATE, *words]))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--model.adapters.targets=['params/*/kernels']"], "did you mean 'params/Dense_"),
        (["--model.adapters.rank=11"], "rank must be at most 10.*Dense_1/kernel"),
        (["--model.adapters.targets={'params/*/kernel' = 2}"], "be below 2"),
        (["--model.options.hidden_sizes=[8]"], r"Dense_0/bias must have shape \[8\]"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(base, words, rule):
    with pytest.raises(ValueError, match=rule):
        built(*ADAPTERS, f"--model.pretrained={base[0]}", *words)


NOISE = ("--privacy.client.epsilon=none", "--privacy.client.noise_multiplier=0.1")
CLIENT = ("--privacy.unit=client", "--algorithm.name=dp_fedavg", *NOISE)
RECORD = ("--privacy.unit=record", "--algorithm.name=dp_sgd")


@telling
@pytest.mark.parametrize("level", [CLIENT, RECORD], ids=["client", "record"])
def test_adapters_alone_are_trained_sent_and_saved_and_the_statement_says_so(
    tmp_path, no_pictures, base, level
):
    path, arrays = base
    words = (*MLP, *level, *ADAPTERS, f"--model.pretrained={path}", "--training.learning_rate=0.1")
    folder = tmp_path / "run"
    assert execute(folder, *words)[0] == 0
    summary = read_json(folder, "summary.json")
    assert summary["num_parameters"] == TRAINED
    assert summary["parameters"]["num_frozen"] == WHOLE
    assert {"num_parameters", "parameters"}.isdisjoint(summary["not_private"])
    assert metrics(folder)[-1]["bytes_down"] == 3 * 4 * TRAINED
    assert sum(x.size for x in saved_arrays(folder)[1].values() if x.ndim > 1) == TRAINED
    text = (folder / "privacy.md").read_text(encoding="utf-8")
    assert f"Of the model's {TRAINED + WHOLE:,} parameters {TRAINED} are trained" in text
    assert f"{WHOLE:,} are frozen" in text and "no ε here covers data" in text
    run = load_run(folder)
    full = run.model.full_params(run.params)["params"]
    for layer in ("Dense_0", "Dense_1"):
        moved = np.linalg.svd(full[layer]["kernel"] - arrays[f"params/{layer}/kernel"])[1]
        assert moved[1] > 1e-3 and moved[2] < 1e-5
        np.testing.assert_array_equal(full[layer]["bias"], arrays[f"params/{layer}/bias"])
    # A release names the patterns, and no folder.
    text = public_config(run.experiment)
    assert "params/*/kernel" in text and '"base.safetensors"' in text and path not in text
    save_file({name: array + 1 for name, array in arrays.items()}, path)
    with pytest.raises(ValueError, match="must be those of the checkpoint"):
        load_run(folder)
    with pytest.raises(ValueError, match="must be those of the checkpoint"):
        resume(folder)


def test_a_run_resumes_on_its_own_base_alone():
    def of(value):
        base = frozen({"body": np.zeros(2), "head": np.zeros(2)}, "body", {"body": value})
        section = SimpleNamespace(pretrained="base.safetensors")
        model = SimpleNamespace(frozen=(base,))
        return SimpleNamespace(model=model, config=SimpleNamespace(model=section))

    one, other = of(np.zeros(2)), of(np.ones(2))
    saved = {"frozen": digest(one.model.frozen)}
    _require_same_base(one, saved)
    with pytest.raises(ValueError, match=r"of base\.safetensors must be those of the checkpoint"):
        _require_same_base(other, saved)
    # Checkpoints of earlier versions.
    _require_same_base(other, {})


def test_a_stored_configuration_without_adapters_can_be_read_and_run_again(tmp_path):
    config = load_config(None, [*MLP, *NOT_PRIVATE])
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    again = load_config(tmp_path / "config.toml")
    assert again == config
    validate(again)


def test_a_base_is_divided_by_rules_of_the_configuration():
    words = ("--execution.model_devices=2", "--execution.model_rules={'params/*/kernel'=1}")
    one = "--execution.devices=1"
    for some, rule in (
        ((one, words[0]), r"model_devices must divide the number of devices, 1, got 2"),
        ((one, words[1]), r"model_rules must be left out without .*model_devices above 1"),
    ):
        config = load_config(None, some)
        with pytest.raises(ValueError, match=rf"^execution\.{rule}"):
            execution_of(config.execution, config.run)
    config = load_config(None, (one, *words))
    assert config.execution.model_rules == {"params/*/kernel": 1}
    rule = r"^execution\.model_devices must divide the number of devices, 1, got 2"
    with pytest.raises(ValueError, match=rule):
        execution_of(config.execution, config.run)
