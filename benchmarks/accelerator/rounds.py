"""Rounds of several workloads in one process: compiled side by side, timed in turn."""

import concurrent.futures
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedjax_dp.core.backend import Facts, facts
from fedjax_dp.core.choices import Measured, Speed, choices
from fedjax_dp.engine import ExecutionConfig
from fedjax_dp.experiment.studies import timing
from fedjax_dp.experiment.studies.workloads import WORKLOADS, Prepared, Workload, prepare

# A case of fewer seconds a round is repeated for as long, in calls of one round.
_LEAST_SECONDS = 0.2
# Models with kernels that side by side are of each client.
_CONVOLUTIONAL = ("emnist_cnn", "thesis_cnn", "resnet18")


def preferring(form: str, here: Facts) -> Measured | None:
    """Makes up speeds by which `auto` computes convolutions in a form, and changes nothing else."""
    default = choices(here)
    if form == default.convolutions:
        return None
    rates = {form: 2.0, default.convolutions: 1.0}
    busy = default.operations_per_chunk
    return Measured(
        here.device, tuple(Speed(name, "default", 1, rate, busy) for name, rate in rates.items())
    )


def rows(
    cases: Sequence[dict[str, Any]], rounds: int, together: int | None = None
) -> Iterator[dict[str, Any]]:
    """Times cases in turn, `rounds` calls of one round each, and then calls of many rounds.

    A case has the `name` of a workload, and may have changed fields of it (`changes`), a `form` of
    convolutions, `products`, and the `clients_per_chunk`. One that fails has a row with its error.

    Raises:
      SystemExit: at the end, if a case failed.
    """
    prepared = functools.cache(lambda key: prepare(_workload(json.loads(key))))
    # One after another: cases of one workload share its data.
    parts = [prepared(json.dumps(_identity(case))) for case in cases]
    with concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        build = functools.partial(_case, together=together)
        futures = [pool.submit(build, *pair) for pair in zip(cases, parts, strict=True)]
    made: dict[int, timing.Case] = {}
    errors: dict[int, str] = {}

    def attempt(index: int, action: Callable[[], Any]) -> Any:
        try:
            return action()
        # Of one case, such as too little memory; others can be measured all the same.
        except Exception as error:
            errors[index] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            made.pop(index, None)

    for index, future in enumerate(futures):
        if (case := attempt(index, future.result)) is not None:
            made[index] = case
    times: dict[int, list[float]] = {index: [] for index in made}
    peaks: list[float] = []
    for turn in range(rounds + 1):
        for index, case in list(made.items()):
            found = attempt(index, functools.partial(_turn, case))
            if turn > 0 and found is not None:
                times[index] += found
        peaks.append(timing.gemm_peak(0.2))
    for index, (case, whole) in enumerate(zip(cases, parts, strict=True)):
        about = _described(case) | {"rounds_per_call": 1}
        if index in made:
            workload = _workload(_identity(case))
            found = _figures(workload, whole, made[index], times[index], peaks)
            yield {**about, **found, "dp_overhead": _overhead(index, cases, times)}
        else:
            yield {**about, "error": errors[index]}
    for index, case in list(made.items()) if together is not None else ():
        asked = functools.partial(case.time_round, together)
        several = attempt(index, lambda call=asked: [call() for _ in range(4)][1:])
        about = _described(cases[index]) | {"rounds_per_call": together}
        if several is None:
            yield {**about, "error": errors[index]}
        else:
            workload = _workload(_identity(cases[index]))
            yield {**about, **_figures(workload, parts[index], case, several, peaks)}
    if errors:
        named = "; ".join(f"{cases[i]['name']}: {error}" for i, error in errors.items())
        raise SystemExit(f"Error: {len(errors)} of {len(cases)} cases failed: {named}")


def _overhead(
    index: int, cases: Sequence[dict[str, Any]], times: dict[int, list[float]]
) -> float | None:
    """Compares with the workload without privacy, in the same form or its fastest one."""
    base = WORKLOADS[cases[index]["name"]].base
    twins = [i for i in times if cases[i]["name"] == base]
    form = _described(cases[index]).get("form")
    alike = [i for i in twins if _described(cases[i]).get("form") == form]
    found = [statistics.median(times[i]) for i in alike or twins if times[i]]
    return statistics.median(times[index]) / min(found) if found else None


def _identity(case: dict[str, Any]) -> dict[str, Any]:
    return {"name": case["name"], "changes": case.get("changes", {})}


def _workload(identity: dict[str, Any]) -> Workload:
    changes = {k: tuple(v) if isinstance(v, list) else v for k, v in identity["changes"].items()}
    return WORKLOADS[identity["name"]]._replace(**changes)


def _described(case: dict[str, Any]) -> dict[str, Any]:
    """Says what a case is, in the words of the table."""
    asked = {"products": case["products"]} if "products" in case else {}
    if "clients_per_chunk" in case:
        asked["width_asked"] = case["clients_per_chunk"]
    workload = _workload(_identity(case))
    # Gradients of records compute theirs in no form of choice.
    if workload.model in _CONVOLUTIONAL and workload.unit != "record":
        asked["form"] = case.get("form") or choices(facts()).convolutions
    return {"name": case["name"], **case.get("changes", {}), **asked}


def _case(case: dict[str, Any], parts: Prepared, *, together: int | None) -> timing.Case:
    form = case.get("form")
    execution = ExecutionConfig(
        clients_per_chunk=case.get("clients_per_chunk", "auto"),
        products=case.get("products", "exact"),
        # One program runs any number of rounds up to this one.
        rounds_per_call=together or 1,
        measured=None if form is None else preferring(form, facts()),
    )
    return timing.Case(timing.compiled(parts, execution))


def _turn(case: timing.Case) -> list[float]:
    """Times one round, or as many as say something together."""
    started, found = time.perf_counter(), [case.time_round()]
    while time.perf_counter() - started < _LEAST_SECONDS and len(found) < 10:
        found.append(case.time_round())
    return found


def _figures(
    workload: Workload,
    parts: Prepared,
    case: timing.Case,
    seconds: Sequence[float],
    peaks: Sequence[float],
) -> dict[str, Any]:
    found = timing.figures(workload, parts, case, seconds, peaks[1:])
    # Lists of every round and trial are too long for a table.
    left_out = ("seconds", "gemm_gflops", "layouts", "jax", "backend", "peak_rss_mb")
    return {key: value for key, value in found.items() if key not in left_out}
