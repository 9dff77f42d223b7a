"""`fedjax-dp doctor`: what is here, what is missing, what is broken, and nothing secret."""

import json
from importlib import metadata

import pytest
from marks import slow

from fedjax_dp.core import backend, packages
from fedjax_dp.data import datasets

pytestmark = slow


@pytest.fixture
def doctor(fedjax_dp):
    """Gives `(words) -> (status, document)`."""

    def ask(*words):
        status, output, _ = fedjax_dp("doctor", "--json", *words)
        found = json.loads(output)
        assert found["status"] == status
        return status, found

    return ask


def test_it_agrees_with_what_is_here(doctor, fedjax_dp, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_DP_DATA", str(tmp_path))
    monkeypatch.setenv("SECRET_TOKEN", "hush-hush")
    status, found = doctor()
    assert status == 0 and not [each for each in found["problems"] if each["is_needed"]]
    assert found["libraries"] == packages.libraries() and found["devices"]
    for each in found["extras"]:
        if each["name"] in ("table", "hdf5"):
            here = {"table": "pyarrow", "hdf5": "h5py"}[each["name"]]
            assert (not each["missing"]) == any(metadata.distributions(name=here))
            assert bool(each["missing"]) == (f"[{each['name']}]" in each["command"])
    known = {each["name"]: each for each in found["data"]}
    for name in datasets.available():
        state = datasets.status(name, tmp_path)
        if state.folder is not None:
            row = known.pop(name)
            assert row["folder"] == str(state.folder) and row["missing"] == list(state.missing)
            assert not row["is_present"] and row["command"].startswith("fedjax-dp data ")
    assert not known
    _, shown, _ = fedjax_dp("doctor")
    assert "hush-hush" not in json.dumps(found) + shown
    assert shown.endswith("everything that a run needs is in order\n")
    assert fedjax_dp("doctor", "--quiet")[:2] == (0, "ok\n")


def test_a_missing_package_is_named_with_its_command(doctor, monkeypatch):
    version = metadata.version

    def without_optax(name):
        if name == "optax":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(packages.metadata, "version", without_optax)
    status, found = doctor()
    [problem] = [each for each in found["problems"] if each["is_needed"]]
    assert status == 1 and problem["command"].startswith(f'{packages.installer()} "optax>=')


def test_a_jax_that_does_not_start_is_no_reason_to_stop(doctor, monkeypatch):
    def fails():
        raise ValueError("JAX_PLATFORMS must name platforms that start")

    monkeypatch.setattr(backend, "require_backend", fails)
    status, found = doctor()
    assert status == 1 and found["devices"] == [] and found["data"] and found["libraries"]
    assert found["problems"][-1]["why"] == "JAX_PLATFORMS must name platforms that start"


def test_a_folder_of_data_that_is_a_file_is_broken_and_a_cache_is_not(
    doctor, tmp_path, monkeypatch
):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(backend, "programs_folder", lambda: str(file / "programs"))
    status, found = doctor()
    assert status == 0 and [each["subject"] for each in found["problems"]] == ["cache of programs"]
    monkeypatch.setenv("FEDJAX_DP_DATA", str(file))
    status, found = doctor()
    assert status == 1 and found["problems"][-1]["command"] == "unset FEDJAX_DP_DATA"


def test_requirements_are_read_by_extra_version_and_marker(tmp_path, monkeypatch):
    def install(name, version, *lines):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (folder / "METADATA").write_text("\n".join([*head, *lines]) + "\n")

    install(
        "whole",
        "1.0",
        "Requires-Dist: part>=2",
        "Requires-Dist: absent; python_version < '3'",
        "Requires-Dist: gone>=1; extra == 'more'",
        "Requires-Dist: part[inner]; extra == 'deep'",
    )
    install("part", "1.5", "Requires-Dist: hidden; extra == 'inner'")
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.unmet("whole") == ["part>=2 (here is 1.5)"]
    assert packages.unmet("whole", "more") == ["gone>=1"]
    assert packages.unmet("whole", "deep") == ["hidden"]
