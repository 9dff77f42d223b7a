"""Every file and key of a run is covered, marked as exact, or left out of what may be published."""

import math
import re
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from marks import telling
from run_folders import SMALL, assemble_once, execute, metrics, read_json, saved_arrays
from test_secret import ROOT, SECRET

from fedjax_dp.core.decimals import rounded_down, rounded_up
from fedjax_dp.experiment import load_config, report
from fedjax_dp.experiment.components.experiment import Callback
from fedjax_dp.experiment.reading import validate as validation
from fedjax_dp.experiment.running import run as running
from fedjax_dp.experiment.running import run as steps
from fedjax_dp.experiment.running.release import exact_keys, marks_of, require_publishable
from fedjax_dp.experiment.running.results import (
    covered_models,
    evaluated_models,
    has_personal_models,
)
from fedjax_dp.io import plots
from fedjax_dp.io.params import read_params
from fedjax_dp.privacy.reports.statement import in_words

pytestmark = [
    # With `test_secret`, whose run is read here.
    pytest.mark.xdist_group("resume"),
    pytest.mark.usefixtures("shared_programs"),
]

STATEMENT = {f"privacy.{kind}" for kind in ("json", "md", "tex", "bib")}
# All that a folder for publication may hold: files, and the keys of those that have some.
MAY_BE_PUBLISHED = {
    *("config.toml", "digests.json", "environment.json", "model.safetensors", "summary.json"),
    *STATEMENT,
}
OPEN_KEYS = (
    "algorithm clients_per_chunk covered_models dp_delta dp_delta_client dp_delta_record "
    "dp_delta_smallest epsilon epsilon_client epsilon_record name not_private num_clients "
    "num_parameters rounds test_accuracy_of"
)
CLAIM_KEYS = (
    "accountant assumes_every_round batch_size_per_unit budget_per_unit clip_norm "
    "clip_norm_per_unit discrete_multiplier dp_delta dp_delta_per_unit entry_stddev epsilon "
    "epsilon_per_unit floating_point histories "
    "laplace_scale mechanisms must_stay_hidden noise_multiplier noise_multiplier_per_unit "
    "noise_root not_private num_compositions relation samplers sampling_rate seed trusted unit "
    "versions"
)


@pytest.fixture(scope="module")
def folder(secret_run):
    return secret_run(ROOT, SECRET)


def files_in(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_every_file_of_a_run_folder_has_its_mark(folder):
    marks = read_json(folder, "privacy.json")["files"]
    for path in files_in(folder):
        assert path.relative_to(folder).parts[0] in marks, path
    by_mark = {m: {name for name, own in marks.items() if own == m} for m in set(marks.values())}
    assert by_mark.pop("exact") == {
        *("by_client.jsonl", "data.json", "digests.json", "metrics.jsonl"),
        *("partition.txt", "summary.json"),
        *(["tensorboard"] if (folder / "tensorboard").exists() else []),
    }
    assert by_mark.pop("secret") == {"checkpoint"}
    assert by_mark.pop("covered") == {*STATEMENT, "release"}
    assert by_mark == {"public": {".lock", "config.toml", "environment.json"}}
    text = (folder / "privacy.md").read_text("utf-8")
    for name in marks:
        assert f"| `{name}` | " in text
    assert "| `checkpoint` | no: it allows removing the noise, or shows who was drawn |" in text


def test_lists_and_statements_name_the_files_that_are_there(folder):
    """Every file is listed, and no other; nor does a sentence name a file that is missing."""
    for place in (folder, folder / "release"):
        marks = read_json(place, "privacy.json")["files"]
        assert marks.keys() == {path.name for path in place.iterdir()}
        text = (place / "privacy.md").read_text("utf-8")
        named = re.findall(r"`([\w/-]+\.(?:json|jsonl|toml|txt|png|pdf|key|html|md))`", text)
        assert "summary.json" in named
        assert not [name for name in named if not (place / name).exists()]


def test_every_key_of_a_summary_is_open_or_marked_as_exact(folder):
    summary = read_json(folder, "summary.json")
    marked, others = set(summary["not_private"]), summary.keys() - set(summary["not_private"])
    assert others == set(OPEN_KEYS.split())
    exact = "clipped_client_share update_norm_median communication test_accuracy padding_share "
    exact += (
        "seconds seconds_compiling warnings ended stopped_by test_accuracy_last_ten noise_stddev"
    )
    assert set(exact.split()) <= marked <= summary.keys()


def test_what_nothing_is_known_of_is_exact(tmp_path):
    assert exact_keys({"rounds": 1, "epsilon_client": 2, "a_new_figure": 3}) == ["a_new_figure"]
    assert exact_keys({"rounds": 1}, is_length_public=False) == ["rounds"]
    (tmp_path / "a_new_file").touch()
    (tmp_path / "config.toml").touch()
    marks = marks_of(tmp_path, is_secret=True)
    assert marks["a_new_file"] == "exact" and marks["config.toml"] == "public"
    # Else the seed that the noise is drawn from is in it.
    assert marks_of(tmp_path, is_secret=False)["config.toml"] == "secret"


def test_a_folder_for_publication_holds_these_files_and_keys_alone(folder):
    release = folder / "release"
    assert {str(p.relative_to(release)) for p in files_in(release)} == MAY_BE_PUBLISHED
    summary = read_json(release, "summary.json")
    assert summary.keys() == set(OPEN_KEYS.split()) and summary["not_private"] == []
    stated = read_json(release, "privacy.json")
    assert stated.keys() == {"claims", "files"} and stated["files"].keys() == MAY_BE_PUBLISHED
    assert set(stated["files"].values()) == {"public", "covered"}
    for claim in stated["claims"]:
        assert not claim.keys() - set(CLAIM_KEYS.split())
        assert claim["noise_root"] == "secret"
    inside = read_json(folder, "privacy.json")["claims"]
    for mine, theirs in zip(stated["claims"], inside, strict=True):
        said = [text for text in theirs["not_private"] if "partition." not in text]
        assert mine.pop("not_private") == said
        inside_alone = {"noise_root_file", "client_names", "not_private"}
        assert mine == {k: v for k, v in theirs.items() if k not in inside_alone}


def test_the_page_about_a_release_has_no_exact_figure(folder, tmp_path):
    summary = read_json(folder, "summary.json")
    numbers = [summary[key] for key in summary["not_private"]]
    exact = {f"{x:.6g}" for x in numbers if isinstance(x, float) and x != round(x, 2)}
    whole, public = (
        report(f, tmp_path / "a.html").file.read_text("utf-8") for f in (folder, folder / "release")
    )
    assert len(exact) > 8 and sum(text in whole for text in exact) > 3
    assert not [text for text in exact if text in public]
    assert str(folder) in whole and str(folder) not in public
    assert report(folder / "release", tmp_path / "a.html").mark == "covered"


def listing(marks):
    """The lines that say of each file whether it may be published."""
    words = {
        "public": "yes: it holds no figure of the data",
        "covered": "yes: it holds what ε covers, and public facts",
    }
    return [f"| `{name}` | {words[mark]} |" for name, mark in marks.items()]


def test_the_words_for_publication_follow_from_the_claims_alone(folder):
    """Word for word, so that no figure of any form can stand beside them."""
    stated = read_json(folder / "release", "privacy.json")
    clients, records = stated["claims"]
    of_each = zip(
        range(3),
        records["epsilon_per_unit"],
        records["num_compositions"],
        records["noise_multiplier_per_unit"],
        strict=True,
    )
    parts = [
        "# Privacy\n",
        "## Client level\n",
        in_words(clients),
        "## Record level\n",
        in_words(records),
        "| client | ε | releases | noise multiplier |",
        "|---|---|---|---|",
        *(f"| {i} | {rounded_up(e, 5)} | {n} | {rounded_down(z)} |" for i, e, n, z in of_each),
        "",
        "## Files of this folder\n",
        "| file | may be published |",
        "|---|---|",
        *listing(stated["files"]),
        "",
        "Files that are not listed were added later: do not publish them.",
        "",
    ]
    assert (folder / "release" / "privacy.md").read_text("utf-8") == "\n".join(parts)
    # In the claims themselves the only figures within words are years and versions.
    for claim in stated["claims"]:
        said = [*claim["not_private"], *claim["must_stay_hidden"], claim["trusted"]]
        assert not re.search(r"[0-9]", " ".join(said))
        years = re.findall(r"[0-9]+", claim["floating_point"])
        assert set(years) == {"2012", "2022"}


def test_files_for_publication_that_precede_the_rounds_are_copies(folder):
    for name in ("config.toml", "environment.json"):
        assert (folder / "release" / name).read_bytes() == (folder / name).read_bytes()
    inside = read_json(folder, "summary.json")
    for key, value in read_json(folder / "release", "summary.json").items():
        assert key == "not_private" or value == inside[key], key


def numbers_in(value):
    """All numbers that could be recognised: floats but 0 and 1, whole ones of four digits."""
    if isinstance(value, dict):
        return [x for each in value.values() for x in numbers_in(each)]
    if isinstance(value, list):
        return [x for each in value for x in numbers_in(each)]
    is_float = isinstance(value, float) and math.isfinite(value) and value not in (0.0, 1.0)
    is_long = type(value) is int and abs(value) >= 1000
    return [value] if is_float or is_long else []


def figures_in(text) -> Iterator[tuple[float, int, bool]]:
    """Every number in a text: its value, its digits, and whether it is a percentage."""
    pattern = r"(?<![\w.])([0-9][0-9,_']*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)( ?%)?(?![0-9]|\.[0-9])"
    for number, percent in re.findall(pattern, text):
        plain = re.sub(r"[,_']", "", number)
        digits = len(plain.partition("e")[0].replace(".", "").lstrip("0"))
        yield float(plain), digits, bool(percent)


def is_among(value, digits, numbers):
    """Whether a number, written to so many digits, is one of these."""
    return any(float(f"{x:.{digits}g}") == value for x in numbers)


def leaks_in(text, exact, known):
    """Exact figures in a text, to four digits or as percentages, that are not known otherwise."""
    shares = [100 * x for x in exact if 0 < x < 1]
    for value, digits, is_percentage in figures_in(text):
        if is_percentage and digits and is_among(value, digits, shares):
            yield value
        is_long = digits >= 4 and not is_among(value, digits, known)
        if is_long and is_among(value, digits, [*exact, *shares]):
            yield value


def test_exact_figures_are_recognised_in_every_form():
    exact, known = [0.09444444, 18.411953, 41600, 0.6994859], [1.3989718, 2012]
    for text in ("9.44 %", "9.4%", "18.41 s", "41600", "{'up': 41,600}", "0.69949", "6.995e-1,"):
        assert list(leaks_in(f"from {text} to", exact, known)), text
    for text in ("1.399", "Mironov 2012", "0.10.2", "3.11.7", "f9444", "8 releases", "41601"):
        assert not list(leaks_in(f"from {text} to", exact, known)), text


def test_no_exact_figure_and_no_root_is_in_a_folder_for_publication(folder):
    """Neither as text, to four digits or more or as a percentage, nor as the bytes of a float."""
    summary = read_json(folder, "summary.json")
    exact = numbers_in([summary[key] for key in summary["not_private"]])
    for row in metrics(folder):
        exact += numbers_in({k: v for k, v in row.items() if not k.startswith("epsilon")})
    assert len(exact) > 100 and any(isinstance(x, int) for x in exact)
    public = set(numbers_in([summary[k] for k in summary.keys() - set(summary["not_private"])]))
    texts, arrays = [], []
    for path in files_in(folder / "release"):
        if path.suffix == ".safetensors":
            arrays += [np.ravel(x) for x in read_params(path).values()]
        else:
            texts.append(path.read_text("utf-8"))
    # A public or covered number may equal an exact one; noise is reported beside these too.
    claims = numbers_in(read_json(folder, "privacy.json")["claims"])
    assert not set(claims) & set(exact)
    assert not list(leaks_in(" ".join(texts), exact, [*public, *claims]))
    weights = np.concatenate(arrays).astype(np.float32)
    floats = [x for x in exact if isinstance(x, float)]
    assert not np.isin(np.float32(floats), weights).any()
    everything = b"".join(path.read_bytes() for path in files_in(folder / "release"))
    for shape in (ROOT, ROOT[::-1], ROOT.hex().encode()):
        assert shape not in everything


def test_the_released_model_is_that_of_the_last_round(folder):
    released = read_params(folder / "release" / "model.safetensors")
    saved = [np.asarray(array).tobytes() for array in saved_arrays(folder)[1].values()]
    assert released and all(array.tobytes() in saved for array in released.values())


def test_bytes_are_named_where_they_must_stay_hidden(folder):
    claim = read_json(folder, "privacy.json")["claims"][0]
    assert "how many units were drawn" in claim["must_stay_hidden"]
    said = " ".join(claim["not_private"])
    for words in ("bytes sent", "seconds", "padding", "`partition.txt`"):
        assert words in said
    assert "no ε covers" in (folder / "partition.txt").read_text("utf-8")


NOISE = ("--privacy.record.noise_multiplier=1", "--privacy.record.epsilon=none")
OWN, SHARED = "clients' own models", "the shared model"
DITTO = ("ditto", "--training.num_steps=1")


@pytest.mark.parametrize(
    "unit, words, whose, covered",
    [
        pytest.param("client", ("dp_fedavg",), SHARED, SHARED, marks=pytest.mark.slow),
        ("client", DITTO, f"the {OWN}", f"{SHARED}, and not the {OWN}"),
        pytest.param(
            "record", DITTO, f"the {OWN}", f"{SHARED} and the {OWN}", marks=pytest.mark.slow
        ),
    ],
)
def test_a_summary_names_the_models_that_are_measured_and_those_that_are_covered(
    unit, words, whose, covered
):
    name, *rest = words
    level = f"--privacy.{unit}"
    words = (*SMALL, f"--privacy.unit={unit}", f"--algorithm.name={name}", *rest)
    words = (*words, f"{level}.noise_multiplier=1", f"{level}.epsilon=none")
    experiment = assemble_once(load_config(None, words))
    is_own, is_personal = has_personal_models(experiment), experiment.evaluator.is_personal
    assert evaluated_models(is_personal, is_own) == whose
    assert covered_models(is_personal, is_own, True, (unit,)) == covered


def test_of_both_units_records_alone_cover_the_clients_own_models():
    assert covered_models(True, True, True, ("client", "record")) == (
        f"{SHARED}, and not the {OWN}, which the ε of records alone covers"
    )
    assert evaluated_models(True, False) == "the models that clients choose"
    assert covered_models(True, False, True, ("client",)) == "all models of the server"
    assert covered_models(True, False, False, ("record",)) == "all models of the server"
    # Noise on models that clients keep without it.
    names = f"{SHARED}, and not the {OWN}"
    assert covered_models(True, True, True, ("record",), "own models") == names
    assert covered_models(True, True, True, ("client", "record"), "own models") == names
    assert covered_models(True, False, True, ("record",), "choices") == "all models of the server"
    # Without a model of the whole.
    of_server = "the server's part of the models"
    assert covered_models(True, True, False, ("client",)) == f"{of_server}, and not the {OWN}"


PRIVATE = ("--run.release=private", "--run.secret=true")


@pytest.mark.parametrize(
    "words, message",
    [
        (PRIVATE[:1], r"run\.secret must be true if run\.release is 'private': the seed is in"),
        (
            (*PRIVATE, "--privacy.unit=none", "--algorithm.name=fedavg"),
            r"run\.release must be left out if privacy\.unit is none",
        ),
        (
            (*PRIVATE, "--privacy.record.noise_multiplier=0", "--privacy.record.epsilon=none"),
            r"privacy\.record\.noise_multiplier must be above 0 if run\.release",
        ),
        (
            (*PRIVATE, "--data.name=adult", "--data.options.scaling=standard"),
            r"data\.options\.scaling must be 'range' if run\.release",
        ),
    ],
)
def test_what_no_claim_would_cover_is_refused_before_data_are_read(words, message):
    with pytest.raises(ValueError, match=message):
        validation.validate(load_config(None, words))


def with_facts(experiment, **changes):
    population = experiment.population._replace(**changes)
    return experiment._replace(population=population)


def test_what_only_the_parts_show_is_refused_before_a_folder_is_made(tmp_path):
    small = (*SMALL, *PRIVATE, *NOISE)
    experiment = assemble_once(load_config(None, small))
    require_publishable(experiment, {"mine": Callback(lambda seen: None, is_private=True)})
    with pytest.raises(ValueError, match=r"run\.callbacks must depend on .*'exact_one'"):
        require_publishable(experiment, {"exact_one": Callback(lambda seen: True)})
    with pytest.raises(ValueError, match=r"run\.release must be left out: no ε covers a mean"):
        require_publishable(with_facts(experiment, exact_statistics=("a mean",)), {})
    federation = experiment.simulation.federation
    training = federation.algorithm.training._replace(record=None)
    algorithm = federation.algorithm._replace(training=training)
    unclaimed = experiment.simulation._replace(federation=federation._replace(algorithm=algorithm))
    with pytest.raises(ValueError, match=r"this run claims no record-level privacy"):
        require_publishable(experiment._replace(simulation=unclaimed), {})
    deciding = {"exact_one": Callback(lambda seen: True)}
    with pytest.raises(ValueError, match=r"run\.callbacks must depend"):
        running.run(load_config(None, small), tmp_path / "run", callbacks=deciding)
    assert not (tmp_path / "run").exists()


def test_a_run_warns_of_a_delta_that_is_not_below_the_share_of_a_unit():
    """Before its first round: of 3 clients, and of a client's records, of which each has many."""
    experiment = assemble_once(load_config(None, (*SMALL, *PRIVATE, *NOISE)))
    count = int(experiment.population.train.sizes.max())
    for dp_delta, warned in (
        ({"client": 0.3, "record": 1e-5}, []),
        ({"client": 0.4, "record": [1e-5, 1e-5, 1e-5]}, ["3 clients"]),
        ({"record": 1 / count}, [f"{count} records"]),
    ):
        watcher, texts = running.Watcher(), []
        watcher.warn = texts.append
        running.checked_health(experiment._replace(dp_delta=dp_delta), {}, watcher)
        assert len(texts) == len(warned)
        for text, words, unit in zip(texts, warned, dp_delta, strict=False):
            assert text.startswith(f"privacy.{unit}.dp_delta: δ = ") and words in text


def assert_same_release(folder, whole):
    for path in files_in(whole / "release"):
        other = (folder / "release" / path.name).read_bytes()
        assert path.name == "environment.json" or other == path.read_bytes(), path


@telling
def test_a_run_that_was_interrupted_publishes_nothing_until_it_is_done(
    tmp_path, monkeypatch, folder
):
    """The experimenter has seen exact figures, and may have stopped because of them."""
    monkeypatch.setattr(plots, "save", lambda figure, path: None)
    monkeypatch.setattr("fedjax_dp.core.keys.secrets.token_bytes", lambda size: ROOT[:size])
    rounds = steps._rounds

    def stopped(experiment, state, start, *rest):
        *others, _ = rest
        return rounds(experiment, state, start, *others, lambda: True)

    with monkeypatch.context() as patched:
        patched.setattr(steps, "_rounds", stopped)
        execute(tmp_path / "run", *SECRET)
    assert not (tmp_path / "run" / "release").exists()
    summary = read_json(tmp_path / "run", "summary.json")
    assert summary["rounds"] == 0 and "rounds" in summary["not_private"]
    for claim in read_json(tmp_path / "run", "privacy.json")["claims"]:
        assert "after how many rounds the run was interrupted" in claim["not_private"]
    assert execute(tmp_path / "run", resume=True)[0] == 0
    assert_same_release(tmp_path / "run", folder)


@telling
def test_what_may_be_published_of_a_run_can_be_decided_when_it_is_over(
    tmp_path, monkeypatch, folder
):
    monkeypatch.setattr(plots, "save", lambda figure, path: None)
    later = shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(later / "release")
    text = (later / "config.toml").read_text("utf-8")
    (later / "config.toml").write_text(text.replace('release = "private"\n', ""), "utf-8")
    assert execute(later, resume=True)[0] == 0
    assert not (later / "release").exists()
    assert execute(later, "--run.release=private", resume=True)[0] == 0
    assert_same_release(later, folder)
