"""Secret runs: a root that only the checkpoint holds, and what the statement says of it."""

import json
import shutil
import stat

import jax
import numpy as np
import pytest
from marks import telling
from run_folders import (
    DRAWN,
    SMALL,
    assemble_once,
    assert_same_run,
    execute,
    read_json,
    run_until_death,
    saved_arrays,
)

from fedjax_dp.core import keys
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running import run_folder as saved
from fedjax_dp.experiment.running import starting
from fedjax_dp.experiment.running.starting import first_state, new_root

pytestmark = [
    # With those of `test_resume`, which run the same program.
    pytest.mark.xdist_group("resume"),
    pytest.mark.usefixtures("shared_programs", "no_pictures"),
]
# What may be published is written beside, and tested in `test_release`.
SECRET = (*DRAWN, "--run.secret=true", "--run.release=private")
ROOT = bytes.fromhex("9e3779b97f4a7c15")


@pytest.fixture
def known_root(monkeypatch):
    """The operating system gives this root once, and must not be asked again."""
    left = [ROOT]
    monkeypatch.setattr(keys.secrets, "token_bytes", lambda size: left.pop()[:size])


@pytest.fixture(scope="module")
def uninterrupted(secret_run):
    return secret_run(ROOT, SECRET)


@pytest.fixture
def finished(uninterrupted, tmp_path):
    return shutil.copytree(uninterrupted, tmp_path / "copy")


def root_file(folder):
    return folder / "checkpoint" / "root.key"


def test_the_root_is_in_the_checkpoint_readable_by_its_owner_alone(uninterrupted):
    words = np.frombuffer(ROOT, np.uint32)
    assert json.loads(root_file(uninterrupted).read_text("utf-8"))["root"] == words.tolist()
    assert stat.S_IMODE(root_file(uninterrupted).stat().st_mode) == 0o600
    assert stat.S_IMODE(root_file(uninterrupted).parent.stat().st_mode) == 0o700
    shapes = [ROOT, ROOT[::-1], ROOT.hex().encode(), words.byteswap().tobytes()]
    for word in words.tolist():
        shapes += [str(word).encode(), f"{word:x}".encode()]
    others = [p for p in uninterrupted.rglob("*") if p.is_file() and p != root_file(uninterrupted)]
    assert {"config.toml", "metrics.jsonl", "summary.json", "privacy.json"} <= {
        path.name for path in others
    }
    for path in others:
        text = path.read_bytes().lower()
        assert not any(shape.lower() in text for shape in shapes), path


@pytest.mark.parametrize("is_first", [True, False])
def test_of_several_processes_the_first_alone_writes_the_root(is_first, tmp_path, monkeypatch):
    monkeypatch.setattr(starting, "is_first_process", lambda: is_first)
    experiment = assemble_once(load_config(None, SECRET))
    starting.fresh(experiment, tmp_path / "run")[1].checkpoints.close()
    assert root_file(tmp_path / "run").exists() == is_first


def test_the_statement_names_the_place_of_the_root_and_what_must_stay_hidden(uninterrupted):
    text = (uninterrupted / "privacy.md").read_text("utf-8")
    for claim in read_json(uninterrupted, "privacy.json")["claims"]:
        assert claim["relation"] == "zero_out" and claim["noise_root"] == "secret"
        assert claim["noise_root_file"] == "checkpoint/root.key"
        assert claim["must_stay_hidden"] == ["which units were drawn", "how many units were drawn"]
    for words in ("destroyed or kept secret", "checkpoint/root.key", "replaced by zeros", "n/N"):
        assert words in text
    assert "run.seed" not in text


@telling
@pytest.mark.parametrize("rounds_done", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_secret_run_resumes_to_the_same_bits(
    uninterrupted, tmp_path, known_root, rounds_done
):
    """From round 0 on: the root is on the disk before the first round, and a checkpoint is too."""
    folder = tmp_path / "run"
    run_until_death(folder, rounds_done, *SECRET)
    assert saved_arrays(folder)[0] == rounds_done // 3 * 3
    other = load_config(folder / "config.toml", ["--training.learning_rate=1"])
    before = (folder / "config.toml").read_text("utf-8")
    (folder / "config.toml").write_text(config_files.to_toml(other), encoding="utf-8")
    with pytest.raises(ValueError, match="must be as it was when the run started"):
        execute(folder, resume=True)
    (folder / "config.toml").write_text(before, encoding="utf-8")
    if rounds_done % 3:
        with pytest.raises(ValueError, match="clients_per_chunk was 1 and is 2"):
            execute(folder, "--execution.clients_per_chunk=2", resume=True)
    assert execute(folder, resume=True)[0] == 0
    assert_same_run(folder, uninterrupted)


@pytest.mark.parametrize("lost", ["root", "checkpoint"])
def test_a_secret_run_that_lost_its_root_is_refused(finished, lost):
    if lost == "root":
        root_file(finished).unlink()
    else:
        shutil.rmtree(finished / "checkpoint")
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"root\.key must exist .* new run in another folder"):
        execute(finished, resume=True)
    assert (finished / "metrics.jsonl").read_bytes() == before
    assert not root_file(finished).exists()


def test_a_run_does_not_become_secret_nor_cease_to_be(finished, tmp_path):
    def resumed(secret):
        path = finished / "config.toml"
        config = load_config(path, [f"--run.secret={secret}"])
        path.write_text(config_files.to_toml(config), encoding="utf-8")
        # Without a checkpoint there is no other configuration to compare with.
        for step in (finished / "checkpoint").iterdir():
            if step.is_dir():
                shutil.rmtree(step)
        execute(finished, resume=True)

    with pytest.raises(ValueError, match=r"run\.secret must be true as when the run started"):
        resumed("false")
    root_file(finished).unlink()
    with pytest.raises(ValueError, match=r"root\.key must exist"):
        resumed("true")


def test_a_second_root_never_takes_the_place_of_the_first(finished):
    before = root_file(finished).read_bytes()
    with pytest.raises(ValueError, match="must be a new or an empty folder"):
        execute(finished, *SECRET)
    assert root_file(finished).read_bytes() == before


def noise_of(multiplier, *words):
    """The noise alone that one round of clients who learn nothing adds, by one program."""
    words = (
        *(*SMALL, "--run.rounds=1", "--privacy.unit=client", "--algorithm.name=dp_fedavg"),
        *("--training.learning_rate=0", "--privacy.client.epsilon=none"),
        *("--privacy.client.noise_multiplier=1", "--execution.clients_per_chunk=1"),
        *("--execution.devices=1", *words),
    )
    experiment = assemble_once(load_config(None, words))
    root = new_root(experiment.config.run)
    state = first_state(experiment)
    hyper = experiment.simulation.hyper
    louder = {**hyper.aggregator, "noise_multiplier": multiplier}
    before = [np.ravel(x) for x in jax.tree.leaves(jax.device_get(state.server.params))]
    hyper = hyper._replace(aggregator=louder)
    state, *_ = experiment.simulation.run(state, root, 1, hyper)
    after = [np.ravel(x) for x in jax.tree.leaves(jax.device_get(state.server.params))]
    return np.concatenate(after) - np.concatenate(before), experiment.population


@telling
def test_runs_of_one_seed_share_their_noise_and_secret_runs_do_not():
    """Publishing two of them cancels it; the seed still gives data and initial model."""
    (one, mine), (two, _) = (noise_of(z) for z in (1, 2))
    assert np.abs(one).max() > 0.1
    np.testing.assert_allclose(two, 2 * one, rtol=1e-5, atol=1e-6)
    (first, _), (second, other) = (noise_of(z, "--run.secret=true") for z in (1, 2))
    # Independent normals: the correlation of 650 pairs is below 0.2 but for one time in 10^6.
    for a, b in ((first, second), (first, one)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.2
    assert first.std() == pytest.approx(one.std(), rel=0.2)
    for name, array in mine.train.examples.items():
        np.testing.assert_array_equal(array, other.train.examples[name])


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OTHER_NUMBERS = {
    "jax_default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "jax_threefry_partitionable": lambda: jax.threefry_partitionable(False),
}


@pytest.mark.parametrize("name", OTHER_NUMBERS)
def test_a_run_does_not_go_on_with_other_random_numbers(finished, name):
    before = contents(finished)
    with OTHER_NUMBERS[name](), pytest.raises(ValueError, match=f"of JAX must be .*{name} was"):
        execute(finished, resume=True)
    assert contents(finished) == before


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_private_runs_refuse_a_generator_without_a_stated_quality(impl, tmp_path):
    experiment = assemble_once(load_config(None, SECRET))
    refused = pytest.raises(ValueError, match=f"key must be of threefry2x32 .*{impl}")
    with jax.default_prng_impl(impl), refused:
        starting.fresh(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def resumed_elsewhere(folder, words, rounds_saved):
    """Gives the warnings of a run that resumes with another release of JAX."""
    now, warned = saved.environment(), []
    libraries = {**now["libraries"], "jax": "9.9.9"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saved, "environment", lambda: {**now, "libraries": libraries})
        experiment = assemble_once(load_config(None, words))
        saved.require_same_rounding(experiment, folder, rounds_saved, warned.append)
    return warned


def test_secret_noise_is_not_repeated_with_other_rounding(finished):
    rule = r"\[execution\] must be as they were: rounds 7 to 8.*jax was .* and is 9\.9\.9"
    with pytest.raises(ValueError, match=rule):
        resumed_elsewhere(finished, SECRET, 6)
    # Where no round is repeated, or the seed is public, the bits alone are others.
    for words, rounds_saved in ((SECRET, 8), (DRAWN, 6)):
        (warning,) = resumed_elsewhere(finished, words, rounds_saved)
        assert "not bit for bit" in warning and "and is 9.9.9" in warning
    for name in ("environment.json", "digests.json"):
        (finished / name).unlink()
    with pytest.raises(ValueError, match=r"rounds 7 to 8.*environment\.json is missing"):
        saved.require_same_rounding(
            assemble_once(load_config(None, SECRET)), finished, 6, list().append
        )
