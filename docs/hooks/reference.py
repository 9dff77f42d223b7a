"""Makes the pages of the reference from the package, and tables in other pages.

Those that other pages link to are also files, which say in a clone where to look instead.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. `python
docs/hooks/reference.py` writes those of the files anew.
"""

import functools
import importlib
import inspect
import itertools
import json
import pathlib
import pkgutil
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import yaml
from mkdocs.structure.files import File, Files

import fedjax_dp
from fedjax_dp.cli.main import COMMANDS, command
from fedjax_dp.data import datasets
from fedjax_dp.experiment.components.catalogue import DESCRIBED, TABLES
from fedjax_dp.experiment.reading.keys import Row, describe, describe_choice
from fedjax_dp.privacy.reports.latex import references

# Fields of a BibTeX entry: where it was published, and what links to it.
_VENUES = ("booktitle", "journal", "institution", "school", "publisher", "howpublished")
_LINKS = {
    "doi": "[DOI](https://doi.org/{})",
    "eprint": "[arXiv](https://arxiv.org/abs/{})",
    "url": "[online]({})",
}
_FIELD = re.compile(r"^  (\w+) = \{(.*)\},$", re.MULTILINE)
_ACCENTS = {"'": "\u0301", "`": "\u0300", '"': "\u0308", "~": "\u0303", "v": "\u030c"}
_DOCS = pathlib.Path(__file__).parents[1]
_CITATION = _DOCS.parent / "CITATION.cff"
_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
# The parts of the package in the order in which a study needs them.
_PARTS = (
    "data",
    "models",
    "clients",
    "server",
    "algorithms",
    "engine",
    "privacy",
    "audit",
    "evaluation",
    "experiment",
    "io",
    "flower",
    "extending",
)
# What a paragraph of the page of examples says of the names that it begins with, and its code.
_EXAMPLE = re.compile(r"^(`\w+`(?:, `\w+`)*): (.*?)\n\n(```python\n.*?^```)$", re.M | re.S)
# Options that every command has.
_OF_ALL = ("as_json", "is_quiet", "log_level", "help")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from the package."""
    made = {
        "configuration.md": configuration(),
        "commands.md": commands(),
        "bibliography.md": bibliography(),
        "citing.md": citing(),
    }
    for place, text in (api_pages() | made).items():
        page = File.generated(config, f"reference/{place}", content=text)
        if found := files.get_file_from_path(page.src_uri):
            files.remove(found)
        files.append(page)
    return files


def generated(page: str) -> str:
    """A page with its tables as the package has them now."""
    tables = {"datasets": datasets_table, "methods": methods_table}
    return _BLOCK.sub(lambda found: f"{found[1]}\n{tables[found[2]]()}\n\n{found[3]}", page)


def datasets_table() -> str:
    """The table of data sets, and that of their files, by data sets with the same ones."""
    rows: list[tuple[str, ...]] = []
    alike: dict[str, list[str]] = {}
    for name in datasets.available():
        about = datasets.info(name)
        options = [key for key in datasets.options(name) if key.startswith("client")]
        clients = "yes" if about.names_clients else ", ".join(f"`{key}`" for key in options)
        link = f"[`{name}`](configuration.md#data.name-{name})"
        rows.append((link, about.summary, clients, about.licence))
        if files := "; or ".join(_files(source) for source in about.sources):
            alike.setdefault(files, []).append(f"`{name}`")
    kinds = _table(("name", "what", "clients", "licence"), rows)
    places = [(", ".join(names), files) for files, names in alike.items()]
    return f"{kinds}\n\n{_table(('data sets', 'files'), places)}"


def _files(source: Any) -> str:
    """The files of a source, and whether they can be fetched."""
    names = ", ".join(f"`{name}`" for name in source.files)
    return f"`{source.folders[0]}/`: {names}{' (fetched)' if source.downloads else ''}"


def methods_table() -> str:
    """The table of methods, as the tutorial printed it: its test computes it anew."""
    path = _DOCS / "tutorials" / "choosing-a-method.ipynb"
    cells = json.loads(path.read_text("utf-8"))["cells"]
    (cell,) = (c for c in cells if "Markdown(methods_table" in "".join(c["source"]))
    table = "".join(cell["outputs"][0]["data"]["text/markdown"])
    link = r"[`\1`](configuration.md#algorithm.name-\1)"
    return re.sub(r"\*\*`(\w+)`\*\*", link, table)


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
    pages = {f"api/{part}.md": _part(f"fedjax_dp.{part}") for part in _PARTS}
    return pages | {"api/index.md": _front()}


def _front() -> str:
    """The page of the names that `fedjax_dp` itself has, by part of the package."""
    rows: dict[str, list[tuple[str, str]]] = {part: [] for part in _PARTS}
    own: dict[str, list[str]] = {part: [] for part in _PARTS}
    for paths in _sorted(public_names()):
        name = paths[0].removeprefix("fedjax_dp.")
        value = getattr(fedjax_dp, name, None)
        if "." in name or inspect.ismodule(value):
            continue
        # What is of no part makes keys.
        part = "privacy" if len(paths) == 1 else paths[-1].split(".")[1]
        rows[part].append((f"[`{name}`][{_defined(paths)}]", _about(value)))
        if len(paths) == 1 and _is_defined(value):
            own[part].append(_entry(paths, 3))
    text = _head("fedjax_dp")
    for part in _PARTS:
        about = _about(getattr(fedjax_dp, part))
        table = [_table(("name", "what it does"), rows[part])] if rows[part] else []
        text += [f"## {part}", f"[All of `{part}`]({part}.md). {about}", *table, *own[part]]
    return "\n\n".join(text)


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
    """Names by the alphabet, those that `fedjax_dp` has before others, functions before classes."""

    def place(paths: list[str]) -> tuple[bool, bool, str]:
        package, _, name = paths[-1].rpartition(".")
        is_function = inspect.isfunction(getattr(importlib.import_module(package), name))
        return paths[0].count(".") > 1, not is_function, name.lower()

    return sorted(names, key=place)


def _is_defined(value: Any) -> bool:
    """Whether it is a class or function of the package."""
    is_object = inspect.isclass(value) or inspect.isfunction(value)
    return is_object and value.__module__.startswith("fedjax_dp.")


def _about(value: Any) -> str:
    """The first line of a docstring of its own."""
    has_own = inspect.ismodule(value) or _is_defined(value)
    return inspect.cleandoc(value.__doc__ or "").partition("\n")[0] if has_own else ""


def _defined(paths: list[str]) -> str:
    """The path of an object in the module that defines it, which may have the same name."""
    package, _, name = paths[-1].rpartition(".")
    value = getattr(importlib.import_module(package), name)
    return f"{value.__module__}.{value.__qualname__}" if _is_defined(value) else paths[-1]


def _entry(paths: list[str], level: int) -> str:
    """An object's docstring and example, with an anchor for each of its public paths."""
    path = _defined(paths)
    anchors = "".join(f"[](){{ #{other} }}\n" for other in paths if other != path)
    entry = f"{anchors}\n::: {path}\n    options:\n      heading_level: {level}"
    return entry + examples().get(paths[0], "")


@functools.cache
def examples() -> dict[str, str]:
    """The examples of the main functions, by public path."""
    page = (_DOCS / "reference" / "examples.md").read_text("utf-8")
    found = {}
    for names, about, code in _EXAMPLE.findall(page):
        text = f"\n\n*[Example](../examples.md)*: {about}\n\n{code}"
        for name in re.findall(r"\w+", names):
            package = "fedjax_dp" if name in fedjax_dp.__all__ else "fedjax_dp.experiment"
            found[f"{package}.{name}"] = text
    return found


def configuration() -> str:
    """The page of all keys of a configuration, and of the options of every part."""
    text = [
        "# Configuration",
        "This page shows what `fedjax-dp run --keys` lists. A key is written as `key = value` in "
        "the table of its section, or as `--section.key VALUE` on the command line. "
        "`fedjax-dp run --schema` prints the keys as a JSON schema, with which editors complete "
        "them and mark mistakes. The line `#:schema schema.json` at the top of a file names it.",
    ]
    heads = ("key", "default", "may be", "meaning")
    for section, rows in itertools.groupby(
        describe(), lambda row: row[0].rpartition(".")[0] or row[0]
    ):
        text += [f"## {section}", _table(heads, [_key(row, has_id=True) for row in rows])]
    for key, choice in DESCRIBED.items():
        text.append(f"## Options by {key}")
        table = f"{key}.NAME" if key in TABLES else choice.options
        text.append(f"Keys of the table `{table}`, by the part that `{key}` names.")
        for name in choice.names:
            part = choice.names[name]
            text += [f"### {name} {{ #{key}-{name} }}", _about(getattr(part, "factory", part))]
            rows = [_key(row, has_id=False) for row in describe_choice(f"{key}={name}")]
            text.append(_table(heads, rows) if rows else "No options.")
    return "\n\n".join(text)


def _key(row: Row, *, has_id: bool) -> tuple[str, ...]:
    key, rule, default, about = row
    name = f"`{key.rpartition('.')[2]}`" + (f"{{ #{key} }}" if has_id else "")
    return name, default and f"`{default}`", _escaped(rule), _escaped(about)


def _escaped(text: str) -> str:
    """Escapes what Markdown would read as emphasis or a tag, outside of code."""
    return re.sub(r"`[^`]*`|([*<_])", lambda found: rf"\{found[1]}" if found[1] else found[0], text)


def commands() -> str:
    """The page of all commands with their arguments and options."""
    text = [
        "# Commands and options",
        "Each command also has `--json`, `--quiet`, `--log-level` and `--help`, see "
        "[command line](command-line.md#output).",
    ]
    for name in COMMANDS:
        called = command(name)
        text += _command("##", f"fedjax-dp {name}", called)
        for part, inner in getattr(called, "commands", {}).items():
            text += _command("###", f"fedjax-dp {name} {part}", inner)
    return "\n\n".join(text)


def _command(level: str, words: str, called: click.Command) -> Iterator[str]:
    context = click.Context(called, info_name=words)
    yield f"{level} {words}"
    yield inspect.cleandoc(called.help or "")
    own = (each for each in called.get_params(context) if each.name not in _OF_ALL)
    records = (each.get_help_record(context) for each in own)
    rows = [(f"`{words}`", about) for words, about in filter(None, records)]
    if rows:
        yield _table(("argument or option", "what it does"), rows)


def bibliography() -> str:
    """The page of all sources."""
    text = [
        "# Bibliography",
        "Sources of the package, its pages and its studies, each with the key of its BibTeX entry "
        "in `fedjax_dp/privacy/reports/references.bib`.",
    ]
    return "\n\n".join([*text, *(_source(key, entry) for key, entry in sources().items())])


def citing() -> str:
    """The page on citing, from the citation file of the repository."""
    cited = yaml.safe_load(_CITATION.read_text("utf-8"))
    authors = " and ".join(f"{{{author['name']}}}" for author in cited["authors"])
    entry = {
        "author": authors,
        "title": f"{{{cited['title']}}}",
        "version": cited["version"],
        "note": f"Licence: {cited['license']}",
    }
    fields = "".join(f"  {name} = {{{value}}},\n" for name, value in entry.items())
    return (
        f"# Citing\n\nThis site describes version {fedjax_dp.__version__}. {cited['message']}\n\n"
        f"```bibtex\n@software{{fedjax_dp,\n{fields}}}\n```\n\n"
        "The folder of a run contains the citations of its methods in `privacy.bib`. "
        "Their sources are in the [bibliography](bibliography.md)."
    )


def sources() -> dict[str, dict[str, str]]:
    """The fields of every entry of the bibliography, as plain text."""
    return {
        key: {name: _plain(value) for name, value in _FIELD.findall(entry)}
        for key, entry in references().items()
    }


def _plain(text: str) -> str:
    """Text without LaTeX: accents become letters, braces and commands are removed."""
    accented = r"\{\\(['`\"~v]) ?\\?(\w)\}"
    text = re.sub(accented, lambda found: found[2] + _ACCENTS[found[1]], text)
    text = re.sub(r"[{}]|\\url|\\(?=[&_])", "", text).replace("--", "–")
    return unicodedata.normalize("NFC", text)


def _source(key: str, entry: Mapping[str, str]) -> str:
    """An entry as text, with its key as anchor."""
    people = [" ".join(reversed(name.split(", "))) for name in entry["author"].split(" and ")]
    where = [entry[name] for name in _VENUES if name in entry]
    if "volume" in entry:
        where.append(entry["volume"] + (f"({entry['number']})" if "number" in entry else ""))
    where += [entry[name] for name in ("pages", "year") if name in entry]
    links = [link.format(entry[name]) for name, link in _LINKS.items() if name in entry]
    text = ". ".join(filter(None, (", ".join(people), f"*{entry['title']}*", ", ".join(where))))
    return f"{text}. {' '.join([*links, f'`{key}`'])}\n{{ #{key} }}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (heads, ["---"] * len(heads), *rows)
    return "\n".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in line) + " |"
        for line in lines
    )


if __name__ == "__main__":
    for page in _DOCS.rglob("*.md"):
        page.write_text(generated(page.read_text("utf-8")), "utf-8")
