"""Checkpoints: whole or not there, the newest two, and of this simulation only."""

import os
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from small_problem import make_data, make_model

from fedjax_dp.algorithms import Hyper, feddyn
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import participation, poisson
from fedjax_dp.engine import simulation
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.io import Checkpoints


def state_of(rounds, *, shape=(2, 3), dtype=jnp.float32, more=None):
    """A state with the numbers of a round."""
    numbers = jnp.arange(np.prod(shape)).reshape(shape) + rounds
    return SimulationState(
        server={"weights": numbers.astype(dtype), **(more or {})},
        aggregator=(jnp.float32(0.25), jnp.uint32(7)),
        clients=None,
        round=jnp.int32(rounds),
    )


HYPER = Hyper(LocalConfig(0.1, 2, 3.0), {"mu": 0.5}, {"clip_norm": np.arange(3.0)})


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and isinstance(a, np.ndarray)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_])
def test_what_is_saved_is_restored(tmp_path, dtype):
    saved, extra = state_of(4, dtype=dtype), {"text": "ε", "list": [1, None, 2.5]}
    Checkpoints(tmp_path).save(saved, HYPER, extra)
    restored, hyper, beside = Checkpoints(tmp_path).restore(state_of(0, dtype=dtype), HYPER)
    assert_equal(restored, saved)
    assert_equal(hyper, typed(HYPER))
    assert beside == extra


def test_other_random_numbers_than_those_that_were_saved_are_refused(tmp_path):
    Checkpoints(tmp_path).save(state_of(1), HYPER, {})
    for other in (jax.default_prng_impl("rbg"), jax.threefry_partitionable(False)):
        with other, pytest.raises(ValueError, match="random numbers of JAX must be as when"):
            Checkpoints(tmp_path).restore(state_of(0), HYPER)
        # What draws nothing may read it.
        with other:
            Checkpoints(tmp_path, is_read_only=True).restore(state_of(0), HYPER)


def test_every_bit_of_a_float_survives(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)
    odd = np.array([0x7FC00001, 0xFF800000, 0x00000001, 0x80000000], np.uint32)
    numbers = np.concatenate([bits, odd]).view(np.float32)
    saved = state_of(1, more={"odd": jnp.asarray(numbers)})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(saved, HYPER, {})
    restored, *_ = checkpoints.restore(saved, HYPER)
    assert np.asarray(restored.server["odd"]).tobytes() == numbers.tobytes()


def test_a_root_is_for_its_owner_alone_and_never_replaced(tmp_path):
    folder = tmp_path / "secret"
    checkpoints = Checkpoints(folder, is_secret=True)
    assert checkpoints.root() is None
    root = np.array([0xFFFFFFFF, 1], np.uint32)
    checkpoints.write_root(root)
    checkpoints.save(state_of(3), HYPER, {})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "root.key").stat().st_mode) == 0o600
    again = Checkpoints(folder, is_secret=True)
    np.testing.assert_array_equal(again.root(), root)
    assert again.root().dtype == np.uint32 and again.newest_intact()[0] == 3
    with pytest.raises(ValueError, match=r"root\.key must not exist when a run starts") as error:
        again.write_root(root + 1)
    assert str(0xFFFFFFFF) not in str(error.value)
    np.testing.assert_array_equal(again.root(), root)


def kept(folder):
    """What lies in a folder of checkpoints, beside the folder of their digests."""
    return {path.name for path in folder.iterdir()} - {"digests"}


def test_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "two")
    for rounds in (1, 5, 9, 20):
        checkpoints.save(state_of(rounds), HYPER, {"rounds": rounds})
        assert checkpoints.newest_intact()[0] == rounds
    assert sorted(kept(tmp_path / "two")) == ["20", "9"]
    assert kept(tmp_path / "two" / "digests") == {"9.json", "20.json"}
    restored, _, extra = checkpoints.restore(state_of(0), HYPER)
    assert_equal(restored, state_of(20))
    assert extra == {"rounds": 20}
    three = Checkpoints(tmp_path / "three", keep=3)
    for rounds in range(5):
        three.save(state_of(rounds), HYPER, {})
    assert kept(tmp_path / "three") == {"2", "3", "4"}


def test_a_round_that_is_there_is_not_rewritten(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(3), HYPER, {"first": True})
    checkpoints.save(state_of(3), HYPER, {"first": False})
    assert checkpoints.restore(state_of(0), HYPER)[2] == {"first": True}


@pytest.mark.parametrize("keep", [0, -1, 1.5])
def test_at_least_one_is_kept(tmp_path, keep):
    with pytest.raises(ValueError, match="keep must be an integer of at least 1"):
        Checkpoints(tmp_path, keep=keep)


def test_there_must_be_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_intact()[0] is None
    with pytest.raises(ValueError, match="checkpoint must exist"):
        checkpoints.restore(state_of(0), HYPER)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"shape": (3, 2)}, r"must be float32\[3, 2\] as in this simulation, got 'float32\[2, 3\]"),
        ({"dtype": jnp.int32}, r"must be int32\[2, 3\] as in this simulation"),
        ({"more": {"bias": jnp.zeros(3)}}, "hold 5 arrays as this simulation's state does, got 4"),
    ],
)
def test_another_simulation_is_refused(tmp_path, like, message):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(3), HYPER, {})
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(state_of(0, **like), HYPER)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        (HYPER._replace(algorithm={}), "hold 4 arrays as this simulation's hyper does, got 5"),
        (
            HYPER._replace(algorithm={"mu": np.ones(2)}),
            r"checkpoint hyper algorithm/mu must be float32\[2\] as in this simulation",
        ),
    ],
)
def test_numbers_of_another_simulation_are_refused(tmp_path, hyper, message):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(3), HYPER, {})
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(state_of(0), hyper)


@telling
def test_a_run_resumes_with_its_state_and_its_numbers(tmp_path):
    """Resumed from disk, bit for bit; with the numbers that it began with it would go elsewhere."""
    model, data = make_model(), make_data()
    trainer = local_trainer(model, LocalConfig(0.2, 3))
    algorithm = feddyn(model, trainer, num_clients=data.num_clients)
    sim = simulation(algorithm, data, participation(poisson(), data.num_clients, 3))
    key = jax.random.key(5)
    hyper = sim.hyper._replace(algorithm={"alpha": 0.7})
    whole, *_ = sim.run(sim.init(key), key, 5, hyper)
    half, *_ = sim.run(sim.init(key), key, 2, hyper)
    Checkpoints(tmp_path).save(sim.portable(half), hyper, {})
    like = sim.portable(sim.init(key))
    state, numbers, _ = Checkpoints(tmp_path).restore(like, sim.hyper)
    resumed, *_ = sim.run(state, key, 3, numbers)
    assert_equal(sim.portable(resumed), sim.portable(whole))
    other, *_ = sim.run(state, key, 3)
    assert not np.array_equal(other.server.params["w"], whole.server.params["w"])
    assert sim.num_traces() == 1


def test_a_checkpoint_that_was_not_finished_does_not_count(tmp_path, monkeypatch):
    """The write fails where the whole folder would take its name."""
    from orbax.checkpoint._src.path import atomicity

    class PowerCut(BaseException):
        pass

    def fails(*_args, **_kwargs):
        raise PowerCut

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(1), HYPER, {"rounds": 1})
    with monkeypatch.context() as patched:
        patched.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", fails)
        with pytest.raises(PowerCut):
            checkpoints.save(state_of(2), HYPER, {"rounds": 2})
    left = kept(tmp_path)
    assert "1" in left and "2" not in left and len(left) == 2
    again = Checkpoints(tmp_path)
    assert again.newest_intact()[0] == 1
    assert_equal(again.restore(state_of(0), HYPER)[0], state_of(1))
    again.save(state_of(2), HYPER, {"rounds": 2})
    assert_equal(Checkpoints(tmp_path).restore(state_of(0), HYPER)[0], state_of(2))
    assert kept(tmp_path) == {"1", "2"}


def flip(path, place=None):
    """Flips one bit of a file, in its middle if no place is given."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(bytes(data))


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)


@pytest.mark.parametrize(
    "harm", ["flip", *(pytest.param(h, marks=telling) for h in ("truncate", "delete", "add"))]
)
def test_whatever_is_harmed_in_the_newest_the_one_before_is_taken(tmp_path, harm):
    origin = tmp_path / "whole"
    checkpoints = Checkpoints(origin)
    for rounds in (1, 2):
        checkpoints.save(state_of(rounds), HYPER, {"rounds": rounds})
    checkpoints.close()
    names = [path.relative_to(origin) for path in files_of(origin / "2")]
    assert len(names) > 3
    for i, name in enumerate(names):
        folder = tmp_path / f"{harm}{i}"
        shutil.copytree(origin, folder)
        if harm == "flip":
            flip(folder / name)
        elif harm == "truncate":
            (folder / name).write_bytes((folder / name).read_bytes()[:-1])
        elif harm == "delete":
            (folder / name).unlink()
        else:
            (folder / name).with_name("stranger").write_text("")
        found = Checkpoints(folder)
        step, damaged = found.newest_intact()
        assert step == 1 and list(damaged) == [2]
        what = "stranger" if harm == "add" else name.name
        assert what in damaged[2]
        if harm == "flip" and i:
            found.close()
            continue
        state, _, extra = found.restore(state_of(0), HYPER)
        assert_equal(state, state_of(1))
        assert extra == {"rounds": 1}
        found.set_aside(damaged)
        found.save(state_of(2), HYPER, {"rounds": 2})
        assert found.newest_intact() == (2, {})
        found.close()


@pytest.mark.parametrize("harm", [lambda p: p.unlink(), flip, lambda p: p.write_text("[]")])
def test_a_checkpoint_whose_digests_are_harmed_is_not_trusted(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path)
    for rounds in (1, 2):
        checkpoints.save(state_of(rounds), HYPER, {})
    harm(tmp_path / "digests" / "2.json")
    step, damaged = checkpoints.newest_intact()
    assert step == 1 and list(damaged) == [2]


@pytest.mark.parametrize("place", range(0, 120, 7))
def test_a_root_with_a_flipped_bit_is_refused(tmp_path, place):
    checkpoints = Checkpoints(tmp_path, is_secret=True)
    checkpoints.write_root(np.array([0xFFFFFFFF, 1], np.uint32))
    path = tmp_path / "root.key"
    before, root = path.read_bytes(), checkpoints.root()
    if place < len(before):
        flip(path, place)
        with pytest.raises(ValueError, match=r"root\.key must be unchanged"):
            checkpoints.root()
        path.write_bytes(before)
    np.testing.assert_array_equal(checkpoints.root(), root)


def test_arrays_that_hold_nothing_are_saved_and_come_back(tmp_path):
    state = state_of(3, more={"empty": jnp.zeros((0, 3)), "none": jnp.zeros(0, jnp.int32)})
    Checkpoints(tmp_path).save(state, HYPER, {})
    like = state_of(0, more={"empty": jnp.zeros((0, 3)), "none": jnp.zeros(0, jnp.int32)})
    assert_equal(Checkpoints(tmp_path).restore(like, HYPER)[0], state)


def test_reading_alone_touches_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(3), HYPER, {})
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    reader = Checkpoints(tmp_path, is_read_only=True)
    assert_equal(reader.restore(state_of(0), HYPER)[0], state_of(3))
    reader.close()
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("name", ["[0.1, 0.2]", "a*b?", "100%", "#x", "{a}", "a b\n"])
def test_a_path_is_no_pattern(tmp_path, name):
    """One of these, with brackets, is what a sweep over lists makes."""
    saved = state_of(4)
    Checkpoints(tmp_path / name).save(saved, HYPER, {})
    restored, *_ = Checkpoints(tmp_path / name, is_read_only=True).restore(saved, HYPER)
    assert_equal(restored, saved)


@pytest.mark.parametrize("text", ["[]", '{"item_handlers": 3}', '{"metrics": 3}', "another file's"])
def test_facts_that_orbax_cannot_read_are_damage_as_any_other(tmp_path, text):
    """Orbax reads them before digests can be compared."""
    for rounds in (1, 2):
        Checkpoints(tmp_path).save(state_of(rounds), HYPER, {})
    facts = tmp_path / "2" / "_CHECKPOINT_METADATA"
    if text.startswith("another"):
        text = (tmp_path / "2" / "state" / "_METADATA").read_text()
    facts.write_text(text)
    for is_read_only in (True, False):
        found = Checkpoints(tmp_path, is_read_only=is_read_only)
        step, damaged = found.newest_intact()
        assert (step, damaged) == (1, {2: "_CHECKPOINT_METADATA has changed"})
        assert_equal(found.restore(state_of(0), HYPER)[0], state_of(1))
    found.set_aside(damaged)
    found.save(state_of(2), HYPER, {})
    assert found.newest_intact() == (2, {}) == Checkpoints(tmp_path).newest_intact()


@pytest.mark.skipif(os.sep == "\\", reason="these are other names there")
@pytest.mark.parametrize("name", ["a\\b", "gs:", os.fsdecode(b"\xff"), "x" * 256])
def test_a_path_that_checkpoints_cannot_have_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"directory must (have no backslash|be a path that can)"):
        Checkpoints(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_not_read_back_as_it_was_written_does_not_count(tmp_path, monkeypatch):
    checkpoints, read = Checkpoints(tmp_path), Checkpoints._saved
    checkpoints.save(state_of(1), HYPER, {})

    def other(self, step, **parts):
        found = read(self, step, **parts)
        for name in found.get("state", {}):
            found["state"][name] = np.asarray(found["state"][name]) + 1
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "_saved", other)
        with pytest.raises(OSError, match="2 must be read as it was written"):
            checkpoints.save(state_of(2), HYPER, {})
    assert Checkpoints(tmp_path).newest_intact() == (1, {2: "2.json is missing"})
