"""Which curves each convex figure of chapter 2 consists of."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from experiments.splitting.curves import METHODS, Setting

LS_ROUNDS, LR_ROUNDS = 605, 805
NUM_STEPS = (1, 2, 5, 10, 20, 50, 100)
DECAYS = (1, 1 / 2, 1 / 5, 1 / 10, 1 / 20, 1 / 50)
SCHEDULES = ("constant", "inverse", "inverse_sqrt", "inverse_log10", "exponential")
SIGMAS = (0.25, 2.0, 10.0)
PERIOD = 500
# Step sizes: of local training, of proximal steps, and of these in the first round of a schedule.
FEDAVG = {"ls": 1e-5, "lr": 2e-3}
PROX = {"ls": 1e-5, "lr": 0.01}
FIRST = {"ls": 1e-3, "lr": 0.1}
# η (k − 1) of the lines of figure 2.4.
LINES = {"ls": (1e-4, 5e-5, 2e-5, 1e-5), "lr": (1e-3, 5e-4, 2.5e-4, 1.25e-4)}
# Of the steps that solve a proximal step, below 2 / (L + 1/η), and the most of them.
INNER_RATE, INNER_STEPS = 3e-3, 300


class Group(NamedTuple):
    """Curves that one program computes side by side.

    Attributes:
      name: of its file.
      figure: of the chapter.
      problem: "ls" or "lr".
      sigma: noise of least squares.
      setting: the program.
      curves: numbers by label.
    """

    name: str
    figure: str
    problem: str
    sigma: float
    setting: Setting
    curves: Mapping[str, Mapping[str, float]]


def rounds_of(problem: str) -> int:
    """The chapter's number of rounds."""
    return LS_ROUNDS if problem == "ls" else LR_ROUNDS


def _numbers(problem: str, method: str, step: float) -> dict[str, float]:
    alpha, beta, gamma = METHODS[method]
    own = {"alpha": alpha, "beta": beta, "gamma": gamma}
    if method == "FedAvg":
        return own | {"learning_rate": step}
    if problem == "lr":
        own["learning_rate"] = INNER_RATE
    return own | {"step_size": step}


def _prox(problem: str, num_rounds: int, **options) -> Setting:
    return Setting("prox", num_rounds, 1 if problem == "ls" else INNER_STEPS, **options)


def _fedavg(problem: str) -> Iterator[Group]:
    rounds, eta = rounds_of(problem), FEDAVG[problem]
    for k in NUM_STEPS:
        one = {f"k = {k}": _numbers(problem, "FedAvg", eta)}
        yield Group(
            f"2.2-{problem}-k{k}", "2.2", problem, 0.25, Setting("gradient", rounds, k), one
        )
    swept = {f"η0 · {d:g}": _numbers(problem, "FedAvg", d * eta) for d in DECAYS}
    yield Group(f"2.2-{problem}-eta", "2.2", problem, 0.25, Setting("gradient", rounds, 10), swept)


def _lines(problem: str) -> Iterator[Group]:
    for k in NUM_STEPS[1:]:
        curves = {
            f"k = {k}, η (k − 1) = {c:g}": _numbers(problem, "FedAvg", c / (k - 1))
            for c in LINES[problem]
        }
        setting = Setting("gradient", LS_ROUNDS, k)
        if problem == "lr":
            # The end is what is plotted, and acceleration comes to the same end.
            setting = Setting("gradient", 400, k, memory=5)
        yield Group(f"2.4-{problem}-k{k}", "2.4", problem, 0.25, setting, curves)
    if problem == "lr":
        setting = Setting("gradient", 6000, 2)
        curves = {f"k = 2, η (k − 1) = {c:g}": _numbers(problem, "FedAvg", c) for c in LINES["lr"]}
        yield Group("2.4-lr-plain-k2", "2.4 plain", problem, 0.25, setting, curves)


def _schedules(problem: str) -> Iterator[Group]:
    for schedule in SCHEDULES:
        period = PERIOD if schedule == "exponential" else None
        setting = _prox(problem, rounds_of(problem), schedule=schedule, period=period)
        for figure, method in (("2.5", "FedProx"), ("2.6", "FedRP")):
            curves = {schedule: _numbers(problem, method, FIRST[problem])}
            yield Group(f"{figure}-{problem}-{schedule}", figure, problem, 0.25, setting, curves)


def _heterogeneity() -> Iterator[Group]:
    others = [method for method in METHODS if method != "FedAvg"]
    for sigma in SIGMAS:
        curves = {method: _numbers("ls", method, PROX["ls"]) for method in others}
        name = f"2.7-sigma{sigma:g}"
        yield Group(f"{name}-prox", "2.7", "ls", sigma, _prox("ls", LS_ROUNDS), curves)
        for k in (1, 10):
            one = {f"FedAvg, k = {k}": _numbers("ls", "FedAvg", FEDAVG["ls"])}
            setting = Setting("gradient", LS_ROUNDS, k)
            yield Group(f"{name}-k{k}", "2.7", "ls", sigma, setting, one)


def _acceleration(problem: str) -> Iterator[Group]:
    others = [method for method in METHODS if method != "FedAvg"]
    rounds = rounds_of(problem)
    for memory in (0, 2):
        setting = _prox(problem, rounds, memory=memory)
        curves = {method: _numbers(problem, method, PROX[problem]) for method in others}
        yield Group(f"2.8-{problem}-prox-{memory}", "2.8", problem, 0.25, setting, curves)
        one = {"FedAvg": _numbers(problem, "FedAvg", FEDAVG[problem])}
        setting = Setting("gradient", rounds, 5, memory=memory)
        yield Group(f"2.8-{problem}-fedavg-{memory}", "2.8", problem, 0.25, setting, one)


def _parts(problem: str) -> Iterator[Group]:
    others = [method for method in METHODS if method != "FedAvg"]
    curves = {method: _numbers(problem, method, PROX[problem]) for method in others}
    one = {"FedAvg": _numbers(problem, "FedAvg", FEDAVG[problem])}
    rounds = rounds_of(problem)
    for share in (0.5, 0.7):
        setting = _prox(problem, rounds, participation=share)
        name = f"B.1-{problem}-{share:g}"
        yield Group(f"{name}-prox", "B.1", problem, 0.25, setting, curves)
        setting = Setting("gradient", rounds, 5, participation=share)
        yield Group(f"{name}-fedavg", "B.1", problem, 0.25, setting, one)
    if problem == "lr":
        # A pass over five batches is five steps of local training; of a proximal step, 100 steps.
        setting = Setting("prox", rounds, 100, batch_size=200)
        yield Group("B.2-lr-prox", "B.2", problem, 0.25, setting, curves)
        setting = Setting("gradient", rounds, 5, batch_size=200)
        yield Group("B.2-lr-fedavg", "B.2", problem, 0.25, setting, one)


def groups() -> list[Group]:
    """All curves of all convex figures."""
    found: list[Group] = []
    for problem in ("ls", "lr"):
        for part in (_fedavg, _lines, _schedules, _acceleration, _parts):
            found += part(problem)
    return found + list(_heterogeneity())
