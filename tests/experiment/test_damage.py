"""No damage of a file of a run is silent: it is named, or changes nothing that is read."""

import pathlib
import shutil
import warnings

import jax
import numpy as np
import pytest
from damage import KINDS, damage
from marks import later, slow, telling
from run_folders import assemble_once, read_json

from fedjax_dp.core.files import digest_of
from fedjax_dp.experiment.running import loading
from fedjax_dp.experiment.running import run as running
from fedjax_dp.experiment.running.report import report
from fedjax_dp.experiment.studies.sweep import Point, read_summaries
from fedjax_dp.io import read_metrics

pytestmark = [
    # With the files whose runs have the program of this one.
    pytest.mark.xdist_group("resume"),
    pytest.mark.usefixtures("shared_programs", "no_pictures"),
]


def of_metrics(folder):
    return read_metrics(folder)


def of_report(folder):
    return report(folder, folder.parent / "page.html").file.read_text("utf-8")


def of_table(folder):
    return read_summaries([Point({"name": folder.name}, ())], folder.parent)


def of_model(folder):
    """What `evaluate`, `predict` and `export` have of a run."""
    run = loading.load_run(folder)
    leaves = [np.asarray(x) for x in jax.tree.leaves((run.state._replace(clients=None), run.hyper))]
    ledgers = digest_of([repr(run.accounting.to_json()).encode()])
    return [x.tobytes() for x in leaves], run.metrics, run.config, ledgers


class Heard(running.Watcher):
    """Turns warnings of a run into those of Python."""

    def warn(self, text):
        warnings.warn(text, stacklevel=1)


def of_resumed(folder):
    """A resumed run, which writes its results again."""
    running.resume(folder, Heard())
    return of_metrics(folder), read_json(folder, "privacy.json")


HOST_ONLY = (of_metrics, of_report, of_table)
READERS = (*HOST_ONLY, of_model, of_resumed)


def outcome(reader, folder):
    """What a reader returns, and the errors and warnings that it has."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, said = None, []
        try:
            found = reader(folder)
        except (ValueError, OSError) as error:
            said = [str(error)]
    return found, "\n".join([*(str(each.message) for each in caught), *said])


def names(path: pathlib.Path, folder: pathlib.Path) -> set[str]:
    """What may stand for a file in a message: its own name, or the round of its checkpoint."""
    parts = path.relative_to(folder).parts
    found = {parts[-1]} if parts[-1] != ".lock" else set()
    if parts[0] == "checkpoint" and parts[1] == "digests":
        found.add(f"round {pathlib.Path(parts[2]).stem} ")
    elif parts[0] == "checkpoint" and len(parts) > 2:
        found |= {f"round {parts[1]} ", f"checkpoint/{parts[1]}"}
    return found


def assert_named_or_harmless(whole, folder, readers, path, kind, rng, expected):
    shutil.copytree(whole, folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    rest = [p for p in files if p != folder / path]
    other = rest[rng.integers(len(rest))]
    damage(folder / path, kind, other, rng)
    may_say = names(folder / path, folder) | (names(other, folder) if kind == "swap" else set())
    for reader in readers:
        # The last, a resumed run, changes the folder.
        found, said = outcome(reader, folder)
        is_named = any(name in said for name in may_say)
        same = found == expected[reader]
        assert is_named or same, f"{reader.__name__}: {path} {kind} ({other.name}): {said}"
    shutil.rmtree(folder)


@pytest.fixture
def expected(uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "assemble", lambda config, population: assemble_once(config))

    def of(readers):
        shutil.copytree(uninterrupted, tmp_path / "run")
        found = {reader: outcome(reader, tmp_path / "run") for reader in readers}
        shutil.rmtree(tmp_path / "run")
        assert all(not said for _, said in found.values()), found
        return {reader: each for reader, (each, _) in found.items()}

    return of


@telling
@pytest.mark.parametrize("kind", later(KINDS, but=["flip", "delete"], mark=telling))
def test_what_is_read_without_a_model_names_what_is_damaged(
    uninterrupted, tmp_path, expected, kind
):
    """Every file that these readers read, and a flip at two places of each."""
    rng, before = np.random.default_rng(1), expected(HOST_ONLY)
    beside = [p.name for p in sorted(uninterrupted.iterdir()) if p.is_file()]
    for name in beside * (2 if kind == "flip" else 1):
        assert_named_or_harmless(
            uninterrupted, tmp_path / "run", HOST_ONLY, name, kind, rng, before
        )


@slow
def test_a_hundred_damages_are_named_or_harmless(uninterrupted, tmp_path, expected):
    """Of all kinds, over every file of a run folder."""
    rng, before = np.random.default_rng(2), expected(READERS)
    files = [p.relative_to(uninterrupted) for p in uninterrupted.rglob("*") if p.is_file()]
    beside = [p for p in files if len(p.parts) == 1] * 2
    every = [*rng.permutation(sorted(files)), *sorted(beside)][:100]
    for number, path in enumerate(every):
        kind = KINDS[number % len(KINDS)]
        # Writing results takes most of the time.
        readers = READERS if number % 5 == 0 else READERS[:-1]
        assert_named_or_harmless(uninterrupted, tmp_path / "run", readers, path, kind, rng, before)


def test_a_run_is_read_under_its_own_configuration_and_data_alone(
    uninterrupted, tmp_path, monkeypatch
):
    """An edited seed would draw other held-out data; how a run executes may change."""
    monkeypatch.setattr(loading, "assemble", lambda config, population: assemble_once(config))
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    file, data = folder / "config.toml", folder / "data.json"
    whole = file.read_text("utf-8")
    for old, new in (("seed = 0", "seed = 1"), ("cohort_size = 2", "cohort_size = 1")):
        assert old in whole
        file.write_text(whole.replace(old, new), "utf-8")
        found, said = outcome(loading.load_run, folder)
        assert found is None and "config.toml must be as it was when the run started" in said
    file.write_text(whole, "utf-8")
    saved = data.read_text("utf-8")
    data.write_text(saved.replace('"the number of examples": 1', '"the number of examples": 2'))
    with pytest.raises(ValueError, match="the number of examples of the training data must be as"):
        loading.load_run(folder)
    data.write_text(saved, "utf-8")
    shutil.rmtree(folder / "checkpoint" / "8")
    run, said = outcome(loading.load_run, folder)
    assert int(run.state.round) == 6 and run.metrics[-1]["round"] == 6
    assert "the checkpoint of round 8 is damaged" in said and "is read as of round 6" in said
