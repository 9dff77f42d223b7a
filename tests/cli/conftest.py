"""Programs that were compiled once serve every test and process of a session."""

import os
import pathlib

import jax
import pytest


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return str(pathlib.Path(folder) / "compiled")


@pytest.fixture(scope="session", autouse=True)
def _share_compiled_programs(compilation_cache: str):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", compilation_cache)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
