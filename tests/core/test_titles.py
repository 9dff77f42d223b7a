"""Names of configurations as people read them."""

import pytest

from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.core import titles
from fedjax_dp.core.titles import title_of, title_of_key
from fedjax_dp.data import datasets


def test_every_method_and_data_set_has_a_name_that_is_no_key():
    names = {*ALGORITHMS, *datasets.available()}
    assert not any("_" in title_of(name) for name in names)
    of_parts = {"epsilon", "dp_delta", "lus", "blur"}
    assert set(titles._SPELLINGS) - of_parts <= names


@pytest.mark.parametrize(
    ("key", "others", "title"),
    [
        ("training.learning_rate", ("algorithm.name",), "learning rate"),
        ("privacy.record.clip_norm", ("privacy.client.clip_norm",), "record clip norm"),
        ("privacy.record.epsilon", (), "ε"),
        ("rate", ("rate",), "rate"),
    ],
)
def test_a_key_is_as_short_as_others_allow(key, others, title):
    assert title_of_key(key, (key, *others)) == title
    assert title_of("my.module:own_method") == "own method"
