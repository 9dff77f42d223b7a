"""Errors on keys and values that have moved name those that say the same now."""

import re

import pytest

from fedjax_dp.experiment.reading.config_files import all_keys, load_config
from fedjax_dp.experiment.schema import moved

KEYS = [(key, "3", now) for key, now in moved._KEYS.items()]
VALUES = [(key, old, now) for key, each in moved._VALUES.items() for old, now in each.items()]
LISTS = [(key, "[1, 0.5]", f"schedules.{key} =") for key in sorted(moved._LISTS)]


@pytest.mark.parametrize(("key", "value", "now"), KEYS + VALUES + LISTS)
def test_an_old_word_is_refused_with_the_new_one(key, value, now):
    words = ["--algorithm.name=splitting", "--privacy.unit=none"] * key.startswith("algorithm.opt")
    with pytest.raises(ValueError, match=re.escape(key)) as refused:
        load_config(None, [*words, f"--{key}={value}"])
    said = str(refused.value)
    assert f"; use {now}" in said and "did you mean" not in said


def test_what_is_named_exists():
    known = all_keys()
    for now in (now for _, _, now in KEYS + VALUES):
        for key, _, value in re.findall(r"([a-z_]+\.[a-z_.]+)( = \"(\w+)\")?", now):
            if key.startswith("schedules."):
                curve = re.search(r'curve = "(\w+)"', now)[1]
                options = ["--algorithm.name=splitting", "--privacy.unit=none"]
                load_config(None, [*options, f"--{key}={curve}"])
            elif value:
                words = {"privacy.unit": "client", "algorithm.name": "fedavg", key: value}
                load_config(None, [f"--{name}={word}" for name, word in words.items()])
            else:
                assert key in known, key
