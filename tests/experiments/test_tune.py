"""DP-LoRA from a checkpoint folder: its configurations, its checks, and a run on made-up roles."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from experiments.lora import tiny_checkpoint, tune
from fedjax_dp.experiment import load_config
from fedjax_dp.io.hugging_face import LAYOUTS
from fedjax_dp.models import gpt2, kinds, lora


@pytest.mark.parametrize("unit", ["client", "record"])
def test_the_recipe_of_a_unit_protects_it(unit):
    config = load_config(tune.HERE / f"tune_{unit}.toml")
    assert list(config.privacy.units) == [unit]
    assert getattr(config.privacy, unit).epsilon == 8.0
    assert config.model.adapters.rank == 4 and config.model.name == "gpt2"
    assert config.data.options["template"] == "{instruction}\n"


def test_a_base_that_changed_and_adapters_that_did_not_move_are_refused():
    model = gpt2(jax.ShapeDtypeStruct((4,), jnp.int32), 5, hidden_size=4, num_heads=1, num_layers=1)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    base = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
    low = lora(model, base, rank=1, targets="params/*/c_attn/kernel")
    own = low.init(jax.random.key(1))
    digest = kinds.digest(low.frozen)
    with pytest.raises(ValueError, match="each adapter must have moved"):
        tune.require_moved(low, digest, own)
    moved = jax.tree.map(lambda x: x + 0.5, own)
    assert tune.require_moved(low, digest, moved) == pytest.approx(0.5 * np.sqrt(12))
    base["params"]["wte"]["embedding"][0, 0] = 2.0
    other = lora(model, base, rank=1, targets="params/*/c_attn/kernel")
    with pytest.raises(ValueError, match="the base must be that of the start"):
        tune.require_moved(other, digest, moved)


@slow
def test_a_checkpoint_is_tuned_for_both_units(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_DP_DATA", str(tmp_path))
    (tmp_path / "shakespeare").mkdir()
    words = [
        "to",
        "be",
        "or",
        "not",
        "that",
        "is",
        "the",
        "question",
        "whether",
        "it",
        "nobler",
        "in",
        "mind",
    ]
    rng = np.random.default_rng(0)
    with gzip.open(tmp_path / "shakespeare" / "plays_by_role.jsonl.gz", "wt") as file:
        for play, number in (("tempest", 3), ("hamlet", 4)):
            for i in range(number):
                speeches = [
                    "\n".join(" ".join(rng.choice(words, 4)) for _ in "ab") for _ in "x" * 12
                ]
                row = {"client": f"{play}|{i}", "play": play, "speeches": speeches}
                file.write(json.dumps(row) + "\n")
    folder = tmp_path / "made"
    tiny_checkpoint.prepare(folder, ["--training.num_steps=3", "--training.batch_size=4"])
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert {row["client"].partition("|")[0] for row in rows} == {"hamlet"}
    # Both layouts hold what the library reads.
    for layout in LAYOUTS:
        assert LAYOUTS[layout].params(folder / layout)
    monkeypatch.chdir(folder)
    small = ["--participation.cohort_size=2", "--run.rounds=2", "--run.evaluate_every=2"]
    for unit in ("client", "record"):
        plain, private = tune.rows_of("gpt2", unit, small, "to be")
        assert plain["spent"] == np.inf and 0 < private["spent"] <= 8.0
        assert plain["base"] == private["base"] and private["adapter_norm"] > 0
        assert plain["perplexity_before"] == private["perplexity_before"]
        assert isinstance(private["sample"], str)
    llama = ["--model.name=llama", "--model.pretrained=llama"]
    llama.append("--data.options.tokenizer=llama/tokenizer.json")
    llama.append("--model.adapters.targets=['params/*/q_proj/kernel', 'params/*/v_proj/kernel']")
    assert len(tune.rows_of("llama", "client", [*llama, *small], "to be")) == 2
