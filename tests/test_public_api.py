"""Every public name is documented in the form that the project agreed on."""

import ast
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil
import re
from typing import NamedTuple

import pytest

import fedjax_dp
from fedjax_dp import algorithms
from fedjax_dp.data import sampling

# Words that look like a verb in the third person and are none.
NOT_VERBS = {"This", "Class", "Is", "Its"}


def packages():
    """The package and its public sub-packages: those whose `__init__` lists names."""
    yield fedjax_dp
    for info in pkgutil.walk_packages(fedjax_dp.__path__, "fedjax_dp."):
        if info.ispkg:
            module = importlib.import_module(info.name)
            if getattr(module, "__all__", None):
                yield module


def public_names():
    for package in packages():
        for name in package.__all__:
            yield pytest.param(package, name, id=f"{package.__name__}.{name}")


def first_line(text):
    """The summary: everything up to the first empty line, which must be one line."""
    return inspect.cleandoc(text).split("\n\n")[0]


def section(text, title):
    """The entries of a section by name; an entry's own lines are indented below the title."""
    lines = inspect.cleandoc(text).splitlines()
    if title not in lines:
        return None
    entries, current = {}, None
    for line in lines[lines.index(title) + 1 :]:
        if line and not line.startswith(" "):
            break
        found = re.match(r"^  (\*{0,2}\w+)(?:, \w+)*: \S", line)
        if found:
            current = found.group(1).lstrip("*")
            entries[current] = line.strip()
    return entries


def problems_of_function(function, name):
    """What the docstring of a function lacks."""
    text = function.__doc__
    if not text:
        return [f"{name} has no docstring"]
    wrong, summary = [], first_line(text)
    if "\n" in summary or not summary.endswith("."):
        wrong.append(
            f"{name}: the first line must be one line that ends with a period: {summary!r}"
        )
    if not re.match(r"^[A-Z][a-z]+s\b", summary) or summary.split()[0] in NOT_VERBS:
        wrong.append(
            f"{name}: the first line must begin with a verb, as in 'Computes …': {summary!r}"
        )
    parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
    documented = section(text, "Args:") or {}
    wrong += [f"{name}: Args must name {p}" for p in parameters if p not in documented]
    wrong += [f"{name}: Args names {p}, which is none" for p in documented if p not in parameters]
    returns = inspect.signature(function).return_annotation not in (None, "None", inspect._empty)
    # A method or property without arguments says in its first line what it returns.
    if returns and parameters and "\nReturns:" not in inspect.cleandoc(text):
        wrong.append(f"{name}: Returns must say what comes back")
    return wrong


def fields_of(cls):
    if dataclasses.is_dataclass(cls):
        return [f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")]
    if hasattr(cls, "_fields"):
        return list(cls._fields)
    if hasattr(cls, "__members__"):
        return list(cls.__members__)
    return []


def problems_of_class(cls, name):
    """What the docstring of a class and of its own public methods lacks."""
    text = cls.__dict__.get("__doc__") or ""
    summary = first_line(text) if text else ""
    if not summary.endswith(".") or "\n" in summary or not re.match(r"^[A-Z]", summary):
        return [f"{name}: needs a docstring whose first line ends with a period: {summary!r}"]
    documented = section(text, "Attributes:") or {}
    wrong = [f"{name}: Attributes must name {f}" for f in fields_of(cls) if f not in documented]
    for member, value in vars(cls).items():
        if member.startswith("_") or member in fields_of(cls):
            continue
        function = getattr(value, "__func__", value)
        if isinstance(value, property):
            if not (value.fget.__doc__ or "").strip().split("\n")[0].endswith("."):
                wrong.append(f"{name}.{member}: the first line must end with a period")
        # Methods that a decorator made, such as `replace`, are documented by their makers.
        elif inspect.isfunction(function) and function.__module__.startswith("fedjax_dp"):
            wrong += problems_of_function(function, f"{name}.{member}")
    return wrong


def problems_of(value, name):
    if inspect.isclass(value):
        return problems_of_class(value, name)
    if inspect.isfunction(value):
        return problems_of_function(value, name)
    if inspect.ismodule(value):
        return [] if (value.__doc__ or "").strip() else [f"{name}: the module has no docstring"]
    return []


@pytest.mark.parametrize("package, name", list(public_names()))
def test_public_name_is_documented(package, name):
    assert hasattr(package, name), f"{package.__name__}.__all__ lists {name}, which is missing"
    wrong = problems_of(getattr(package, name), name)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", list(packages()), ids=lambda p: p.__name__)
def test_public_names_are_unique_and_public(package):
    names = list(package.__all__)
    assert len(set(names)) == len(names)
    assert all(not name.startswith("_") for name in names if name != "__version__")


def test_the_front_door_opens_nothing_unlisted():
    """Everything public that `fedjax_dp` holds is on its list, sub-packages apart."""
    held = {
        name
        for name, value in vars(fedjax_dp).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    listed = {n for n in fedjax_dp.__all__ if not inspect.ismodule(getattr(fedjax_dp, n))}
    assert held <= listed
    assert set(dir(fedjax_dp)) >= set(fedjax_dp.__all__)


def parsed(path):
    return ast.parse(pathlib.Path(path).read_text(encoding="utf-8")).body


def test_stub_dir_and_run_time_agree():
    """What editors and type checkers read off the stub is what `dir()` lists and is there."""
    stub = pathlib.Path(fedjax_dp.__file__).with_suffix(".pyi")
    listed = {
        alias.asname: (node.module, alias.name)
        for node in parsed(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(listed) == set(dir(fedjax_dp)) == set(fedjax_dp.__all__)
    for name, (module, origin) in listed.items():
        room = importlib.import_module(f"fedjax_dp.{module}" if module else f"fedjax_dp.{origin}")
        assert getattr(fedjax_dp, name) is (getattr(room, origin) if module else room), name
    with pytest.raises(AttributeError, match="attribute fedavgg"):
        _ = fedjax_dp.fedavgg


def test_names_on_top_are_few_and_those_that_moved_say_where_they_are():
    assert len(dir(fedjax_dp)) <= 60
    for name, room in fedjax_dp._ROOMS.items():
        home = importlib.import_module(f"fedjax_dp.{room}")
        assert name in home.__all__ and name not in fedjax_dp.__all__
        with pytest.warns(DeprecationWarning, match=rf"fedjax_dp\.{name} is fedjax_dp\.{room}\."):
            assert getattr(fedjax_dp, name) is getattr(home, name)


def test_every_algorithm_is_public_by_its_name():
    """Each is on both lists, and is a function whose arguments a type checker can read."""
    for name, entry in fedjax_dp.algorithms.ALGORITHMS.items():
        assert name in algorithms.__all__, (
            f"{name} needs an entry in fedjax_dp/algorithms/__init__.py"
        )
        assert getattr(algorithms, name) is entry.factory, name
        defined = parsed(inspect.getsourcefile(inspect.unwrap(entry.factory)))
        assert name in [node.name for node in defined if isinstance(node, ast.FunctionDef)], name


def test_what_a_study_needs_is_reached_from_the_front_door():
    """Ledger, calibration, samplers; audits and experiments by their packages."""
    for name in ("Ledger", "PrivacyAccounting", "calibrate", "federation", "simulation"):
        assert name in fedjax_dp.__all__, name
    samplers = {
        name
        for name, value in vars(sampling).items()
        if inspect.isfunction(value) and value.__module__ == sampling.__name__
        if not name.startswith("_")
    }
    # The one that mixes two samplers is in its module.
    assert "poisson" in samplers
    assert samplers - {"full_participation_first"} <= set(fedjax_dp.__all__)
    audits = importlib.import_module("fedjax_dp.audit")
    assert {"run_audit", "audit", "plant_clients", "plant_records"} <= set(audits.__all__)


def functions():
    """Every function of the package that is not private, reached by its module."""
    for found in pkgutil.walk_packages(fedjax_dp.__path__, "fedjax_dp."):
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == found.name and name[0] != "_":
                yield f"{found.name}.{name}", value


def has_random_key_in_place(function):
    """A draw takes its key first, all else takes one last of its arguments without defaults."""
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
    ]
    return "key" not in needed or "key" in (needed[0], needed[-1])


def test_random_keys_have_one_position():
    hints = ((name, f, f.__annotations__.get("key")) for name, f in functions())
    wrong = [name for name, f, kind in hints if kind is not str and not has_random_key_in_place(f)]
    assert not wrong
    assert not has_random_key_in_place(lambda state, key, data: None)


def test_the_package_is_typed():
    assert (pathlib.Path(fedjax_dp.__file__).parent / "py.typed").is_file()


GOOD = "Counts things.\n\nArgs:\n  size: how many.\n  *rest: more.\n\nReturns:\n  The count."


def documented(text):
    def function(size: int, *rest: int) -> int:
        return size

    function.__doc__ = text
    return function


class WithoutAttribute(NamedTuple):
    """Holds numbers.

    Attributes:
      first: a number.
    """

    first: int
    second: int


@pytest.mark.parametrize(
    "value, message",
    [
        (documented(GOOD.replace("things.", "things")), "ends with a period"),
        (documented(GOOD.replace("Counts", "The number of")), "begin with a verb"),
        (documented(GOOD.replace("  size: how many.\n", "")), "Args must name size"),
        (documented(GOOD.replace("*rest", "other: gone.\n  *rest")), "names other, which is none"),
        (documented(GOOD.partition("\n\nReturns")[0]), "Returns must say"),
        (WithoutAttribute, "Attributes must name second"),
        (lambda: 0, "has no docstring"),
    ],
)
def test_what_breaks_the_form_is_found(value, message):
    (problem,) = problems_of(value, "value")
    assert message in problem


def test_valid_forms_pass():
    assert not problems_of(documented(GOOD), "good")
