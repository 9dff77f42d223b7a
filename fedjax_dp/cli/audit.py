"""`fedjax-dp audit`: audits the privacy claims of an experiment."""

from typing import Annotated, Any, Literal

import typer

from fedjax_dp.audit.noise import StepCheck
from fedjax_dp.audit.runs import AuditResult
from fedjax_dp.cli.output import Answer, ConfigFile, Configured, Output, answering, application
from fedjax_dp.core import checks
from fedjax_dp.core.decimals import rounded_down, shown
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running.watcher import large_deltas
from fedjax_dp.experiment.studies.audits import AuditReport, audit_experiment

app = application()


@answering(app, cls=Configured)
def command(
    context: typer.Context,
    out: Output,
    file: ConfigFile = None,
    canaries: Annotated[
        int | None,
        typer.Option(help="Canaries of a run; by default 100, at most one for each parameter."),
    ] = None,
    runs: Annotated[int, typer.Option(help="Runs; several also audit one canary alone.")] = 1,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of a run; by default those of the experiment.")
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Joint confidence of the lower bounds of a unit.")
    ] = 0.95,
    membership: Annotated[
        bool, typer.Option(help="Train once more and attack the model's outputs.")
    ] = True,
    records: Annotated[
        Literal["made", "mislabelled"],
        typer.Option(
            help="Canary records: made, with a gradient of one entry, or mislabelled, learned by "
            "the model's own loss."
        ),
    ] = "made",
    noise_share: Annotated[
        float,
        typer.Option(
            help="Attack runs with this share of the claimed noise, to see what the audit can find."
        ),
    ] = 1.0,
) -> Answer:
    """Audit an experiment: `fedjax-dp audit [FILE.toml] [--section.key VALUE ...]`.

    The exit status is 1 if a proven bound exceeds its claim, or a step exceeds its stated bound.
    `--section.key VALUE` overrides a key of FILE, as in `fedjax-dp run`.
    """
    config = config_files.load_config(file, context.args)
    if canaries is not None:
        checks.whole("--canaries", canaries)
    checks.whole("--runs", runs)
    checks.require(0 < confidence < 1, "--confidence", "be in (0, 1)", confidence)
    if rounds is not None:
        checks.whole("--rounds", rounds)
    checks.positive("--noise-share", noise_share)
    out.note("reading data, attacking the experiment")
    experiment = assemble(config)
    for text in large_deltas(experiment):
        out.warn(text)
    report = audit_experiment(
        experiment,
        num_canaries=canaries,
        num_runs=runs,
        num_rounds=rounds,
        confidence=confidence,
        has_membership=membership,
        records=records,
        noise_share=noise_share,
    )
    verdict = "violated" if report.is_violated else "not violated"
    status = 1 if report.is_violated else 0
    return Answer(_document(report), lambda out: _show(out, report, noise_share), verdict, status)


def _document(report: AuditReport) -> dict[str, Any]:
    def fields(value: Any) -> dict[str, Any]:
        return dict(value._asdict())

    return {
        "is_violated": report.is_violated,
        "bounds": [fields(bound) | {"is_violated": bound.is_violated} for bound in report.bounds],
        "steps": [
            {"unit": unit} | fields(check) | {"is_violated": check.is_violated}
            for unit, results in report.steps.items()
            for check in results
        ],
        "membership": None if report.membership is None else fields(report.membership),
        "collusion": [fields(attack) for attack in report.collusion],
        "no_collusion": report.no_collusion,
    }


def _show(out: Output, report: AuditReport, noise_share: float) -> None:
    def verdict(result: AuditResult | StepCheck) -> str:
        return "VIOLATED" if result.is_violated else "holds"

    if report.bounds:
        heads = ("unit", "method", "δ", "proven ε ≥", "claimed ε ≤", "confidence", "verdict")
        bounds = []
        for b in report.bounds:
            names = ("dp_delta", "epsilon_lower", "epsilon_claimed", "confidence")
            figures = (shown(name, getattr(b, name)) for name in names)
            bounds.append((b.unit, b.method, *figures, verdict(b)))
        out.table(heads, bounds)
    if report.steps:
        steps = [
            # What was measured is a lower bound on the sensitivity.
            (
                *(unit, s.name, rounded_down(s.measured, 6)),
                *(shown("sensitivity", s.allowed, 6), verdict(s)),
            )
            for unit, results in report.steps.items()
            for s in results
        ]
        out.table(("unit", "step on neighbouring data", "measured", "allowed", "verdict"), steps)
    attack = report.membership
    if attack is not None:
        low, high = attack.accuracy_interval
        out.say(
            f"membership attack on outputs: accuracy {attack.accuracy:.3f} "
            f"({low:.3f} to {high:.3f}; guessing is 0.5), AUC {attack.auc:.3f}, "
            f"{attack.true_positive_rate:.3f} of members found at 1 % false alarms"
        )
    if report.collusion:
        found = [
            (a.attack, *(f"{x:.3g}" for x in (a.r2, a.residual_variance, a.expected_variance)))
            for a in report.collusion
        ]
        out.table(("attack of all clients but one", "r²", "variance left", "expected"), found)
        out.say(
            "r² is between their estimates and what one client sent, entries of 1 or −1; nothing "
            "is claimed against them"
        )
    if report.no_collusion:
        out.say(f"collusion of clients was not tried: {report.no_collusion}")
    if not report.bounds and not report.steps:
        out.say("no privacy is claimed: there is nothing to audit")
    elif report.is_violated:
        out.say("violated: a proven bound exceeds its claim, or a step exceeds its stated bound")
    elif noise_share < 1:
        out.say(
            f"no violation found at {noise_share:g} of the noise: this audit is too small to find "
            "one; more --runs or --canaries find more"
        )
    else:
        out.say("no violation found, which does not prove privacy")
