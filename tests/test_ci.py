"""Continuous integration: the Pythons that it takes, and the bounds that it tries."""

import pathlib
import re
import shutil
import subprocess
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BASH = shutil.which("bash")
PYENV = "3.11.7\n3.12.1\n3.13.0\n3.13.4\n3.13.9t\n3.14-dev\n"
PLAIN = "echo VERSION"
# As the names that pyenv puts on the path.
SHIM = (
    '[ "${PYENV_VERSION:-}" = %s ] && echo VERSION || { echo "command not found" >&2; exit 127; }'
)


def fake(folder, name, does):
    file = folder / name
    file.write_text(f"#!{BASH}\n{does}\n")
    file.chmod(0o755)


CASES = {
    "none but python3": ({}, "python3"),
    "by name": ({"python3.12": PLAIN, "python3.13": PLAIN}, "python3.13"),
    "none that answers": ({"python3.12": "exit 127"}, "python3"),
    "without venv": ({"python3.14": "exit 1", "python3.12": PLAIN}, "python3.12"),
    "one that is another": ({"python3.14": "echo 3.9"}, "python3"),
    "of pyenv": ({"python3.13": SHIM % "3.13.4"}, "env PYENV_VERSION=3.13.4 python3.13"),
    "of pyenv, of which one answers": (
        {"python3.14": SHIM % "3.14-dev", "python3.13": SHIM % "3.13.0", "python3.12": PLAIN},
        "env PYENV_VERSION=3.13.0 python3.13",
    ),
    "without pyenv": ({"pyenv": "exit 1", "python3.13": SHIM % "3.13.4"}, "python3"),
}


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("name", CASES)
def test_the_newest_python_that_answers_is_taken(name, tmp_path):
    commands, expected = CASES[name]
    tmp_path.joinpath("env").symlink_to(shutil.which("env"))
    for command, does in {"pyenv": f"printf '{PYENV}'", "python3": "exit 0", **commands}.items():
        fake(tmp_path, command, does.replace(" VERSION", command.replace("python", " ")))
    script = [BASH, ROOT / ".ci" / "newest-python"]
    found = subprocess.run(
        script, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == expected


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = {file.stem: file.read_text("utf-8") for file in ROOT.glob(".github/workflows/*.yml")}


def test_every_package_has_a_lower_bound_and_one_job_takes_all_of_them():
    listed = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    others = {one for group in listed for one in group if not one.startswith("fedjax-dp[")}
    assert {one for one in others if ">=" not in one} == {"click<8.5"}
    assert "uv pip install --system --resolution lowest-direct -e '.[tests]'" in WORKFLOWS["ci"]


def test_every_python_and_system_that_is_stated_is_tried():
    words = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if ":: Python ::" in line]
    (matrix,) = re.findall(r"python: \[(.*)\]", WORKFLOWS["ci"])
    assert re.findall(r"3\.\d+", matrix) == words
    assert {"macos-latest", "windows-latest"} <= set(re.findall(r"\w+-latest", WORKFLOWS["ci"]))
    assert "--prerelease allow" in WORKFLOWS["nightly"]
