"""A privacy statement as a LaTeX paragraph for a paper, with the BibTeX entries that it cites."""

import importlib.resources
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_dp.core.decimals import shown
from fedjax_dp.core.foreign_text import in_latex
from fedjax_dp.privacy.reports.statement import RESTS_ON_MASKS, ends, unused_of

_UNITS = {"client": "all data of one client", "record": "one record of one client"}
_RELATIONS = {
    "add_remove": r"Neighbouring data sets differ by {unit}, which is present or absent.",
    "zero_out": (
        r"Neighbouring data sets differ by {unit}, whose contributions are replaced by "
        r"zeros~\cite{{kairouz2021practical}}; the numbers of clients and records are public."
    ),
    "replace_one": r"Neighbouring data sets differ by {unit}, which is exchanged for any other.",
}
_MECHANISMS = {
    "Gaussian noise": r"Gaussian noise~\cite{dwork2014algorithmic}",
    "Laplace noise": r"Laplace noise~\cite{dwork2006calibrating}",
    "randomised response": r"randomised response~\cite{warner1965randomized}",
    "discrete Gaussian noise": (
        r"discrete Gaussian noise~\cite{canonne2020discrete,kairouz2021distributed}"
    ),
    "Skellam noise": r"Skellam noise~\cite{agarwal2021skellam}",
    "private selection by the exponential mechanism": (
        r"the exponential mechanism~\cite{mcsherry2007mechanism,dong2020optimal}"
    ),
    "staircase noise": r"staircase noise~\cite{geng2015staircase}",
    "bounded Laplace noise": r"bounded Laplace noise~\cite{geng2020tight}",
}
_SAMPLERS = {
    "no sampling": "without amplification by sampling",
    "Poisson sampling": "on Poisson samples",
    "fixed-size sampling without replacement": (
        r"on samples of fixed size without replacement~\cite{wang2019subsampled}"
    ),
    "Poisson sampling truncated to a capacity": (
        r"on Poisson samples truncated to a capacity~\cite{chua2024scalable}"
    ),
}
_NOISE = {
    "noise_multiplier": (
        "The Gaussian noise has a standard deviation of {} times the largest contribution of one "
        "unit."
    ),
    "laplace_scale": (
        r"The Laplace noise has a scale of {} times the largest $\ell_1$ norm of a contribution."
    ),
    "discrete_multiplier": (
        r"The discrete noise in a sum has a scale of {} times the largest $\ell_2$ norm of a "
        "contribution, both on the lattice."
    ),
    "entry_stddev": (
        "Each entry has its own noise, with a standard deviation of {} times its bound."
    ),
}
_RENYI = r"in R\'enyi differential privacy~\cite{mironov2017renyi}"
_ACCOUNTANTS = {
    "rdp": _RENYI,
    "rdp-classic-64": _RENYI + " (integer orders up to 64)",
    "pld": (
        "by privacy loss distributions~\\cite{koskela2020computing,doroshenko2022connect}, or in "
        r"R\'enyi differential privacy where that is tighter~\cite{mironov2017renyi}"
    ),
}
# Where the curve of a sampled mechanism is from.
_SAMPLED = {
    True: r"~\cite{abadi2016deep,mironov2019renyi}",
    False: r"~\cite{zhu2019poisson}",
}
_TRUST = {
    "server": (
        "The server is trusted and the guarantee holds against all who see only released models."
    ),
    "client": (
        "Each client adds its own noise and trusts only itself; the guarantee holds against the "
        "server and all others."
    ),
    "secure_aggregation": (
        r"Secure aggregation~\cite{bonawitz2017practical} is trusted, and at least the accounted "
        "number of shares of the noise is assumed to be in each sum."
    ),
    "honest_but_curious": (
        "The server is honest but curious and sees sums "
        r"only~\cite{bonawitz2017practical,bell2020secure}; "
        "the accounted noise is that of the clients that do not collude with it."
    ),
    "gamma_shares": (
        "Every party is trusted to add its shares of the noise and to keep those of others secret, "
        "and the server to follow the protocol; a coalition of parties can subtract its shares."
    ),
    "selection": (
        "The server and those who run the trials are trusted; the guarantee holds for what is "
        "published of the chosen run."
    ),
}
_ROOTS = {
    "seed": (
        "The noise is pseudorandom from a seed: the guarantee does not hold against those who have "
        "the seed."
    ),
    "secret": (
        "The noise is pseudorandom from a secret key of 64 bits, drawn from the operating system."
    ),
}
_MASKS = (
    "Messages are under pairwise masks, {pairs}: they stay secret while at most {colluders} of the "
    "clients of a round collude with the server, and a sum is found while at most {dropouts} drop "
    "out."
)
_SIMULATED_KEYS = (
    "Key agreement and masks are simulated, and the guarantee assumes that a deployment has them."
)
_EXPOSED = (
    r"The random graph of masks fails with a probability of at most ${}$ over all rounds, which "
    r"$\delta$ includes~\cite{{bell2020secure}}."
)
_DEPLOYED = (
    "Rounds ran on clients' own machines~\\cite{beutel2020flower}, which are trusted to clip and "
    "to add noise as agreed; it is assumed that whether a client answers depends neither on "
    "the model nor on who else was drawn."
)
_WITHOUT_MASKS = (
    "There were no masks between the clients: the server is trusted to add messages up unread."
)
_SCORES = r"The server has exact scores of participants, which $\varepsilon$ does not cover."
_FLOATS = (
    "The analysis is for real-valued noise; the implementation is in floating "
    r"point~\cite{mironov2012significance,casacuberta2022widespread,haney2022precision}."
)
_CHOICE = (
    r"The run was chosen among {points} settings by random repetition of mean {mean:g} and shape "
    r"{shape:g}, which $\varepsilon$ includes~\cite{{papernot2022hyperparameter}}."
)
_PLANNED = (
    r"Training ended early by a rule on released values; $\varepsilon$ is that of all {} planned "
    "rounds."
)
_NOT_COVERED = (
    r"Metrics of training and evaluation were computed exactly, and $\varepsilon$ covers neither "
    "them nor choices made from the data outside of the run, such as of hyper-parameters."
)
_ONCE = "Each record is read in one round only, and its client pays for that round alone."
_BUDGET = r"Of a budget for $\varepsilon$ of {}, {} was spent."


class Paragraphs(NamedTuple):
    """A statement for a paper.

    Attributes:
      latex: the text, one paragraph for each claim.
      bibtex: the entries of all works that it cites, in order of citation.
    """

    latex: str
    bibtex: str


def for_paper(claims: Sequence[Mapping[str, Any]]) -> Paragraphs:
    """Writes the claims of a run as LaTeX paragraphs, with the BibTeX entries that they cite.

    The text holds no seed and no key, and nothing that ε does not cover. It needs no LaTeX package.

    Args:
      claims: what `statement` returned for each unit; none for a run that claims no privacy.

    Returns:
      The paragraphs and their bibliography.
    """
    text = "\n".join(_paragraph(claim) for claim in claims)
    if not claims:
        text = "No differential privacy is claimed.\n"
    cited = [key for group in re.findall(r"\\cite\{([^}]*)\}", text) for key in group.split(",")]
    entries = references()
    return Paragraphs(text, "\n".join(entries[key] for key in dict.fromkeys(cited)))


def references() -> dict[str, str]:
    """Reads the package's BibTeX entries, by key."""
    file = importlib.resources.files("fedjax_dp.privacy.reports").joinpath("references.bib")
    text = file.read_text("utf-8")
    return {m[1]: m[0] for m in re.finditer(r"^@\w+\{(\w+),$.*?^\}\n", text, re.DOTALL | re.M)}


def _paragraph(claim: Mapping[str, Any]) -> str:
    unit = _UNITS[claim["unit"]]
    if not claim["histories"] or not any(claim["num_compositions"]):
        return f"Nothing was released about {unit}.\n"
    if math.isinf(float(claim["epsilon"])):
        return "The run is not differentially private: something was released without noise.\n"
    sentences = [
        *_claimed(claim),
        *([in_latex(claim["large_delta"]) + "."] if "large_delta" in claim else []),
        _RELATIONS[claim["relation"]].format(unit=unit),
        *_copies(claim),
        *_released(claim),
        _TRUST[claim["trusted"]],
        *_hidden(claim),
        *_masks(claim),
        *_deployed(claim),
        *([_CHOICE.format(**claim["choice"])] if "choice" in claim else []),
        *([_PLANNED.format(claim["planned_rounds"])] if "planned_rounds" in claim else []),
        *_models(claim),
        _ROOTS[claim["noise_root"]],
        *([_FLOATS] if "floating_point" in claim else []),
        _NOT_COVERED,
    ]
    return "\n".join(sentences) + "\n"


def _claimed(claim: Mapping[str, Any]) -> list[str]:
    """Writes ε and δ, after what no ε covers."""
    epsilon, dp_delta = _epsilon(claim["epsilon"]), _delta(claim["dp_delta"], 6)
    text = (
        r"Training is $(\varepsilon, \delta)$-differentially private~\cite{dwork2014algorithmic} "
        rf"at the level of {claim['unit']}s, with $\varepsilon = {epsilon}$ and "
        rf"$\delta = {dp_delta}$"
    )
    text += ", the largest over all units." if len(claim["epsilon_per_unit"]) > 1 else "."
    if "not_covered" not in claim:
        return [text]
    what = in_latex(str(claim["not_covered"]))
    return [f"As a whole the run is not differentially private: no noise protects {what}.", text]


def _copies(claim: Mapping[str, Any]) -> list[str]:
    """Writes the claim for a record that several clients have."""
    found = claim.get("shared_records")
    if found is None:
        return []
    text = f"Of a record up to {found['most_holders']} clients have a copy; for all of its copies "
    if found["epsilon"] is None:
        return [text + r"no $\varepsilon$ is claimed."]
    epsilon, dp_delta = _epsilon(found["epsilon"]), _delta(found["dp_delta"])
    return [text + rf"$\varepsilon = {epsilon}$ at $\delta = {dp_delta}$."]


def _released(claim: Mapping[str, Any]) -> list[str]:
    """Writes mechanism, sampling, noise, clipping and composition."""
    mechanisms = [_MECHANISMS.get(name, in_latex(name)) for name in claim["mechanisms"]]
    is_gaussian = set(claim["mechanisms"]) == {"Gaussian noise"}
    samplers = [
        _SAMPLERS[name] + _SAMPLED[is_gaussian] * (name == "Poisson sampling")
        for name in claim["samplers"]
    ]
    text = f"Releases use {_listed(mechanisms)} {_listed(samplers)}"
    if claim["sampling_rate"]:
        text += f", at a rate of {_range('sampling_rate', claim['sampling_rate'])}"
    sentences = [text + "."]
    sentences += [
        words.format(_range(name, claim[name])) for name, words in _NOISE.items() if claim[name]
    ]
    clip = claim.get("clip_norm_per_unit", claim.get("clip_norm"))
    if claim.get("contribution") is None and clip is not None:
        sentences.append(f"Contributions are clipped to a norm of {_range('clip_norm', clip)}.")
    counts = dict.fromkeys((min(claim["num_compositions"]), max(claim["num_compositions"])))
    composed = " to ".join(f"${count}$" for count in counts)
    verb = "release is" if [*counts] == [1] else "releases are"
    sentences.append(
        f"For each unit {composed} {verb} composed, {_ACCOUNTANTS[claim['accountant']]}, "
        r"with the events of dp-accounting~\cite{dpaccounting} as the simulator fedjax\_dp charged "
        r"them~\cite{fedjaxdp}."
    )
    sentences += [_ONCE] * bool(claim.get("reads_once"))
    if (found := unused_of(claim)) is not None:
        budgets, spent, _ = found
        sentences.append(_BUDGET.format(_range("budget", budgets), _range("epsilon", spent)))
    return sentences


def _hidden(claim: Mapping[str, Any]) -> list[str]:
    what = claim["must_stay_hidden"]
    return [f"It assumes that {' and '.join(what)} stay hidden."] if what else []


def _masks(claim: Mapping[str, Any]) -> list[str]:
    """Writes what secure aggregation assumes, and its part of δ."""
    facts = claim.get("secure_aggregation")
    if facts is None:
        return []
    k = facts["num_neighbors"]
    pairs = "one for each pair of clients" if k is None else f"with {k} random neighbours each"
    text = [_MASKS.format(pairs=pairs, colluders=facts["colluders"], dropouts=facts["dropouts"])]
    text += [_SIMULATED_KEYS] * (facts["keys"] != "between_nodes")
    if "dp_delta_of_masks" in claim:
        text.append(_EXPOSED.format(_delta(claim["dp_delta_of_masks"])))
    return text


def _deployed(claim: Mapping[str, Any]) -> list[str]:
    """Writes what a deployment assumes."""
    facts = claim.get("deployment")
    if facts is None:
        return []
    has_masks = claim.get("secure_aggregation", {}).get("keys") == "between_nodes"
    is_open = claim["trusted"] in RESTS_ON_MASKS and not has_masks
    is_exact = facts.get("scores") == "exact"
    return [_DEPLOYED, *[_WITHOUT_MASKS] * is_open, *[_SCORES] * is_exact]


def _models(claim: Mapping[str, Any]) -> list[str]:
    """Writes whether personal models are covered, if there are any."""
    if "kept_by_clients" not in claim:
        return []
    is_covered = claim["unit"] == "record" and "not_covered" not in claim
    verb = "covers" if is_covered else "does not cover"
    return [rf"$\varepsilon$ {verb} the models that clients have for themselves."]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _range(name: str, values: Any) -> str:
    return " to ".join(f"${_mantissa(end)}$" for end in ends(name, values))


def _epsilon(value: float) -> str:
    return _mantissa(shown("epsilon", value))


def _delta(value: float, digits: int = 4) -> str:
    return _mantissa(shown("dp_delta", value, digits))


def _mantissa(text: str) -> str:
    """Writes 1e-05 as 10^{-5} and 2.5e-06 as 2.5 \\cdot 10^{-6}."""
    mantissa, has_exponent, exponent = text.partition("e")
    if not has_exponent:
        return text
    power = f"10^{{{int(exponent)}}}"
    return power if mantissa == "1" else rf"{mantissa} \cdot {power}"
