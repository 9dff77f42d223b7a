"""Files with digests in them, which name damage that their formats do not detect."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dp.core import files
from fedjax_dp.experiment.assembly.own_data import Registered
from fedjax_dp.io.params import read_params, write_params


def flipped(content, count):
    """The content with one bit flipped, at several places."""
    for place in np.linspace(0, len(content) - 1, count).astype(int):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        yield bytes(changed)


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_no_flip_of_parameters_is_silent(tmp_path, form):
    params = {"a": np.arange(6.0, dtype=np.float32), "b": jnp.ones((2, 2), jnp.int32)}
    path = tmp_path / f"p.{form}"
    write_params(path, params, form)
    whole, content = read_params(path), path.read_bytes()
    named = 0
    for changed in itertools.chain(flipped(content, 60), [content[:-3], b""]):
        path.write_bytes(changed)
        try:
            found = read_params(path)
        except ValueError as error:
            named += str(path) in str(error)
            continue
        # In what the format does not read, such as times of an archive.
        assert found.keys() == whole.keys()
        for name, array in found.items():
            np.testing.assert_array_equal(array, whole[name])
    assert named > 20
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_equal_parameters_are_equal_files_and_what_is_said_of_them_is_sealed(tmp_path, form):
    about = {"model": "x", "inputs": {"age": [0.1, 1e-30]}}
    for number in range(8):
        write_params(tmp_path / f"{number}.{form}", {"a": np.ones(3)}, about=about)
    (content,) = {path.read_bytes() for path in tmp_path.iterdir()}
    assert read_params(tmp_path / f"0.{form}").keys() == {"a"}
    changed = tmp_path / f"changed.{form}"
    # Text of an archive of NumPy has four bytes for each character.
    name = "age" if form == "safetensors" else "age".encode("utf-32-le").decode()
    assert content.count(name.encode()) == 1
    changed.write_bytes(content.replace(name.encode(), name.replace("g", "c").encode()))
    with pytest.raises(ValueError, match="be an intact"):
        read_params(changed)


def test_parameters_of_16_bits_have_a_digest_too(tmp_path):
    path = tmp_path / "p.safetensors"
    write_params(path, {"a": jnp.ones(3, jnp.bfloat16), "b": np.arange(3)})
    assert read_params(path)["a"].dtype == jnp.bfloat16


def test_a_node_s_states_are_those_of_their_file(tmp_path):
    states = pytest.importorskip("fedjax_dp.flower.ledger")
    kept = states.StatesOnDisk(tmp_path, "run")
    for client in (0, 1):
        kept.write(client, 3, {"x": np.full(4, client, np.float32)}, 3)
    np.testing.assert_array_equal(kept.read(1, 3)["x"], 1)
    one, other = sorted(tmp_path.iterdir())
    mine, theirs = one.read_bytes(), other.read_bytes()
    # A state of another client is whole too.
    for content in (theirs, mine[:-1], b"", mine[:-2] + b"\1\0"):
        one.write_bytes(content)
        with pytest.raises(ValueError, match="must be as it was written") as error:
            kept.read(0, 3)
        assert one.name in str(error.value) and one.name not in error.value.public
    for content in flipped(mine, 40):
        one.write_bytes(content)
        try:
            np.testing.assert_array_equal(kept.read(0, 3)["x"], 0)
        except ValueError as error:
            assert one.name in str(error)
    one.write_bytes(mine)
    np.testing.assert_array_equal(kept.read(0, 3)["x"], 0)


def test_what_a_server_has_of_nodes_is_as_it_was_written(tmp_path):
    file = tmp_path / "registered.json"
    facts = Registered({"task": "classification"}, [3, 4], [1])
    facts.write(file)
    assert Registered.read(file) == facts
    content = file.read_bytes()
    for changed in (*flipped(content, 30), content[:9], b""):
        file.write_bytes(changed)
        try:
            found = Registered.read(file)
        except (ValueError, TypeError) as error:
            assert "registered.json" in str(error)
        else:
            assert found == facts
    # A file of an earlier version.
    file.write_text(json.dumps(facts._asdict()))
    assert Registered.read(file) == facts


def test_an_object_is_read_as_it_was_written():
    content = {"b": [1, 0.1, None], "a": {"x": "ε"}}
    assert files.without_digest(files.with_digest(content), "f") == content
    assert files.without_digest(content, "f") == content
    for changed in ({**files.with_digest(content), "b": [1, 0.2, None]}, [1]):
        with pytest.raises(ValueError, match=r"^f must"):
            files.without_digest(changed, "f")
