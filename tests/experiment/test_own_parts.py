"""Parts of the user, named by a configuration, serve a whole run."""

import pathlib
import sys

import jax
import numpy as np
import optax
import pytest
from marks import telling
from run_folders import (
    NOT_PRIVATE,
    SMALL,
    assert_same_run,
    die_and_resume,
    execute,
    metrics,
    read_json,
)
from safetensors.numpy import load_file

from fedjax_dp.core.registry import imported
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.components.callbacks import CALLBACKS, callbacks_of
from fedjax_dp.experiment.running.loading import evaluate_run, load_run
from fedjax_dp.experiment.schema.constraints import ConfigError
from fedjax_dp.experiment.studies import sweep
from fedjax_dp.experiment.studies.audits import audit_experiment
from fedjax_dp.io.params import read_params, write_params

OWN = pathlib.Path(__file__).parents[1] / "own"
LANGUAGE, PARTS = OWN / "language.py", OWN / "parts.py"
TEXTS = ("abcdefgh", "bdfhjl", "acegik", "lkjihgfedc", "aaaa", "cfilcfil", "hgfe")

pytestmark = [pytest.mark.xdist_group("own parts"), pytest.mark.usefixtures("no_pictures")]


@pytest.fixture
def words(tmp_path):
    """A private run of the language model on the table."""
    lines = [f"user{i % 4}\t{TEXTS[i % len(TEXTS)]}\n" for i in range(60)]
    (tmp_path / "table.tsv").write_text("".join(lines), encoding="utf-8")
    return (
        f"--data.name={LANGUAGE}:table",
        f"--data.options.path={tmp_path / 'table.tsv'}",
        "--data.partition=natural",
        f"--model.name={LANGUAGE}:model",
        "--model.options.width=4",
        "--algorithm.name=dp_fedavg",
        "--privacy.unit=client",
        "--training.learning_rate=0.5",
        "--training.batch_size=4",
        '--run.metrics=["perplexity"]',
        "--run.rounds=4",
        "--run.checkpoint_every=2",
        "--execution.devices=1",
    )


@telling
def test_a_user_defined_language_model_runs_dies_resumes_is_evaluated_and_exported(words, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert execute(whole, *words)[0] == 0
    die_and_resume(folder, 3, *words)
    assert_same_run(folder, whole)
    summary = read_json(folder, "summary.json")
    assert summary["name"] == "table", "a run is named by its data"
    row = metrics(folder)[-1]
    # Each example weighs the same in the loss, and each token in the perplexity.
    assert row["test_perplexity"] == summary["test_perplexity"] > 1

    run = load_run(folder)
    found = evaluate_run(run)
    assert found["test_perplexity"] == summary["test_perplexity"]
    test = run.experiment.population.test.client(0)
    logits = np.asarray(run.model.predict(run.params, test["x"]), np.float64)
    logs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    is_target = test["y"] >= 0
    each = np.take_along_axis(logs, np.maximum(test["y"], 0)[..., None], axis=-1)[..., 0]
    assert found["test_perplexity"] == pytest.approx(np.exp(-each[is_target].mean()), rel=1e-5)

    write_params(tmp_path / "out.safetensors", run.params)
    elsewhere = load_file(tmp_path / "out.safetensors")
    assert elsewhere.keys() == {
        f"params/{name}" for name in ("Dense_0/bias", "Dense_0/kernel", "Embed_0/embedding")
    }
    np.testing.assert_array_equal(
        elsewhere["params/Dense_0/kernel"], np.asarray(run.params["params"]["Dense_0"]["kernel"])
    )
    again = load_config(None, [*words, f"--model.pretrained={tmp_path / 'out.safetensors'}"])
    experiment = assemble(again)
    start = experiment.simulation.federation.shared(experiment.simulation.init(jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, start, run.params)


@pytest.mark.slow
def test_a_model_of_several_inputs_is_audited(words):
    record = ("--algorithm.name=dp_sgd", "--privacy.unit=record")
    plain = [w for w in words if not w.startswith(("--algorithm.name", "--privacy.unit"))]
    experiment = assemble(load_config(None, [*plain, *record]))
    report = audit_experiment(experiment, num_canaries=8, num_runs=1, num_rounds=2)
    assert not report.is_violated and report.steps["record"]


@telling
def test_own_parts_are_swept_and_stopped_by_an_own_callback(words, tmp_path):
    (tmp_path / "study.toml").write_text("[run]\nrounds = 4\n", encoding="utf-8")
    rule = "{metric='test_perplexity', patience=1, min_change=1e9}"
    stops = [f"--run.callbacks.early_stopping={rule}"]
    study = sweep.Study(
        name="own",
        file=tmp_path / "study.toml",
        axes={"width": {str(n): (f"--model.options.width={n}",) for n in (2, 3)}},
        rows="width",
        columns="width",
        metrics={"test_perplexity": 1.0},
    )
    grid, said = sweep.grid_points(study, {}, (*words, *stops)), []
    for _ in range(2):
        sweep.sweep(study, grid, tmp_path, said.append)
    rows = sweep.read_summaries(grid, tmp_path)
    assert [row["rounds"] for row in rows] == [2, 2], "stopped by the callback"
    found = sweep.average_over_seeds(study, rows)
    assert [f["mean"] for f in found] == [row["test_perplexity"] for row in rows]
    assert all(1 < f["mean"] < 40 for f in found)
    assert sum("done before" in line for line in said) == 2


@pytest.mark.slow
def test_an_own_algorithm_of_own_parts_is_audited():
    """Callbacks and metrics see evaluations, which an attack has none of."""
    own = (f"--algorithm.name={PARTS}:algorithm", f"--run.callbacks={{'{PARTS}:watching'={{}}}}")
    words = (*own, f"--run.metrics=['{PARTS}:first_class']", "--run.rounds=2")
    experiment = assemble(load_config(None, [*SMALL, *words]))
    report = audit_experiment(experiment, num_canaries=8, num_rounds=2)
    assert not report.is_violated and [b.unit for b in report.bounds] == ["record"]


@pytest.mark.parametrize("form", ["safetensors", "npz", "orbax"])
def test_parameters_are_written_by_name(tmp_path, form):
    params = {"a": {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3)}, "b": np.int32(4)}
    path = tmp_path / f"params.{form}"
    write_params(path, params, form)
    with pytest.raises(ValueError, match="path must be new"):
        write_params(path, params, form)
    if form == "orbax":
        import orbax.checkpoint as ocp

        found = ocp.StandardCheckpointer().restore(path)
        jax.tree.map(np.testing.assert_array_equal, found, params)
        return
    found = read_params(path)
    assert found.keys() == {"a/w", "b"}
    np.testing.assert_array_equal(found["a/w"], params["a"]["w"])
    assert found["b"] == 4
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="must be an intact"):
        read_params(path)


def test_pretrained_parameters_must_fit(tmp_path):
    model = assemble(load_config(None, [*SMALL, *NOT_PRIVATE])).model
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    [(name, kernel)] = [(n, x) for n, x in shapes["params"]["Dense_0"].items() if x.ndim == 2]
    good = np.full(kernel.shape, 3.0)
    start = model.with_params({f"params/Dense_0/{name}": good}).init(jax.random.key(0))
    assert np.all(np.asarray(start["params"]["Dense_0"][name]) == 3)
    assert start["params"]["Dense_0"][name].dtype == kernel.dtype
    others = model.init(jax.random.key(0))["params"]["Dense_0"]
    for other in others.keys() - {name}:
        np.testing.assert_array_equal(start["params"]["Dense_0"][other], others[other])
    with pytest.raises(ValueError, match=f"did you mean 'params/Dense_0/{name}'"):
        model.with_params({f"params/Dense_0/{name}s": good})
    with pytest.raises(ValueError, match="have shape"):
        model.with_params({"params": {"Dense_0": {name: good[1:]}}})
    with pytest.raises(ValueError, match="hold at least one array"):
        model.with_params({})


PLAIN = (*SMALL, *NOT_PRIVATE, "--data.client_test_share=0")


def assembled(*words):
    return assemble(load_config(None, (*PLAIN, *words)))


def test_an_own_algorithm_takes_its_options():
    words = (f"--algorithm.name={PARTS}:algorithm", "--algorithm.options.pull=2.5")
    assert assembled(*words).simulation.algorithm.name == "pulled by 2.5"
    with pytest.raises(ConfigError, match="pull must be at least 0, got -1"):
        assembled(words[0], "--algorithm.options.pull=-1")
    with pytest.raises(ConfigError, match="did you mean 'pull'"):
        assembled(words[0], "--algorithm.options.pul=1")
    with pytest.raises(ValueError, match=r"be none or record .*; an Entry states the units"):
        assembled(words[0], "--privacy.unit=client")


def test_an_own_partition_spreads_the_pool():
    found = assembled(f"--data.partition={PARTS}:by_turns", "--data.partition_options.skip=37")
    sizes = found.population.train.sizes
    assert sizes.sum() == 1437 - 37 and sizes.max() - sizes.min() <= 1


@telling
def test_an_own_aggregator_and_optimiser_take_part():
    key = jax.random.key(0)

    def step(*words):
        made = assembled("--execution.devices=1", *words).simulation
        start = made.init(key)
        state, *_ = made.federation.run_round(start, made.hyper, made_examples(made), key)
        shared = made.federation.shared
        return jax.tree.map(lambda a, b: np.asarray(a) - b, shared(state), shared(start))

    def made_examples(made):
        return examples

    from fedjax_dp.engine.facts import examples_of

    examples = examples_of(assembled().population.train)
    whole, half = step(), step(f"--algorithm.aggregator={PARTS}:half_mean")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, 2 * b, rtol=1e-6, atol=1e-7), whole, half
    )
    words = (f"--training.optimizer={PARTS}:signs", "--training.optimizer_options.scale=0.5")
    one = step(*words, "--training.num_steps=1", "--training.learning_rate=0.25")
    sizes = np.unique(np.abs(np.concatenate([x.ravel() for x in jax.tree.leaves(one)])))
    assert sizes.max() == pytest.approx(0.125)


def test_an_own_metric_is_computed_by_client_and_whole():
    words = (f'--run.metrics=["{PARTS}:first_class", "f1"]', "--data.client_test_share=0.3")
    made = assembled(*words)
    state = made.simulation.init(jax.random.key(0))
    by_client, whole = made.evaluator.clients(state), made.evaluator.whole(state)
    data = made.population.client_test
    counts = [np.sum(data.client(i)["y"] == 0) for i in range(3)]
    assert by_client.client_metrics["first_class"].tolist() == counts
    assert by_client.metrics["first_class"] == sum(counts)
    assert whole.metrics["first_class"] == np.sum(made.population.test.examples["y"] == 0)
    assert 0 <= whole.metrics["f1"] <= 1 and by_client.client_metrics["f1"].shape == (3,)


@telling
def test_a_user_callback_ends_a_run_and_the_statement_declares_it(tmp_path):
    looks = imported(f"{PARTS}:looks")
    looks.clear()
    name = f"{PARTS}:stop_after"
    words = (*SMALL, "--run.rounds=5", f'--run.callbacks={{"{name}" = {{rounds = 2}}}}')
    status, text = execute(tmp_path / "run", *words)
    assert status == 0 and f"stopped after round 2 by {name}" in " ".join(text.split())
    summary = read_json(tmp_path / "run", "summary.json")
    assert summary["rounds"] == 2
    assert (summary["ended"], summary["stopped_by"]) == ("callback", name)
    assert [len(look.rows) for look in looks] == [1, 2]
    assert looks[-1].rows == metrics(tmp_path / "run")
    said = (tmp_path / "run" / "privacy.md").read_text(encoding="utf-8")
    assert f"after how many rounds the run ended, which {name} decided." in said
    # A resumed run ends in the same way.
    assert execute(tmp_path / "run", resume=True)[0] == 0
    assert read_json(tmp_path / "run", "summary.json")["rounds"] == 2


@telling
def test_an_end_that_follows_from_releases_costs_all_planned_rounds(tmp_path):
    """Noise is calibrated for five rounds and ε = 8, which a run that could have had them pays."""
    name = f"{PARTS}:stop_after"
    options = "{rounds = 2, is_private = true}"
    words = (*SMALL, "--run.rounds=5", f'--run.callbacks={{"{name}" = {options}}}')
    folder = tmp_path / "run"
    for resumed in (False, True):
        assert execute(folder, *words, resume=resumed)[0] == 0
        summary = read_json(folder, "summary.json")
        assert (summary["rounds"], summary["stopped_by"]) == (2, name)
        assert summary["epsilon"] == pytest.approx(8, rel=1e-3)
        assert metrics(folder)[-1]["epsilon_record"] < 6
        said = (folder / "privacy.md").read_text(encoding="utf-8")
        assert "Any of its 5 planned rounds could have been the last" in said
        assert "the run ended, which" not in said


@telling
def test_a_callback_that_watches_ends_nothing(tmp_path):
    looks = imported(f"{PARTS}:looks")
    looks.clear()
    words = (*SMALL, *NOT_PRIVATE, f'--run.callbacks={{"{PARTS}:watching" = {{}}}}')
    assert execute(tmp_path / "run", *words)[0] == 0
    summary = read_json(tmp_path / "run", "summary.json")
    assert len(looks) == 2 and (summary["ended"], summary["stopped_by"]) == ("finished", None)


@pytest.mark.parametrize(
    ("losses", "stop"), [([3, 2, 1, 1, 1], 5), ([3, 2, 2.5, 1, 2, 3], 6), ([3, 2, 1], None)]
)
def test_early_stopping_waits_for_something_better(losses, stop):
    from fedjax_dp.experiment.components.callbacks import early_stopping
    from fedjax_dp.experiment.components.experiment import Progress

    callback = early_stopping(patience=2)
    rows = [{"round": i + 1, "test_loss": loss} for i, loss in enumerate(losses)]
    ended = [
        i for i in range(1, len(rows) + 1) if callback.call(Progress(rows[:i], None, None, None))
    ]
    assert (ended[0] if ended else None) == stop
    assert not callback.is_private
    with pytest.raises(ValueError, match=r"must be one of .*test_loss.*got 'tset_loss'"):
        early_stopping(metric="tset_loss").call(Progress(rows, None, None, None))
    tables = [row | {"mine": {"a": 1}} for row in rows]
    with pytest.raises(ValueError, match=r"must be one of \['round', 'test_loss'\], got 'mine'"):
        early_stopping(metric="mine").call(Progress(tables, None, None, None))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (f"--model.name={PARTS}:modle", "has no 'modle'"),
        (f"--model.name={PARTS}:no_kin", "did you mean .*parts.py:no_kind"),
        (f"--model.name={PARTS}:no_kind", "option width .* must be annotated with a kind"),
        (f"--model.name={PARTS}:number", r"must name a function \(example_x.*got 3"),
        (f"--algorithm.name={PARTS}:number", "name a function or an Entry, got 3"),
        (f"--data.partition={PARTS}:number", "name a function or a Partition, got 3"),
        ("--model.name=nowhere.py:model", "must name an existing file"),
        ("--model.name=no_such_package.part:model", "there is no module 'no_such_package'"),
        ("--model.name=:model", "must have the form package.module:name or file.py:name"),
        (f"--model.name={OWN / 'broken.py'}:model", "broken.py, line 3: RuntimeError: not today"),
        ('--run.metrics=["perplexty"]', "did you mean 'perplexity'"),
        (f'--run.metrics=["{PARTS}:number"]', "be a Metric"),
        ("--run.callbacks={early_stoping = {}}", "did you mean 'early_stopping'"),
        ("--run.callbacks.early_stopping=3", "must be a table of options, got 3"),
        (
            "--run.callbacks.early_stopping.metric=test_confusion",
            "metric that is one number.*are t",
        ),
        ("--run.callbacks.early_stopping.patience=0", "patience must be an integer of at leas"),
        ("--data.name=digit", "did you mean 'digits'"),
        (
            "--data.name=my.csv",
            "a file is data.name = 'table' with data.options.path, got 'my.csv'",
        ),
        ("--model.name=net.py", "the form file.py:name or package.module:name if it is your own"),
        (f"--model.name={LANGUAGE}:Bigrams", r"a function \(example_x.*Model.from_flax"),
    ],
)
def test_what_cannot_be_a_part_is_refused_with_its_place(word, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(None, [word])
    assert str(error.value).startswith("command line: ")


def test_a_function_that_makes_no_callback_is_refused(monkeypatch):
    monkeypatch.setitem(CALLBACKS, "odd", lambda: 3)
    with pytest.raises(ValueError, match="the result of odd must be a Callback, got 'int'"):
        callbacks_of({"odd": {}})


def test_a_module_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine_for_a_test.py").write_text(PARTS.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = load_config(None, ["--algorithm.name=mine_for_a_test:algorithm", *PLAIN[:3]])
    assert config.algorithm.name == "mine_for_a_test:algorithm"


def test_options_of_an_own_part_are_listed(fedjax_dp):
    _, output, _ = fedjax_dp("run", "--keys", f"algorithm.name={PARTS}:algorithm")
    row = output.splitlines()[1]
    assert row.split("\t")[:3] == ["algorithm.options.pull", "a number of at least 0", "0.5"]


def test_the_optimiser_of_the_test_is_as_described():
    made = imported(f"{PARTS}:signs")(0.1, scale=2.0)
    updates, _ = made.update(np.array([3.0, -4.0]), made.init(np.zeros(2)))
    np.testing.assert_allclose(optax.apply_updates(np.zeros(2), updates), [-0.2, 0.2], rtol=1e-6)
