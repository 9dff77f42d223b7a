"""The pages on privacy say what the code does."""

import ast
import contextlib
import inspect
import io
import pathlib
import re

import dp_accounting as dpa
import pytest
from dp_accounting import dp_event as standard
from marks import telling

from fedjax_dp.data import sampling
from fedjax_dp.io import statement as files
from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy.accounting.dp_accounting_adapter import require_analysis
from fedjax_dp.privacy.mechanisms.distributed import make_central_plan
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaSharesDpEvent
from fedjax_dp.privacy.mechanisms.noise import BoundedLaplaceDpEvent, StaircaseDpEvent
from fedjax_dp.privacy.mechanisms.selection import selection_event
from fedjax_dp.privacy.reports import facts, statement

ROOT = pathlib.Path(__file__).parents[2]


def page_of(name):
    return (ROOT / "docs" / "privacy" / name).read_text("utf-8")


def rows_of(page, heading):
    """The cells of the first table below a heading, without its first two lines."""
    section = page.partition(f"## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_test_that_the_proofs_name_exists():
    named = 0
    for _, _, tests in rows_of(page_of("proofs.md"), "Where each clause is tested"):
        file = None
        for name in re.findall(r"`((?:tests/)?[\w/]*\.py)?(?:::(\w+))?`", tests):
            file = name[0] or file
            if not file:
                continue
            (path,) = (ROOT / "tests").rglob(pathlib.Path(file).name)
            if name[1]:
                assert f"def {name[1]}(" in path.read_text("utf-8"), name
                named += 1
    assert named > 25


def poisson(event):
    return dpa.PoissonSampledDpEvent(0.1, event)


GAUSSIAN, LAPLACE, ZCDP = dpa.GaussianDpEvent(2.0), dpa.LaplaceDpEvent(2.0), dpa.ZCDpEvent(0.1)
CURVES = [
    make_central_plan(100, 1.0, 1.0).event(),
    make_central_plan(100, 1.0, 1.0)._replace(noise="skellam").event(),
    StaircaseDpEvent(4.0, 2),
    BoundedLaplaceDpEvent(4.0, 2, 1e-8),
    GammaSharesDpEvent(4.0, 2),
]
# By row of the table, what stands for it.
EVENTS = {
    "Poisson sampling, Gaussian": [poisson(GAUSSIAN)],
    "Poisson sampling, Laplace": [poisson(LAPLACE)],
    "Poisson sampling: zCDP": [poisson(event) for event in (ZCDP, *CURVES)],
    "Poisson draw cut": [dpa.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 3.0)],
    "fixed size without replacement, Gaussian": [
        dpa.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN)
    ],
    "fixed size without replacement, others": [
        dpa.SampledWithoutReplacementDpEvent(100, 10, event) for event in (LAPLACE, ZCDP, *CURVES)
    ],
    "given cohorts (full, cyclic, min-separated), Gaussian": [GAUSSIAN],
    "given cohorts, Laplace": [LAPLACE],
    "given cohorts: zCDP": [ZCDP, *CURVES],
    "the exponential mechanism": [selection_event(1.0)],
    "the best of a random number": [standard.RepeatAndSelectDpEvent(poisson(GAUSSIAN), 3.0, 1.0)],
}


def accountants(event, relation):
    found = set()
    for accountant in ("rdp", "pld", "rdp-classic-64"):
        with contextlib.suppress(ev.UnsupportedEvent):
            require_analysis([event], relation, accountant)
            found.add(accountant)
    return found


def test_the_table_of_valid_analyses_is_that_of_the_accountants():
    rows = rows_of(page_of("mechanisms.md"), "What has a valid analysis")
    unread = set(EVENTS)
    for label, *cells in rows:
        if label == "shuffled epochs":
            assert cells == ["refused"] * 2
            with pytest.raises(ValueError, match="never reported with a Poisson epsilon"):
                sampling.shuffled().event(GAUSSIAN, 100, 10)
            continue
        (key,) = (key for key in EVENTS if label.startswith(key))
        unread.remove(key)
        for cell, relations in zip(
            cells, (("add_remove", "zero_out"), ("replace_one",)), strict=True
        ):
            said = set(re.findall(r"`(.+?)`", cell))
            said |= {"rdp-classic-64"} & {f"{name}-classic-64" for name in said}
            assert bool(said) == (cell != "refused")
            for event in EVENTS[key]:
                assert all(accountants(event, relation) == said for relation in relations), label
    assert not unread


@telling
def test_the_page_prints_what_relations_cost():
    page = page_of("mechanisms.md")
    (code, _, shown) = re.search(
        r"```python\n(.*?)```\n(.*?)```\n(.*?)```", page, re.DOTALL
    ).groups()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue() == shown


class Texts(ast.NodeVisitor):
    """Collects what a module may write: no docstrings, no messages of errors."""

    def __init__(self):
        self.found = []

    def visit_Constant(self, node):
        self.found += [node.value] if isinstance(node.value, str) else []

    def visit_JoinedStr(self, node):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        self.found.append("".join(parts))

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Call(self, node):
        if not ast.unparse(node.func).startswith("checks."):
            self.generic_visit(node)

    def visit_Assign(self, node):
        if ast.unparse(node.targets[0]) != "rule":
            self.generic_visit(node)


def sentences_of(*modules):
    """The first four words of every sentence, and its last four if others share the first."""
    texts = Texts()
    for module in modules:
        tree = ast.parse(inspect.getsource(module))
        if module is not facts:
            texts.visit(tree)
            continue
        # The words of a page come before those of a paper.
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        for call in calls:
            if ast.unparse(call.func) == "Words" and call.args:
                texts.visit(call.args[0])
    alike = {}
    for text in texts.found:
        for sentence in re.split(r"(?<=[.]) ", text):
            # Words between numbers, emphasis and formulas.
            pieces = (piece.split() for piece in re.split(r"\{[^{}]*\}|[*$~#]|\n", sentence))
            if pieces := [words for words in pieces if len(words) > 1]:
                first = " ".join(pieces[0][:4]).strip(" .,:;")
                alike.setdefault(first, set()).add(" ".join(pieces[-1][-4:]).strip(" .,:;"))
    return [*alike, *(last for ends in alike.values() if len(ends) > 1 for last in ends)]


def test_every_sentence_of_a_statement_is_explained():
    # Neither the blocks nor the quoted statement, which explain nothing. The LaTeX has short forms
    # of the same sentences, which another test compares with the block.
    page = re.sub(r"^```.*?^```$", "", page_of("statement.md"), flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^>.*$", "", page, flags=re.MULTILINE).replace("*", "")
    quoted = " ".join(" | ".join(re.findall(r'"([^"]+)"', page)).split())
    sentences = sentences_of(facts, statement, files)
    assert len(sentences) > 100
    assert not [words for words in sentences if words not in quoted]
