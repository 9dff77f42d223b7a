"""Makes the pages of the reference from the package."""

import importlib
import inspect
import pkgutil
from typing import Any

from mkdocs.structure.files import File, Files

import fedjax_dp


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from the package."""
    for place, text in api_pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def public_packages() -> list[str]:
    """The package and those of its sub-packages that list public names, parents first."""
    found = pkgutil.walk_packages(fedjax_dp.__path__, "fedjax_dp.")
    packages = [importlib.import_module(info.name) for info in found if info.ispkg]
    return ["fedjax_dp", *(p.__name__ for p in packages if getattr(p, "__all__", None))]


def public_names() -> list[list[str]]:
    """Every public object by its paths, that through the innermost package last."""
    paths: dict[tuple[str, int], list[str]] = {}
    for package in map(importlib.import_module, public_packages()):
        for name in package.__all__:
            found = paths.setdefault((name, id(getattr(package, name))), [])
            found.append(f"{package.__name__}.{name}")
    return list(paths.values())


def api_pages() -> dict[str, str]:
    """A page for each part of the package, and one for the names of `fedjax_dp` itself."""
    parts = [name for name in fedjax_dp.__all__ if inspect.ismodule(getattr(fedjax_dp, name))]
    pages = {f"reference/api/{part}.md": _part(f"fedjax_dp.{part}") for part in parts}
    return pages | {"reference/api/index.md": _front()}


def _front() -> str:
    """The page of the names that `fedjax_dp` itself has."""
    table, own = ["| name | |", "|---|---|"], []
    for paths in _sorted(public_names()):
        name = paths[0].removeprefix("fedjax_dp.")
        if "." in name:
            continue
        value = getattr(fedjax_dp, name)
        link = f"({name}.md)" if inspect.ismodule(value) else f"[{_defined(paths)}]"
        about = value.__doc__ if inspect.ismodule(value) or _is_defined(value) else ""
        table.append(f"| [`{name}`]{link} | {inspect.cleandoc(about).partition(chr(10))[0]} |")
        if len(paths) == 1 and _is_defined(value):
            own.append(_entry(paths, 2))
    return "\n\n".join([*_head("fedjax_dp"), "\n".join(table), *own])


def _part(part: str) -> str:
    """The page of a part of the package and of its sub-packages."""
    text = []
    packages = [name for name in public_packages() if f"{name}.".startswith(f"{part}.")] or [part]
    for package in packages:
        text += _head(package)
        for paths in _sorted(public_names()):
            if paths[-1].rpartition(".")[0] == package and paths[-1] not in packages:
                text.append(_entry(paths, package.count(".") + 1))
    return "\n\n".join(text)


def _head(package: str) -> list[str]:
    """A heading with the docstring of a package."""
    level = "#" * max(1, package.count("."))
    about = inspect.cleandoc(importlib.import_module(package).__doc__ or "")
    return [f"[](){{ #{package} }}\n\n{level} {package}", about]


def _sorted(names: list[list[str]]) -> list[list[str]]:
    return sorted(names, key=lambda paths: paths[-1].rpartition(".")[2].lower())


def _is_defined(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def _defined(paths: list[str]) -> str:
    """The path of an object in the module that defines it, which may have the same name."""
    package, _, name = paths[-1].rpartition(".")
    value = getattr(importlib.import_module(package), name)
    return f"{value.__module__}.{value.__qualname__}" if _is_defined(value) else paths[-1]


def _entry(paths: list[str], level: int) -> str:
    """An object's docstring, with an anchor for each of its public paths."""
    path = _defined(paths)
    anchors = "".join(f"[](){{ #{other} }}\n" for other in paths if other != path)
    return f"{anchors}\n::: {path}\n    options:\n      heading_level: {level}"
