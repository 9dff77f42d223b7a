"""The statement of a paper says what the claim says, and cites what it needs."""

import re
import shutil
import subprocess

import dp_accounting as dpa
import pytest
from marks import slow

from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.mechanisms.distributed import (
    DistributedDiscreteGaussianDpEvent,
    SkellamDpEvent,
)
from fedjax_dp.privacy.reports import facts
from fedjax_dp.privacy.reports import statement as st
from fedjax_dp.privacy.reports.latex import for_paper, references

GAUSSIAN = dpa.GaussianDpEvent(1.5)


def claimed(*events, unit="client", relation="zero_out", units=1, dp_delta=1e-5, **facts):
    ledger = Ledger(unit, relation, num_units=units)
    for event in events:
        ledger.charge(event, count=10)
    return st.statement(ledger, dp_delta, **facts)


def cited(text):
    return {key for group in re.findall(r"\\cite\{([^}]*)\}", text) for key in group.split(",")}


MASKS = {"form": "masked", "keys": "agreed", "colluders": 3, "dropouts": 2, "num_neighbors": None}
CLAIMS = {
    "poisson": claimed(dpa.PoissonSampledDpEvent(0.1, GAUSSIAN), seed=48613, clip_norm=0.25),
    "laplace": claimed(dpa.PoissonSampledDpEvent(0.1, dpa.LaplaceDpEvent(2.0)), unit="record"),
    "fixed": claimed(
        dpa.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN), relation="replace_one"
    ),
    "pld": claimed(
        dpa.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 3.0), accountant="pld", units=2
    ),
    "masks": claimed(GAUSSIAN, trust="honest_but_curious", noise_root="secret"),
    "discrete": claimed(
        DistributedDiscreteGaussianDpEvent(6.0, 4, 3.0, 5.0, 7),
        trust="honest_but_curious",
        secure_aggregation=MASKS | {"num_neighbors": 6, "secrecy_failure": 1e-9},
    ),
    "skellam": claimed(SkellamDpEvent(36.0, 3.0, 5.0)),
    "deployed": claimed(
        GAUSSIAN, trust="secure_aggregation", deployment={"keys": "device", "scores": "exact"}
    ),
    "deployed with masks": claimed(
        GAUSSIAN,
        trust="secure_aggregation",
        deployment={"keys": "device"},
        secure_aggregation=MASKS | {"keys": "between_nodes"},
    ),
    "copies": claimed(GAUSSIAN, unit="record", units=3, num_shared=5, most_holders=2),
    "not covered": claimed(GAUSSIAN, not_covered="what costs 5% & more_of it"),
    "chosen": claimed(
        GAUSSIAN,
        trust="selection",
        choice={"points": 12, "mean": 4.0, "shape": 1.0, "score": "test_accuracy"},
    ),
    "ended early": claimed(GAUSSIAN, planned_rounds=30),
    "swept": claimed(GAUSSIAN, sweep=9),
    "searched": claimed(GAUSSIAN, sweep=7, search="Optuna"),
    "personal": claimed(GAUSSIAN, has_personal_models=True),
    "states": claimed(GAUSSIAN, has_client_states=True),
    "no noise": claimed(dpa.NonPrivateDpEvent()),
    "nothing": claimed(),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_the_text_is_latex_and_its_works_are_in_the_bibliography(name):
    text, entries = for_paper([CLAIMS[name]])
    assert text.isascii() and text.count("$") % 2 == 0
    for part in (text, entries):
        assert part.count("{") == part.count("}")
    # Outside of formulas and commands no character is special.
    assert not re.findall(r"(?<!\\)[&%#_^]", re.sub(r"\$[^$]*\$|\\cite\{[^}]*\}", "", text))
    assert set(re.findall(r"^@\w+\{(\w+),", entries, re.MULTILINE)) == cited(text)
    assert "48613" not in text


def test_numbers_are_those_of_the_claim_and_no_less():
    claim = CLAIMS["poisson"]
    text = for_paper([claim]).latex
    found = float(re.search(r"\\varepsilon = ([\d.]+)\$", text)[1])
    assert claim["epsilon"] <= found < claim["epsilon"] * 1.001
    for words in (
        r"$\delta = 10^{-5}$",
        "deviation of $1.5$ times",
        "at a rate of $0.1$",
        "a norm of $0.25$",
        "each unit $10$ releases",
        "replaced by zeros",
        "server is trusted",
        "from a seed",
        "which units were drawn and how many units were drawn stay hidden",
    ):
        assert words in text.replace("\n", " "), words
    delta = for_paper([claimed(GAUSSIAN, dp_delta=2.5e-7)]).latex
    assert r"$\delta = 2.5 \cdot 10^{-7}$" in delta


def test_what_limits_a_claim_is_said():
    said = {name: for_paper([claim]).latex for name, claim in CLAIMS.items()}
    assert said["not covered"].startswith(
        r"As a whole the run is not differentially private: no noise protects "
        r"what costs 5\% \& more\_of it."
    )
    assert "not differentially private" in said["no noise"]
    assert "Nothing was released" in said["nothing"]
    assert "up to 2 clients have a copy" in said["copies"]
    assert "largest over all units" in said["pld"]
    assert "does not cover the models that clients have" in said["personal"]
    assert "states of their own" in said["states"] and "does not cover these" in said["states"]
    assert "12 settings" in said["chosen"] and "papernot2022hyperparameter" in said["chosen"]
    assert "zhu2019poisson" in said["laplace"] and "abadi2016deep" not in said["laplace"]
    assert "secret key of 64 bits" in said["masks"] and "from a seed" not in said["masks"]
    assert "noise in a sum has a scale of $4$ times" in said["discrete"]
    assert "noise in a sum has a scale of $2$ times" in said["skellam"]
    assert "with 6 random neighbours each" in said["discrete"]
    assert "at most 3 of the clients of a round collude" in said["discrete"]
    assert "fails with a probability of at most $10^{-8}$ over all rounds" in said["discrete"]
    assert "masks are simulated" in said["discrete"]
    assert "one for each pair of clients" in said["deployed with masks"]
    for words in ("masks are simulated", "no masks", "exact scores"):
        assert words not in said["deployed with masks"]
    assert "of all 30 planned rounds" in said["ended early"]
    assert "of hyper-parameters." in said["poisson"]
    assert "hyper-parameters or of this run among the 9 or more of a sweep." in said["swept"]
    assert "among the 7 or more of a sweep, whose settings Optuna chose" in said["searched"]
    assert "no masks between the clients" in said["deployed"]
    assert "exact scores of participants" in said["deployed"]
    both = for_paper([CLAIMS["poisson"], CLAIMS["laplace"]])
    assert "level of clients" in both.latex and "level of records" in both.latex
    assert both.bibtex.count("{dwork2014algorithmic,") == 1
    assert for_paper([]).latex == "No differential privacy is claimed.\n"


def test_a_fact_that_the_table_gains_is_said_in_both_forms(monkeypatch):
    """By the name of an entry of a claim; a claim without the entry says nothing."""
    fact = facts.Words("\n\nA page has {weather}.", "A paper has {weather}~[mironov2017renyi].")
    monkeypatch.setitem(facts.SENTENCES, "weather", fact)
    with_fact, without = claimed(GAUSSIAN, weather="wet & 5% {dry}"), claimed(GAUSSIAN)
    paper = for_paper([with_fact])
    assert st.in_words(with_fact) == st.in_words(without) + "\nA page has wet & 5% {dry}.\n"
    said = r"A paper has wet \& 5\% \{dry\}~\cite{mironov2017renyi}." + "\n"
    assert paper.latex == for_paper([without]).latex + said


def words_of(value):
    """All words in a value of the table's module."""
    if isinstance(value, facts.Words):
        yield value
    elif isinstance(value, dict):
        yield from (words for part in value.values() for words in words_of(part))


def test_a_paper_leaves_out_only_what_is_named_here():
    terms = (facts.UNITS, facts.RELATIONS, facts.TRUST, facts.ROOTS)
    terms += (facts.MECHANISMS, facts.SAMPLERS)
    assert all(words.page and words.paper for table in terms for words in table.values())
    assert facts.SENTENCES.keys() >= set(facts.NOISE)
    assert {name for name, words in facts.SENTENCES.items() if not words.paper} == {
        *("contribution", "first_bound", "batch", "is_every_round", "is_count_hidden"),
        *("is_drawn_unevenly", "parameters", "noise_root_file", "computed"),
    }
    assert [name for name, words in facts.SENTENCES.items() if not words.page] == ["relation"]


def test_every_work_is_cited_and_has_what_an_entry_needs():
    papers = "".join(words.paper for part in vars(facts).values() for words in words_of(part))
    wanted = {key for keys in re.findall(r"~\[([^]]*)\]", papers) for key in keys.split(",")}
    entries = references()
    assert {"dwork2014algorithmic", "dpaccounting"} <= wanted <= entries.keys()
    for key, entry in entries.items():
        assert re.search(r"^  author = \{.+\},$", entry, re.MULTILINE), key
        assert re.search(r"^  title = \{.+\},$", entry, re.MULTILINE), key
        year = re.search(r"^  year = \{(\d{4})\},$", entry, re.MULTILINE)
        assert key in ("dpaccounting", "fedjaxdp") or year[1] in key, key
        # Kinds that BibTeX knows, and no command of another package.
        assert re.match(
            r"@(article|inproceedings|incollection|book|misc|phdthesis|mastersthesis|techreport)\{",
            entry,
        ), key
        assert "\\url" not in entry, key


@slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_latex_prints_every_claim_and_every_work(tmp_path):
    text = "\n".join(for_paper([claim]).latex for claim in CLAIMS.values())
    (tmp_path / "works.bib").write_text("\n".join(references().values()), encoding="utf-8")
    (tmp_path / "paper.tex").write_text(
        "\\documentclass{article}\n\\begin{document}\n" + text + "\\nocite{*}\n"
        "\\bibliographystyle{plain}\\bibliography{works}\n\\end{document}\n",
        encoding="utf-8",
    )
    typeset = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper"]
    for command in (typeset, ["bibtex", "paper"], typeset, typeset):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]
    log = (tmp_path / "paper.log").read_text(encoding="latin-1")
    assert "undefined" not in log and "Overfull" not in log
    assert "Warning" not in (tmp_path / "paper.blg").read_text(encoding="latin-1")


def test_braces_of_a_file_are_text():
    claim = claimed(GAUSSIAN) | {"must_stay_hidden": ["the {cohorts}"]}
    assert "the {cohorts}" in st.in_words(claim) and "{cohorts}" in for_paper([claim]).latex
