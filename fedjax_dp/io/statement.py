"""The privacy statement of a run, in words and as data."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.io.logbook import write_json
from fedjax_dp.privacy.accounting import Ledger


class Claim(NamedTuple):
    """What a statement says beside ε, for one unit of privacy.

    Attributes:
      sampler: how units are drawn into a release.
      mechanism: what makes a release private.
      noise_multiplier: noise standard deviation over the clip norm, a scalar or `[num_units]`.
      clip_norm: bound on one unit's contribution, a scalar or `[num_units]`.
    """

    sampler: str
    mechanism: str
    noise_multiplier: Any
    clip_norm: Any


_UNITS = {
    "client": "one client with all of its examples",
    "record": "one example of one client",
}
_RELATIONS = {
    "add_remove": "neighbouring data differ by one {unit} that is there or not",
    "replace_one": "neighbouring data differ by one {unit} that is exchanged for another",
}
_TRUST = {
    "client": (
        "The server is trusted to clip, to add the noise and to keep the cohort secret; whoever "
        "sees only the models that it publishes learns no more than ε and δ allow."
    ),
    "record": (
        "Nobody but the client itself is trusted: noise is added in every local step, so that the "
        "server and everybody else are covered. The number of examples of each client is public."
    ),
}


def statement(
    claims: Mapping[str, Claim],
    ledgers: Mapping[str, Ledger],
    dp_delta: Mapping[str, float],
    accountant: str,
) -> dict[str, Any]:
    """Collects a run's privacy statement as data.

    Args:
      claims: by unit, "client" and "record".
      ledgers: by unit, what ran.
      dp_delta: by unit.
      accountant: as for `Ledger.epsilon`.

    Returns:
      `claims`, a list with an entry for each unit: unit, neighbouring relation, sampler, mechanism,
      noise multiplier, clip norm, δ, ε (the largest and of every unit), accountant, number of
      compositions, and who is trusted; empty where nothing is claimed.
    """
    entries = []
    for unit, ledger in ledgers.items():
        claim = claims[unit]
        epsilon = ledger.epsilon(dp_delta[unit], accountant)
        entries.append(
            {
                "unit": unit,
                "unit_in_words": _UNITS[unit],
                "neighbouring_relation": ledger.relation,
                "sampler": claim.sampler,
                "mechanism": claim.mechanism,
                "noise_multiplier": np.asarray(claim.noise_multiplier, dtype=np.float64),
                "clip_norm": np.asarray(claim.clip_norm, dtype=np.float64),
                "dp_delta": dp_delta[unit],
                "epsilon": float(np.max(epsilon)),
                "epsilon_by_unit": epsilon,
                "accountant": accountant,
                "num_compositions": ledger.num_compositions,
                "event": [repr(ledger.events(i)) for i in range(ledger.num_units)],
                "trust": _TRUST[unit],
            }
        )
    return {"claims": entries}


def in_words(content: Mapping[str, Any]) -> str:
    """Writes a privacy statement as Markdown.

    Args:
      content: what `statement` returned.

    Returns:
      The text.
    """
    if not content["claims"]:
        return "# Privacy\n\nThis run claims no privacy: nothing was clipped and noised.\n"
    parts = ["# Privacy"]
    for claim in content["claims"]:
        unit, relation = claim["unit"], claim["neighbouring_relation"]
        compositions = np.atleast_1d(claim["num_compositions"])
        epsilon = np.atleast_1d(claim["epsilon_by_unit"])
        noise = _range(claim["noise_multiplier"])
        noun = "record" if unit == "record" else "client"
        lines = [
            f"## {unit.capitalize()} level",
            f"The run is (ε, δ)-differentially private with **ε = {claim['epsilon']:.4g}** at "
            f"**δ = {claim['dp_delta']:g}**, the largest over all units. The unit of privacy is "
            f"{claim['unit_in_words']}; {_RELATIONS[relation].format(unit=noun)} "
            f"(`{relation}`).",
            f"Each release is a sum of contributions clipped to an L2 norm of "
            f"{_range(claim['clip_norm'])}, with {claim['mechanism'].capitalize()} noise of "
            f"{noise} times that norm. Units are drawn by the sampler `{claim['sampler']}`; "
            f"{_range(compositions, '{:.0f}')} releases are composed for a unit by the accountant "
            f"`{claim['accountant']}`.",
            claim["trust"],
            "Accuracies, losses and norms in the run folder are computed exactly. They are for the "
            "experimenter, are not private, and are not covered by this statement.",
        ]
        if unit == "record":
            lines.append(
                "| client | ε | releases |\n|---|---|---|\n"
                + "\n".join(
                    f"| {i} | {e:.4f} | {n} |"
                    for i, (e, n) in enumerate(zip(epsilon, compositions, strict=True))
                )
            )
        parts += lines
    return "\n\n".join(parts) + "\n"


def _range(values: Any, form: str = "{:.4g}") -> str:
    values = np.atleast_1d(np.asarray(values, dtype=np.float64))
    low, high = form.format(values.min()), form.format(values.max())
    return low if low == high else f"{low} to {high}"


def write_statement(
    folder: str | pathlib.Path,
    claims: Mapping[str, Claim],
    ledgers: Mapping[str, Ledger],
    dp_delta: Mapping[str, float],
    accountant: str,
) -> None:
    """Writes `privacy.json` and `privacy.md` into a run folder.

    Args:
      folder: the run folder.
      claims: as for `statement`.
      ledgers: as for `statement`.
      dp_delta: as for `statement`.
      accountant: as for `statement`.
    """
    folder = pathlib.Path(folder)
    content = statement(claims, ledgers, dp_delta, accountant)
    write_json(folder / "privacy.json", content)
    (folder / "privacy.md").write_text(in_words(content), encoding="utf-8")
