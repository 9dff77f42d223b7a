"""Programs that were compiled once serve every test and process of a session."""

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest
from run_folders import DRAWN, ROUNDS, TouchedError, assemble_once, execute, metrics

from fedjax_dp.core import keys
from fedjax_dp.experiment.assembly import population
from fedjax_dp.experiment.running import run as running
from fedjax_dp.io import plots


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder that all processes of a session of tests see."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def compilation_cache(shared_folder: pathlib.Path) -> str:
    return str(shared_folder / "compiled")


@pytest.fixture(scope="session")
def once(shared_folder: pathlib.Path) -> Callable[[str, Callable[[pathlib.Path], None]], Any]:
    """Lets one process of a session fill a folder, and the others wait for it."""

    def fill(name: str, build: Callable[[pathlib.Path], None]) -> pathlib.Path:
        folder, done = shared_folder / name, shared_folder / f"{name} is done"
        try:
            folder.mkdir()
        except FileExistsError:
            until = time.monotonic() + 300
            while not done.exists():
                assert time.monotonic() < until, f"another process did not fill {folder}"
                time.sleep(0.1)
        else:
            build(folder)
            done.touch()
        return folder

    return fill


@pytest.fixture(scope="module")
def shared_programs():
    """Runs of a module with the same configuration share what is assembled and compiled."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(running, "assemble", assemble_once)
        yield


@pytest.fixture(scope="module")
def secret_run(once, shared_programs):
    """Gives the folder of a run whose root the operating system has given, which is run once."""

    def ran(root: bytes, words: tuple[str, ...]) -> pathlib.Path:
        def build(folder: pathlib.Path) -> None:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(plots, "save", lambda figure, path: None)
                patched.setattr(keys.secrets, "token_bytes", lambda size: root[:size])
                assert execute(folder / "run", *words)[0] == 0

        return once("secret", build) / "run"

    return ran


@pytest.fixture(scope="module")
def uninterrupted(once, shared_programs):
    """Gives the folder of a run of eight rounds, with checkpoints of rounds 6 and 8."""

    def build(folder):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(plots, "save", lambda figure, path: None)
            assert execute(folder / "run", *DRAWN)[0] == 0

    folder = once("uninterrupted", build) / "run"
    rounds = [row["round"] for row in metrics(folder)]
    assert rounds == list(range(1, ROUNDS + 1))
    return folder


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch):
    """Fails where data are read."""

    def touched(*_args, **_kwargs):
        raise TouchedError("data were read")

    # How many devices there are is settled once JAX has started.
    jax.devices()
    monkeypatch.setattr(population.datasets, "load", touched)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch):
    """Drawing takes longer than short runs; the test of the main job reads pictures."""
    monkeypatch.setattr(plots, "save", lambda figure, path: None)


@pytest.fixture(scope="session", autouse=True)
def _share_compiled_programs(compilation_cache: str):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", compilation_cache)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
