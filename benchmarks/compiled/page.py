"""Writes `results/compiled.md` from `results/compiled.jsonl`: `python -m benchmarks.compiled.page`.

The lines are those that `python -m benchmarks.compiled.one` prints.
"""

import json
import pathlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_dp.core import targets
from fedjax_dp.core.program_text import SCOPES
from fedjax_dp.experiment.studies.workloads import WORKLOADS

RESULTS = pathlib.Path(__file__).parents[1] / "results"
_HEAD = """\
# Rounds compiled for devices that are not here

By XLA's compilers for TPUs (`libtpu`) and for NVIDIA GPUs (`jax[cuda13]`, no autotuning), JAX {jax}. Nothing was run.
`python -m benchmarks.compiled` continues and renews this page. *By hand* is the same round in plain JAX
(`benchmarks/compiled/by_hand.py`), with as many clients side by side as are fastest by estimate, of the whole cohort,
a quarter and a sixteenth. For records it computes with full products, as ours does; the lines *default precision* are
by hand without them. Workloads without such figures (masks, a clock, acceleration, AFL, FedLTN) are not written by
hand. Poisson cohorts by hand have their expected size.

*Estimate* is the compiler's own, to which a GPU's has 2 µs added for the start of each kernel, and for calls of cuDNN
and cuBLAS, which have no estimate, the larger of the times that their bytes and their products take at the card's
peaks (TF32). Such calls do not reach these, and grouped convolutions least of all: on GPUs bytes and operations say
more than the estimate. GB are what operations read and write, GFLOP are of products and convolutions. Ratios are ours
by the one by hand. A round has no part of what a call does once: by hand a TPU copies examples into another layout,
which takes the time of the lines *call* below, and stays among the temporaries (P1, F1). Seconds to compile are of two
busy cores.
"""  # noqa: E501
_ONE_HEAD = """
## {target}

| workload | clients side by side: ours | by hand | estimate of a round, ms: ours | by hand | ratio | temporaries, MB: ours | by hand | ratio | GB of a round: ours | by hand | operations of a round: ours | by hand | seconds to compile: ours | by hand |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
"""  # noqa: E501
_LOOP_HEAD = """
### {target}, by loop

All passes of a round together; a call is once for all of its rounds.

| workload | loop | passes: ours | by hand | operations: ours | by hand | GB: ours | by hand | GFLOP: ours | by hand | {unit}: ours | by hand |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
"""  # noqa: E501
_BEFORE_HEAD = """
## Before

One local step of the whole cohort, at commit {commit}, now, and by hand; of {ones}, whose clients
take one step, the whole round. µs of fusions alone, Mcycles as estimated. How many clients are side by side differs,
and temporaries, which are those of one pass, differ with it: a ratio of them compares widths. All other figures are of
as many passes as the cohort takes. The first ones were counted for one pass, and are multiplied here where that was a
part of the cohort: {parts}.

| workload | v5e, clients side by side: before | now | by hand | Mcycles: before | now | by hand | temporaries, MB: before | now | by hand | H100, clients side by side: before | now | by hand | GB: before | now | by hand | µs: before | now | by hand |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
"""  # noqa: E501
_SEVERAL_HEAD = """
## Several devices

All figures are of one device.

| workload | devices | clients side by side | estimate of a round, ms | on one device | arguments, MB | temporaries, MB | exchanged in a round, MB |
|---|---|---:|---:|---:|---:|---:|---|
"""  # noqa: E501
_WIDTHS_HEAD = """
## By hand, by clients side by side

| workload | target | clients: estimate of a round in ms, temporaries in MB |
|---|---|---|
"""
_Row = Mapping[str, Any]
_Table = Mapping[tuple[str, str, str], _Row]


def page(rows: Sequence[_Row]) -> str:
    """Writes all tables."""
    found = {(row["workload"], row["program"], row["target"]): row for row in rows}
    before = json.loads((RESULTS / "compiled_before.json").read_text(encoding="utf-8"))
    names = dict.fromkeys(row["target"] for row in rows)
    of_one = [name for name in names if targets.target(name).num_devices == 1]
    parts = [_HEAD.format(jax=" and ".join(sorted({row["jax"] for row in rows})))]
    parts += _before(found, before)
    for target in of_one:
        workloads = dict.fromkeys(row["workload"] for row in rows if row["target"] == target)
        parts.append(_ONE_HEAD.format(target=target))
        parts += (line for name in workloads for line in _lines(found, name, target))
        parts.append(_LOOP_HEAD.format(target=target, unit=_unit(target)))
        parts += (line for name in workloads for line in _by_loop(found, name, target))
    several = [row for row in rows if targets.target(row["target"]).num_devices > 1]
    parts += [_SEVERAL_HEAD] if several else []
    parts += (_several(row, found) for row in several)
    parts.append(_WIDTHS_HEAD)
    parts += (_widths(row) for row in rows if "tried" in row)
    return "".join(parts)


def _before(found: _Table, before: Mapping[str, Any]) -> Iterator[str]:
    names = [name for name in before if name in WORKLOADS]
    parts = [
        f"{before[name]['clients']} of {_cohort(name)} clients in {name}"
        for name in names
        if before[name]["passes"] > 1
    ]
    ones = [name for name in names if _num_steps(name) == 1]
    yield _BEFORE_HEAD.format(commit=before["commit"], ones=", ".join(ones), parts=", ".join(parts))
    for name in names:
        cells, was = [], before[name]
        for target, keys in (("v5e", ("Mcycles", "temporaries_MB")), ("h100", ("GB", "µs"))):
            both = found.get((name, "ours", target)), _hand(found, name, target)
            widths = (_of(row, lambda r: f"{r['clients_per_chunk']:,}") for row in both)
            cells += [f"{was['clients']:,}", *widths]
            for key in keys:
                times = 1 if key == "temporaries_MB" else was["passes"]
                now = (_value(row, lambda r, key=key: _step(r, key)) for row in both)
                cells += [_number(times * was[target][key]), *map(_number, now)]
        yield _line(name, *cells)


def _lines(found: _Table, name: str, target: str) -> Iterator[str]:
    ours, hand = found.get((name, "ours", target)), _hand(found, name, target)
    if ours is not None or hand is not None:
        yield _line(name, *_cells(ours, hand))
    default = found.get((name, "by hand", target))
    if default is not None and default is not hand:
        yield _line(f"{name}, default precision", *_cells(None, default))


def _cells(ours: _Row | None, hand: _Row | None) -> list[str]:
    rows = ours, hand
    cells = [_of(row, lambda r: f"{r['clients_per_chunk']:,}") for row in rows]
    estimates = [_value(row, lambda r: 1e3 * r["round_seconds"]) for row in rows]
    held = [_value(row, lambda r: r["temporaries_MB"]) for row in rows]
    for pair in (estimates, held):
        cells += [*map(_number, pair), _ratio(*pair)]
    for key in ("GB", "operations"):
        cells += [_number(_value(row, lambda r, key=key: _whole(r)[key])) for row in rows]
    cells += [_number(_value(row, lambda r: r["trace_s"] + r["compile_s"])) for row in rows]
    if ours is not None and "error" in ours:
        cells[0] = _reason(ours)
    if hand is not None and "error" in hand:
        cells[1] = _reason(hand)
    return cells


def _by_loop(found: _Table, name: str, target: str) -> Iterator[str]:
    rows = found.get((name, "ours", target)), _hand(found, name, target)
    sums = [None if row is None or "error" in row else _scopes(row) for row in rows]
    for scope in SCOPES:
        both = [None if found is None else found.get(scope) for found in sums]
        if not any(cost and cost["passes"] for cost in both):
            continue
        cells = []
        for key in ("passes", "operations", "GB", "GFLOP", _unit(target)):
            cells += [_number(cost[key] if cost else None) for cost in both]
        yield _line(name, scope.replace("_", " "), *cells)


def _several(row: _Row, found: _Table) -> str:
    alone = found.get((row["workload"], row["program"], targets.target(row["target"]).kind))
    if "error" in row:
        return _line(row["workload"], row["target"], _reason(row), *[""] * 5)
    exchanged: dict[str, float] = defaultdict(float)
    for loops, by_kind in row["collectives"].items():
        for kind, count in by_kind.items():
            exchanged[kind] += count * row["passes"].get(loops, 0.0)
    return _line(
        row["workload"],
        row["target"],
        f"{row['clients_per_chunk']:,}",
        _number(1e3 * row["round_seconds"]),
        _number(_value(alone, lambda r: 1e3 * r["round_seconds"])),
        _number(row["arguments_MB"]),
        _number(row["temporaries_MB"]),
        ", ".join(f"{kind} {_number(count / 1e6)}" for kind, count in sorted(exchanged.items())),
    )


def _widths(row: _Row) -> str:
    name = row["workload"] + row["program"].removeprefix("by hand")
    tried = (
        f"{one['clients']:,}: {_number(1e3 * one['round_seconds'])}, "
        f"{_number(one['temporaries_MB'])}"
        for one in row["tried"]
    )
    return _line(name, row["target"], "; ".join(tried))


def _scopes(row: _Row) -> dict[str, dict[str, float]]:
    """Adds up, by the innermost scope, all passes of a round."""
    found: dict[str, dict[str, float]] = {}
    for loops, cost in row["costs"].items():
        passes = row["passes"].get(loops, 1.0)
        total = found.setdefault(loops.rpartition("/")[2], defaultdict(float))
        total["passes"] += passes
        for key, value in cost.items():
            total[key] += passes * value
    return found


def _whole(row: _Row) -> dict[str, float]:
    """Adds up a round, without what is once a call."""
    found: dict[str, float] = defaultdict(float)
    for scope, cost in _scopes(row).items():
        for key, value in cost.items():
            found[key] += value if scope != SCOPES[0] else 0.0
    return found


def _step(row: _Row, key: str) -> float:
    """Returns a figure of one local step of the whole cohort."""
    if key not in _whole(row):
        return row[key]
    steps = _num_steps(row["workload"])
    of_steps = {} if steps == 1 else _scopes(row).get(SCOPES[-1], {})
    return of_steps.get(key, _whole(row)[key]) / steps


def _cohort(name: str) -> int:
    workload = WORKLOADS[name]
    return workload.cohort or workload.num_clients


def _num_steps(name: str) -> int:
    workload = WORKLOADS[name]
    return workload.num_steps or -(-workload.examples_per_client // workload.batch_size)


def _hand(found: _Table, name: str, target: str) -> _Row | None:
    """Finds the round by hand, at the precision of ours."""
    exact = found.get((name, "by hand, exact", target))
    is_of_records = WORKLOADS[name].unit == "record"
    return exact if is_of_records else found.get((name, "by hand", target))


def _unit(target: str) -> str:
    return "Mcycles" if targets.target(target).device.clock else "µs"


def _value(row: _Row | None, of: Any) -> float | None:
    return None if row is None or "error" in row else of(row)


def _of(row: _Row | None, of: Any) -> str:
    return "" if row is None or "error" in row else of(row)


def _reason(row: _Row) -> str:
    return "does not fit" if row.get("fits") is False else "failed"


def _ratio(ours: float | None, hand: float | None) -> str:
    return f"{ours / hand:.2f}" if ours is not None and hand else ""


def _number(value: float | None) -> str:
    """Writes three digits, and all that are before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    text = (RESULTS / "compiled.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    (RESULTS / "compiled.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
