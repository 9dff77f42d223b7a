"""The other commands: data sets, accounting, the list of keys."""

import itertools
import json
import math
import os

import dp_accounting
import numpy as np
import pytest
import requests
from dp_accounting import pld, rdp
from marks import telling
from run_folders import NOT_PRIVATE, SMALL

from fedjax_dp.cli import privacy
from fedjax_dp.cli.output import plain
from fedjax_dp.core.decimals import rounded_up
from fedjax_dp.data import datasets
from fedjax_dp.experiment.reading import keys


def test_list_shows_what_is_here_and_how_to_get_the_rest(fedjax_dp, tmp_path):
    status, output, _ = fedjax_dp("data", "list", "--data-dir", tmp_path)
    assert status == 0
    for name in datasets.available():
        state = datasets.status(name, tmp_path)
        row = next(line for line in output.splitlines() if line.startswith(f"{name}\t"))
        assert row.split("\t") == [name, "yes" if state.is_present else "no", state.summary]
        if not state.is_present:
            assert state.how_to_get in output
            assert (f"fedjax-dp data fetch {name}, or by hand" in output) == state.can_fetch
    assert datasets.status("digits", tmp_path).is_present
    assert not datasets.status("mnist", tmp_path).is_present
    assert not any(tmp_path.iterdir())


@pytest.mark.needs_data("mnist")
def test_list_sees_files_that_are_there(fedjax_dp, data_dir):
    _, output, _ = fedjax_dp("data", "list", "--data-dir", data_dir)
    row = next(line for line in output.splitlines() if line.startswith("mnist\t"))
    assert row.split("\t")[1] == "yes"


def test_fetching_what_is_built_in_does_nothing(fedjax_dp, tmp_path):
    status, output, _ = fedjax_dp("data", "fetch", "digits", "--data-dir", tmp_path)
    assert status == 0 and "nothing to fetch: all files of digits are here" in output


def test_without_a_network_fetch_names_the_places_tried_and_the_files_needed(
    fedjax_dp, tmp_path, monkeypatch
):
    asked = []

    def unreachable(session, method, url, **_options):
        asked.append(url)
        raise requests.ConnectionError("Name or service not known")

    monkeypatch.setattr(requests.Session, "request", unreachable)
    status, _, error = fedjax_dp("data", "fetch", "mnist", "--data-dir", tmp_path)
    assert status == 2 and error.startswith("error: ") and "Traceback" not in error
    assert asked and all(f"{url}: no connection" in error for url in asked)
    download = datasets.info("mnist").sources[0].downloads[0]
    assert f"Put the file {download.name} (SHA-256 {download.sha256}) into" in error
    assert str(tmp_path / "mnist") in error


def rows_of(table):
    """Reads a table as it is printed where no terminal is."""
    return [tuple(line.split("\t")) for line in table.splitlines()[1:]]


@pytest.mark.parametrize(
    "part",
    [
        *("algorithm.name=fedprox", "algorithm.aggregator=trimmed_mean", "model.name=mlp"),
        *("data.name=digits", "data.partition=shards"),
    ],
)
def test_keys_of_a_part_lists_its_options(fedjax_dp, part):
    status, output, _ = fedjax_dp("run", "--keys", part)
    assert status == 0 and rows_of(output) == keys.describe_choice(part)


ACCOUNT = ("--sampling-rate", 0.1, "--steps", 50, "--delta", 1e-5)


def composed(noise_multiplier, accountant, rate=0.1, steps=50):
    event = dp_accounting.PoissonSampledDpEvent(
        rate, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    account = accountant()
    account.compose(event, steps)
    return account.get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("name", "accountant"), [("rdp", rdp.RdpAccountant), ("pld", pld.PLDAccountant)]
)
def test_epsilon_is_that_of_dp_accounting(fedjax_dp, name, accountant):
    words = ("--noise-multiplier", 1.5, *ACCOUNT, "--accountant", name)
    status, output, _ = fedjax_dp("privacy", "epsilon", *words, "--json")
    answer = json.loads(output)
    assert status == 0 and answer["accountant"] == name
    # By distributions two lattices of different widths agree to what either may add.
    tolerance = {"rdp": 1e-6, "pld": 1e-3}[name]
    assert answer["epsilon"] == pytest.approx(composed(1.5, accountant), rel=tolerance)
    _, output, _ = fedjax_dp("privacy", "epsilon", *words)
    assert f"ε = {rounded_up(answer['epsilon'], 6)} at δ = 1e-05" in output


def test_noise_for_a_small_delta_is_no_more_than_renyi_curves_ask_for(fedjax_dp):
    words = ("--epsilon", 1, "--steps", 1000, "--sampling-rate", 0.01, "--delta", 1e-15)
    found = {}
    for accountant in ("rdp", "pld"):
        _, output, _ = fedjax_dp("privacy", "calibrate", *words, "--accountant", accountant)
        assert f"({accountant})" in output
        _, output, _ = fedjax_dp(
            "privacy", "calibrate", *words, "--accountant", accountant, "--json"
        )
        found[accountant] = json.loads(output)
        assert found[accountant]["by"] == accountant
    noise = [found[name]["noise_multiplier"] for name in ("pld", "rdp")]
    # μ of the central limit; ε = 1 at this δ belongs to 0.1336 by the closed form for Gaussians,
    # and sampled noise, whose losses are skewed, has to stay a little below.
    assert 0.9 < 0.01 * np.sqrt(1000 * np.expm1(noise[0] ** -2)) / 0.13356 < 1
    assert noise[0] < noise[1] < 2.8


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (("--delta", 0.1), "should be well below 1/n"),
        pytest.param(("--delta", 1e-5), "", marks=telling),
        (("--delta", 0.1, "--num-units", 9), ""),
        (("--delta", 0.1, "--num-units", 40), "too large for 40 units"),
        (("--delta", 1e-5, "--num-units", 200_000), "too large for 200000 units"),
    ],
)
def test_a_delta_that_is_not_below_the_share_of_a_unit_is_warned_of(fedjax_dp, words, warned):
    common = ("--sampling-rate", 0.5, "--steps", 2, *words)
    for question in (("epsilon", "--noise-multiplier", 3), ("calibrate", "--epsilon", 1)):
        status, _, errors = fedjax_dp("privacy", *question, *common)
        assert status == 0 and ("warning" in errors) == bool(warned) and warned in errors


def test_noise_beyond_what_accountants_compute_is_refused_by_its_rule(fedjax_dp):
    words = ("--sampling-rate", 0.5, "--steps", 5, "--delta", 1e-5)
    for noise, accountant in itertools.product((1e-200, 1e160), ("rdp", "pld")):
        status, _, errors = fedjax_dp(
            *("privacy", "epsilon", *words, "--noise-multiplier", noise, "--accountant", accountant)
        )
        assert status == 2 and "noise_multiplier must be 0, or from 1e-100 to 1e9" in errors


def test_an_epsilon_that_is_infinite_is_written_as_text():
    assert plain({"epsilon": [np.float64("inf"), -math.inf]}) == {"epsilon": ["inf", "-inf"]}


def test_calibrate_finds_the_smallest_noise_within_a_budget(fedjax_dp):
    status, output, _ = fedjax_dp("privacy", "calibrate", "--epsilon", 2.0, *ACCOUNT, "--json")
    noise = json.loads(output)["noise_multiplier"]
    assert status == 0
    assert composed(noise, rdp.RdpAccountant) <= 2.0 * (1 + 1e-9)
    assert composed(noise * (1 - 1e-4), rdp.RdpAccountant) > 2.0


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"--noise-multiplier": 0}, "--noise-multiplier must be above 0"),
        ({"--sampling-rate": 0}, "--sampling-rate must be in"),
        ({"--steps": 0}, "--steps must be an integer of"),
        ({"--delta": 1}, "--delta must be in (0, 1)"),
        ({"--accountant": "rpd"}, "did you mean 'rdp'?"),
    ],
)
def test_accounting_out_of_range_is_refused(fedjax_dp, changes, rule):
    given = {"--noise-multiplier": 1} | dict(zip(ACCOUNT[::2], ACCOUNT[1::2], strict=True))
    words = [word for pair in (given | changes).items() for word in pair]
    status, _, error = fedjax_dp("privacy", "epsilon", *words)
    assert status == 2 and rule in error and "Traceback" not in error


def test_compare_draws_a_curve_for_each_setting(fedjax_dp, tmp_path):
    picture = tmp_path / "curves.png"
    words = ("--setting", "1.5,0.1", "--setting", "3,1", "--steps", 50, "--delta", 1e-5)
    status, output, _ = fedjax_dp("privacy", "compare", *words, "--output", picture, "--json")
    answer = json.loads(output)
    assert status == 0 and picture.read_bytes().startswith(b"\x89PNG")
    expected = composed(1.5, rdp.RdpAccountant), composed(3.0, rdp.RdpAccountant, rate=1.0)
    assert list(answer["epsilon"].values()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--setting", "1,2"), "rate must be in (0, 1]"),
        (("--setting", "-1,0.5"), "noise multiplier must be above 0"),
        (("--setting", "1.50,0.1"), "--setting must be different for each curve"),
        (("--output", os.devnull + "/curves.png"), "--output must be a folder"),
    ],
)
def test_all_settings_are_checked_before_the_first_curve(fedjax_dp, monkeypatch, words, rule):
    monkeypatch.setattr(privacy, "Ledger", None)
    words = ("--setting", "1.5,0.1", "--steps", 50, "--delta", 1e-5, *words)
    status, _, error = fedjax_dp("privacy", "compare", *words)
    assert status == 2 and rule in error and "Traceback" not in error


def test_report_needs_a_run(fedjax_dp, tmp_path):
    status, _, error = fedjax_dp("privacy", "report", tmp_path)
    assert status == 2 and "must be a folder with privacy.md and .json" in error
    (tmp_path / "privacy.md").write_text("# Privacy\n\nwords")
    event = {"type": "GaussianDpEvent", "noise_multiplier": 1.0}
    claim = {"unit": "client", "histories": [{"units": [0, 2], "event": event}]}
    (tmp_path / "privacy.json").write_text(json.dumps({"claims": [claim]}))
    status, output, _ = fedjax_dp("privacy", "report", tmp_path)
    assert status == 0 and output.startswith("# Privacy\n\nwords")
    assert f"clients [0, 2]: {json.dumps(event)}" in output
    _, output, _ = fedjax_dp("privacy", "report", tmp_path, "--json")
    assert json.loads(output)["statement"] == {"claims": [claim]}


@telling
def test_a_run_gets_the_next_free_folder(fedjax_dp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine-001").mkdir(parents=True)
    words = ("--run.name=mine", "--execution.clients_per_chunk=1", "--run.rounds", 1)
    status, output, _ = fedjax_dp("run", *SMALL[:1], *NOT_PRIVATE, *words)
    assert status == 0 and "run folder: runs/mine-002" in output
    summary = json.loads((tmp_path / "runs" / "mine-002" / "summary.json").read_text())
    assert summary["name"] == "mine" and summary["rounds"] == 1
    assert not any((tmp_path / "runs" / "mine-001").iterdir())
