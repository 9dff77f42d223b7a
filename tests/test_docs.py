"""The code of every page is run, as one program each, and every command line is one that exists."""

import ast
import contextlib
import inspect
import io
import json
import pathlib
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator

import pytest
import typer
from marks import slow, telling
from typer.main import get_command

import fedjax_dp
from fedjax_dp.cli.main import COMMANDS, app, command
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.components.catalogue import CHOICES
from fedjax_dp.experiment.components.numbers_by_client import with_named_lists
from fedjax_dp.experiment.reading import validate
from fedjax_dp.experiment.reading.config_files import all_keys

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted(path for path in ROOT.rglob("*.md") if ".venv" not in path.parts)
# The pages that show a file of the package.
FILES = {
    "how-to/write-an-algorithm.md": "fedjax_dp/algorithms/feddyn.py",
    "how-to/write-an-aggregator.md": "fedjax_dp/server/trimmed_mean.py",
}


def fenced(text: str) -> list[tuple[str, str]]:
    """The blocks of a page with their languages."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return [code for kind, code in fenced(page.read_text("utf-8")) if kind == language]


def run(page: pathlib.Path) -> str:
    """Runs all Python of a page, one block after the other; gives what it prints."""
    names: dict = {"__name__": page.stem}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for number, code in enumerate(blocks(page, "python")):
            exec(compile(code, f"{page.name}, block {number}", "exec"), names)
    return printed.getvalue()


@telling
def test_the_round_of_the_readme_runs():
    loss, epsilon = run(ROOT / "README.md").split("{")
    assert "nan" not in loss and "client" in epsilon


@pytest.mark.parametrize("page", sorted(path.name for path in ROOT.glob("*.md")))
def test_links_of_pages_at_the_root_lead_somewhere(page):
    text = without_code(ROOT / page)
    # A link may be broken between lines.
    found = re.findall(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)", text)
    missing = [path for path, _ in found if not (ROOT / path).exists()]
    headings = [
        (path, anchor)
        for path, anchor in found
        if anchor and path not in missing and anchor[1:] not in anchors(ROOT / path)
    ]
    assert not missing and not headings


def without_code(page: pathlib.Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of the headings of a page, as a site makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\s-]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_pages_of_a_clone_link_to_what_is_there():
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", without_code(page))
        if not (page.parent / path).exists()
    ]
    assert not missing


def test_every_page_is_in_the_navigation_and_every_section_in_the_readme():
    docs = ROOT / "docs"
    files = (*docs.rglob("*.md"), *docs.rglob("*.ipynb"))
    pages = {path.relative_to(docs).as_posix() for path in files}
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert pages <= set(re.findall(r"[\w/-]+\.(?:md|ipynb)", navigation))
    read_on = (ROOT / "README.md").read_text("utf-8").partition("Read on: ")[2].partition("\n\n")[0]
    sections = {page.partition("/")[0] + "/" if "/" in page else page for page in pages}
    assert set(re.findall(r"\]\(docs/([\w/.-]+)\)", read_on)) == sections


def sentences(text: str, ends: str = ".?!") -> Iterator[str]:
    """The sentences of paragraphs and lists without quotes, in which a piece of code is a word."""
    text = re.sub(r"^```.*?^```$|^\$\$.*?^\$\$$|^>.*?$", "", text, flags=re.M | re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*- |#|\||\d+\. )", text):
        if not paragraph.lstrip().startswith("|"):
            yield from re.split(rf"(?<=[{ends}])[*)]*\s", " ".join(paragraph.split()))


# Folders of pages, and pages.
GUIDES = (
    *("docs/" + name for name in ("start", "how-to", "deploy", "reference", "privacy", "methods")),
    *("docs/" + name for name in ("developing", "index.md", "gallery.md", "architecture.md")),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"),
    *sorted(page.relative_to(ROOT).as_posix() for page in ROOT.glob("experiments/**/README.md")),
)


@pytest.mark.parametrize("place", GUIDES)
def test_no_sentence_of_a_guide_is_longer_than_thirty_words(place):
    words = "word " * 31
    lengths = [len(each.split()) for each in sentences(f"# A\n\n- {words}\n- Two. {words}")]
    assert lengths == [2, 32, 2, 31]
    pages = [page for page in PAGES if page.relative_to(ROOT).as_posix().startswith(place)]
    assert pages
    # Pages of studies may still continue a sentence after a colon.
    ends = ".?!:" if place.startswith("experiments/") else ".?!"
    for page in pages:
        text = page.read_text("utf-8")
        assert not [s for s in sentences(text, ends) if len(s.split()) > 30], page


def test_no_sentence_of_a_tutorial_is_longer_than_thirty_words():
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        cells = json.loads(page.read_text("utf-8"))["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        assert not [s for s in sentences(text) if len(s.split()) > 30], page


def test_every_main_function_has_an_example():
    page = (ROOT / "docs" / "reference" / "examples.md").read_text("utf-8")
    found = re.findall(r"^(`\w+`(?:, `\w+`)*): .*?\n\n```python\n(.*?)^```$", page, re.M | re.S)
    shown = {name: code for names, code in found for name in re.findall(r"\w+", names)}
    assert len(found) == len(blocks(ROOT / "docs" / "reference" / "examples.md", "python"))
    assert all(re.search(rf"\.{name}\b", code) for name, code in shown.items())
    main = {name for name in fedjax_dp.__all__ if inspect.isfunction(getattr(fedjax_dp, name))}
    assert main <= shown.keys()


def programs_of(page: pathlib.Path) -> str:
    """All Python of a page or a notebook."""
    if page.suffix == ".md":
        return "\n".join(blocks(page, "python"))
    cells = json.loads(page.read_text("utf-8"))["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    # Command lines, which may be broken.
    return re.sub(r"^[!%](.*\\\n)*.*$", "", code, flags=re.M)


def not_public(path: str) -> bool:
    """Whether a dotted name is in no list of public names on the way to it."""
    package, (_, *names) = fedjax_dp, path.split(".")
    if any(name.startswith("_") and not name.endswith("__") for name in names):
        return True
    for name in names:
        listed = getattr(package, "__all__", None)
        # What stands in a module or class that is listed itself.
        if listed is None:
            return False
        member = getattr(package, name, None)
        is_package = inspect.ismodule(member) and hasattr(member, "__all__")
        if name not in listed and not is_package:
            return True
        package = member
    return False


def names_used(code: str) -> set[str]:
    """The dotted names of the package that a program imports, or reads as attributes of it."""
    tree, found, aliases = ast.parse(code), set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("fedjax_dp."):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            mine = [a for a in node.names if f"{a.name}.".startswith("fedjax_dp.")]
            found |= {alias.name for alias in mine}
            aliases |= {alias.asname or "fedjax_dp": alias.name for alias in mine}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in aliases and all(map(str.isidentifier, rest)):
                found.add(".".join((aliases[first], *rest)))
    return found


READ = [page for page in (*PAGES, *sorted(ROOT.glob("docs/**/*.ipynb"))) if page.is_file()]


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_imports_is_public(page):
    assert not list(filter(not_public, sorted(names_used(programs_of(page)))))


@pytest.mark.parametrize(
    "code",
    [
        "from fedjax_dp.core import trees",
        "from fedjax_dp.algorithms.base import Views",
        "import fedjax_dp.core.trees",
        "import fedjax_dp as fdp\nfdp.engine.round.run_round",
        "from fedjax_dp import engine as e\ne.facts.FederationFacts",
        "from fedjax_dp.extending import trees\ntrees._total",
    ],
)
def test_a_name_that_is_not_public_is_found(code):
    assert any(map(not_public, names_used(code)))


# A command that installs the package, and its extras.
INSTALLS = re.compile(r"""pip install ([^\n`|]*?["']?(?:fedjax-dp|\.)\[([\w,-]+)\]["']?)""")


def test_pages_install_the_package_as_the_page_on_installing_says():
    """Until a release is on an index, from the repository; messages add to what is installed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    start = (ROOT / "docs" / "start" / "install.md").read_text("utf-8")
    (how, names), *_ = INSTALLS.findall(start)
    for page in READ:
        for words, wanted in INSTALLS.findall(page.read_text("utf-8")):
            from_wheel = words.startswith("dist/*.whl ")
            assert from_wheel or words == how.replace(names, wanted), page
            assert set(wanted.split(",")) <= extras["optional-dependencies"].keys(), page
    sources = [
        p for p in (ROOT / "fedjax_dp").rglob("*.py") if "pip install" in p.read_text("utf-8")
    ]
    # The other one writes a Dockerfile.
    assert sorted(path.name for path in sources) == ["export.py", "packages.py"]


# Lines that meet the messages of the page on troubleshooting before any work.
TABLE = "run --data.name=table --data.options.label={} --data.options.path={}.csv"
MEETS = {
    "there is no key '…'; did you mean '…'?": "run --training.lr 0.1",
    "participation.cohort_size must be": "run --participation.cohort_size 5",
    "algorithm.options must hold": "run --algorithm.name=ifca --privacy.unit=client",
    "privacy.unit must be record": "run --privacy.unit client",
    "privacy.client.epsilon must": "run --privacy.client.epsilon=3",
    "privacy.unit must be none": "run --algorithm.name=afl",
    "shuffled epochs": "run --training.sampler shuffled",
    "privacy.record.epsilon must allow": "run --privacy.record.noise_multiplier=1 "
    "--privacy.record.epsilon=0.1",
    "privacy.relation must": "run --privacy.relation add_remove",
    "run.secret must": "run --run.release private",
    "must have a value in every row": TABLE.format("ill", "gaps"),
    "must hold names that recur": TABLE.format("ill", "names"),
    "label, a column": TABLE.format("sick", "gaps"),
    "data.name must be one of": "run --data.name MNIST",
    "missing: …": "run --data.name cifar10 --data.data_dir .",
    "needs the package": TABLE.format("ill", "names"),
    "must be a run folder": "evaluate nothing",
    "must be a new or an empty folder": "run --output full",
}


@telling
def test_messages_of_the_page_on_troubleshooting_are_those_of_the_package(
    fedjax_dp, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("gaps.csv").write_text("age,ill\n3,x\n,y\n")
    rows = [f"n{i},{'xy'[i % 2]}\n" for i in range(60)]
    pathlib.Path("names.csv").write_text("name,ill\n" + "".join(rows))
    (tmp_path / "full" / "run").mkdir(parents=True)
    page = (ROOT / "docs" / "start" / "troubleshooting.md").read_text("utf-8")
    messages = [" ".join(m.split()) for m in re.findall(r"^- `([^`]+)`", page, re.MULTILINE)]
    source = [ast.walk(ast.parse(p.read_text("utf-8"))) for p in (ROOT / "fedjax_dp").rglob("*.py")]
    texts = {n.value for nodes in source for n in nodes if isinstance(n, ast.Constant)}
    texts = "\n".join(text for text in texts if isinstance(text, str))
    met = set()
    for message in messages:
        (start,) = [start for start in MEETS if message.startswith(start)] or [None]
        if start is None:
            pieces = message.removeprefix("model must ").split("…")
            assert all(piece.strip(" '%") in texts for piece in pieces), message
            continue
        met.add(start)
        with monkeypatch.context() as blocked:
            if start == "needs the package":
                blocked.setitem(sys.modules, "pyarrow", None)
            status, _, said = fedjax_dp(*shlex.split(MEETS[start]))
        assert status == 2
        assert re.search(re.escape(message).replace("…", ".*"), " ".join(said.split())), message
    assert met == MEETS.keys()


def command_lines(code: str) -> list[list[str]]:
    """The words after `fedjax-dp` in a block; what stands in brackets is a form, no line."""
    lines = code.replace("\\\n", " ").splitlines()
    # One that another machine runs ends with a quote.
    found = [
        re.search(r"^\S*fedjax-dp ([^\"]*(?=\"$)|.*)", line.split("&& ")[-1]) for line in lines
    ]
    return [shlex.split(one[1], comments=True) for one in found if one and "[--" not in one[1]]


# The first line of a block that is a file of the reader.
NAMED = r"# (\w+\.\w+)\n"


def write_named(code: str) -> None:
    """Writes a block that begins with the name of a file, `# mine.py`, to that file."""
    if name := re.match(NAMED, code):
        pathlib.Path(name[1]).write_text(code, "utf-8")


LINES = [
    (page, words)
    for page in PAGES
    for kind in ("", "sh", "bash")
    for code in blocks(page, kind)
    for words in command_lines(code)
]


def test_a_command_in_a_sentence_has_options_that_exist():
    keys = {f"--{key}" for key in all_keys()}
    tables = ("--schedules.", *(f"--{choice.options}." for choice in CHOICES.values()))
    met = 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
        for line in re.findall(r"`fedjax-dp ([a-z][^`]*)`(?! and a tab)", text):
            name, *rest = " ".join(line.split()).partition(" >")[0].split(" ")
            called = command(name) if name in COMMANDS else None
            if hasattr(called, "commands"):
                called = called.commands[rest.pop(0)] if rest else called
            assert called, (page, line)
            known = {option for each in called.params for option in (*each.opts, "--help")}
            used = {word.partition("=")[0] for word in rest if word.startswith("-")}
            wrong = [w for w in used - known - keys if not w.startswith((*tables, "--data.KEY"))]
            assert not wrong, (page, line)
            met += bool(used)
    assert met > 50


@pytest.mark.parametrize(("page", "words"), LINES, ids=[" ".join(words) for _, words in LINES])
def test_a_command_line_of_a_page_is_one_that_exists(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    for _, code in fenced(page.read_text("utf-8")):
        write_named(code)
    # A reader's own configuration, if the page shows none.
    for file in ("mine.toml", *re.findall(r"\w+\.safetensors", page.read_text("utf-8"))):
        pathlib.Path(file).touch()
    for folder in re.findall(r"--model\.pretrained=(\S+)", " ".join(words)):
        pathlib.Path(folder).mkdir()
    name, *rest = words
    if name.startswith("--"):
        assert name in {option for each in get_command(app).params for option in each.opts}
        return
    assert name in COMMANDS
    called = command(name)
    if hasattr(called, "commands"):
        called = called.commands[rest.pop(0)]
    try:
        parsed = called.make_context(name, rest)
    except typer.Exit:
        assert words[-1] == "--help"
        return
    if (
        name in ("run", "audit")
        and not parsed.params.get("keys")
        and not parsed.params.get("resume")
    ):
        config = load_config(parsed.params["file"], parsed.args)
        validate.validate(with_named_lists(config))


@slow
def test_the_page_on_splitting_prints_the_accuracies_of_its_command(tmp_path, fedjax_dp):
    page = ROOT / "docs" / "methods" / "splitting.md"
    lines = [words for code in blocks(page, "") for words in command_lines(code)]
    (line,) = [words for words in lines if "--algorithm.options.dual_weight=-1" in words]
    text = " ".join(page.read_text("utf-8").split())
    form = (
        "ends at (.+?) % with w = −1 and (.+?) % with w = 1, where the server's model has (.+?) %"
    )
    printed = [float(figure) for figure in re.search(form, text).groups()]
    found = []
    for weight in (-1, 1):
        folder = tmp_path / str(weight)
        words = [word.replace("weight=-1", f"weight={weight}") for word in line]
        assert not fedjax_dp(*words, "--output", folder, "--quiet")[0]
        found.append(json.loads((folder / "summary.json").read_text("utf-8")))
    accuracies = [found[0]["test_accuracy"], found[1]["test_accuracy"]]
    accuracies.append(found[0]["shared_test_accuracy"])
    # Other machines may round otherwise, which moves an image or two of 287 and 360.
    assert [100 * accuracy for accuracy in accuracies] == pytest.approx(printed, abs=0.6)


@pytest.mark.parametrize("page", FILES)
def test_a_page_shows_what_is_in_the_repository(page):
    shown = blocks(ROOT / "docs" / page, "python")
    source = (ROOT / FILES[page]).read_text("utf-8")
    shown = [code for code in shown if not re.match(NAMED, code)]
    of_the_file = [code for code in shown if re.search(r"^(class|def) ", code, re.MULTILINE)]
    assert of_the_file and all(code.strip() in source for code in of_the_file)
    tests = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    for code in blocks(ROOT / "docs" / page, "py"):
        for part in code.strip().split("\n\n\n"):
            indented = textwrap.indent(part, " " * 4)
            assert any(part in text or indented in text for text in tests), part


def is_variation(words: list[str]) -> bool:
    """Whether a line runs the main job with other parts, on other data, or audits it."""
    others = any(word.startswith("--privacy.unit") for word in words)
    return words[0] == "audit" or "DATA" in words or others


# A run with one of these is as long as it says, or none.
ENDING = ("--run.rounds", "--resume", "--keys", "--help")


# Pages whose programs take longest, and whose tests of parts tell the same.
LATER = {
    f"how-to/{name}"
    for name in (
        *("augmentation", "bring-your-own", "data", "early-stopping", "models"),
        *("parquet-and-hugging-face", "pretrained-models", "resuming", "schedules", "sweeps"),
        *("tasks", "write-a-wrapper"),
    )
} | {"methods/asynchronous", "methods/clock"}


def programs():
    """Every page with what runs of it: most but variations soon, all in the slow suite."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        found = fenced(page.read_text("utf-8"))
        lines = [words for kind, code in found if not kind for words in command_lines(code)]
        varied = [words for words in lines if is_variation(words)]
        if len(varied) < len(lines) or any(kind for kind, _ in found):
            yield pytest.param(page, False, marks=slow if name in LATER else telling, id=name)
        if varied:
            yield pytest.param(page, True, marks=slow, id=f"{name}, with variations")


@pytest.mark.parametrize(("page", "with_variations"), list(programs()))
def test_what_a_page_prints_works_in_the_readers_order(
    page, with_variations, tmp_path, monkeypatch, fedjax_dp, data_folder
):
    """Files, command lines and Python of a page; lines with DATA run one round if it is here.

    Runs without a number of rounds end after two: the main job has a test of its own.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    names: dict = {"__name__": page.stem}
    text, printed = page.read_text("utf-8"), io.StringIO()
    if "[the README's round]" in " ".join(text.split()):
        exec(blocks(ROOT / "README.md", "python")[0], names)
    # The reader's own table, which other pages may write anew.
    exec(blocks(ROOT / "docs" / "how-to" / "from-a-csv.md", "python")[0], {})
    for number, (kind, code) in enumerate(fenced(text)):
        write_named(code)
        if kind == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"{page.name}, block {number}", "exec"), names)
        for words in () if kind else command_lines(code):
            if is_variation(words) and not with_variations:
                continue
            if "DATA" in words:
                if not data_folder.is_dir():
                    continue
                words = [str(data_folder) if word == "DATA" else word for word in words]
                words = [word for word in words if not word.startswith("--run.rounds=")]
                words.append("--run.rounds=1")
            elif words[0] == "run" and not any(word.startswith(ENDING) for word in words):
                words.append("--run.rounds=2")
            status, _, said = fedjax_dp(*words)
            assert not status, f"{words}: {said}"
    if any(page == ROOT / "docs" / shown for shown in FILES):
        outputs = [code for code in blocks(page, "") if not command_lines(code)]
        assert printed.getvalue() == "".join(outputs)
