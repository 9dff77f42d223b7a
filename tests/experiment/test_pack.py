"""A run folder is one file, whole or with what may be published alone, and can be read again."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tarfile

import numpy as np
import pytest
from marks import slow
from run_folders import read_json
from test_report import as_release, write
from test_secret import ROOT, SECRET

from fedjax_dp.experiment import pack, report
from fedjax_dp.experiment.running.run_folder import locked
from fedjax_dp.io.digests import seal

pytestmark = [
    pytest.mark.xdist_group("resume"),
    pytest.mark.usefixtures("shared_programs", "no_pictures"),
]
RESUMED = {"rounds": 3}


def files_in(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def unpack(archive, folder):
    """Unpacks with the program that systems have."""
    folder.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
    (top,) = folder.iterdir()
    return top


def as_run(folder, **options):
    """Writes a run with a checkpoint, and client state in a folder that is empty."""
    write(folder, **options)
    (folder / "checkpoint" / "2").mkdir(parents=True)
    (folder / "checkpoint" / "root.key").write_bytes(bytes(range(8)))
    (folder / "checkpoint" / "2" / "array").write_bytes(bytes(range(256)) * 9)
    (folder / "clients").mkdir()
    (folder / ".lock").touch()
    return folder


@pytest.fixture
def folder(tmp_path):
    return as_run(tmp_path / "wards-001")


@slow
def test_an_archive_has_every_file_and_the_same_bytes_wherever_it_is_made(folder, tmp_path):
    packed = pack(folder)
    assert packed.file == tmp_path / "wards-001.tar" and not packed.left_out
    assert packed.sha256 == hashlib.sha256(packed.file.read_bytes()).hexdigest()
    top = unpack(packed.file, tmp_path / "there")
    assert top.name == "wards-001" and files_in(top) == files_in(folder)
    assert set(packed.files) == set(files_in(folder)) and (top / "clients").is_dir()
    # Who reads it has the root of the noise.
    for path in (packed.file, top / "checkpoint" / "root.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(packed.file) as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names) and len({member.mtime for member in members}) == 1
    assert {(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "", "")}
    other = tmp_path / "elsewhere" / "wards-001"
    other.mkdir(parents=True)
    # Files that were made in another order, at another time, with other permissions.
    for name, content in sorted(files_in(folder).items(), reverse=True):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_bytes(content)
        os.utime(other / name, (10**9, 10**9))
        (other / name).chmod(0o640)
    (other / "clients").mkdir()
    assert pack(other).file.read_bytes() == packed.file.read_bytes()
    assert report(top).state == report(folder).state


def test_what_may_be_published_is_what_the_marks_say(folder, tmp_path):
    (folder / "a note").write_text("Ward A has 12 patients")
    packed = pack(folder, release=True)
    assert packed.file == tmp_path / "wards-001-release.tar"
    assert set(packed.files) == {"config.toml", "environment.json", "privacy.json", "privacy.md"}
    exact = "it holds exact figures of the data, which no ε covers"
    assert packed.left_out == {
        **dict.fromkeys(["a note", "clients", "metrics.jsonl", "summary.json"], exact),
        "checkpoint": "it allows removing the noise, or shows who was drawn",
    }
    top = unpack(packed.file, tmp_path / "there")
    # Not the name of the folder.
    assert top.name == "release" and b"wards-001" not in packed.file.read_bytes()
    assert files_in(top) == {name: files_in(folder)[name] for name in packed.files}
    # A seed is the root of the noise.
    seeded = pack(as_run(tmp_path / "seeded", secret=False), release=True)
    assert seeded.files == ("environment.json",)
    assert seeded.left_out["config.toml"] == "it allows removing the noise, or shows who was drawn"


@slow
def test_of_a_run_with_a_release_that_alone_is_packed(folder, tmp_path):
    inside = folder / "release"
    shutil.copytree(as_release(write(tmp_path / "other")), inside)
    (inside / "report.html").write_text("added later")
    packed = pack(folder, tmp_path / "deep" / "a.tar", release=True)
    own = set(read_json(inside, "privacy.json")["files"])
    assert set(packed.files) == own & set(files_in(inside)) and "summary.json" in own
    assert packed.left_out["release/report.html"].startswith("no mark of the run")
    assert packed.left_out["environment.json"].startswith("the folder release, which is packed")
    assert packed.left_out["summary.json"].startswith("it holds exact figures")
    top = unpack(packed.file, tmp_path / "there")
    assert report(top).mark == "covered"
    # The folder alone, which is what another person has.
    again = pack(top, tmp_path / "again.tar", release=True)
    (top / "report.html").unlink()
    assert again.sha256 == packed.sha256


@slow
def test_marks_of_a_release_that_was_changed_are_not_trusted(folder):
    inside = folder / "release"
    inside.mkdir()
    (inside / "model.safetensors").write_bytes(b"not sealed, not marked")
    packed = pack(folder, release=True)
    assert not [name for name in packed.files if name.startswith("release")]
    assert packed.left_out["release"].startswith("no mark of the run")


def test_a_release_without_a_file_of_its_statement_is_not_published(folder, tmp_path):
    inside = folder / "release"
    shutil.copytree(as_release(write(tmp_path / "other")), inside)
    for name in ("environment.json", "summary.json"):
        (inside / name).rename(tmp_path / name)
        with pytest.raises(ValueError, match=f"files that its statement lists.*none of {name}"):
            pack(folder, release=True)
        (tmp_path / name).rename(inside / name)
    assert pack(folder, release=True).files


@slow
def test_a_statement_that_a_resumed_run_has_outlived_is_not_published(folder, tmp_path):
    write(folder, summary=json.loads((folder / "summary.json").read_text()) | RESUMED)
    with pytest.raises(ValueError, match="folder must be a run that has ended since it was star"):
        pack(folder, release=True)
    assert pack(folder).files and not (tmp_path / "wards-001-release.tar").exists()


@slow
@pytest.mark.parametrize("is_released", [False, True])
def test_links_that_lead_out_of_a_folder_are_refused(folder, tmp_path, is_released):
    secret = tmp_path / "secret"
    secret.write_text("of another person")
    link = folder / "environment.json"
    link.unlink()
    for target in (secret, tmp_path, folder / "none", folder / "checkpoint"):
        link.symlink_to(target)
        with pytest.raises(ValueError, match=r"environment.json must be a .*, got 'a link to"):
            pack(folder, release=is_released)
        link.unlink()
    link.symlink_to("checkpoint/root.key")
    if is_released:
        with pytest.raises(ValueError, match="json must be a file, a folder, got"):
            pack(folder, release=True)
    else:
        top = unpack(pack(folder).file, tmp_path / "there")
        assert (top / "environment.json").read_bytes() == bytes(range(8))
        assert not (top / "environment.json").is_symlink()
    assert not list(tmp_path.glob("*release.tar*"))


@slow
def test_refusals_name_the_rule_and_write_nothing(folder, tmp_path, fedjax_dp):
    (tmp_path / "there.tar").write_text("mine")
    os.mkfifo(folder / "pipe")
    for words, message in (
        ((folder,), "pipe must be a file, a folder or a link to a file of the run folder"),
        ((folder, "--output", tmp_path / "there.tar"), "output must be a new file that ends in"),
        ((folder, "--output", tmp_path / "a.zip"), "output must be a new file that ends in .tar"),
        ((folder, "--output", folder / "clients" / "a.tar"), "output must be outside of the run"),
        ((tmp_path,), "folder must be a run folder with a config.toml"),
        ((tmp_path / "none",), "folder must be a run folder with a config.toml"),
    ):
        status, output, errors = fedjax_dp("pack", *words)
        assert status == 2 and not output and message in errors, errors
    (folder / "pipe").unlink()
    seal(folder, ["environment.json"])
    (folder / "environment.json").write_text("{}")
    for words in ((), ("--release",)):
        _, _, errors = fedjax_dp("pack", folder, *words)
        assert "environment.json must be as it was written, but it has changed" in errors
    (folder / "digests.json").unlink()
    with locked(folder):
        _, _, errors = fedjax_dp("pack", folder)
    assert "wards-001' is already in use by another process" in errors
    assert (tmp_path / "there.tar").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.tar", "wards-001"]


@slow
def test_the_command_says_what_it_packed_and_what_it_left_out(folder, tmp_path, fedjax_dp):
    status, output, errors = fedjax_dp("pack", folder)
    assert status == 0 and not errors
    said = f"wrote {tmp_path / 'wards-001.tar'}: 8 files, not to be published: --release packs"
    assert output.startswith(said)
    status, output, errors = fedjax_dp("pack", folder, "--release")
    assert (
        status == 0 and "checkpoint\tit allows removing the noise, or shows who was drawn" in output
    )
    assert "this run has released neither a summary nor a model" in errors
    (tmp_path / "wards-001-release.tar").unlink()
    status, output, _ = fedjax_dp("pack", folder, "--release", "--json")
    document = json.loads(output)
    assert document["file"] == str(tmp_path / "wards-001-release.tar")
    assert {
        "file": "checkpoint",
        "reason": "it allows removing the noise, or shows who was drawn",
    } in document["left_out"]
    assert len(document["files"]) == 4 and len(document["sha256"]) == 64


@slow
def test_a_run_that_was_packed_is_evaluated_as_before(secret_run, tmp_path, fedjax_dp):
    folder = secret_run(ROOT, SECRET)
    packed = pack(folder, tmp_path / "run.tar")
    top = unpack(packed.file, tmp_path / "there")
    figures = []
    for each in (folder, top):
        status, output, _ = fedjax_dp("evaluate", each, "--json")
        assert status == 0
        figures.append(json.loads(output)["figures"])
    assert figures[0] == figures[1] and np.isfinite(figures[0]["test_accuracy"])
    status, output, _ = fedjax_dp("report", top, "--json")
    assert status == 0 and json.loads(output)["state"] == "finished"
    released = pack(folder, tmp_path / "released.tar", release=True)
    assert "model.safetensors" in released.files and "checkpoint" in released.left_out
    apart = unpack(released.file, tmp_path / "apart")
    assert files_in(apart) == files_in(folder / "release")
    assert ROOT not in released.file.read_bytes()
    assert report(apart).mark == "covered"
