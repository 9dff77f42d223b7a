"""`fedjax-dp audit`: attacks an experiment and puts what that proves beside what is claimed."""

import json
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from fedjax_dp.audit.noise import StepCheck
from fedjax_dp.audit.runs import AuditResult
from fedjax_dp.core import checks
from fedjax_dp.experiment import reading as configuration
from fedjax_dp.experiment.assemble import assemble
from fedjax_dp.experiment.audits import AuditReport, audit_experiment

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def command(
    context: typer.Context,
    canaries: Annotated[
        int | None,
        typer.Option(help="Canaries of a run; 100 if not given, or one for each parameter."),
    ] = None,
    runs: Annotated[
        int, typer.Option(help="Runs; one audits all canaries, many audit one canary too.")
    ] = 1,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of a run; those of the experiment if not given.")
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="How sure the lower bounds of a unit are together.")
    ] = 0.95,
    membership: Annotated[
        bool, typer.Option(help="Train once more and attack the model's outputs.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Audit an experiment: `fedjax-dp audit [FILE.toml] [--section.key VALUE ...]`.

    The exit status is 1 where more was proven than claimed, or a step does not hold what it states.
    """
    words = list(context.args)
    file = words.pop(0) if words and not words[0].startswith("--") else None
    config = configuration.load(file, words)
    if canaries is not None:
        checks.whole("--canaries", canaries)
    checks.whole("--runs", runs)
    checks.require(0 < confidence < 1, "--confidence", "lie in (0, 1)", confidence)
    if rounds is not None:
        checks.whole("--rounds", rounds)
    report = audit_experiment(
        assemble(config),
        num_canaries=canaries,
        num_runs=runs,
        num_rounds=rounds,
        confidence=confidence,
        has_membership=membership,
    )
    if as_json:
        print(json.dumps(_plain(report)))
    else:
        _show(Console(), report)
    raise typer.Exit(1 if report.is_violated else 0)


def _plain(report: AuditReport) -> dict[str, Any]:
    def number(value: Any) -> Any:
        is_odd = isinstance(value, float) and not np.isfinite(value)
        return repr(value) if is_odd else value

    def fields(value: Any) -> dict[str, Any]:
        return {name: number(entry) for name, entry in value._asdict().items()}

    return {
        "is_violated": report.is_violated,
        "bounds": [fields(bound) | {"is_violated": bound.is_violated} for bound in report.bounds],
        "steps": [
            {"unit": unit} | fields(check) | {"is_violated": check.is_violated}
            for unit, results in report.steps.items()
            for check in results
        ],
        "membership": None if report.membership is None else fields(report.membership),
    }


def _show(console: Console, report: AuditReport) -> None:
    def verdict(result: AuditResult | StepCheck) -> str:
        return "VIOLATED" if result.is_violated else "holds"

    if report.bounds:
        table = Table("unit", "method", "δ", "proven ε ≥", "claimed ε ≤", "confidence", "")
        for b in report.bounds:
            numbers = (b.dp_delta, b.epsilon_lower, b.epsilon_claimed, b.confidence)
            table.add_row(b.unit, b.method, *(f"{x:.4g}" for x in numbers), verdict(b))
        console.print(table)
    if report.steps:
        table = Table("unit", "step on neighbouring data", "measured", "allowed", "")
        for unit, results in report.steps.items():
            for s in results:
                table.add_row(unit, s.name, f"{s.measured:.6g}", f"{s.allowed:.6g}", verdict(s))
        console.print(table)
    attack = report.membership
    if attack is not None:
        low, high = attack.accuracy_interval
        console.print(
            f"membership attack on outputs: accuracy {attack.accuracy:.3f} "
            f"({low:.3f} to {high:.3f}; guessing is 0.5), AUC {attack.auc:.3f}, "
            f"{attack.true_positive_rate:.3f} of members found at 1 % false alarms"
        )
    if not report.bounds and not report.steps:
        console.print("no privacy is claimed: there is nothing to hold the run to")
    elif report.is_violated:
        console.print("more was proven than claimed, or a step does not hold what it states")
    else:
        console.print("nothing was proven beyond what is claimed; that is no proof of privacy")
