"""Bytes of messages, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.messages import (
    ENCODINGS,
    Choices,
    Coded,
    Form,
    Known,
    counts_of,
    received,
    tariff_of,
)


def measured(message, encoding):
    """What one message takes, and its bytes in all."""
    counts = np.array([int(c) for c in counts_of(message)])
    found = {n: int(b) for n, b in tariff_of(message).bytes_of(counts, encoding).items()}
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_has_no_mask_is_sent_as_it_is(encoding):
    message = {
        "a": jnp.zeros((2, 3)),
        "b": jnp.zeros(5, jnp.bfloat16),
        "c": jnp.zeros((), jnp.int32),
        "key": jax.random.key(0),
        "none": None,
        "number": 1.5,
    }
    expected = {"float32": 24 + 4, "bfloat16": 10, "int32": 4, "uint32": 8}
    assert measured(message, encoding) == expected
    assert counts_of(message) == ()


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("dense", {"float16": 40, "float32": 8}),
        ("bitmap", {"bool": 3, "float16": 6, "float32": 8}),
        ("index", {"int32": 12, "float16": 6, "float32": 8}),
        ("values", {"float16": 6, "float32": 8}),
        ("smallest", {"bool": 3, "float16": 6, "float32": 8}),
    ],
)
def test_a_mask_with_three_of_twenty_entries(encoding, expected):
    mask = jnp.arange(20) % 7 == 1
    message = Sparse(
        {"bias": jnp.ones(2), "w": jnp.ones(20, jnp.float16)}, {"bias": None, "w": mask}
    )
    assert measured(message, encoding) == expected


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("dense", {"float16": 40, "float32": 8}),
        *((e, {"float16": 6, "float32": 8}) for e in ("bitmap", "index", "values", "smallest")),
    ],
)
def test_a_mask_that_the_receiver_has_is_not_sent(encoding, expected):
    mask = jnp.arange(20) % 7 == 1
    values = {"bias": jnp.ones(2), "w": jnp.ones(20, jnp.float16)}
    message = Sparse(values, {"bias": None, "w": mask}, is_known=True)
    assert measured(message, encoding) == expected


def test_zeros_within_a_mask_are_sent():
    message = Sparse(jnp.zeros(8), jnp.ones(8, bool))
    assert measured(message, "values") == {"float32": 32}


def test_a_mask_of_whole_numbers_counts_once_by_type():
    message = Sparse(jnp.ones(8, jnp.int32), jnp.arange(8) < 2)
    assert measured(message, "index") == {"int32": 2 * 4 + 2 * 4}


@pytest.mark.parametrize(("bits", "expected"), [(1, 2), (8, 9), (12, 14), (20, 23)])
def test_whole_numbers_take_their_bits_rounded_up_to_a_byte(bits, expected):
    assert measured(Coded(jnp.zeros(9, jnp.uint32), bits), "dense") == {f"uint{bits}": expected}


@pytest.mark.parametrize(("sends_all", "times"), [(True, 4), (False, 1)])
def test_all_models_that_are_offered_are_sent_or_one_of_them(sends_all, times):
    models = {"w": 1 + jnp.arange(18.0).reshape(6, 3), "b": jnp.arange(6, dtype=jnp.int8)}
    choices = Choices(models, jnp.int32(4), jnp.bool_(sends_all), jnp.int32(2))
    message = choices, jnp.ones(2)
    for encoding in ENCODINGS:
        assert measured(message, encoding) == {"float32": times * 12 + 8, "int8": times}
    assert tariff_of(message).most == (6,)
    is_sent = np.isin(np.arange(6), range(4) if sends_all else [2])
    for index in range(6):
        expected = np.arange(1 + 3 * index, 4 + 3 * index) * is_sent[index]
        np.testing.assert_array_equal(choices.take(index)["w"], expected)
    offered = np.where(np.arange(6)[:, None] < 4 * sends_all, models["w"], 0)
    np.testing.assert_array_equal(choices.offered()["w"], offered)


def test_choices_hold_no_masks():
    masked = Sparse(jnp.ones(3), jnp.ones(3, bool))
    with pytest.raises(ValueError, match="values must hold no part that is masked"):
        tariff_of(Choices(masked, jnp.int32(1), jnp.bool_(True), jnp.int32(0)))


def test_what_its_receiver_has_takes_no_bytes():
    assert measured((Known(jnp.ones(5)), jnp.ones(2)), "dense") == {"float32": 8}


def test_a_message_arrives_without_what_is_not_sent():
    mask = jnp.array([True, False, True])
    sent = Sparse({"b": jnp.ones(2), "w": jnp.arange(1.0, 4)}, {"b": None, "w": mask})
    arrived = received({"known": Known(jnp.ones(2)), "ticket": sent})
    np.testing.assert_array_equal(arrived["known"], [1, 1])
    np.testing.assert_array_equal(arrived["ticket"].values["w"], [1, 0, 3])
    np.testing.assert_array_equal(arrived["ticket"].values["b"], [1, 1])


def test_an_unknown_encoding_is_refused_by_name():
    with pytest.raises(ValueError, match="encoding must be one of"):
        tariff_of(jnp.ones(3)).bytes_of(np.zeros(0), "zip")


def test_a_sparse_form_sends_what_is_not_zero_of_arrays_of_floats():
    update = {"n": jnp.arange(3), "one": jnp.float32(0), "w": jnp.array([0.0, 2.0, 0.0, 3.0])}
    assert Form().of(update) is not None and measured(Form().of(update), "values") == {
        "float32": 4 + 16,
        "int32": 12,
    }
    sparse = Form().sparse().of_type("bfloat16").of(update)
    assert measured(sparse, "values") == {"bfloat16": 4, "float32": 4, "int32": 12}
    assert measured(sparse, "bitmap")["bool"] == 1


def test_a_form_is_static():
    form = Form(is_sparse=True)
    assert jax.tree.leaves(form) == []
    assert jax.jit(lambda f: f)(form) == form


def test_many_messages_are_counted_each_by_itself():
    tariff = tariff_of(Sparse(jnp.zeros(16), jnp.ones(16, bool)))
    counts = np.array([[0, 1], [15, 16]])[..., None]
    best = tariff.bytes_of(counts, "smallest")
    assert sum(best.values()).tolist() == [[0, 6], [62, 64]]
    dense = tariff.bytes_of(counts, "dense")
    assert dense["float32"].tolist() == [[64, 64], [64, 64]]
