"""The library works without the extras, and names the extra that has what is missing."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from marks import slow, telling

from fedjax_dp.core.packages import MissingPackageError, installer
from fedjax_dp.privacy import banded_noise

OPTIONAL = ("jax_privacy", "typer", "matplotlib", "pydantic", "tomli_w", "filelock", "platformdirs")
PROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"
README = pathlib.Path(__file__).parents[2] / "README.md"
MISSING = """
import sys
for attempt in (
    lambda: fdp.load_run("."),
    lambda: fdp.io.accuracy_and_epsilon([], ""),
    lambda: __import__("fedjax_dp.cli.main"),
):
    try:
        attempt()
    except ImportError as error:
        print(error)
import runpy
runpy.run_module("fedjax_dp", run_name="__main__")
"""


def without(packages, code):
    """Runs code in a process that cannot import some packages."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"
    command = [sys.executable, "-c", blocked + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_extras_that_configurations_alone_use_bring_them():
    extras = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    for name in ("tensorboard", "search", "cluster", "mlflow", "wandb", "trackio", "docs"):
        brought = {part for line in extras[name] for part in re.findall(r"[\w-]+", line)}
        assert {"fedjax-dp", "cli"} <= brought, name


def test_correlated_noise_names_its_extra(monkeypatch):
    assert banded_noise(3, 1, min_separation=1).num_rounds == 3
    monkeypatch.setitem(sys.modules, "jax_privacy.matrix_factorization", None)
    rule = r'correlated noise .* needs the package jax_privacy.*"fedjax-dp\[correlated\]"'
    with pytest.raises(MissingPackageError, match=rule):
        banded_noise(3, 2, min_separation=2)


@telling
def test_a_simulation_needs_no_extra_and_what_does_names_it():
    (simulation,) = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.M | re.S)
    ended = without(OPTIONAL, simulation + MISSING)
    result, runs, plots, command = ended.stdout.splitlines()[-4:]
    assert "client" in result
    words = "needs the package {}, which is not installed: " + installer() + ' "fedjax-dp[{}]"'
    assert words.format("filelock", "cli") in runs
    assert words.format("matplotlib", "plots") in plots
    assert words.format("typer", "cli") in command
    assert ended.returncode == 1
    assert ended.stderr == f"fedjax-dp: {command}\n"


@slow
def test_a_run_without_matplotlib_leaves_all_but_its_plots(tmp_path):
    words = ["run", "--run.rounds=1", f"--output={tmp_path / 'run'}"]
    code = f"import sys; sys.argv[1:] = {words!r}\nfrom fedjax_dp.__main__ import main; main()"
    ended = without(("matplotlib",), code)
    assert ended.returncode == 0, ended.stderr
    assert "no plots are drawn" in ended.stderr and "fedjax-dp[plots]" in ended.stderr
    assert (tmp_path / "run" / "summary.json").is_file()
    assert not (tmp_path / "run" / "plots" / "accuracy_epsilon.png").exists()
