"""What wrappers say about themselves, and which goes around which."""

import pathlib

import jax.numpy as jnp
import pytest
from small_problem import NUM_CLIENTS, make_data, make_model, plain_trainer

from fedjax_dp import algorithms
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import Change, Wrapper, anderson, federation, serverless, several_servers
from fedjax_dp.engine.wrapping import ANDERSON_OF_CLIENTS, BUILT_IN

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "write-a-wrapper.md"


def bound():
    model = make_model()
    everyone = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    algorithm = algorithms.fedavg(model, plain_trainer(model))
    return federation(algorithm, make_data(), everyone)


def split(fed):
    servers = jnp.arange(NUM_CLIENTS) % 2
    return several_servers(fed, servers=servers, exchange_every=1)


def undeclared(fed):
    return fed._replace(step=lambda *given: fed.step(*given))


def declared(changes):
    def wrap(fed):
        return fed.wrapped(Wrapper("mine", frozenset(changes)), step=undeclared(fed).step)

    return wrap


def accelerated(fed):
    return anderson(fed, memory=1)


@pytest.mark.parametrize(
    ("inner", "outer", "rule"),
    [
        (undeclared, split, "have a server"),
        (undeclared, serverless, "have one model for all clients"),
        (undeclared, accelerated, "have one server, whose model is accelerated"),
        (declared({Change.TIME}), split, "have no wrapper of its own"),
        (declared({Change.MESSAGES}), accelerated, "have rounds that map one model"),
        (split, split, "be wrapped by several_servers"),
        (serverless, split, "have a server"),
        (accelerated, accelerated, "be wrapped by anderson"),
    ],
)
def test_a_wrapper_that_does_not_go_around_another_refuses_it(inner, outer, rule):
    with pytest.raises(ValueError, match=f"federation must {rule}"):
        outer(inner(bound()))


def test_wrappers_that_declare_what_they_change_go_together():
    fed = split(declared({Change.MESSAGES})(bound()))
    assert [wrapper.name for wrapper in fed.wrappers] == ["several_servers", "mine"]
    names = [wrapper.name for wrapper in undeclared(fed).wrappers]
    assert names[0].startswith("a wrapper that declares nothing") and len(names) == 3
    assert fed.has_server and not serverless(bound()).has_server
    assert declared({Change.MESSAGES})(undeclared(bound())).has_server


def test_a_wrapper_declares_that_it_changes_who_takes_part():
    fed = bound()
    fewer = fed.cohorts.thinned(lambda round_index, clients: clients > 0)
    with pytest.raises(ValueError, match=r"the wrapper 'mine' must declare Change\.COHORTS"):
        fed.wrapped(Wrapper("mine", frozenset({Change.TIME})), cohorts=fewer)
    with pytest.raises(ValueError, match=r"a wrapper must replace fields among .*'algorithm'"):
        fed.wrapped(Wrapper("mine"), algorithm=fed.algorithm)


@pytest.mark.parametrize(
    ("wrapper", "rule"),
    [
        ("mine", "wrapper must be a Wrapper"),
        (Wrapper(3), "wrapper.name must be a string"),
        (Wrapper("mine", {"cohorts"}), "wrapper.changes must be a frozenset"),
        (Wrapper("mine", frozenset({"cohorts"})), "have values of Change"),
        (Wrapper("mine", needs={"time": "have no clock"}), "have values of Change"),
    ],
)
def test_a_wrapper_with_a_wrong_declaration_is_refused(wrapper, rule):
    with pytest.raises(ValueError, match=rule):
        bound().wrapped(wrapper)


def test_the_page_says_which_goes_around_which():
    text = PAGE.read_text(encoding="utf-8")
    for outer in BUILT_IN:
        name = "anderson of clients" if outer is ANDERSON_OF_CLIENTS else outer.name
        cells = ["no" if outer.refusal(inner) else "yes" for inner in BUILT_IN]
        assert f"| {' | '.join([name, *cells])} |\n" in text
