"""`fedjax-dp privacy`: accounting, calibration, statements of runs."""

import json
import pathlib
from typing import Annotated, Any

import dp_accounting
import typer

from fedjax_dp.cli.output import Answer, Output, answering, application, completed
from fedjax_dp.core import checks, files
from fedjax_dp.core.decimals import rounded_up, shown
from fedjax_dp.io.digests import read_sealed, read_sealed_object
from fedjax_dp.io.node_ledger import LEDGER_FILE, claim_of_node
from fedjax_dp.io.statement import section
from fedjax_dp.privacy.accounting.calibration import bound_of_poisson, calibrate_poisson
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.reports.large_delta import large_delta
from fedjax_dp.privacy.reports.latex import for_paper

# Counts up to this are exact as float64.
_MOST = 2**53
# A larger δ protects fewer than a thousand units, too few for most claims.
_LARGE = 1e-3
app = application("Accounting: ε, calibration, reports, comparisons.")

_Rate = Annotated[
    float, typer.Option("--sampling-rate", help="Probability that a unit is drawn, in (0, 1].")
]
_Steps = Annotated[int, typer.Option("--steps", help="Number of releases, at least 1.")]
_Delta = Annotated[float, typer.Option("--delta", help="δ in (0, 1).")]
_Units = Annotated[
    int | None,
    typer.Option(help="Number of clients or records; warns of a δ that is too large for it."),
]
_Accountant = Annotated[
    str,
    typer.Option(
        help="rdp, pld or rdp-classic-64.",
        autocompletion=completed(lambda: ("rdp", "pld", "rdp-classic-64")),
    ),
]
_Relation = Annotated[
    str,
    typer.Option(
        help="add_remove, zero_out or replace_one.",
        autocompletion=completed(lambda: ("add_remove", "zero_out", "replace_one")),
    ),
]


def _check(sampling_rate: float, steps: int, delta: float) -> None:
    checks.probability("--sampling-rate", sampling_rate)
    _check_count("--steps", steps)
    checks.require(0 < delta < 1, "--delta", "be in (0, 1)", delta)


def _check_count(option: str, count: int) -> None:
    checks.whole(option, count, is_sized=False)
    checks.require(count <= _MOST, option, "be at most 2^53", count)


def _warn_of(out: Output, delta: float, num_units: int | None) -> None:
    """Warns of a δ that is not below 1/n for n units, or seldom is where n is not given."""
    if num_units is not None:
        _check_count("--num-units", num_units)
        if text := large_delta("unit", delta, num_units):
            out.warn(text)
    elif delta > _LARGE:
        out.warn(
            f"δ = {_delta(delta)} should be well below 1/n, for n clients or records; "
            "--num-units compares"
        )


def _epsilon(value: float) -> str:
    return shown("epsilon", value, 6)


def _delta(value: float) -> str:
    return shown("dp_delta", value, 6)


def _by(requested: str, used: str) -> str:
    """Names the accountant, and the one that the number is from if it differs."""
    return requested if requested == used else f"{requested}, by {used}"


@answering(app)
def epsilon(
    out: Output,
    noise_multiplier: Annotated[float, typer.Option(help="Noise over the clip norm, above 0.")],
    sampling_rate: _Rate,
    steps: _Steps,
    delta: _Delta,
    accountant: _Accountant = "rdp",
    relation: _Relation = "add_remove",
    num_units: _Units = None,
) -> Answer:
    """Compute ε of Poisson-sampled Gaussian releases."""
    _check(sampling_rate, steps, delta)
    _warn_of(out, delta, num_units)
    checks.positive("--noise-multiplier", noise_multiplier)
    spent = bound_of_poisson(
        noise_multiplier, sampling_rate, steps, delta, accountant=accountant, relation=relation
    )
    value, used = float(spent.value), str(spent.accountant)
    facts = {"dp_delta": delta, "accountant": accountant, "by": used, "relation": relation}
    words = f"ε = {_epsilon(value)} at δ = {_delta(delta)} ({_by(accountant, used)}, {relation})"
    return Answer({"epsilon": value, **facts}, lambda out: out.say(words), _epsilon(value))


@answering(app)
def calibrate(
    out: Output,
    epsilon: Annotated[float, typer.Option(help="The budget, above 0.")],
    sampling_rate: _Rate,
    steps: _Steps,
    delta: _Delta,
    accountant: _Accountant = "rdp",
    relation: _Relation = "add_remove",
    num_units: _Units = None,
) -> Answer:
    """Compute the smallest noise multiplier within a budget."""
    _check(sampling_rate, steps, delta)
    _warn_of(out, delta, num_units)
    checks.positive("--epsilon", epsilon)
    found = calibrate_poisson(
        epsilon, delta, sampling_rate, steps, accountant=accountant, relation=relation
    )
    value = float(found)
    spent = bound_of_poisson(
        value, sampling_rate, steps, delta, accountant=accountant, relation=relation
    )
    used, options = str(spent.accountant), {"accountant": accountant, "relation": relation}
    facts = {"epsilon": epsilon, "dp_delta": delta, "by": used, **options}
    # Noise that is needed is rounded up, unlike noise that was added.
    needed = rounded_up(value, 6)
    words = f"noise multiplier = {needed} for ε = {_epsilon(epsilon)} at δ = {_delta(delta)} "
    words += f"({_by(accountant, used)})"
    document = {"noise_multiplier": value, **facts}
    return Answer(document, lambda out: out.say(words), needed)


@answering(app)
def report(
    out: Output,
    run: Annotated[
        pathlib.Path,
        typer.Argument(metavar="RUN", help=f"A run folder, or a node's {LEDGER_FILE}."),
    ],
    latex: Annotated[
        bool, typer.Option("--latex", help="Print a LaTeX paragraph and its BibTeX entries.")
    ] = False,
    delta: Annotated[
        float | None, typer.Option("--delta", help="δ in (0, 1), for the ledger of a node.")
    ] = None,
    accountant: Annotated[
        str | None,
        typer.Option(help="For the ledger of a node: rdp (the default), pld or rdp-classic-64."),
    ] = None,
) -> Answer:
    """Print a run's privacy statement, with the events to recompute ε from.

    Of a node of a deployment, `RUN` is the file ledger.json in its `state-dir`: the statement is
    then that of the records of its clients, over all runs with this ledger, at `--delta`.
    """
    if run.suffix == ".json":
        return _of_node(run, delta, accountant or "rdp", latex=latex)
    for option, value in (("--delta", delta), ("--accountant", accountant)):
        rule = "be left out: the statement of a run has its own"
        checks.require(value is None, option, rule, value)
    words, data = run / "privacy.md", run / "privacy.json"
    checks.require(
        words.is_file() and data.is_file(), "RUN", "be a folder with privacy.md and .json", str(run)
    )
    text, statement = read_sealed(run, words.name).rstrip(), read_sealed_object(run, data.name)
    return _stated(text, statement, data, latex=latex)


def _of_node(path: pathlib.Path, delta: float | None, accountant: str, *, latex: bool) -> Answer:
    """Answers with the statement of a node's ledger."""
    files.require_file(path, "RUN")
    checks.require(
        delta is not None,
        "--delta",
        "be given for the ledger of a node: the dp_delta of its runs",
        None,
    )
    assert delta is not None
    checks.require(0 < delta < 1, "--delta", "be in (0, 1)", delta)
    claim = claim_of_node(path, delta, accountant)
    about = "The records of a node's clients, over all runs with its ledger.\n"
    text = "\n".join(["# Privacy\n", about, *section(claim)]).rstrip()
    return _stated(text, {"claims": [claim]}, path, latex=latex)


def _stated(text: str, statement: dict[str, Any], data: pathlib.Path, *, latex: bool) -> Answer:
    """Answers with a statement in words, or in LaTeX."""
    with files.reading(data, "be a privacy statement as a run writes it", TypeError, LookupError):
        events = [
            f"{claim['unit']}s {history['units']}: {json.dumps(history['event'])}"
            for claim in statement["claims"]
            for history in claim["histories"]
        ]
        paper = for_paper(statement["claims"] if latex else [])
    if latex:
        printed = f"{paper.latex}\n{paper.bibtex}".rstrip()
        return Answer(paper._asdict(), lambda out: out.say(printed), printed)

    def show(out: Output) -> None:
        for part in (text, "\nEvents, as charged:\n", *events):
            out.say(part)

    return Answer({"statement": statement}, show, text)


@answering(app)
def compare(
    out: Output,
    setting: Annotated[
        list[str], typer.Option(help="NOISE_MULTIPLIER,SAMPLING_RATE of a curve; repeatable.")
    ],
    steps: _Steps,
    delta: _Delta,
    output: Annotated[
        pathlib.Path, typer.Option(help="The PNG file; a PDF is beside it.")
    ] = pathlib.Path("epsilon_by_round.png"),
    accountant: _Accountant = "rdp",
    relation: _Relation = "add_remove",
    num_units: _Units = None,
) -> Answer:
    """Draw ε over rounds for several settings."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    # All are checked before the first is computed, which takes a while.
    settings = [_setting(text, steps, delta) for text in setting]
    rule = "be different for each curve"
    checks.require(len(set(settings)) == len(settings), "--setting", rule, setting)
    is_picture = output.suffix in (".png", ".pdf") and not output.is_dir()
    checks.require(is_picture, "--output", "be a file that ends in .png or .pdf", str(output))
    files.require_folder(output.absolute().parent, "--output", writable=True)
    for noise_multiplier, rate in settings:
        rounds = sorted({max(1, round(steps * i / 40)) for i in range(1, 41)})
        ledger, base = Ledger("client", relation), dp_accounting.GaussianDpEvent(noise_multiplier)
        event = base if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, base)
        noise = shown("noise_multiplier", noise_multiplier, 6)
        name = f"noise {noise}, rate {shown('sampling_rate', rate, 6)}"
        out.note(name)
        spent, done = [], 0
        for count in rounds:
            ledger.charge(event, count=count - done)
            spent.append(float(ledger.epsilon(delta, accountant)[0]))
            done = count
        curves[name] = (rounds, spent)
    _warn_of(out, delta, num_units)
    title = f"ε at δ = {_delta(delta)} ({accountant}, {relation})"
    from fedjax_dp.io import plots

    plots.save(plots.epsilon_curves(curves, title), output)
    final = {name: spent[-1] for name, (_, spent) in curves.items()}

    def show(out: Output) -> None:
        for name, value in final.items():
            out.say(f"{name}: ε = {_epsilon(value)} after {steps} rounds")
        out.say(f"drawn in {output}")

    return Answer({"epsilon": final, "plot": str(output)}, show, str(output))


def _setting(text: str, steps: int, delta: float) -> tuple[float, float]:
    """Reads the noise multiplier and the sampling rate of a curve."""
    parts = text.split(",")
    rule = "be NOISE_MULTIPLIER,SAMPLING_RATE"
    checks.require(len(parts) == 2 and all(map(_is_number, parts)), "--setting", rule, text)
    noise_multiplier, rate = map(float, parts)
    _check(rate, steps, delta)
    checks.positive("noise multiplier", noise_multiplier)
    return noise_multiplier, rate


def _is_number(text: str) -> bool:
    try:
        return checks.is_finite_number(float(text))
    except ValueError:
        return False
