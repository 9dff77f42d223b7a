"""The statement of a paper says what the claim says, and cites what it needs."""

import re

import dp_accounting as dpa
import pytest

from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.reports import latex
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
    "copies": claimed(GAUSSIAN, unit="record", units=3, num_shared=5, most_holders=2),
    "not covered": claimed(GAUSSIAN, not_covered="what costs 5% & more_of it"),
    "chosen": claimed(
        GAUSSIAN,
        trust="selection",
        choice={"points": 12, "mean": 4.0, "shape": 1.0, "score": "test_accuracy"},
    ),
    "personal": claimed(GAUSSIAN, has_personal_models=True),
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
    assert "12 settings" in said["chosen"] and "papernot2022hyperparameter" in said["chosen"]
    assert "zhu2019poisson" in said["laplace"] and "abadi2016deep" not in said["laplace"]
    assert "secret key of 64 bits" in said["masks"] and "from a seed" not in said["masks"]
    both = for_paper([CLAIMS["poisson"], CLAIMS["laplace"]])
    assert "level of clients" in both.latex and "level of records" in both.latex
    assert both.bibtex.count("{dwork2014algorithmic,") == 1
    assert for_paper([]).latex == "No differential privacy is claimed.\n"


def test_every_term_of_a_statement_has_words_for_a_paper():
    assert latex._UNITS.keys() == st._UNITS.keys()
    assert latex._RELATIONS.keys() == st._RELATIONS.keys()
    assert latex._TRUST.keys() == st._TRUST.keys()
    assert latex._ROOTS.keys() == st._ROOTS.keys()
    assert latex._NOISE.keys() == st._NOISE.keys()
    assert latex._SAMPLERS.keys() == {"no sampling", *st._SAMPLERS.values()}
    # Those without an entry are named by the statement's own words.
    assert latex._MECHANISMS.keys() <= set(st._MECHANISMS.values())


def test_every_work_is_cited_and_has_what_an_entry_needs():
    source = "".join(
        str(value) for name, value in vars(latex).items() if name.startswith("_") and name.isupper()
    )
    function_texts = r"\cite{dwork2014algorithmic,dpaccounting,fedjaxdp}"
    wanted = cited(source.replace("{{", "{").replace("}}", "}")) | cited(function_texts)
    entries = references()
    assert wanted <= entries.keys()
    for key, entry in entries.items():
        assert re.search(r"^  author = \{.+\},$", entry, re.MULTILINE), key
        assert re.search(r"^  title = \{.+\},$", entry, re.MULTILINE), key
        year = re.search(r"^  year = \{(\d{4})\},$", entry, re.MULTILINE)
        assert key in ("dpaccounting", "fedjaxdp") or year[1] in key, key
