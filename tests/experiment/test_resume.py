"""A run that was killed or interrupted anywhere resumes to the bits of one that was not."""

import contextlib
import errno
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import time
import tomllib

import jax
import numpy as np
import pytest
import tomli_w
from marks import slow, telling
from run_folders import (
    DRAWN,
    ENTRY,
    EVERY,
    ROUNDS,
    SMALL,
    assert_same_run,
    command,
    die_and_resume,
    execute,
    metrics,
    read_json,
    run_until_death,
    saved_arrays,
)
from safetensors import SafetensorError

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly import assemble
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.loading import load_run
from fedjax_dp.experiment.running.run_folder import (
    is_in_use,
    locked,
    require_free,
    require_same_config,
)
from fedjax_dp.experiment.running.starting import restored
from fedjax_dp.io.checkpoint import Checkpoints
from fedjax_dp.io.digests import DiskFull, reporting_full_disk
from fedjax_dp.io.logbook import Logbook, read_metrics, write_json

# Most are compared with one run.
pytestmark = [
    pytest.mark.xdist_group("resume"),
    pytest.mark.usefixtures("shared_programs", "no_pictures"),
]
DISCRETE = (
    "--privacy.unit=client",
    "--algorithm.name=dp_fedavg",
    "--privacy.client.mechanism=discrete_gaussian",
    "--privacy.client.noise_multiplier=1",
)
# The process stops for good after some row of metrics, and waits there to be killed.
_STALL = """
import time
from fedjax_dp.io.logbook import Logbook, read_metrics
write = Logbook.write
def stalling(self, row):
    write(self, row)
    while row["round"] == {round}:
        time.sleep(0.05)
Logbook.write = stalling
"""
# The process leaves a mark when its rounds are compiled and begin.
_MARKING = """
import pathlib
from fedjax_dp.experiment.running import run as steps
rounds = steps._rounds
def marking(*args):
    pathlib.Path(COMPILED).touch()
    return rounds(*args)
steps._rounds = marking
"""
# The process kills itself where a whole checkpoint would take its name.
_HALF_WRITTEN = """
import os, signal, pathlib
from orbax.checkpoint._src.path import atomicity
async def killed(self, *args, **kwargs):
    if pathlib.Path(str(self.get_final())).name == "{round}":
        os.kill(os.getpid(), signal.SIGKILL)
    return await finalize(self, *args, **kwargs)
finalize = atomicity.AtomicRenameTemporaryPath.finalize
atomicity.AtomicRenameTemporaryPath.finalize = killed
"""

# The process kills itself some moments after it begins to write its second checkpoint.
_DYING = """
import os, signal, threading
from fedjax_dp.io.checkpoint import Checkpoints
save, calls = Checkpoints.save, []
def dying(self, *args):
    calls.append(args)
    if len(calls) == 2:
        threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGKILL)).start()
    save(self, *args)
    while len(calls) == 2:
        pass
Checkpoints.save = dying
"""


@contextlib.contextmanager
def answering_the_keyboard():
    """Tests that were started in the background may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for(condition, process, seconds=240):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "the run did not come so far"
        time.sleep(0.02)


def start(folder, round_index, cache, program=_STALL):
    """Starts the run in a process of its own and waits until it has logged a round."""
    words = command(
        "run",
        *DRAWN,
        "--output",
        str(folder),
        program=program.format(round=round_index) + ENTRY,
        cache=cache,
    )
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_of(folder):
    path = folder / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def assert_goes_on_as(folder, whole, **besides):
    """Resumes a run to its end, where it must be the same as another; gives what it said."""
    status, text = execute(folder, resume=True)
    assert status == 0
    assert_same_run(folder, whole, **besides)
    return text


def whole_and_resumed(tmp_path, *words):
    """The folders of a run of 4 rounds, and of the same one that died behind the third."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    words = (*words, "--run.rounds=4", "--run.checkpoint_every=2")
    assert execute(whole, *words, "--execution.clients_per_chunk=1")[0] == 0
    die_and_resume(folder, 3, *words, "--execution.clients_per_chunk=1")
    assert_same_run(folder, whole)
    return whole, folder


def reconfigure(folder, *words):
    path = folder / "config.toml"
    path.write_text(config_files.to_toml(load_config(path, words)), encoding="utf-8")


def slowly(*parameters):
    return [pytest.param(parameter, marks=pytest.mark.slow) for parameter in parameters]


@pytest.mark.slow
@pytest.mark.parametrize("rounds_done", [2, 5])
def test_a_killed_run_resumes_to_the_same_bits(
    uninterrupted, tmp_path, compilation_cache, rounds_done
):
    """Before the first checkpoint, and between two of them."""
    folder = tmp_path / "run"
    process = start(folder, rounds_done, compilation_cache)
    wait_for(lambda: lines_of(folder) >= rounds_done, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert lines_of(folder) == rounds_done
    assert not (folder / "summary.json").exists()
    if rounds_done > EVERY:
        assert saved_arrays(folder)[0] == EVERY
    assert_goes_on_as(folder, uninterrupted)


@pytest.mark.slow
def test_a_checkpoint_that_was_half_written_is_ignored(uninterrupted, tmp_path, compilation_cache):
    folder = tmp_path / "run"
    process = start(folder, 2 * EVERY, compilation_cache, _HALF_WRITTEN)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    names = {path.name for path in (folder / "checkpoint").iterdir()} - {"digests"}
    assert str(EVERY) in names and str(2 * EVERY) not in names and len(names) == 2
    assert saved_arrays(folder)[0] == EVERY
    assert_goes_on_as(folder, uninterrupted)
    names = {path.name for path in (folder / "checkpoint").iterdir()} - {"digests"}
    assert all(name.isdigit() for name in names)


@telling
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_wish_to_stop_ends_a_run_after_the_rounds_under_way(
    uninterrupted, tmp_path, monkeypatch, signum
):
    folder, write = tmp_path / "run", Logbook.write

    def pressing(self, row):
        write(self, row)
        if row["round"] == 4:
            os.kill(os.getpid(), signum)

    with monkeypatch.context() as patched, answering_the_keyboard():
        patched.setattr(Logbook, "write", pressing)
        status, text = execute(folder, *DRAWN)
    assert status == 130 and "interrupted after round 4; to resume" in text
    assert f"fedjax-dp run --resume {folder}" in " ".join(text.split())
    summary = read_json(folder, "summary.json")
    assert saved_arrays(folder)[0] == summary["rounds"] == 4
    assert summary["ended"] == "interrupted"
    assert_goes_on_as(folder, uninterrupted)


@pytest.mark.slow
def test_ctrl_c_saves_completed_rounds(uninterrupted, tmp_path, compilation_cache):
    folder = tmp_path / "run"
    stall = _STALL.replace("== {round}:", "== {round} and not os.path.exists({flag!r}):")
    flag = tmp_path / "go on"
    program = "import os\n" + stall.replace("{flag!r}", repr(str(flag)))
    process = start(folder, 4, compilation_cache, program)
    wait_for(lambda: lines_of(folder) >= 4, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    flag.touch()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert "interrupted after round 4; to resume" in output
    assert f"fedjax-dp run --resume {folder}" in " ".join(output.split())
    assert saved_arrays(folder)[0] == 4
    assert [row["round"] for row in metrics(folder)] == [1, 2, 3, 4]
    assert read_json(folder, "summary.json")["rounds"] == 4
    assert (folder / "privacy.md").exists() and (folder / "plots").exists()
    # This process has drawn pictures, and the list of files names their folder.
    assert_goes_on_as(folder, uninterrupted, besides=("privacy.json", "privacy.md"))
    names = [set(read_json(f, "privacy.json")["files"]) for f in (folder, uninterrupted)]
    assert names[0] - names[1] == {"plots"} and not names[1] - names[0]


@telling
@pytest.mark.parametrize("rounds_done", [7, *slowly(1, 3, 4, 6, 8)])
def test_a_run_that_dies_at_any_round_resumes_to_the_same_bits(
    uninterrupted, tmp_path, rounds_done
):
    folder = tmp_path / "run"
    die_and_resume(folder, rounds_done, *DRAWN)
    assert_same_run(folder, uninterrupted)


@pytest.mark.slow
def test_a_run_can_die_more_than_once(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    run_until_death(folder, 4, *DRAWN)
    run_until_death(folder, 5, resume=True)
    assert_goes_on_as(folder, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "fedadam", "local_only"])
def test_client_and_server_state_is_resumed(tmp_path, name):
    joins = ("--participation.sampler=cyclic", "--participation.cohort_size=2")
    words = (*SMALL, *joins, "--privacy.unit=none", f"--algorithm.name={name}")
    whole_and_resumed(tmp_path, *words)


@pytest.mark.slow
def test_a_run_with_a_frozen_base_is_resumed_to_the_same_bits(tmp_path):
    model = ("--model.name=mlp", "--model.options.hidden_sizes=[8]")
    words = (*DRAWN, *model, "--model.frozen=['params/Dense_0']")
    whole, folder = whole_and_resumed(tmp_path, *words)
    arrays = saved_arrays(folder)[1].values()
    assert {a.shape for a in arrays if a.ndim > 1} == {(8, 10)}
    assert read_json(folder, "summary.json")["num_parameters"] == 8 * 10 + 10
    # The base is that of the start of the run, in each of them.
    models = [assemble.assemble(load_config(f / "config.toml")).model for f in (whole, folder)]
    bases = [m.full_params(m.init(jax.random.key(0)))["params"]["Dense_0"] for m in models]
    jax.tree.map(np.testing.assert_array_equal, *bases)
    assert np.abs(np.asarray(bases[0]["kernel"])).max() > 0.01


@telling
def test_the_statement_of_a_run_declares_that_its_seed_determines_its_noise(uninterrupted):
    text = (uninterrupted / "privacy.md").read_text("utf-8")
    assert "`run.seed` in `config.toml`" in text and "publishing two of them may cancel" in text
    claims = read_json(uninterrupted, "privacy.json")["claims"]
    assert [claim["noise_root"] for claim in claims] == ["seed", "seed"]


@pytest.fixture
def finished(uninterrupted, tmp_path):
    return pathlib.Path(shutil.copytree(uninterrupted, tmp_path / "copy"))


def test_a_finished_run_stays_what_it_is(uninterrupted, finished):
    *_, saved = saved_arrays(finished)
    assert f"{ROUNDS} rounds in" in assert_goes_on_as(finished, uninterrupted)
    # The seconds of all parts of a run are added.
    now = read_json(finished, "summary.json")
    for part in ("seconds", "seconds_rounds"):
        assert now[part] > saved[part] > 0
    apart = now["seconds"] - now["seconds_rounds"], saved["seconds"] - saved["seconds_rounds"]
    assert apart[0] > apart[1] > 0, "reading and compiling"


@pytest.mark.filterwarnings("ignore:.*has changed since it was written:UserWarning")
def test_a_torn_last_line_of_metrics_is_written_again(uninterrupted, finished):
    """As a crash of the whole computer may leave it: the last lines cut off or gone."""
    shutil.rmtree(finished / "checkpoint" / str(ROUNDS))
    path = finished / "metrics.jsonl"
    path.write_text(path.read_text(encoding="utf-8")[:-25], encoding="utf-8")
    # Statements list the copy of what was damaged.
    besides = ("warnings", "privacy.md", "privacy.json")
    text = assert_goes_on_as(finished, uninterrupted, besides=besides)
    assert "metrics.jsonl has changed since it was written" in text
    assert f"digests/{ROUNDS}.json" not in text and f"round {ROUNDS} is damaged" in text


def test_a_folder_without_a_run_is_refused(tmp_path, fedjax_dp):
    status, _, said = fedjax_dp("run", "--resume", tmp_path)
    assert status == 2 and "error: --resume must name a run folder with a config.toml" in said
    assert not any(tmp_path.iterdir())


def test_a_run_that_never_reached_a_checkpoint_starts_again(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(uninterrupted / "config.toml", folder)
    assert_goes_on_as(folder, uninterrupted)


def test_another_configuration_in_the_folder_is_refused(finished):
    """And the folder is free again while the exception is there."""
    reconfigure(finished, "--run.seed=1")
    text = r"config\.toml must be as it was when the run started"
    with pytest.raises(ValueError, match=text) as refusal:
        execute(finished, resume=True)
    assert not is_in_use(finished), refusal
    assert read_json(finished, "summary.json")["rounds"] == ROUNDS


def test_other_data_than_those_of_the_run_are_refused(uninterrupted, finished):
    file = finished / "data.json"
    saved = read_json(finished, "data.json")
    saved["training"]["the number of examples"] += 1
    write_json(file, saved)
    message = r"the number of examples of the training data must be as when the run started, 1\d+"
    with pytest.raises(ValueError, match=message):
        execute(finished, resume=True)
    assert read_json(finished, "summary.json")["rounds"] == ROUNDS
    file.unlink()
    execute(finished, resume=True)
    assert metrics(finished) == metrics(uninterrupted)
    # A new file for later resumptions.
    assert read_json(finished, "data.json") == read_json(uninterrupted, "data.json")


@pytest.mark.parametrize(
    "words, key",
    [
        (DISCRETE, "privacy.client.num_deviations"),
        ((), "communication"),
        ((), "evaluation.personal"),
        (("--run.release=private",), "run.release"),
        ((), "data.client_test_share"),
    ],
)
def test_a_key_that_came_after_a_run_has_its_default_there(words, key):
    config = load_config(None, words)
    tables = tomllib.loads(config_files.to_toml(config))
    *path, last = key.split(".")
    section = functools.reduce(dict.__getitem__, path, tables)
    del section[last]
    require_same_config(config, tomli_w.dumps(tables))


@pytest.mark.parametrize("word", ["--run.seed=1", "--privacy.client.num_deviations=9"])
def test_a_key_that_was_another_is_named(word):
    config = load_config(None, (*DISCRETE, word))
    saved = config_files.to_toml(load_config(None, DISCRETE))
    key, value = word[2:].split("=")
    rule = rf"config\.toml must be as it was when the run started(?s:.*)\n{key}: \S+ and {value}\b"
    with pytest.raises(ValueError, match=rule):
        require_same_config(config, saved)
    require_same_config(config, config_files.to_toml(config))


@pytest.mark.slow
def test_another_model_in_the_folder_is_refused(finished):
    reconfigure(finished, "--model.name=mlp")
    with pytest.raises(ValueError, match=r"when the run started.*\nmodel.name: 'logistic"):
        execute(finished, resume=True)


@pytest.mark.slow
def test_a_resumed_run_may_execute_in_another_way(finished):
    reconfigure(finished, "--execution.clients_per_chunk=2")
    assert execute(finished, resume=True)[0] == 0


@telling
def test_the_noise_that_is_accounted_is_the_one_in_the_checkpoint(finished, monkeypatch):
    """Calibration may change between versions; the run continues with the noise it started with."""
    calibrated = assemble.calibrated

    def louder(*args):
        found = calibrated(*args)
        local = found.hyper.local
        local = local._replace(noise_multiplier=2 * local.noise_multiplier)
        return found.with_hyper(found.hyper._replace(local=local))

    monkeypatch.setattr(assemble, "calibrated", louder)
    experiment = assemble.assemble(load_config(finished / "config.toml"))
    state, start = restored(experiment, finished, pytest.fail)
    start.checkpoints.close()
    start.lock.release()
    claims = {c["unit"]: c for c in read_json(finished, "privacy.json")["claims"]}
    kept = claims["record"]["noise_multiplier_per_unit"]
    assert int(state.round) == ROUNDS
    np.testing.assert_array_equal(np.asarray(start.hyper.local.noise_multiplier, float), kept)
    assert np.all(np.asarray(experiment.simulation.hyper.local.noise_multiplier) > kept)
    spent = start.accounting.epsilon(experiment.dp_delta, "rdp")
    assert {unit: np.max(each) for unit, each in spent.items()} == {
        unit: claim["epsilon"] for unit, claim in claims.items()
    }


@telling
def test_ctrl_c_twice_ends_at_once(monkeypatch, tmp_path):
    def impatient(self, row):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr(Logbook, "write", impatient)
    with answering_the_keyboard():
        with pytest.raises(KeyboardInterrupt):
            execute(tmp_path / "run", *DRAWN)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert Checkpoints(tmp_path / "run" / "checkpoint").newest_intact()[0] is None


def test_signals_that_come_together_are_one(monkeypatch, tmp_path):
    def hasty(self, row):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Logbook, "write", hasty)
    status, text = execute(tmp_path / "run", *DRAWN)
    assert status == 130 and "interrupted after round 2; to resume" in text


@slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_round_that_never_ends_is_ended_by_the_second_signal(
    tmp_path, compilation_cache, devices
):
    """On one device Python is not reached; on two it is, and would wait for the round."""
    folder = tmp_path / "run"
    words = ["--training.num_steps=2e9", f"--execution.devices={devices}"]
    if devices > (os.cpu_count() or 1):
        pytest.skip("no second core")
    compiled = tmp_path / "compiled"
    endless = _MARKING.replace("COMPILED", repr(str(compiled)))
    replaced = tuple(word.partition("=")[0] for word in words)
    endless += f"import sys; kept = [a for a in sys.argv if not a.startswith({replaced})]\n"
    endless += f"sys.argv = kept + {words}\n"
    process = start(folder, 0, compilation_cache, endless)
    wait_for(compiled.exists, process)
    for _ in range(2):
        time.sleep(8)
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "once more stops at once" in output and "is kept" in output


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        pytest.param(shutil, "disk_usage", None, marks=telling),
        (Checkpoints, "save", ValueError("RESOURCE_EXHAUSTED: No space left on device")),
        (Logbook, "write", OSError(errno.ENOSPC, "No space left on device")),
    ],
    ids=["before saving", "while saving", "while logging"],
)
def test_a_full_disk_is_named_and_loses_nothing(
    uninterrupted, tmp_path, monkeypatch, owner, name, error
):
    folder, real, calls = tmp_path / "run", getattr(owner, name), []

    def filling(*args):
        calls.append(args)
        if len(calls) < 2:
            return real(*args)
        if error is None:
            return real(*args)._replace(free=1000)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, filling)
        with pytest.raises(DiskFull, match=f"the disk is full: .* --resume {folder}"):
            execute(folder, *DRAWN)
    if owner is not Logbook:
        assert saved_arrays(folder)[0] == 3
    assert_goes_on_as(folder, uninterrupted)


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(n, os.strerror(n)) for n in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        SafetensorError("Error while serializing: I/O error: No space left on device"),
    ],
)
def test_a_limit_of_space_of_any_kind_is_named(error):
    with pytest.raises(DiskFull, match="the disk is full"), reporting_full_disk():
        raise error


def test_a_full_disk_is_named_before_a_run_has_begun(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedjax_dp.experiment.running.starting.write_text", full)
    with pytest.raises(DiskFull, match="nothing was started: free some space and try again"):
        execute(tmp_path / "run", *DRAWN)
    # So that trying again is not refused.
    require_free(tmp_path / "run")


@pytest.mark.slow
def test_ten_kills_while_saving(uninterrupted, tmp_path, compilation_cache):
    """Each at another moment of the second checkpoint."""
    saved = []
    for delay in np.random.default_rng(3).uniform(0, 0.15, 10):
        folder = tmp_path / f"run-{delay:.4f}"
        process = start(folder, 0, compilation_cache, _DYING.format(delay=delay))
        process.communicate(timeout=240)
        assert process.returncode == -signal.SIGKILL
        left = Checkpoints(folder / "checkpoint", is_read_only=True)
        newest, damaged = left.newest_intact()
        saved.append(newest)
        # One that was complete but for its digests is not trusted, with a word.
        assert_goes_on_as(folder, uninterrupted, besides=("warnings",))
        warned = read_json(folder, "summary.json")["warnings"]
        assert len(warned) == len(damaged) and all("is damaged" in text for text in warned)
    print(f"newest intact checkpoint after each kill: {saved}")
    assert set(saved) <= {3, 6} and 3 in saved


@pytest.fixture
def interrupted(uninterrupted, tmp_path):
    """A run that died in round 7, with checkpoints of rounds 3 and 6."""
    folder = tmp_path / "run"
    run_until_death(folder, 7, *DRAWN)
    return folder


def harmed(folder, rng):
    """Flips a bit of some file, cuts it short or deletes it; gives the file and what was done."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    path = files[rng.integers(len(files))]
    how = ["flip", "truncate", "delete"][rng.integers(3)]
    data = bytearray(path.read_bytes())
    if how == "delete" or not data:
        path.unlink()
    elif how == "truncate":
        path.write_bytes(bytes(data[: rng.integers(len(data))]))
    else:
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(data))
    return path.relative_to(folder), how


@telling
@pytest.mark.parametrize("seed", [0, *slowly(*range(1, 30))])
def test_a_harmed_folder_resumes_to_the_same_bits_or_is_refused(uninterrupted, interrupted, seed):
    rng = np.random.default_rng(seed)
    path, how = harmed(interrupted, rng)
    try:
        status, text = execute(interrupted, resume=True)
    except (ValueError, OSError) as error:
        # Beside checkpoints only these are read; an error says which is wrong.
        read = ("config.toml", "data.json", "digests.json", "environment.json")
        assert path.name in read, (path, how, error)
        assert path.name == "config.toml" or (how != "delete" and path.name in str(error))
        return
    assert status == 0
    was_newest = path.parts[:2] == ("checkpoint", "6") or path.name == "6.json"
    assert ("the checkpoint of round 6 is damaged" in text) == was_newest, (path, how, text)
    besides = ("metrics.jsonl", "warnings", "privacy.md", "privacy.json")
    assert_same_run(interrupted, uninterrupted, besides=besides)
    rounds = [row["round"] for row in read_metrics(interrupted)]
    lost = set(range(1, ROUNDS + 1)) - set(rounds)
    # A line that was damaged is lost alone.
    assert sorted(set(rounds)) == rounds and (not lost or path.name == "metrics.jsonl")
    assert how != "flip" or len(lost) <= 2


@telling
def test_where_no_checkpoint_is_whole_a_run_starts_from_its_seed(uninterrupted, interrupted):
    shutil.rmtree(interrupted / "checkpoint" / "digests")
    text = assert_goes_on_as(interrupted, uninterrupted, besides=("warnings",))
    for rounds in (3, 6):
        assert f"the checkpoint of round {rounds} is damaged ({rounds}.json is missing)" in text
    warned = read_json(interrupted, "summary.json")["warnings"]
    assert len(warned) == 2 and all("is damaged" in text for text in warned)


@telling
def test_a_folder_is_written_by_one_process_at_a_time(finished):
    lock = locked(finished)
    try:
        with pytest.raises(ValueError, match="already in use by another process"):
            execute(finished, resume=True)
        assert not load_run(finished).state.round < ROUNDS, "reading needs no lock"
    finally:
        lock.release()
    assert execute(finished, resume=True)[0] == 0


def test_a_folder_that_is_being_started_is_not_started_twice(tmp_path):
    lock = locked(tmp_path / "run")
    try:
        with pytest.raises(ValueError, match="already in use by another process"):
            execute(tmp_path / "run", *DRAWN)
    finally:
        lock.release()
    assert not (tmp_path / "run" / "config.toml").exists()


@telling
def test_a_run_may_go_on_for_longer_than_was_planned(tmp_path):
    fixed = ("--privacy.record.noise_multiplier=1", "--privacy.client.noise_multiplier=1")
    free = ("--privacy.record.epsilon=none", "--privacy.client.epsilon=none")
    words = (*DRAWN, *fixed, *free)
    assert execute(tmp_path / "whole", *words)[0] == 0
    assert execute(tmp_path / "short", *words, "--run.rounds=5")[0] == 0
    assert execute(tmp_path / "short", f"--run.rounds={ROUNDS}", resume=True)[0] == 0
    # The figures of round 5 were computed when it was the last one.
    besides = ("metrics.jsonl", "test_accuracy_last_ten")
    assert_same_run(tmp_path / "short", tmp_path / "whole", besides=besides)


@telling
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--run.rounds=9", "run.rounds must be 8: the noise was calibrated for that many"),
        ("--run.rounds=7", "config.toml must be as it was when the run started"),
        ("--run.seed=1", "config.toml must be as it was when the run started"),
        ("--training.learning_rate=1", "config.toml must be as it was when the run started"),
    ],
)
def test_a_resumed_run_cannot_change_its_configuration(finished, word, message):
    before = (finished / "config.toml").read_bytes()
    with pytest.raises(ValueError, match=message):
        execute(finished, word, resume=True)
    assert (finished / "config.toml").read_bytes() == before
