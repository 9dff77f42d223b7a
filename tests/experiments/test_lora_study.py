"""The study of adapters: its parts of Shakespeare, and configurations that are valid."""

import gzip
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments.lora import plays, study
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.reading.validate import validate


@pytest.mark.parametrize("unit", study.UNITS)
@pytest.mark.parametrize("method", study.METHODS)
def test_every_run_is_a_valid_configuration(tmp_path, unit, method):
    save_file({"params/x": np.zeros(1)}, tmp_path / "base.safetensors")
    words = [*study.METHODS[method], *study.UNITS[unit]]
    words += [f"--model.pretrained={tmp_path / 'base.safetensors'}"]
    for epsilon in study.BUDGETS:
        config = load_config(
            study.HERE / "federated.toml", [*words, *study.budget_words(unit, epsilon)]
        )
        validate(config)
        assert (config.model.adapters.rank is None) == (method == "full")
        assert getattr(config.privacy, unit).epsilon == epsilon
    validate(load_config(study.HERE / "base.toml"))


def test_no_play_is_in_both_parts(tmp_path):
    names = ("tempest|ARIEL", "hamlet|HAMLET", "tempest|ALL", "hamlet|GHOST", "macbeth|BANQUO")
    (tmp_path / "shakespeare").mkdir()
    with gzip.open(tmp_path / "shakespeare" / "plays_by_role.jsonl.gz", "wt") as file:
        for name in names:
            speeches = [f"{name} {i} says what it has to say." for i in range(12)]
            row = {"client": name, "play": name.partition("|")[0], "speeches": speeches}
            file.write(json.dumps(row) + "\n")
    public = plays.public(tmp_path, sequence_length=16)
    private = plays.private(tmp_path, sequence_length=16, min_speeches=10)
    assert set(public.train_clients) == {"tempest|ARIEL", "tempest|ALL"}
    assert set(private.train_clients) == set(names) - set(public.train_clients)
    for part in (public, private):
        assert len(part.train["x"]) == len(part.train_clients)
        assert set(part.test_clients) <= set(part.train_clients)
