"""What a server and its colluders can prove from masked sums of which clients drop out."""

import csv
import pathlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp import FederatedData, algorithms, audit, engine, models
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.core.decimals import rounded_down, rounded_up
from fedjax_dp.data import full_participation, participation, poisson, without_amplification
from fedjax_dp.privacy import make_plan
from fedjax_dp.privacy.mechanisms.distributed import Plan
from fedjax_dp.server import Summed, discrete_mean, secure

# Of a round's clients, those of the smallest indices collude, the next ones drop out, and the
# canaries, which come last, stay: the noise that is left is the least that a plan counts on.
COLLUDERS, DROPOUTS, CANARIES = 26, 4, 2
ORDINARY = COLLUDERS + DROPOUTS
CLIENTS = ORDINARY + CANARIES
CLIP_NORM, SIZE, DELTA = 1.0, 64, 1e-5
# How many clients may be missing from a round: none of a fixed cohort; two of a Poisson cohort, of
# which 31 clients are expected, and who are honest, so that there are as many colluders fewer.
SPARE = {"fixed": 0, "poisson": 2}
EXPECTED = {"fixed": 32, "poisson": 31}


def graph_of(cohorts: str) -> secure.MaskGraph:
    """Builds the masks of the smallest round that is not lost."""
    spare = SPARE[cohorts]
    return secure.all_pairs(CLIENTS - spare, colluders=COLLUDERS - spare, dropouts=DROPOUTS)


def plan_of(noise_multiplier: float, *, counts_colluders: bool, cohorts: str = "fixed") -> Plan:
    """Calibrates the noise for the shares that stay, with or without those of the colluders."""
    graph = graph_of(cohorts)
    return make_plan(
        SIZE,
        CLIP_NORM,
        noise_multiplier,
        num_clients=CLIENTS,
        num_shares=graph.min_senders,
        colluders=graph.colluders if counts_colluders else 0,
        bits=24,
    )


def _seen_by_colluders(mean: Summed, colluders: int) -> Summed:
    """Subtracts from the sum what colluders sent, which they know with its noise."""

    def encode(state, numbers, contribution, sender):
        message = mean.encode(state, numbers, contribution, sender)
        is_known = sender.index < colluders
        return jax.tree.map(lambda x: jnp.where(is_known, jnp.zeros_like(x), x), message)

    return mean._replace(encode=encode)


def _without_some(federation: engine.Federation, colluders: int) -> engine.Federation:
    """Lets the clients after the colluders drop out, once masks were agreed."""

    def draw(state, hyper, key, layout=engine.Layout()):
        cohort = federation.cohorts.draw(state, hyper, key, layout)
        drops = (cohort.ids >= colluders) & (cohort.ids < colluders + DROPOUTS) & cohort.is_drawn
        fate = jnp.where(drops, engine.Fate.DROPPED, cohort.fate).astype(jnp.int8)
        return cohort._replace(fate=fate)

    return federation._replace(cohorts=federation.cohorts.given(draw))


def run(
    noise_multiplier: float,
    num_runs: int,
    num_rounds: int,
    seed: int,
    *,
    counts_colluders: bool,
    cohorts: str = "fixed",
    form: str = "masked",
) -> list[dict[str, Any]]:
    """Audits masked rounds, as a server that knows the cohorts and its colluders see them."""
    model = models.Model.from_functions(
        lambda key: {"w": jnp.zeros((SIZE,))},
        lambda params, x: x @ params["w"],
        loss="squared_error",
    )
    graph, is_fixed = graph_of(cohorts), cohorts == "fixed"
    plan = plan_of(noise_multiplier, counts_colluders=counts_colluders, cohorts=cohorts)
    structure = jax.eval_shape(model.init, jax.random.key(0))
    mean = _seen_by_colluders(discrete_mean(structure, plan, EXPECTED[cohorts]), graph.colluders)
    mean = secure.masked(mean, secure.fixed_point(CLIENTS), graph, form=form)
    trainer = local_trainer(model, LocalConfig(learning_rate=0.1, batch_size=1, num_steps=1))
    algorithm = algorithms.dp_fedavg(model, trainer, aggregator=mean)
    rng = np.random.default_rng(seed)
    one = {"x": rng.normal(size=(1, SIZE)).astype(np.float32), "y": np.ones(1, np.float32)}
    data = FederatedData.from_clients([one] * ORDINARY)
    sampler = full_participation() if is_fixed else without_amplification(poisson())
    joined = participation(sampler, ORDINARY, EXPECTED[cohorts] * ORDINARY / CLIENTS)
    planted = audit.plant_clients(algorithm, data, joined, CANARIES, rng)
    seen = audit.run_audit(
        planted,
        jax.random.key(seed),
        num_runs=num_runs,
        num_rounds=num_rounds,
        wrapper=partial(_without_some, colluders=graph.colluders),
    )
    fates = np.asarray(seen.record.fate)
    num_drawn = (fates != engine.Fate.EMPTY).sum(axis=-1)
    num_dropped = (fates == engine.Fate.DROPPED).sum(axis=-1)
    assert np.all(num_dropped == DROPOUTS) if is_fixed else num_dropped.max() == DROPOUTS
    return [
        {
            "form": form,
            "cohorts": cohorts,
            "rounds_lost": float(np.mean(num_drawn < graph.num_clients)),
            "colluders": graph.colluders,
            "calibrated_for_colluders": counts_colluders,
            "noise_multiplier": noise_multiplier,
            "method": found.method,
            "runs": found.num_runs,
            "canaries": found.num_canaries,
            "rounds": num_rounds,
            "dp_delta": found.dp_delta,
            "epsilon_claimed": found.epsilon_claimed,
            "epsilon_proven": found.epsilon_lower,
            "is_violated": found.is_violated,
        }
        for found in audit.audit(seen, DELTA)
    ]


def write(path: pathlib.Path, results: list[dict[str, Any]]) -> None:
    """Writes one line for each bound."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(results[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(results)


def as_markdown(results: list[dict[str, Any]]) -> str:
    """Writes a table of the bounds."""
    lines = [
        f"{CLIENTS} clients, masks {results[0]['form']}; {DROPOUTS} of those that are drawn drop "
        "out after masking.",
        "",
        "| cohorts | rounds lost | colluders | noise calibrated for | method | runs × rounds | δ "
        "| ε claimed | ε proven | above |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        shares = "shares of those that stay"
        if one["calibrated_for_colluders"]:
            shares += ", less those of colluders"
        lines.append(
            f"| {one['cohorts']} | {one['rounds_lost']:.1%} | {one['colluders']} "
            f"| {shares} | {one['method']} | {one['runs']} × {one['rounds']} | {one['dp_delta']:g} "
            f"| {rounded_up(one['epsilon_claimed'])} | {rounded_down(one['epsilon_proven'])} "
            f"| {'yes' if one['is_violated'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"
