"""Every tutorial runs in process, and prints what is kept in its file."""

import ast
import base64
import contextlib
import io
import itertools
import json
import math
import pathlib
import re
import shlex

import pytest
from marks import slow, telling

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.ipynb"))
# Those that take more than eight seconds.
LONG: set[str] = {
    "auditing-and-attacking",
    "choosing-a-method",
    "deploying",
    "hidden-clusters",
    "own-data-and-model",
    "personal-and-sparse",
    "scaling",
    "secure-aggregation-and-clock",
    "sweeps",
    "unequal-budgets",
    "user-level",
}

TIME = re.compile(r"\d[\d.]*(?= ?(?:s|ms|min|seconds)\b)")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
# The first line of a cell whose figures are of the machine that ran it.
MEASURED = "# Figures of the machine that ran this."
# Kept in no output: absolute paths, addresses, escape codes.
OF_A_MACHINE = re.compile(r"(?:^|[\s'\"(=])/(?:tmp|home|work|usr|root)/|\b0x[0-9a-f]{6}|\x1b")


def cells(path: pathlib.Path, kind: str = "code") -> list[dict]:
    read = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in read if kind in ("", cell["cell_type"])]


def shown(value) -> str:
    """A value as a notebook shows it."""
    for form in ("_repr_markdown_", "_repr_html_"):
        if hasattr(value, form) and (text := getattr(value, form)()):
            return text
    return repr(value)


def run(source: str, names: dict, command) -> str:
    """Runs a cell and gives what it prints and shows; command lines have one program alone."""
    others = re.findall(r"^\s*(?:%|!(?!fedjax-dp ))[^\n]*", source, re.MULTILINE)
    assert not others, f"only lines of !fedjax-dp and Python run in a test: {others}"
    source = source.replace("\\\n", " ")
    line = r"_ = _command(r'''\1''')"
    source = re.sub(r"^!fedjax-dp (.*)$", line, source, flags=re.MULTILINE)
    printed, tree = io.StringIO(), ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        names["_command"] = lambda line: command(*shlex.split(line))
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None and not source.rstrip().endswith(";"):
                print(shown(value))
    return printed.getvalue()


def kept(cell: dict) -> str:
    """The text that a cell printed and showed when it was executed."""
    parts = []
    for output in cell["outputs"]:
        forms = output.get("data", {"text/plain": output.get("text", "")})
        preferred = ("text/markdown", "text/html", "text/plain")
        parts += next(forms[form] for form in preferred if form in forms)
        parts += "" if output["output_type"] == "stream" else "\n"
    return "".join(parts)


def require_alike(found: str, expected: str) -> None:
    """Requires the same words and whole numbers; others may differ by 1 in their second digit.

    Times are not compared.
    """
    found, expected = (TIME.sub("#", text) for text in (found, expected))
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (found, expected)]
    assert words[0] == words[1]
    for ours, theirs in zip(NUMBER.findall(found), NUMBER.findall(expected), strict=True):
        if ours != theirs:
            assert not re.fullmatch(r"[-+]?\d+", ours + theirs), f"{ours} is not {theirs}"
            size = max(abs(float(theirs)), 1e-12)
            step = 10.0 ** (math.floor(math.log10(size)) - 1)
            assert abs(float(ours) - float(theirs)) <= 1.001 * step, f"{ours} is not {theirs}"


def require_same_words(found: str, expected: str) -> None:
    """Requires the same words, in any figures."""
    words = [re.sub(r"\d[\d.]*(?:e[-+]?\d+)?", "#", text).split() for text in (found, expected)]
    assert words[0] == words[1]


@pytest.mark.parametrize(
    ("found", "expected", "is_alike"),
    [
        ("ε 1.234, 12 clients, 3.5 s", "ε 1.25,  12 clients, 14 s", True),
        ("ε 1.234", "ε 1.4", False),
        ("12 clients", "13 clients", False),
        ("12 clients", "12 rounds", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(found, expected, is_alike):
    with contextlib.nullcontext() if is_alike else pytest.raises(AssertionError):
        require_alike(found, expected)


def test_figures_of_a_machine_are_not_compared_and_words_are():
    require_same_words("1.5e-3 s on 2 devices", "0.2 s on 16 devices")
    with pytest.raises(AssertionError):
        require_same_words("1.5 s", "1.5 ms")


def test_a_cell_has_no_magic_and_no_other_program():
    for line in ("%time 1", "!ls"):
        with pytest.raises(AssertionError, match="fedjax-dp"):
            run(line, {}, None)
    assert run("!fedjax-dp a 'b c' \\\n d\n1 + 1", {}, lambda *words: print(words)) == (
        "('a', 'b c', 'd')\n2\n"
    )


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_short_and_its_outputs_are_of_no_machine(path):
    code, all_cells = cells(path), cells(path, "")
    assert len(code) <= 12
    assert "".join(all_cells[0]["source"]).startswith("# ")
    assert "Read on" in "".join(all_cells[-1]["source"])
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    for output in itertools.chain.from_iterable(cell["outputs"] for cell in code):
        assert output["output_type"] != "error" and output.get("name") != "stderr"
        image = base64.b64decode(output.get("data", {}).get("image/png", ""))
        assert len(image) <= 60_000
        assert not OF_A_MACHINE.search(kept({"outputs": [output]}))
    for cell in cells(path, "markdown"):
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", "".join(cell["source"])):
            assert "://" in link or (FOLDER / link).exists(), link


@pytest.mark.xdist_group("tutorials")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=slow if path.stem in LONG else telling, id=path.stem)
        for path in TUTORIALS
    ],
)
def test_a_tutorial_prints_what_is_kept_in_its_file(path, tmp_path, monkeypatch, fedjax_dp):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": path.stem}
    for number, cell in enumerate(cells(path)):
        try:
            source = "".join(cell["source"])
            require = require_same_words if source.startswith(MEASURED) else require_alike
            require(run(source, names, fedjax_dp), kept(cell))
        except Exception as error:
            error.add_note(f"{path.name}, code cell {number + 1}")
            raise
