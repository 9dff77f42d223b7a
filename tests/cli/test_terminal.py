"""What stands between the command and its user: encodings, interruptions, platforms, forks."""

import io
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from marks import later, slow, telling

import fedjax_dp
from fedjax_dp.core import terminal

PACKAGE = pathlib.Path(fedjax_dp.__file__).parent


def command(*words, options=(), **environment):
    """Runs `fedjax-dp` in a process of its own."""
    return subprocess.run(
        [sys.executable, *options, "-m", "fedjax_dp", *words],
        capture_output=True,
        env=os.environ | environment,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("cp1252", b"epsilon = 8\x85 -> caf\xe9 ?"),
        ("latin-1", b"epsilon = 8... -> caf\xe9 ?"),
        ("ascii", b"epsilon = 8... -> caf? ?"),
        ("utf-8", "ε = 8… → café \N{SNOWMAN}".encode()),
    ],
)
def test_streams_take_any_text(monkeypatch, encoding, shown):
    files = {name: io.TextIOWrapper(io.BytesIO(), encoding) for name in ("stdout", "stderr")}
    for name, file in files.items():
        monkeypatch.setattr(sys, name, file)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    terminal.prepare()
    for file in files.values():
        print("ε = 8… → café \N{SNOWMAN}", end="", file=file, flush=True)
        assert file.buffer.getvalue() == shown


def test_text_files_name_their_encoding():
    ruff = [sys.executable, "-m", "ruff", "check", "--preview", "--select=PLW1514", "--isolated"]
    ended = subprocess.run([*ruff, str(PACKAGE)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_a_width_of_0_is_one_that_is_not_known(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for given, left in (("0", None), ("20", "20")):
        monkeypatch.setenv("COLUMNS", given)
        terminal.prepare()
        assert os.environ.get("COLUMNS") == left


def test_there_may_be_no_streams(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", object())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    terminal.prepare()


@slow
def test_a_run_on_a_terminal_of_another_encoding_ends_well(tmp_path):
    words = ("run", "--run.rounds=1", f"--output={tmp_path / 'run'}")
    ended = command(*words, PYTHONIOENCODING="cp1252", PYTHONUTF8="0")
    assert ended.returncode == 0, ended.stderr
    assert b"epsilon = 8 at delta = 1e-05" in ended.stdout


@telling
@pytest.mark.parametrize("level", ["-O", "-OO"])
def test_python_may_drop_assertions_and_docstrings(level):
    ended = command("run", "--keys", "--algorithm.name=fedprox", options=[level])
    assert ended.returncode == 0, ended.stderr
    assert b"algorithm.options.mu" in ended.stdout


@pytest.mark.parametrize("platform", later(["cuda", "rocm", "nonsense"], soon=["cuda"]))
def test_a_platform_that_does_not_start_is_refused(tmp_path, platform):
    ended = command("run", f"--output={tmp_path / 'run'}", JAX_PLATFORMS=platform)
    if ended.returncode == 0:
        pytest.skip(f"{platform} is here")
    error = ended.stderr.decode()
    assert "JAX_PLATFORMS must name platforms that start on this machine" in error
    assert "Traceback" not in error and ended.returncode == 2


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupted_command_ends_before_threads_can_crash_it():
    """A compiled round runs on in threads while Python takes itself apart."""
    script = """
import atexit, os, signal, sys, types
# A shell's background jobs ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from fedjax_dp import __main__ as command

def run():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        sys.exit(130)

atexit.register(os.abort)
sys.modules["fedjax_dp.cli.main"] = types.SimpleNamespace(main=run)
command.main()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert ended.returncode == 130, ended.stderr


@telling
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("seconds", [1.0, 3.0, 7.0])
def test_fast_interruptions_end_a_command_without_a_traceback(tmp_path, seconds):
    words = ["run", "--run.rounds=100000", f"--output={tmp_path / 'run'}"]
    pipe = subprocess.PIPE
    # What ignores it, as a shell's background jobs do, would have children that ignore it too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = subprocess.Popen([sys.executable, "-m", "fedjax_dp", *words], stdout=pipe, stderr=pipe)
    signal.signal(signal.SIGINT, before)
    time.sleep(seconds)
    for _ in range(5):
        run.send_signal(signal.SIGINT)
        time.sleep(0.04)
    try:
        _, errors = run.communicate(timeout=120)
    finally:
        run.kill()
    # Python may end by the signal itself, which shells report as 130 too.
    assert run.returncode in (130, -signal.SIGINT)
    assert b"Traceback" not in errors and b"ignored" not in errors


FORKED = """
import os, sys
import fedjax_dp as fdp
import jax.numpy as jnp
jnp.zeros(3) + 1
child = os.fork()
if child == 0:
    init, apply = lambda key: {"w": jnp.zeros(2)}, lambda params, x: x * params["w"]
    try:
        fdp.Model.from_functions(init, apply, loss="squared_error")
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
sys.exit(os.waitpid(child, 0)[1])
"""


@telling
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_process_forked_after_jax_has_started_is_refused():
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert b"forked after JAX had started" in ended.stdout and b"spawn" in ended.stdout
