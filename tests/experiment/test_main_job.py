"""The main job: one command without arguments, and every file that it leaves."""

import os
import pathlib
import re
import struct
import tomllib

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from marks import telling
from run_folders import assert_same_run, in_subprocess, metrics, read_json, saved_arrays

from fedjax_dp.core.decimals import rounded_up
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import population_of

# One run serves all.
pytestmark = [pytest.mark.xdist_group("main job"), telling]
ROUNDS = 30


@pytest.fixture(scope="module")
def main_job(once, compilation_cache):
    """The command as a newcomer types it, but for where its folder goes."""

    def build(folder):
        done = in_subprocess("run", "--output", str(folder / "run"), cache=compilation_cache)
        assert done.returncode == 0, done.stderr
        (folder / "printed.txt").write_text(done.stderr + done.stdout, encoding="utf-8")

    folder = once("main_job", build)
    return folder / "run", (folder / "printed.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(main_job):
    return main_job[0]


def test_the_promise_is_kept(folder):
    summary = read_json(folder, "summary.json")
    assert summary["test_accuracy"] >= 0.85
    assert 0 < summary["epsilon"] <= 8
    assert summary["dp_delta"] <= 1e-5
    assert summary["rounds"] == ROUNDS
    assert 0 < summary["seconds_compiling"] + summary["seconds_rounds"] < summary["seconds"] < 90
    assert summary["algorithm"] == "dp_sgd" and summary["num_clients"] == 10
    assert summary["num_parameters"] == 64 * 10 + 10
    assert 0 <= summary["padding_share"] < 1
    assert summary["worst_client_accuracy"] <= summary["mean_client_accuracy"]


def test_progress_shows_phase_round_accuracy_and_epsilon(main_job):
    lines = main_job[1].splitlines()
    assert lines[0] == "loading libraries" and "compiling" in lines
    assert lines.index("compiling") < lines.index(
        next(line for line in lines if line.startswith(f"round 1 of {ROUNDS}, accuracy 0."))
    )
    summary = read_json(main_job[0], "summary.json")
    last = next(line for line in lines if line.startswith(f"round {ROUNDS} of {ROUNDS}"))
    assert (
        f"accuracy {summary['test_accuracy']:.3f}, ε {rounded_up(summary['epsilon'])} (record)"
        in last
    )
    assert str(main_job[0]) in lines[-1]


def test_the_resolved_configuration_is_the_default(folder):
    loaded, default = (load_config(folder / "config.toml"), load_config(None))
    # What was left open is written down as it was settled.
    assert loaded.execution.devices in range(1, 1 + (os.cpu_count() or 1))
    execution = loaded.execution.model_copy(update={"devices": default.execution.devices})
    assert loaded.model_copy(update={"execution": execution}) == default
    tables = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    assert tables["run"]["rounds"] == ROUNDS and tables["privacy"]["record"]["epsilon"] == 8.0


def test_every_client_epsilon_agrees_with_dp_accounting(folder):
    """Nothing but configuration, sizes and noise goes in; ε is composed by dp-accounting alone."""
    tables = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    claim = read_json(folder, "privacy.json")["claims"][0]
    sizes = population_of(load_config(folder / "config.toml")).train.sizes
    batch, epochs = tables["training"]["batch_size"], tables["training"]["num_epochs"]
    noise = claim["noise_multiplier_per_unit"]
    assert len(sizes) == len(noise) == len(claim["epsilon_per_unit"]) == 10
    for i, size in enumerate(sizes):
        steps = ROUNDS * int(np.ceil(np.ceil(size / batch) * epochs))
        rate = min(1.0, batch / size)
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise[i]))
        accountant = rdp.RdpAccountant(
            neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        )
        accountant.compose(event, steps)
        expected = accountant.get_epsilon(tables["privacy"]["record"]["dp_delta"])
        assert claim["epsilon_per_unit"][i] == pytest.approx(expected, rel=1e-6)
        assert claim["num_compositions"][i] == steps
    assert claim["epsilon"] == max(claim["epsilon_per_unit"])
    assert read_json(folder, "summary.json")["epsilon"] == claim["epsilon"]


def test_the_statement_is_complete(folder):
    claims = read_json(folder, "privacy.json")["claims"]
    assert [claim["unit"] for claim in claims] == ["record"]
    claim = claims[0]
    assert claim["relation"] == "zero_out"
    assert claim["samplers"] == ["Poisson sampling"]
    assert claim["mechanisms"] == ["Gaussian noise"]
    assert claim["accountant"] == "rdp"
    assert claim["dp_delta"] == 1e-5
    assert claim["clip_norm_per_unit"] == [1.0] * 10
    low, high = claim["noise_multiplier"]
    assert low == min(claim["noise_multiplier_per_unit"]) > 0
    assert high == max(claim["noise_multiplier_per_unit"])
    text = (folder / "privacy.md").read_text(encoding="utf-8")
    for words in ("(ε, δ)-differentially private", "1e-05", "zero_out", "Gaussian", "Poisson"):
        assert words in text
    lines = text.partition("## Files")[0].splitlines()
    rows = [line.split("|")[1:4] for line in lines if line.startswith("| ")][1:]
    assert [int(client) for client, _, _ in rows] == list(range(10))
    np.testing.assert_allclose([float(e) for _, e, _ in rows], claim["epsilon_per_unit"], atol=1e-4)
    assert [int(n) for _, _, n in rows] == claim["num_compositions"]


def test_the_page_on_statements_quotes_that_of_the_main_job(folder):
    """All paragraphs of the text, and the text for a paper; versions may be others."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "privacy" / "statement.md"
    shown = page.read_text("utf-8")

    def words(text):
        return re.sub(r"\d+(\.\d+){2,}", "", text).split()

    said = (folder / "privacy.md").read_text("utf-8").partition("| client |")[0]
    quoted = "\n".join(line[1:] for line in shown.splitlines() if line.startswith(">"))
    assert words("# Privacy ## Record level " + quoted) == words(said)
    (block,) = re.findall(r"^```latex\n(.*?)^```$", shown, re.DOTALL | re.MULTILINE)
    assert words(block) == words((folder / "privacy.tex").read_text("utf-8"))


def test_metrics_hold_every_round(folder):
    rows = metrics(folder)
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    spent = [row["epsilon_record"] for row in rows]
    assert np.all(np.diff(spent) > 0)
    summary = read_json(folder, "summary.json")
    assert spent[-1] == summary["epsilon"]
    assert rows[-1]["test_accuracy"] == summary["test_accuracy"]
    for row in rows:
        assert row["num_participants"] == 10 and row["num_non_finite"] == 0
        assert 0 <= row["test_accuracy"] <= 1 and 0 <= row["clipped_example_share"] <= 1
        assert row["worst_client_accuracy"] <= row["best_client_accuracy"]


def test_the_last_checkpoint_is_the_end(folder):
    step, arrays, extra = saved_arrays(folder)
    assert step == ROUNDS
    assert any(array.shape == (64, 10) for array in arrays.values())
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert "record" in extra["ledgers"]
    assert {p.name for p in (folder / "checkpoint").iterdir()} == {"20", "30", "digests"}


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def test_plots_are_pictures(folder):
    from PIL import Image

    names = {path.name for path in (folder / "plots").glob("*.png")}
    assert names == {
        *("accuracy_epsilon.png", "accuracy_bytes.png", "client_accuracy.png"),
        *("partition.png", "update_norms.png"),
    }
    in_papers = {path.name for path in (folder / "plots").glob("*.pdf")}
    assert in_papers == {name.replace(".png", ".pdf") for name in names}
    for name in names:
        width, height = png_size(folder / "plots" / name)
        assert width >= 600 and height >= 400
        with Image.open(folder / "plots" / name) as image:
            colours = image.convert("RGB").getcolors(maxcolors=1 << 24)
        assert len(colours) > 20, "a picture with curves has more than paper and ink"


def test_tensorboard_events_are_the_metrics(folder):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    scalars = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            header = data[at : at + 8]
            (length,) = struct.unpack("<Q", header)
            assert struct.unpack("<I", data[at + 8 : at + 12])[0] == masked_crc32c(header)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    rows = metrics(folder)
    for name in ("test_accuracy", "epsilon_record", "train_loss", "worst_client_accuracy"):
        assert list(scalars[name]) == [row["round"] for row in rows]
        np.testing.assert_allclose(
            list(scalars[name].values()), [row[name] for row in rows], rtol=1e-6
        )


@pytest.mark.slow
def test_the_file_that_a_run_writes_runs_again(folder, tmp_path, compilation_cache):
    again = tmp_path / "again"
    words = ("run", str(folder / "config.toml"), "--output", str(again))
    done = in_subprocess(*words, cache=compilation_cache)
    assert done.returncode == 0, done.stderr
    assert_same_run(folder, again)


def test_summary_and_metrics_are_plain_json(folder):
    for name in ("summary.json", "privacy.json", "metrics.jsonl"):
        text = (folder / name).read_text(encoding="utf-8")
        assert "NaN" not in text and "Infinity" not in text
    assert not list(folder.glob("*.tmp"))
