"""Flags that XLA does not know, and processes that it ends, say so."""

import os
import pathlib
import subprocess
import sys

import pytest
from marks import later, telling
from starting import known_flags

_DIES = 'import os\ndef test():\n    os.write(2, b"the reason")\n    os._exit(1)\n'


@telling
def test_a_flag_that_xla_does_not_know_is_left_out():
    level = "xla_backend_optimization_level=0"
    assert known_flags((level, "xla_removed_in_some_version=0")) == [level]


def test_a_flag_of_the_user_that_xla_does_not_know_is_named():
    with pytest.raises(pytest.UsageError, match="Unknown flag in XLA_FLAGS: --xla_mistyped"):
        known_flags((), "--xla_mistyped=0")


@pytest.mark.parametrize("workers", later([0, 1], but=[0], mark=telling))
def test_a_process_that_ends_in_a_test_says_why(tmp_path, workers):
    (tmp_path / "conftest.py").write_text(
        "from starting import show_last_words as pytest_configure"
    )
    (tmp_path / "test_that_dies.py").write_text(_DIES)
    options = ["-n", str(workers), "--max-worker-restart=0"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1 and "ended early" in ended.stderr
    assert "the reason" in ended.stderr
