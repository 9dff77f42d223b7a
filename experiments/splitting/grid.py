"""Which curves each convex figure of chapter 2 consists of."""

import itertools
from collections.abc import Iterator

from experiments.splitting.curves import INNER_RATE, METHODS, Group, Setting

ROUNDS = {"ls": 605, "lr": 805}
NUM_STEPS = {"ls": (1, 2, 5, 10, 20, 50, 100), "lr": (1, 2, 5, 10, 20)}
LINE_STEPS = (2, 5, 10, 20, 50, 100)
DECAYS = (1, 1 / 2, 1 / 5, 1 / 10, 1 / 20, 1 / 50)
SCHEDULES = ("constant", "inverse", "inverse_sqrt", "inverse_log10", "exponential")
SIGMAS = (0.25, 2.0, 10.0)
PERIOD = 500
# Rounds after which the steps of these two are shorter than the constant one beside them.
LONGER = {"inverse_log10": 12_000, "exponential": 2_000}
# Step sizes: of local training, of proximal steps, of these in the first round of a schedule, and
# of the constant step beside the schedules, which the chapter sets lower than schedules begin.
FEDAVG = {"ls": 1e-5, "lr": 2e-3}
PROX = {"ls": 1e-5, "lr": 0.01}
FIRST = {"ls": 1e-3, "lr": 0.1}
CONSTANT = {"ls": 2e-4, "lr": 0.02}
# η (k − 1) of the lines of figure 2.4.
LINES = {"ls": (1e-4, 5e-5, 2e-5, 1e-5), "lr": (1e-3, 5e-4, 2.5e-4, 1.25e-4)}
# The norm of the gradient at which a proximal step counts as solved, and the most steps to it.
TOLERANCE, FIRST_TOLERANCE, INNER_STEPS = 1e-3, 1e-2, 100
PROXIMAL = [method for method in METHODS if method != "FedAvg"]


def _numbers(
    problem: str,
    method: str,
    step: float,
    tolerance: float = TOLERANCE,
    *,
    in_batches: bool = False,
) -> dict[str, float]:
    alpha, beta, gamma = METHODS[method]
    own: dict[str, float] = {"alpha": alpha, "beta": beta, "gamma": gamma}
    if method == "FedAvg":
        return own | {"learning_rate": step}
    own["step_size"] = step
    if problem == "ls" and not in_batches:
        return own
    return own | {"learning_rate": INNER_RATE[problem], "tolerance": tolerance}


def _group(figure: str, name: str, curves, k: int, *of, **options) -> Group:
    return Group(f"{figure}-{name}", figure, Setting(*of, **options), k, curves)


def _fedavg(problem: str) -> Iterator[Group]:
    of = (problem, 0.25, "gradient", ROUNDS[problem])
    for k in NUM_STEPS[problem]:
        one = {f"k = {k}": _numbers(problem, "FedAvg", FEDAVG[problem])}
        yield _group("2.2", f"{problem}-k{k}", one, k, *of)
    swept = {f"η0 · {d:g}": _numbers(problem, "FedAvg", d * FEDAVG[problem]) for d in DECAYS}
    yield _group("2.2", f"{problem}-eta", swept, 10, *of)


def _lines(problem: str) -> Iterator[Group]:
    of = (problem, 0.25, "gradient")
    for k in LINE_STEPS:
        curves = {
            f"k = {k}, η (k − 1) = {c:g}": _numbers(problem, "FedAvg", c / (k - 1))
            for c in LINES[problem]
        }
        if problem == "ls":
            yield _group("2.4", f"{problem}-k{k}", curves, k, *of, ROUNDS["ls"])
        else:
            # The end is what is plotted, and acceleration comes to the same end.
            yield _group("2.4", f"{problem}-k{k}", curves, k, *of, 120, memory=5)
    if problem == "lr":
        curves = {f"k = 2, η (k − 1) = {c:g}": _numbers(problem, "FedAvg", c) for c in LINES["lr"]}
        plain = _group("2.4", "lr-plain-k2", curves, 2, *of, 6000)
        yield plain._replace(figure="2.4 plain")


def _schedule(problem: str, schedule: str, rounds: int, part: str = "") -> Group:
    period = PERIOD if schedule == "exponential" else None
    first = CONSTANT if schedule == "constant" else FIRST
    curves = {
        f"{method}, {schedule}": _numbers(problem, method, first[problem], FIRST_TOLERANCE)
        for method in ("FedProx", "FedRP")
    }
    of = (problem, 0.25, "prox", rounds, schedule, period)
    return _group("2.5", f"{part}{problem}-{schedule}", curves, INNER_STEPS, *of)


def _schedules(problem: str) -> Iterator[Group]:
    for schedule in SCHEDULES:
        yield _schedule(problem, schedule, ROUNDS[problem])


def longer() -> list[Group]:
    """Schedules of figure 2.5 until their steps are shorter than the constant one."""
    of = itertools.product(ROUNDS, LONGER.items())
    found = [_schedule(problem, *setting, "longer-") for problem, setting in of]
    return [group._replace(figure="2.5 longer") for group in found]


def _heterogeneity() -> Iterator[Group]:
    for sigma in SIGMAS:
        curves = {method: _numbers("ls", method, PROX["ls"]) for method in PROXIMAL}
        yield _group("2.7", f"sigma{sigma:g}-prox", curves, 1, "ls", sigma, "prox", ROUNDS["ls"])
        for k in (1, 10):
            one = {f"FedAvg, k = {k}": _numbers("ls", "FedAvg", FEDAVG["ls"])}
            of = ("ls", sigma, "gradient", ROUNDS["ls"])
            yield _group("2.7", f"sigma{sigma:g}-k{k}", one, k, *of)


def _all_methods(
    figure: str, name: str, problem: str, inner_steps: int = INNER_STEPS, **options
) -> Iterator[Group]:
    """The proximal methods, and FedAvg with five steps."""
    in_batches = "batch_size" in options
    curves = {
        method: _numbers(problem, method, PROX[problem], in_batches=in_batches)
        for method in PROXIMAL
    }
    of = (problem, 0.25, "prox", ROUNDS[problem])
    yield _group(figure, f"{problem}-prox-{name}", curves, inner_steps, *of, **options)
    one = {"FedAvg": _numbers(problem, "FedAvg", FEDAVG[problem])}
    of = (problem, 0.25, "gradient", ROUNDS[problem])
    yield _group(figure, f"{problem}-fedavg-{name}", one, 5, *of, **options)


def groups() -> list[Group]:
    """All curves of all convex figures."""
    found: list[Group] = []
    for problem in ("ls", "lr"):
        for part in (_fedavg, _lines, _schedules):
            found += part(problem)
        for memory in (0, 2):
            found += _all_methods("2.8", f"{memory}", problem, memory=memory)
        for share in (0.5, 0.7):
            found += _all_methods("B.1", f"{share:g}", problem, participation=share)
    # A pass over five batches is five steps of local training. It solves a proximal step of least
    # squares too: 1/η is 15 times L, and each step leaves a third of the distance, or less.
    found += _all_methods("B.2", "batches", "ls", inner_steps=5, batch_size=1000)
    found += _all_methods("B.2", "batches", "lr", batch_size=200)
    return found + list(_heterogeneity())
