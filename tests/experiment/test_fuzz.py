"""Bad inputs to every key: what `--keys` says is enforced, and nothing ends in a traceback."""

import collections
import math
import re

import pytest
from marks import telling

from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.reading import keys
from fedjax_dp.experiment.reading.config_files import all_keys
from fedjax_dp.experiment.schema.constraints import ConfigError

# What a key needs beside it, so that it is looked at at all.
BESIDE = {
    "participation.cohort_size": "--participation.sampler=poisson",
    "participation.capacity": "--participation.sampler=poisson",
    "participation.everybody_first": "--participation.sampler=fixed_size",
    "participation.separation": "--participation.sampler=min_separated",
    "privacy.client.bits": "--privacy.client.mechanism=discrete_gaussian",
    "privacy.client.num_deviations": "--privacy.client.mechanism=discrete_gaussian",
    "privacy.client.bands": "--privacy.client.mechanism=correlated_gaussian",
    "algorithm.aggregator_options": "--algorithm.aggregator=trimmed_mean",
}
# As somebody might type them, with the value that TOML reads in them.
WORDS = {
    "-7": -7,
    "0": 0,
    "1": 1,
    "2": 2,
    "0.5": 0.5,
    "1.0": 1.0,
    "-0.5": -0.5,
    "1e300": 1e300,
    "1e999": math.inf,
    "nan": math.nan,
    "-inf": -math.inf,
    "99999999999999999999": 99999999999999999999,
    "true": True,
    "none": "none",
    "auto": "auto",
    "no such word": "no such word",
    "'quoted'": "quoted",
    "[]": [],
    "[-1, 2]": [-1, 2],
    "['a', 3]": ["a", 3],
    "{}": {},
    "{ nothing_of_this_name = 1 }": {"nothing_of_this_name": 1},
    "../..": "../..",
    "": "",
    "日本": "日本",
}


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def within(value, words):
    """Whether a number is inside what words such as "above 0" or "in [0, 1)" say."""
    if not words:
        return True
    if found := re.fullmatch(r"in ([\[(])(\S+), (\S+)([\])])", words):
        low, high = float(found[2]), float(found[3])
        above = value >= low if found[1] == "[" else value > low
        return above and (value <= high if found[4] == "]" else value < high)
    if " and " in words:
        return all(within(value, part) for part in words.split(" and "))
    kind, limit = re.fullmatch(r"(of at least|of at most|above|below) (\S+)", words).groups()
    limit = 2.0**31 if limit == "2^31" else float(limit)
    return {
        "of at least": value >= limit,
        "of at most": value <= limit,
        "above": value > limit,
        "below": value < limit,
    }[kind]


def allows(rule, value, word):
    """Whether the words that `--keys` shows let a value in."""
    if rule == "true or false":
        return isinstance(value, bool)
    alternatives = re.split(r" or (?!false)", rule)
    return any(_allows(one, alternatives, value, word) for one in alternatives)


def _allows(rule, alternatives, value, word):
    if rule == "none":
        return value == "none"
    if rule.startswith("one of "):
        return f"'{value}'" in rule.removeprefix("one of ").split(", ")
    if rule == "a list of such, one for each client":
        one = alternatives[alternatives.index(rule) - 1]
        return isinstance(value, list) and bool(value) and all(allows(one, v, word) for v in value)
    if rule == "a table of such by the clients' names":
        one = alternatives[0]
        entries = value.values() if isinstance(value, dict) else ()
        return bool(entries) and all(allows(one, v, word) for v in entries)
    if listed := re.fullmatch(r"a list( of at least one entry)?, each entry (.*)", rule):
        entry = listed[2]
        if not isinstance(value, list) or (listed[1] and not value):
            return False
        # Alone, a text key takes whatever is typed; in a list it is a text.
        return all(
            isinstance(v, str) if entry == "a text" else allows(entry, v, word) for v in value
        )
    if rule == "a table":
        return isinstance(value, dict)
    if rule == "a text":
        return True
    if rule.startswith("a plain name"):
        # A number or a truth value on the command line is the text that was typed.
        text = value if isinstance(value, str) else word
        return bool(re.fullmatch(r"\w[\w .,=+-]*", text))
    kind = re.fullmatch(r"(a whole number|a number|a finite number)(?: (.*))?", rule)
    assert kind, f"nobody has said what {rule!r} lets in"
    # Whatever the rule, runs compute in float32.
    if not is_number(value) or not math.isfinite(value) or abs(value) > 3.4e38:
        return False
    if kind[1] == "a whole number" and value % 1 != 0:
        return False
    return within(value, kind[2] or "")


# Keys whose value names a part, and tables whose entries the part decides over, have tests of their
# own: `tests/experiment/test_own_parts.py`, `test_config.py`.
NAMES = {
    "data.name",
    "data.partition",
    "model.name",
    "algorithm.name",
    "algorithm.aggregator",
    "training.optimizer",
    "run.metrics",
    "participation.sampler",
    "privacy.client.mechanism",
}
CASES = [
    (key, rule) for key, rule, _, _ in keys.describe() if key not in NAMES and rule != "a table"
]


@telling
def test_what_is_said_of_every_key_is_what_is_enforced():
    outcomes = collections.Counter()
    for key, rule in CASES:
        for word, value in WORDS.items():
            beside = [BESIDE[key]] if key in BESIDE else []
            try:
                load_config(None, [*beside, f"--{key}={word}"])
                is_let_in = True
            except ConfigError as error:
                is_let_in = False
                message = str(error)
                assert message.startswith("command line: ") and key in message, (key, word, message)
                assert re.search(r" must | there is no ", message), (key, word, message)
            assert is_let_in == allows(rule, value, word), (key, word, rule)
            outcomes[is_let_in] += 1
    assert outcomes[False] > 600 and outcomes[True] > 100, outcomes


def test_every_key_is_looked_at():
    assert {key for key, *_ in keys.describe()} == set(all_keys())
    assert len(CASES) > 40


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"\(a folder\)"):
        load_config(tmp_path)
