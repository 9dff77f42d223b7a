"""The page about a run shows what its folder holds, says what may be published, and no more."""

import itertools
import json
import re
import shutil
import threading
import time

import numpy as np
import pytest
from marks import telling
from pages import Page, charts
from run_folders import SMALL, execute

from fedjax_dp.experiment import load_config, report
from fedjax_dp.experiment import run as run_experiment
from fedjax_dp.experiment.components.experiment import Callback
from fedjax_dp.experiment.running.release import marks_of
from fedjax_dp.experiment.running.run_folder import locked

CONFIG = """
[run]
name = "wards"
seed = 7
secret = {secret}
rounds = 4

[data]
name = "digits"

[algorithm]
name = "fedprox"

[privacy]
unit = "both"

[privacy.client]
epsilon = 3.5

[privacy.record]
epsilon = [1.0, 8.0, 2.0]
"""
ROWS = [
    {
        "round": i,
        "train_loss": 2.5 / i,
        "num_participants": 9,
        "num_dropped": i % 2,
        "num_non_finite": 2,
        "num_overflow": 0,
        "bytes_up": 1_500_000 * i,
        "bytes_down": 4_000_000,
        "epsilon_client": 0.75 * i,
        "epsilon_record": 2.0 * i,
        "epsilon_record_smallest": 0.25 * i,
        "simulated_seconds": 10.0 * i,
        "round_seconds": 10.0,
        "client_accuracy_q50": 0.1 * i,
    }
    | ({} if i % 2 else {"test_accuracy": 0.2 * i, "worst_client_accuracy": 0.05 * i})
    for i in range(1, 5)
]
SUMMARY = {
    "name": "wards",
    "algorithm": "fedprox",
    "rounds": 4,
    "num_clients": 3,
    "test_accuracy": 0.8,
    "test_accuracy_of": "the shared model",
    "worst_client_accuracy": 0.2,
    "worst_client_accuracy_after_local": 0.3125,
    "epsilon_client": 3.2,
    "epsilon_record": 8.0,
    "dp_delta": 1e-5,
    "covered_models": "the shared model",
    "warnings": ["a thing & another"],
    "ended": "finished",
    "stopped_by": None,
    "not_private": ["test_accuracy", "warnings"],
}
STATEMENT = """# Privacy

## Client level

With **ε = 3.2**, by `rdp`.

| client | ε |
|---|---|
| Ward\\|A | 3 |
"""


def write(folder, *, rows=ROWS, summary=SUMMARY, config=CONFIG, secret=True, statement=STATEMENT):
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(config.replace("{secret}", str(secret).lower()), "utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    (folder / "environment.json").write_text(
        json.dumps({"libraries": {"jax": "1.2.3"}, "cores": 2})
    )
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
        (folder / "privacy.md").write_text(statement, "utf-8")
        (folder / "privacy.json").write_text(json.dumps({"claims": []}))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "run")


def page_of(folder, **options):
    found = report(folder, **options)
    return found, found.file.read_text("utf-8")


ROUNDS = range(1, 5)


def is_close(curve, points):
    """Requires points within half a hundredth of the extent of a curve in each direction."""
    seen, given = np.array(curve), np.array(list(points), float)
    assert seen.shape == given.shape
    extent = np.maximum(np.ptp(given, axis=0), np.max(np.abs(given), axis=0))
    assert np.all(np.abs(seen - given) <= 0.005 * extent), (seen, given)


def test_a_page_shows_curves_figures_and_texts_of_its_folder(folder):
    found, html = page_of(folder)
    assert found == (folder / "report.html", "finished", 4, "exact")
    drawn, page = charts(html), Page(html)
    is_close(drawn["Accuracy by round"].curves[0], [(2, 0.4), (4, 0.8)])
    is_close(drawn["Loss by round"].curves[0], [(i, 2.5 / i) for i in ROUNDS])
    spent = drawn["ε of one client by round"]
    is_close(spent.curves[0], [(i, 0.75 * i) for i in ROUNDS])
    assert spent.limits == pytest.approx([3.5], abs=0.02)
    spent = drawn["ε of one record by round"]
    is_close(spent.curves[0], [(i, 2 * i) for i in ROUNDS])
    is_close(spent.curves[1], [(i, 0.25 * i) for i in ROUNDS])
    assert spent.limits == pytest.approx([8.0, 1.0], abs=0.05)
    assert spent.legend == ["largest", "smallest", "largest budget", "smallest budget"]
    clients = drawn["Clients by round"]
    assert clients.legend == ["drawn", "contributed", "dropped out or late", "update not finite"]
    is_close(clients.curves[1], zip(ROUNDS, (6, 7, 6, 7), strict=True))
    up, down = drawn["Traffic by round"].curves
    is_close(up, [(i, 1.5 * i) for i in ROUNDS])
    is_close(down, [(i, 4) for i in ROUNDS])
    is_close(drawn["Accuracy by simulated time"].curves[0], [(20, 0.4), (40, 0.8)])
    is_close(drawn["Accuracy over clients, as received"].curves[0], [(2, 0.1), (4, 0.2)])
    for text in (
        *("wards: FedProx", "Finished: round 4 of 4.", "ε of one client 3.2 of 3.5"),
        *(
            "ε of one record 8 of 1 to 8, by client",
            "a thing & another",
            "jax 1.2.3",
            "up 15 MB 3.75 MB",
        ),
        *("test accuracy of the shared model 0.8", "contributed 26 6.5", "With ε = 3.2 , by rdp"),
        *("Ward|A 3", 'name = "wards"', "worst client 0.2 0.3125", "All metrics of round 4"),
    ):
        assert text in page.text, text


def test_a_page_is_one_file_with_headings_headers_and_descriptions(folder):
    page = Page(page_of(folder)[1])
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form"}
    for tag, attrs in page.tags:
        assert not {"src", "srcset", "data", "action", "style"} & attrs.keys(), (tag, attrs)
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
        assert attrs.get("href", "#").startswith("#"), attrs
    named = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(named) == len(set(named))
    assert {"#" + name for name in named} == {attrs["href"] for attrs in page.all("a")}
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert page.all("html") == [{"lang": "en"}] and page.all("th")
    assert all(attrs.get("scope") in ("row", "col") for attrs in page.all("th"))
    for attrs in page.all("svg"):
        assert attrs.get("aria-hidden") == "true" or (attrs["role"], bool(attrs["aria-label"])) == (
            "img",
            True,
        )
    assert not [a for a in page.all("meta") if a.get("http-equiv") == "refresh"]


HOSTILE = "<script>alert(1)</script>\"'>&amp;"


def test_scores_of_participants_are_shown_as_means_and_make_the_page_secret(folder):
    reports = [(0, [2], {"accuracy": 0.5}), (0, [0], {"accuracy": 0.7, "<b>": 3.0})]
    reports += [(2, [2], {"accuracy": 0.9})]
    names = ("round", "clients", "scores")
    lines = [json.dumps(dict(zip(names, each, strict=True))) for each in reports]
    # The last line is being written.
    (folder / "scores.jsonl").write_text("\n".join(lines) + '\n{"round": 3, "cli')
    found, html = page_of(folder)
    assert found.mark == "secret"
    drawn, page = charts(html), Page(html)
    chart = drawn["Mean score by round"]
    assert chart.legend == ["<b>", "accuracy"]
    is_close(chart.curves[1], [(1, 0.6), (3, 0.9)])
    assert "accuracy 3 0.5 0.9" in page.text and "Scores of participants" in page.text
    (folder / "scores.jsonl").unlink()
    assert page_of(folder)[0].mark == "exact"


def test_bytes_of_nodes_are_beside_those_of_the_meter(folder, tmp_path):
    sent = {"wire_bytes_up": 250_000, "wire_bytes_down": 3_250_000}
    rows = [{**row, **sent} for row in ROWS]
    text = page_of(write(tmp_path / "deployed", rows=rows))[1]
    for way, total, each in (
        ("up from nodes", "1 MB", "250 kB"),
        ("down to nodes", "13 MB", "3.25 MB"),
    ):
        assert re.search(rf"{way}</t[hd]>\s*<td[^>]*>{total}</td>\s*<td[^>]*>{each}</td>", text)
        assert way not in page_of(folder)[1]


def test_texts_of_a_folder_are_text(tmp_path):
    config = CONFIG.replace('"wards"', f"'''{HOSTILE}'''").replace('"digits"', f"'''{HOSTILE}'''")
    rows = [{"round": 4, HOSTILE: HOSTILE, "test_accuracy": HOSTILE, "epsilon_client": HOSTILE}]
    summary = {k: HOSTILE for k in SUMMARY} | {"rounds": 4, "warnings": [HOSTILE, HOSTILE]}
    statement = (
        f"# Privacy\n\n## {HOSTILE}\n\n{HOSTILE} ![x](http://a.b/c) [y](http://d.e)\n\n<b>\n"
    )
    made = {"rows": rows, "summary": summary, "config": config, "statement": statement}
    place = write(tmp_path / "<b>&amp;", **made)
    (place / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE, "libraries": HOSTILE}))
    page = Page(page_of(place)[1])
    assert not {"script", "img", "b"} & ({tag for tag, _ in page.tags} - {"b"})
    assert all(attrs == {} for attrs in page.all("b")) and len(page.all("a")) == len(page.all("h2"))
    assert page.text.count(HOSTILE) >= 12 and "<b>&amp;" in page.text
    assert "![x](http://a.b/c) [y](http://d.e)" in page.text


def test_values_that_cannot_be_drawn_are_left_out(tmp_path):
    bad = [None, True, "0.5", [0.5], {"a": 1}, 10**400, float("nan"), float("inf"), -1e300]
    rows = [{"round": i, "test_accuracy": v, "train_loss": v} for i, v in enumerate(bad, 1)]
    rows.append({"round": len(bad) + 1, "test_accuracy": 0.5})
    place = write(tmp_path / "run", rows=rows, summary=None)
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"round": 11, "test_accuracy": 0.9')
    found, html = page_of(place)
    assert found.rounds == 10 and list(charts(html)) == ["Accuracy by round"]
    assert len(charts(html)["Accuracy by round"].curves[0]) == 1


def test_a_run_without_privacy_and_tests_has_a_page(tmp_path):
    config = '[run]\nrounds = 2\n[data]\nname = "digits"\n[privacy]\nunit = "none"\n'
    rows = [{"round": i, "train_loss": 1.0, "num_participants": 2} for i in (1, 2)]
    summary = {"rounds": 2, "warnings": [], "not_private": ["warnings"]}
    place = write(tmp_path / "run", rows=rows, summary=summary, config=config, statement="None.")
    page = Page(page_of(place)[1])
    assert "privacy none is claimed" in page.text and "test accuracy" not in page.text
    assert "Warnings" not in page.text and "Privacy budget" not in page.text


@pytest.mark.parametrize(
    ("change", "state", "said"),
    [
        ({}, "finished", "Finished: round 4 of 4."),
        (
            {"rounds": 3, "ended": "budget"},
            "budget",
            "Stopped after round 3 of 4: one more would exceed the privacy",
        ),
        (
            {"rounds": 3, "ended": "callback", "stopped_by": "early"},
            "callback",
            "after round 3 of 4 by the callback early",
        ),
        ({"rounds": 3, "ended": "interrupted"}, "interrupted", "Interrupted after round 3 of 4"),
        # More rounds were asked for, of which none is done.
        ({"rounds": 3}, "interrupted", "Interrupted after round 3 of 4"),
        (None, "interrupted", "Interrupted after round 3 of 4; fedjax-dp run --resume"),
        # The summary of an earlier end, whose ε is too small by now.
        ({"rounds": 2}, "interrupted", "Interrupted after round 3 of 4; fedjax-dp run --resume"),
    ],
)
def test_the_state_of_a_run_is_that_of_its_folder(tmp_path, change, state, said):
    rows = ROWS if change == {} else ROWS[:3]
    summary = None if change is None else SUMMARY | change
    found, html = page_of(write(tmp_path / "run", rows=rows, summary=summary))
    page = Page(html)
    assert found.state == state and said in page.text
    is_shown = change not in (None, {"rounds": 2})
    assert ("With ε = 3.2" in page.text) == is_shown
    assert ("The statement is written when the run ends." in page.text) != is_shown
    assert f"ε of one client {3.2 if is_shown else 2.25} of 3.5" in page.text


def refreshes(html):
    return [a["content"] for a in Page(html).all("meta") if a.get("http-equiv") == "refresh"]


def test_a_watched_page_follows_the_run_to_its_end(tmp_path, monkeypatch):
    place = write(tmp_path / "run", rows=ROWS[:1], summary=SUMMARY | {"rounds": 1})
    lock, seen, slept = locked(place), [], []

    def sleep(seconds):
        html = (place / "report.html").read_text("utf-8")
        slept.append((seconds, refreshes(html), "With ε = 3.2" in Page(html).text))
        if len(slept) == 1:
            write(place, rows=ROWS[:2], summary=None)
        else:
            write(place)
            lock.release()

    monkeypatch.setattr(time, "sleep", sleep)
    last = report(place, every=2.5, progress=seen.append)
    assert [(each.state, each.rounds) for each in seen] == [
        *(("running", 1), ("running", 2), ("finished", 4))
    ]
    # The statement in the folder is that of an earlier end.
    assert slept == [(2.5, ["3"], False)] * 2 and last == seen[-1]
    html = (place / "report.html").read_text("utf-8")
    assert refreshes(html) == [] and "With ε = 3.2" in Page(html).text
    assert not list(place.glob("*.tmp"))


def test_a_page_that_is_no_longer_watched_is_not_read_again(tmp_path, monkeypatch):
    place = write(tmp_path / "run", rows=ROWS[:1], summary=None)

    def stop(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", stop)
    lock = locked(place)
    with pytest.raises(KeyboardInterrupt):
        report(place, every=1.0)
    lock.release()
    html = (place / "report.html").read_text("utf-8")
    assert "Under way: round 1 of 4." in Page(html).text and refreshes(html) == []


def test_a_look_at_the_lock_takes_it_from_no_run(tmp_path):
    place = write(tmp_path / "run")
    assert report(place).state == "finished" and not (place / ".lock").exists()
    lock = locked(place)
    assert report(place).state == "running"
    lock.release()
    assert report(place).state == "finished"
    locked(place).release()


def test_a_run_waits_for_a_look_at_its_lock(tmp_path):
    place, is_held = write(tmp_path / "run"), threading.Event()

    def look():
        lock = locked(place)
        is_held.set()
        time.sleep(0.05)
        lock.release()

    other = threading.Thread(target=look)
    other.start()
    assert is_held.wait(10)
    locked(place).release()
    other.join()


def marks_said(html):
    return [
        attrs["class"].split()[-1]
        for attrs in Page(html).all("p")
        if "mark" in attrs.get("class", "").split()
    ]


@pytest.mark.parametrize("secret", [True, False])
def test_each_part_says_what_the_marks_of_its_files_say(tmp_path, secret):
    place = write(tmp_path / "run", secret=secret)
    found, html = page_of(place)
    marks = marks_of(place, is_secret=secret)
    of_page, *of_parts = marks_said(html)
    assert found.mark == of_page == marks["report.html"] == ("exact" if secret else "secret")
    titles = [attrs["id"] for attrs in Page(html).all("h2")]
    said = dict(zip(titles, of_parts, strict=True))
    files = {"privacy": "privacy.md", "configuration": "config.toml"}
    files |= {"environment": "environment.json"}
    for part, mark in said.items():
        assert mark == marks[files.get(part, "metrics.jsonl")], part


def as_release(place):
    release = place / "release"
    names = ("config.toml", "environment.json", "summary.json", "privacy.md", "privacy.json")
    release.mkdir()
    for name in names[:4]:
        shutil.copy(place / name, release / name)
    marks = {"config.toml": "public", "environment.json": "public"}
    marks |= dict.fromkeys(names[2:], "covered")
    (release / "privacy.json").write_text(json.dumps({"claims": [], "files": marks}))
    return release


def test_the_page_of_a_release_has_only_what_is_marked_for_publication(tmp_path):
    """Also where an exact file or key was put beside it."""
    release = as_release(write(tmp_path / "run"))
    shutil.copy(tmp_path / "run" / "metrics.jsonl", release)
    found, html = page_of(release)
    page = Page(html)
    assert found[1:] == ("released", 4, "covered") and charts(html) == {}
    assert set(marks_said(html)) == {"covered", "public"}
    assert [attrs["id"] for attrs in page.all("h2")] == [
        *("overview", "privacy", "configuration", "environment")
    ]
    for text in ("a thing", "0.8", "0.3125", str(tmp_path), "metrics of round"):
        assert text not in page.text, text
    assert "This page may be published: yes ;" in page.text and "ε of one client 3.2" in page.text


@pytest.mark.parametrize("inside", ["whole.html", "deeper/whole.html"])
def test_the_page_of_a_whole_run_is_not_put_into_a_release(folder, inside):
    release = as_release(folder)
    before = sorted(release.rglob("*"))
    with pytest.raises(
        ValueError, match="output must not be in a folder release: the report of th"
    ):
        report(folder, release / inside)
    assert sorted(release.rglob("*")) == before
    assert report(release, release / inside).mark == "covered"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.toml", "[run", "config.toml is not valid TOML"),
        ("summary.json", "{", "summary.json must be JSON"),
        ("summary.json", "[]", "summary.json must hold an object"),
        ("privacy.json", "[]", "privacy.json must hold an object"),
        ("privacy.md", "\0", "privacy.md, line 1 must be text in UTF-8"),
    ],
)
def test_a_damaged_file_is_named(folder, name, text, message):
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        report(folder)
    assert not (folder / "report.html").exists()


def test_the_command_writes_a_page_and_refuses_what_is_no_run(fedjax_dp, folder, tmp_path):
    status, output, _ = fedjax_dp("report", folder)
    assert status == 0 and output == f"wrote {folder / 'report.html'}\n"
    page = tmp_path / "deep" / "a.html"
    status, output, _ = fedjax_dp("report", folder, "--output", page, "--watch", "--json")
    assert (
        status == 0
        and page.is_file()
        and json.loads(output)
        == {
            **{"version": 1, "command": "report", "status": 0, "file": str(page)},
            **{"state": "finished", "rounds": 4, "mark": "exact"},
        }
    )
    (tmp_path / "empty").mkdir()
    # An exported app, with the connections of Flower.
    flower = tmp_path / "app" / ".flwr"
    flower.mkdir(parents=True)
    (flower / "config.toml").write_text("[superlink]\n")
    config = folder / "config.toml"
    rule = "folder must be a run folder with a config.toml, and environment.json or summary.json"
    for words, message in (
        ((tmp_path / "empty",), f"{rule}, got"),
        ((tmp_path / "none",), f"{rule}, got"),
        ((flower.parent,), f"{rule}, got"),
        ((flower,), f"{rule}, got"),
        ((tmp_path,), f"{rule}; 'run' in it is one, of 1, got"),
        ((config,), "folder must be a folder"),
        ((folder, "--output", config), "output must end in .html, got"),
        ((folder, "--every", "2"), "--every must come with --watch, got 2"),
        ((folder, "--watch", "--every", "0"), "every must be above 0, got 0"),
    ):
        before = config.read_bytes()
        status, _, errors = fedjax_dp("report", *words)
        assert status == 2 and message in errors, errors
        assert config.read_bytes() == before


@telling
def test_a_run_has_a_page_while_it_is_under_way_and_at_its_end(tmp_path, no_pictures):
    place, seen = tmp_path / "run", []

    def look(progress):
        seen.append(page_of(progress.folder))

    config = load_config(None, (*SMALL, "--run.evaluate_every=1"))
    run_experiment(config, place, callbacks={"look": Callback(look)})
    assert [(found.state, found.rounds) for found, _ in seen] == [("running", 1), ("running", 2)]
    assert all("Accuracy by round" in charts(html) for _, html in seen)
    marks = json.loads((place / "privacy.json").read_text("utf-8"))["files"]
    assert marks["report.html"] == "secret"
    found, html = page_of(place)
    assert (found.state, found.mark) == ("finished", "secret")
    assert "Record level" in Page(html).text
    assert execute(place, "--run.rounds=2", resume=True)[0] == 0
