"""Tunes the adapters of a checkpoint folder on prompts and responses, and continues a prompt.

python -m experiments.lora.tune --folder DIR --checkpoint gpt2 --unit client --output DIR
"""

import argparse
import contextlib
import csv
import math
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lora.study import budget_words, measured, memory_of
from experiments.sweep import hardware
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import tokenizer
from fedjax_dp.experiment import Config, Experiment, assemble, load_config
from fedjax_dp.models import Model, generator, kinds

HERE = pathlib.Path(__file__).parent
BUDGETS = (None, 8.0)
PROMPT, NUM_TOKENS, TEMPERATURE = "To be, or not to be: that is the question:", 24, 0.7


def require_moved(model: Model, before: str, params: PyTree) -> float:
    """Requires the base of the start and adapters that add to it; returns their norm."""
    after = kinds.digest(model.frozen)
    if after != before or not before:
        raise ValueError(f"the base must be that of the start, {before}, got {after}")
    parts = [float(jnp.linalg.norm(pair["up"])) for pair in params["adapters"].values()]
    norm = math.hypot(*parts)
    if not (math.isfinite(norm) and min(parts) > 0):
        raise ValueError(f"each adapter must have moved by a finite amount, got a norm of {norm}")
    return norm


def sample(config: Config, model: Model, params: PyTree, prompt: str) -> str:
    """Continues a prompt in the template of the data, from a key of its own."""
    options = config.data.options
    chosen = tokenizer(str(options["tokenizer"]))
    (ids,) = chosen.encode([options["template"].format(instruction=prompt)], "prompt {}".format)
    if len(ids) and ids[-1] == chosen.special.end:
        ids = ids[:-1]
    generate = generator(model, NUM_TOKENS, end=chosen.special.end)
    key = jax.random.key(config.run.seed + 1)
    tokens = np.asarray(generate(params, jnp.asarray(ids)[None], key, TEMPERATURE)[0])
    return chosen.decode(tokens[tokens >= 0])


def rows_of(checkpoint: str, unit: str, words: Sequence[str], prompt: str) -> list[dict[str, Any]]:
    """Tunes one checkpoint without noise and with it, by one compiled program where it can be."""
    rows, shared, memory = list[dict[str, Any]](), None, dict[str, int]()
    for epsilon in BUDGETS:
        budget = budget_words(unit, epsilon)
        config = load_config(HERE / f"tune_{unit}.toml", [*words, *budget])
        own: Experiment = assemble(config)
        digest = kinds.digest(own.model.frozen)
        if shared is None:
            shared, memory = own, memory_of(own)
            state = shared.simulation.init(jax.random.key(0))
            jax.block_until_ready(shared.simulation.compile(state, jax.random.key(0)))
        figures, params = measured(shared, own, config.run.rounds, config.run.seed)
        norm = require_moved(own.model, digest, params)
        training = config.training
        window = own.population.train.examples["x"].shape[1]
        tokens = (training.num_steps or 1) * training.batch_size * window
        rows.append(
            {"checkpoint": checkpoint, "unit": unit, "epsilon": epsilon, **figures, **memory}
        )
        rows[-1] |= {
            "perplexity_before": math.exp(figures["loss_before"]),
            "perplexity": math.exp(figures["loss"]),
            "tokens_a_cpu_second": figures["clients_a_cpu_second"] * tokens,
            "adapter_norm": norm,
            "base": digest,
            "sample": sample(config, own.model, params, prompt),
        }
        print(rows[-1], flush=True)
    return rows


def earlier(file: pathlib.Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reads the rows of earlier calls, without those of a checkpoint and unit that ran anew."""

    def read(text: str) -> Any:
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
        return text or None

    if not file.is_file():
        return []
    ran = {(row["checkpoint"], row["unit"]) for row in rows}
    with file.open(newline="", encoding="utf-8") as lines:
        found = [{name: read(x) for name, x in row.items()} for row in csv.DictReader(lines)]
    return [row for row in found if (row["checkpoint"], row["unit"]) not in ran]


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Writes the table of the README."""
    lines = [
        "| checkpoint | unit | ε | perplexity before, after | accuracy before, after | parameters "
        "| kB a client and round, down + up | MB of temporaries | MB of base | "
        "tokens a CPU second |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        budget = "no noise" if row["epsilon"] is None else f"{row['epsilon']:g}"
        sent = (row["bytes_down_of_a_client"] + row["bytes_up_of_a_client"]) / 1e3
        lines.append(
            f"| {row['checkpoint']} | {row['unit']} | {budget} | "
            f"{row['perplexity_before']:.1f}, {row['perplexity']:.1f} | "
            f"{row['accuracy_before']:.3f}, {row['accuracy']:.3f} | {row['parameters']:,} | "
            f"{sent:.1f} | {row['temporary_bytes'] / 1e6:.1f} | {row['frozen_bytes'] / 1e6:.2f} | "
            f"{row['tokens_a_cpu_second']:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Tunes, checks that adapters alone moved, samples, and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Further words, --section.key=VALUE, override the configuration of every run.",
    )
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="where paths start")
    parser.add_argument(
        "--output", type=pathlib.Path, required=True, help="rows of earlier calls are kept"
    )
    parser.add_argument("--checkpoint", action="append", default=[], help="folder of a checkpoint")
    parser.add_argument("--unit", action="append", choices=["client", "record"], default=[])
    parser.add_argument("--prompt", default=PROMPT)
    known, words = parser.parse_known_args()
    output = known.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    os.chdir(known.folder)
    started, rows = time.process_time(), list[dict[str, Any]]()
    for checkpoint in known.checkpoint or ["gpt2"]:
        name = pathlib.Path(checkpoint).name
        own = [f"--model.pretrained={checkpoint}"]
        own.append(f"--data.options.tokenizer={pathlib.Path(checkpoint) / 'tokenizer.json'}")
        for unit in known.unit or ["client", "record"]:
            rows += rows_of(name, unit, [*own, *words], known.prompt)
    note = f"{hardware()}, {time.process_time() - started:.0f} CPU seconds in the last call.\n\n"
    rows = [*earlier(output / "tune.csv", rows), *rows]
    with (output / "tune.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (output / "tune.md").write_text(note + as_markdown(rows), encoding="utf-8")
    print(note + as_markdown(rows))


if __name__ == "__main__":
    main()
