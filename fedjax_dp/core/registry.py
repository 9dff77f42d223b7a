"""Parts by name: those of the package, and those of users as `module:function`."""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Registry(MutableMapping[str, _T], Generic[_T]):
    """Components by name; `package.module:name` and `file.py:name` are imported."""

    def __init__(self, parts: Mapping[str, _T], adopt: Callable[[Any], _T] | None = None):
        """Stores parts by name; `adopt` turns an imported object into a part, or refuses it."""
        self._parts, self._adopt = dict(parts), adopt
        self._own: dict[str, _T] = {}

    def __getitem__(self, name: str) -> _T:
        """Returns a part; raises a ValueError if an import fails."""
        if not is_own(name):
            return self._parts[name]
        if name not in self._own:
            part = imported(name)
            if self._adopt is None and not callable(part):
                raise ValueError(f"{name!r} must name a function, got {type(part).__name__}")
            self._own[name] = part if self._adopt is None else self._adopt(part)
        return self._own[name]

    def __setitem__(self, name: str, part: _T) -> None:
        """Names a part."""
        self._parts[name] = part

    def __delitem__(self, name: str) -> None:
        """Removes a name."""
        del self._parts[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names that are listed."""
        return iter(self._parts)

    def __len__(self) -> int:
        """Counts the names that are listed."""
        return len(self._parts)


def options_of(factory: Callable[..., Any], given: Collection[str] = ()) -> dict[str, Any]:
    """Lists a factory's options, except `given`, with defaults or `Parameter.empty`.

    An option is a parameter, or a field of one whose default is a named tuple.
    """
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    groups, options = groups_of(factory), dict[str, Any]()
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind not in several:
            options |= groups[name]._asdict() if name in groups else {name: parameter.default}
    return {name: default for name, default in options.items() if name not in given}


def groups_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """Lists the parameters whose default is a named tuple: its fields are options."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if hasattr(p.default, "_fields")}


def grouped(factory: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a factory's arguments of options: those that are fields go into their named tuple."""
    arguments = dict(options)
    for name, default in groups_of(factory).items():
        fields = arguments.keys() & set(default._fields)
        arguments[name] = default._replace(**{field: arguments.pop(field) for field in fields})
    return arguments


def is_own(name: str) -> bool:
    """Whether a name has to be imported."""
    return ":" in name


def imported(name: str) -> Any:
    """Imports `package.module:name`, or `file.py:name`; errors say what failed, and where."""
    module, place, attribute = _module_of(name)
    if not hasattr(module, attribute):
        known = [n for n in vars(module) if not n.startswith("_")]
        hint = difflib.get_close_matches(attribute, known, 1)
        raise ValueError(
            f"{name!r} must name something in {place}, which has no {attribute!r}"
            + (f"; did you mean {place}:{hint[0]}?" if hint else "")
        )
    return getattr(module, attribute)


def digest_of_source(name: str) -> str:
    """Computes the SHA-256 of the file from which a name is imported; empty without a file."""
    file = getattr(_module_of(name)[0], "__file__", None)
    return hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() if file else ""


def _module_of(name: str) -> tuple[ModuleType, str, str]:
    """Imports the module of a name; returns it, where it is, and the name in it."""
    place, _, attribute = name.rpartition(":")
    is_named = bool(place) and attribute.isidentifier()
    if not is_named:
        raise ValueError(f"{name!r} must have the form package.module:name or file.py:name")
    module = (
        module_of_file(pathlib.Path(place), name) if place.endswith(".py") else _module(place, name)
    )
    return module, place, attribute


def _module(place: str, name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{name!r} must name a module that can be imported, and there is no module "
                f"{error.name!r}"
            ) from None
        raise _failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def module_of_file(path: pathlib.Path, name: str) -> ModuleType:
    """Imports a file, once; errors quote the name."""
    path = pathlib.Path(os.path.expanduser(path))
    if not path.is_file():
        raise ValueError(f"{name!r} must name an existing file, and {str(path)!r} does not exist")
    path = path.resolve()
    known = f"fedjax_dp_own_{path.stem}_{abs(hash(str(path))):x}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    try:
        spec.loader.exec_module(module)
    # The status of an exit may be that of success.
    except (Exception, SystemExit) as error:
        del sys.modules[known]
        raise _failed(name, error, str(path)) from error
    return module


def _failed(name: str, error: BaseException, file: str = "") -> ValueError:
    """Says where an import failed: in the file if it was run, in the last call otherwise."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if f.filename == file), frames[-1])
    # The text of a syntax error names its place.
    where = "" if isinstance(error, SyntaxError) else f"{last.filename}, line {last.lineno}: "
    return ValueError(
        f"{name!r} must be a module that can be imported; {where}{type(error).__name__}: {error}"
    )
