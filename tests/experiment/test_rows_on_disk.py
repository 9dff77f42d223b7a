"""Runs whose clients keep their rows on the disk: resumed, read, refused."""

import shutil
import subprocess
import sys
from collections import namedtuple

import jax
import numpy as np
import pytest
from marks import slow, telling
from run_folders import (
    EVERY,
    SMALL,
    assert_same_run,
    die_and_resume,
    execute,
    read_json,
    run_until_death,
)

from fedjax_dp.data import fixed_size, full_participation_first, participation, poisson
from fedjax_dp.experiment.running.loading import evaluate_run, load_run
from fedjax_dp.io import plots

pytestmark = [
    pytest.mark.xdist_group("rows on the disk"),
    pytest.mark.usefixtures("shared_programs", "no_pictures"),
]
WORDS = (
    *(*SMALL, "--algorithm.name=ditto", "--privacy.unit=none", "--run.rounds=8"),
    *(f"--run.checkpoint_every={EVERY}", "--run.evaluate_every=2"),
    *("--participation.sampler=poisson", "--participation.cohort_size=2"),
    *("--execution.clients_per_chunk=1", "--execution.devices=1"),
)
DISK = (*WORDS, "--execution.placement=disk")


@pytest.fixture(scope="module")
def whole(once, shared_programs):
    def build(folder):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(plots, "save", lambda figure, path: None)
            for placement in ("disk", "host"):
                words = (*WORDS, f"--execution.placement={placement}")
                assert execute(folder / placement, *words)[0] == 0

    return once("rows on the disk", build)


def personal(folder):
    run = load_run(folder)
    return [run.params_of(i) for i in range(3)], evaluate_run(run)


def assert_same_models(*folders):
    jax.tree.map(np.testing.assert_array_equal, *(personal(folder)[0] for folder in folders))


# What Windows has not, or a system of another kind; asyncio of this system needs its own.
DEPRIVED = """
import asyncio, builtins, errno, mmap, os, sys
for name in ("pwrite", "preadv", "pread", "O_DIRECTORY", "sched_getaffinity", "sysconf"):
    delattr(os, name)
for name in ("register_at_fork", "fork", "getuid", "chown"):
    delattr(os, name)
# Where there is no `sched_getaffinity` Python has no other count.
os.process_cpu_count = os.cpu_count
del mmap.MADV_DONTNEED
os.supports_dir_fd.clear()
sys.modules["resource"] = None
real_open, real_stat = os.open, os.stat

def no_folders(path, *args, **options):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    return real_open(path, *args, **options)

class Stat:
    def __init__(self, found):
        self._found = found

    def __getattr__(self, name):
        if name in ("st_blocks", "st_blksize"):
            raise AttributeError(name)
        return getattr(self._found, name)

import shutil, tempfile
os.open = no_folders
import fedjax_dp.data.record_file as records
import types
records.os = types.SimpleNamespace(**{n: getattr(os, n) for n in dir(os) if n[0] != "_"})
records.os.stat = lambda path: Stat(real_stat(path))
import fedjax_dp.cli.bench
from fedjax_dp.__main__ import main
main()
"""


@slow
def test_a_run_needs_no_more_of_a_system_than_all_have(whole, tmp_path):
    folder = tmp_path / "run"
    once = dict(word.split("=", 1) for word in DISK)
    words = ["run", *("=".join(pair) for pair in once.items()), f"--output={folder}"]
    code = f"import sys; sys.argv[1:] = {words!r}\n{DEPRIVED}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    # These list plots, which the other run has none of.
    assert_same_run(folder, whole / "disk", besides=("privacy.json", "privacy.md"))
    assert_same_models(folder, whole / "disk")


@telling
def test_a_run_on_the_disk_is_the_run_in_memory(whole):
    rows = [(whole / name / "metrics.jsonl").read_bytes() for name in ("disk", "host")]
    assert rows[0] == rows[1]
    models, results = zip(*(personal(whole / name) for name in ("disk", "host")), strict=True)
    jax.tree.map(np.testing.assert_array_equal, *models)
    assert results[0] == results[1]
    assert not np.array_equal(*[jax.tree.leaves(models[0][i])[0] for i in (0, 1)])


@telling
@pytest.mark.parametrize("round_index", [2, 5, 7])
def test_a_run_on_the_disk_is_resumed_to_the_same_bits(whole, tmp_path, round_index):
    folder = tmp_path / "run"
    die_and_resume(folder, round_index, *DISK)
    assert_same_run(folder, whole / "disk", besides=("metrics.jsonl",))
    assert_same_models(folder, whole / "disk")


@telling
def test_damaged_rows_take_the_run_back_to_an_older_checkpoint(whole, tmp_path):
    folder = shutil.copytree(whole / "disk", tmp_path / "run")
    state = load_run(folder).state
    path, rows = folder / "clients" / "rows.bin", state.clients
    older = load_run(folder).state.clients.file.pinned[6]
    only_newest = [s for s in rows.slots if s >= 0 and s not in older]
    data = bytearray(path.read_bytes())
    data[int(only_newest[0]) * rows.file.num_bytes] ^= 1
    path.write_bytes(data)
    status, text = execute(folder, resume=True)
    assert status == 0 and "the checkpoint of round 8 is damaged (the state of client" in text
    assert_same_models(folder, whole / "disk")


@telling
def test_rows_stay_where_they_are(whole, tmp_path):
    folder = shutil.copytree(whole / "disk", tmp_path / "run")
    message = r"execution\.placement must not change .* was 'disk'.*got 'host'"
    with pytest.raises(ValueError, match=message):
        execute(folder, "--execution.placement=host", resume=True)
    assert not read_json(folder, "summary.json")["warnings"]


@pytest.mark.parametrize("num_rounds", [1, 40])
def test_room_is_for_those_who_may_be_drawn(num_rounds):
    """A bound on distinct clients, by 20,000 draws of coins; exact where a cohort has one size."""
    rng = np.random.default_rng(0)
    of_coins = participation(poisson(), 300, 2.0)
    most = of_coins.most_drawn(num_rounds)
    found = rng.binomial(300, 1 - (1 - 2 / 300) ** num_rounds, 20_000)
    assert found.max() <= most < 300
    fixed = participation(fixed_size(), 300, 2)
    assert fixed.most_drawn(num_rounds) == 2 * num_rounds
    assert of_coins.most_drawn(10_000) == fixed.most_drawn(10_000) == 300
    at_first = participation(full_participation_first(1, poisson()), 300, 2.0)
    assert at_first.most_drawn(num_rounds) == 300


def leave_free(monkeypatch, num_bytes):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, num_bytes))


@telling
def test_a_resumed_run_requires_the_space_of_a_new_one(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    run_until_death(folder, 2, *DISK)
    with monkeypatch.context() as patched:
        leave_free(patched, 0)
        with pytest.raises(ValueError, match=r"--output must be on a disk with .* bytes free, for"):
            execute(folder, resume=True)
    assert execute(folder, resume=True)[0] == 0


def test_rows_larger_than_the_disk_are_refused_before_any_work(tmp_path, monkeypatch):
    leave_free(monkeypatch, 4000)
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=r"--output must be on a disk with .* bytes free, for"):
        execute(folder, *DISK)
    assert not (folder / "config.toml").exists() and not (folder / "clients").exists()
