"""Compiles a round of every method and wrapper for a device that is not here: TARGET [NAME ...].

A process of its own: compilers read their settings when they are loaded. Prints a line of JSON for
each, with the number of operations of a round, or its error.
"""

import json
import sys
from functools import partial

import timed
from cases import CASES, VARIANTS
from small_problem import NUM_CLIENTS, make_data, make_model

from fedjax_dp.core import targets
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import (
    absences,
    anderson,
    asynchronous,
    clocked,
    federation,
    leaving,
    serverless,
    several_servers,
)
from fedjax_dp.engine.execution.elsewhere import compiled_for
from fedjax_dp.engine.facts import population_of

_RULES = {**timed.TIMED, "concurrency": 4, "max_staleness": 3}
WRAPPERS = {
    "anderson": partial(anderson, memory=2),
    "clocked": partial(clocked, **timed.UNSURE, availability=absences(0.1, rounds=1)),
    "asynchronous": partial(asynchronous, **_RULES),
    "leaving": leaving,
    "serverless": serverless,
    "several servers": partial(several_servers, servers=[0, 1, 0, 1, 1, 1], exchange_every=2),
}


def of_case(case):
    """Binds a case to its data."""
    data, validation = case.data(), case.validation()
    population = population_of(data, validation)
    return federation(case.make(make_model()), population, case.participation()), data, validation


def wrapped(name):
    """Binds FedAvg to six clients, within a wrapper."""
    if name == "leaving":
        bound, data, validation = of_case(CASES["warm_start_averaging"])
        return leaving(bound), data, validation
    sampler, size = sampling.full_participation(), NUM_CLIENTS
    if name == "asynchronous":
        sampler, size = sampling.fixed_size(), 2
    joins = participants.participation(sampler, NUM_CLIENTS, size)
    data = make_data()
    bound = federation(timed.algorithm(), population_of(data, None), joins)
    return WRAPPERS[name](bound), data, None


BUILDS = {name: partial(of_case, case) for name, case in {**CASES, **VARIANTS}.items()}
BUILDS |= {name: partial(wrapped, name) for name in WRAPPERS}


def main():
    """Compiles those that are named, else all."""
    target, *names = sys.argv[1:]
    for name in names or BUILDS:
        try:
            found = compiled_for(targets.target(target), BUILDS[name])
            result = {"operations": found.round.operations, "seconds": found.round.seconds}
        except Exception as error:  # The next one is compiled all the same.
            result = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main()
