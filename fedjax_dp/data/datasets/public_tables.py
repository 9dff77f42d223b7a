"""Public tables: Adult, heart disease, KDD Cup 1999 (UCI), and credit card fraud (ULB)."""

import pathlib
import re
from collections.abc import Mapping
from typing import Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.ranges import ProperFraction, Seed
from fedjax_dp.data.datasets.base import Dataset, stratified_split
from fedjax_dp.data.datasets.catalog import locate
from fedjax_dp.data.datasets.formats import read_bytes
from fedjax_dp.data.datasets.tabular import (
    MISSING,
    SCALINGS,
    Categorical,
    Column,
    Numeric,
    Scaling,
    encode,
    exact_statistics,
    feature_names,
    in_range,
    is_number,
    read_table,
)

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")

# Ranges are medically plausible ones, not those of these patients.
HEART_DISEASE: tuple[Column, ...] = (
    Numeric("age", 0, 100),
    Numeric("sex", 0, 1),
    Categorical("cp", ("1", "2", "3", "4")),
    Numeric("trestbps", 0, 220),
    Numeric("chol", 0, 600),
    Numeric("fbs", 0, 1),
    Categorical("restecg", ("0", "1", "2")),
    Numeric("thalach", 40, 220),
    Numeric("exang", 0, 1),
    Numeric("oldpeak", -3, 7),
    Categorical("slope", ("1", "2", "3")),
    Numeric("ca", 0, 3),
    Categorical("thal", ("3", "6", "7")),
)
_DEGREE = Categorical("num", ("0", "1", "2", "3", "4"))
TEXT_COLUMNS = (1, 2, 3)
NUM_COLUMNS = 41
NUMBER_COLUMNS = tuple(i for i in range(NUM_COLUMNS) if i not in TEXT_COLUMNS)
_DAY, _WORD_OF_32_BITS = 86_400, 2**32
# Ranges by what kddcup.names says of a column: flags and rates are in [0, 1]; `count` and
# `srv_count` are connections of a window of two seconds, `dst_host_…` of the last hundred or, in
# the files, 255; amounts have any order of magnitude. None was derived from the rows.
_FLAGS_AND_RATES = (6, 11, 13, 20, 21, *range(24, 31), *range(33, 41))
_RANGES = {i: Numeric(f"column_{i}", 0, 1) for i in _FLAGS_AND_RATES} | {
    0: Numeric("column_0", 0, _DAY, is_log=True),
    4: Numeric("column_4", 0, _WORD_OF_32_BITS, is_log=True),
    5: Numeric("column_5", 0, _WORD_OF_32_BITS, is_log=True),
    7: Numeric("column_7", 0, 3),
    8: Numeric("column_8", 0, 10),
    9: Numeric("column_9", 0, 100, is_log=True),
    10: Numeric("column_10", 0, 5),
    12: Numeric("column_12", 0, 10_000, is_log=True),
    14: Numeric("column_14", 0, 2),
    15: Numeric("column_15", 0, 10_000, is_log=True),
    16: Numeric("column_16", 0, 100, is_log=True),
    17: Numeric("column_17", 0, 5),
    18: Numeric("column_18", 0, 10),
    19: Numeric("column_19", 0, 10),
    22: Numeric("column_22", 0, 511),
    23: Numeric("column_23", 0, 511),
    31: Numeric("column_31", 0, 255),
    32: Numeric("column_32", 0, 255),
}
# As published; with fixed ranges any other service has no column.
_SERVICES = (
    "IRC X11 Z39_50 auth bgp courier csnet_ns ctf daytime discard domain domain_u echo eco_i ecr_i "
    "efs exec finger ftp ftp_data gopher hostnames http http_443 imap4 iso_tsap klogin kshell ldap "
    "link login mtp name netbios_dgm netbios_ns netbios_ssn netstat nnsp nntp ntp_u other pm_dump "
    "pop_2 pop_3 printer private red_i remote_job rje shell smtp sql_net ssh sunrpc supdup systat "
    "telnet tftp_u tim_i time urh_i urp_i uucp uucp_path vmnet whois"
)
NORMAL = "normal."
_PROTOCOLS = ("tcp", "udp", "icmp")
_FLAGS = ("SF", "S0", "S1", "S2", "S3", "REJ", "RSTO", "RSTR", "RSTOS0", "SH", "OTH")
_ATTACKS = (
    "back buffer_overflow ftp_write guess_passwd imap ipsweep land loadmodule multihop neptune "
    "nmap perl phf pod portsweep rootkit satan smurf spy teardrop warezclient warezmaster"
)
_INCOMES, _TEST_INCOMES = ("<=50K", ">50K"), ("<=50K.", ">50K.")
_WORD = re.compile(r"[A-Za-z0-9_.-]+")
_LABELS = (NORMAL, *(f"{attack}." for attack in _ATTACKS.split()))
_TWO_DAYS = 172_800
# Ranges that do not depend on the rows: the table holds two days in seconds; amounts have any order
# of magnitude; the published components are principal components of unknown units.
COLUMNS = (
    Numeric("Time", 0, _TWO_DAYS),
    *(Numeric(f"V{i}", -50, 50) for i in range(1, 29)),
    Numeric("Amount", 0, 100_000, is_log=True),
)
HEADER = (*(column.name for column in COLUMNS), "Class")
_CLASSES = ("genuine", "fraudulent")


def _categories(name: str, values: str, *, can_miss: bool = False) -> Categorical:
    return Categorical(name, tuple(values.split()) + ((MISSING,) if can_miss else ()))


# Categories as listed in UCI's adult.names; ranges cover what the census form allows.
ADULT: tuple[Column, ...] = (
    Numeric("age", 0, 100),
    _categories(
        "workclass",
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay "
        "Never-worked",
        can_miss=True,
    ),
    Numeric("fnlwgt", 0, 1_500_000),
    _categories(
        "education",
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
        "Masters 1st-4th 10th Doctorate 5th-6th Preschool",
    ),
    Numeric("education-num", 1, 16),
    _categories(
        "marital-status",
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse",
    ),
    _categories(
        "occupation",
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
        "Priv-house-serv Protective-serv Armed-Forces",
        can_miss=True,
    ),
    _categories("relationship", "Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    _categories("race", "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    _categories("sex", "Female Male"),
    Numeric("capital-gain", 0, 100_000),
    Numeric("capital-loss", 0, 5_000),
    Numeric("hours-per-week", 0, 100),
    _categories(
        "native-country",
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) "
        "India Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica "
        "Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
        "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
        "Trinadad&Tobago Peru Hong Holand-Netherlands",
        can_miss=True,
    ),
)


def load_adult(
    data_dir: pathlib.Path, *, scaling: Scaling = "standard", drop_missing: bool = False
) -> Dataset:
    """Loads Adult (Kohavi 1996) with 0/1 columns for categories.

    A missing workclass, occupation or country is a separate category.

    Args:
      scaling: "standard" for zero mean and unit deviation over the training part, or "range" for
        fixed ranges that are known without the data; `tabular.encode` says what each means for
        privacy.
      drop_missing: leave out people with a missing cell, as part of the literature does.

    Returns:
      Inputs `[n, 108]`, float32, and labels (1 for more than 50,000), without natural clients.
    """
    located = locate("adult", data_dir)
    # In adult.test, labels end in a full stop.
    tables = [
        read_table(located.paths[name], ADULT, Categorical("income", labels), ", ")
        for name, labels in (("adult.data", _INCOMES), ("adult.test", _TEST_INCOMES))
    ]
    if drop_missing:
        tables = [table[(table != MISSING).all(axis=1)] for table in tables]
    labels = [
        (table[:, -1] == more).astype(np.int32)
        for table, (_, more) in zip(tables, (_INCOMES, _TEST_INCOMES), strict=True)
    ]
    x_train, x_test = encode(ADULT, tables[0][:, :-1], tables[1][:, :-1], scaling)
    return Dataset(
        "adult",
        {"x": x_train, "y": labels[0]},
        {"x": x_test, "y": labels[1]},
        num_classes=2,
        task="classification",
        class_names=_INCOMES,
        feature_names=feature_names(ADULT),
        origin=located.source.name,
        exact_statistics=exact_statistics(scaling),
    )


def load_heart_disease(
    data_dir: pathlib.Path,
    *,
    scaling: Scaling = "standard",
    target: Literal["disease", "degree"] = "disease",
    test_fraction: ProperFraction = 0.34,
    seed: Seed = 0,
) -> Dataset:
    """Loads the four heart-disease tables of UCI (Janosi et al. 1988).

    The source has no test part: one is drawn with the same share of every hospital and class. The
    share is that of FLamby's Fed-Heart-Disease, which drops patients and columns with missing cells
    while this loader keeps all 920 and fills them in, as `tabular.encode` describes. A cholesterol
    of 0, which stands for missing at Switzerland and VA, is left as it is in the files.

    Args:
      scaling: "standard" (zero mean, unit deviation over the pooled training part, missing cells
        from the same statistics) or "range" (fixed ranges, nothing learned from the data).
      target: "disease" for 0 or 1, or "degree" for the five ordered degrees from 0, healthy, to 4.
      test_fraction: the share of each hospital's patients set aside for testing, in (0, 1).
      seed: chooses these patients.

    Returns:
      Inputs `[n, 22]`, float32, labels (1 for any degree of disease, or the degree), and the
      hospital's name as client id.
    """
    located = locate("heart_disease", data_dir)
    tables = [_read_hospital(located.paths[f"processed.{hospital}.data"]) for hospital in HOSPITALS]
    cells = np.concatenate(tables)
    hospitals = np.repeat(np.asarray(HOSPITALS), [len(table) for table in tables])
    is_ill = (cells[:, -1] != "0").astype(np.int32)
    strata = np.char.add(hospitals, is_ill.astype(str))
    names: tuple[str, ...] = ("healthy", "disease")
    labels = is_ill
    if target == "degree":
        names, labels = _DEGREE.values, cells[:, -1].astype(np.int32)
    train, test = stratified_split(strata, test_fraction, seed)
    x_train, x_test = encode(HEART_DISEASE, cells[train, :-1], cells[test, :-1], scaling)
    return Dataset(
        "heart_disease",
        {"x": x_train, "y": labels[train]},
        {"x": x_test, "y": labels[test]},
        num_classes=len(names),
        task="classification",
        train_clients=hospitals[train],
        test_clients=hospitals[test],
        class_names=names,
        feature_names=feature_names(HEART_DISEASE),
        origin=located.source.name,
        exact_statistics=exact_statistics(scaling),
    )


def _read_hospital(path: pathlib.Path) -> np.ndarray:
    table = read_table(path, HEART_DISEASE, _DEGREE, ",")
    num_ill = int(np.sum(table[:, -1] != "0"))
    fits = min(num_ill, len(table) - num_ill) >= 2
    rule = "hold at least two healthy patients and two who are not"
    checks.require(fits, str(path), rule, f"{len(table) - num_ill} and {num_ill}")
    return table


def load_kddcup99(
    data_dir: pathlib.Path,
    *,
    scaling: Scaling = "standard",
    target: Literal["attack", "kind"] = "attack",
    distinct: bool = False,
    test_fraction: ProperFraction = 0.2,
    seed: Seed = 0,
) -> Dataset:
    """Loads the ten-per-cent file of KDD Cup 1999.

    Protocol, service and flag become 0/1 columns in alphabetical order. The file has no test part:
    one is drawn with the same share of every class. Most rows occur many times, so that a row of
    the test part is often in the training part too, unless `distinct` is set.

    Args:
      scaling: "standard" for numbers of zero mean and unit deviation over the training part and a
        column for each category of the file, or "range" for fixed ranges and published categories,
        which are known without the data.
      target: "attack" for normal (0) against any attack (1), or "kind" for all 23 labels.
      distinct: keep one copy of equal rows.
      test_fraction: the share of the rows set aside for testing, in (0, 1).
      seed: chooses these rows.

    Returns:
      Inputs `[n, 118]`, float32, and labels, without natural clients.
    """
    checks.one_of("target", target, ("attack", "kind"))
    checks.one_of("scaling", scaling, SCALINGS)
    located = locate("kddcup99", data_dir)
    (path,) = located.paths.values()
    names, numbers = _read_connections(path, distinct)
    kinds, kind = np.unique(names[:, -1], return_inverse=True)
    if target == "attack":
        class_names: tuple[str, ...] = ("normal", "attack")
        labels = (kinds[kind] != NORMAL).astype(np.int32)
    else:
        class_names = tuple(str(name).rstrip(".") for name in kinds)
        labels = kind.astype(np.int32)
    # A label that occurs once cannot be in both parts; such rows share one stratum.
    strata = np.where(np.bincount(kind)[kind] > 1, kind, -1)
    strata = strata if np.sum(strata == -1) != 1 else np.zeros_like(strata)
    train, test = stratified_split(strata, test_fraction, seed)
    is_fixed = scaling == "range"
    if is_fixed:
        ranges = [_RANGES[i] for i in NUMBER_COLUMNS]
        columns = [in_range(own, cells) for own, cells in zip(ranges, numbers.T, strict=True)]
        numbers = np.stack(columns, axis=1).astype(np.float32)
    else:
        mean = numbers[train].mean(axis=0, dtype=np.float64)
        deviation = numbers[train].std(axis=0, dtype=np.float64)
        numbers = ((numbers - mean) / np.where(deviation > 0, deviation, 1)).astype(np.float32)
    blocks, features = [numbers], [f"column_{i}" for i in NUMBER_COLUMNS]
    published = (sorted(_PROTOCOLS), _SERVICES.split(), sorted(_FLAGS))
    for i, column in enumerate(TEXT_COLUMNS):
        values = np.asarray(published[i]) if is_fixed else np.unique(names[:, i])
        # Values ascend; others have no column.
        place = np.minimum(np.searchsorted(values, names[:, i]), len(values) - 1)
        is_own = values[place] == names[:, i]
        blocks.append(np.eye(len(values), dtype=np.float32)[place] * is_own[:, None])
        features.extend(f"column_{column}={value}" for value in values)
    x = np.concatenate(blocks, axis=1)
    return Dataset(
        "kddcup99",
        {"x": x[train], "y": labels[train]},
        {"x": x[test], "y": labels[test]},
        num_classes=len(class_names),
        task="classification",
        class_names=class_names,
        feature_names=tuple(features),
        origin=located.source.name,
        exact_statistics=exact_statistics(scaling),
    )


def _read_connections(path: pathlib.Path, distinct: bool) -> tuple[np.ndarray, np.ndarray]:
    """Reads protocol, service, flag and label, `[rows, 4]`, and numbers, `[rows, 38]`."""
    rows = list(files.lines(files.as_text(read_bytes(path), path)))
    checks.require(bool(rows), str(path), "hold rows", "none")
    for number, line in rows:
        if line.count(",") != NUM_COLUMNS:
            width, rule = line.count(",") + 1, f"have {NUM_COLUMNS + 1} columns"
            checks.require(False, files.at_line(path, number), rule, width)
    if distinct:
        rows = [(number, line) for line, number in _first_of_each(rows).items()]
    lines = [line for _, line in rows]
    columns = (*TEXT_COLUMNS, NUM_COLUMNS)
    names = np.loadtxt(lines, dtype=str, delimiter=",", usecols=columns, comments=None)
    names = names.reshape(len(rows), len(columns))
    # Services are listed only in the file.
    services = tuple(str(name) for name in np.unique(names[:, 1]) if _WORD.fullmatch(name))
    known = (_PROTOCOLS, services, _FLAGS, _LABELS)
    for column, cells, values in zip(columns, names.T, known, strict=True):
        wrong = np.flatnonzero(~np.isin(cells, values))
        if len(wrong):
            place = f"{files.at_line(path, rows[wrong[0]][0])}, column {column}"
            rule = "a plain word" if values is services else f"one of {', '.join(values)}"
            checks.require(False, place, f"hold {rule}", str(cells[wrong[0]]))
    try:
        numbers = np.loadtxt(
            lines, dtype=np.float32, delimiter=",", usecols=NUMBER_COLUMNS, comments=None, ndmin=2
        )
    except ValueError as error:
        raise _first_bad_cell(path, rows, {i: str(i) for i in NUMBER_COLUMNS}) from error
    if not np.isfinite(numbers).all():
        raise _first_bad_cell(path, rows, {i: str(i) for i in NUMBER_COLUMNS})
    return names, numbers


def _first_of_each(rows: list[tuple[int, str]]) -> dict[str, int]:
    first: dict[str, int] = {}
    for number, line in rows:
        first.setdefault(line, number)
    return first


def _first_bad_cell(
    path: pathlib.Path, rows: list[tuple[int, str]], names: Mapping[int, str], quote: str = ""
) -> ValueError:
    """Finds the first cell of these columns that is no number; slow, so only for an error."""
    for number, line in rows:
        cells = [cell.strip(quote) for cell in line.split(",")]
        for i, name in names.items():
            if not is_number(cells[i]):
                place = f"{files.at_line(path, number)}, column {name}"
                return ValueError(f"{place} must hold a number, got {cells[i]!r}")
    return ValueError(f"{path} must hold numbers in columns {', '.join(names.values())}")


def load_credit_card_fraud(
    data_dir: pathlib.Path,
    *,
    scaling: Scaling = "standard",
    test_fraction: ProperFraction = 0.25,
    seed: Seed = 0,
) -> Dataset:
    """Loads the table of credit card transactions (Dal Pozzolo and others 2015).

    The file has no test part: one is drawn with the same share of both classes.

    Args:
      scaling: "standard" for zero mean and unit deviation over the training part, or "range" for
        fixed ranges that are known without the data.
      test_fraction: the share of the rows set aside for testing, in (0, 1).
      seed: chooses these rows.

    Returns:
      Inputs `[n, 30]`, float32, and labels (1 for fraud), without natural clients.
    """
    checks.one_of("scaling", scaling, SCALINGS)
    located = locate("credit_card_fraud", data_dir)
    (path,) = located.paths.values()
    table = _read_transactions(path)
    x, labels = table[:, :-1], table[:, -1].astype(np.int32)
    train, test = stratified_split(labels, test_fraction, seed)
    if scaling == "range":
        x = np.stack([in_range(c, own) for c, own in zip(COLUMNS, x.T, strict=True)], axis=1)
    else:
        deviation = x[train].std(axis=0)
        x = (x - x[train].mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    x = x.astype(np.float32)
    return Dataset(
        "credit_card_fraud",
        {"x": x[train], "y": labels[train]},
        {"x": x[test], "y": labels[test]},
        num_classes=2,
        task="classification",
        class_names=_CLASSES,
        feature_names=HEADER[:-1],
        origin=located.source.name,
        exact_statistics=exact_statistics(scaling),
    )


def _read_transactions(path: pathlib.Path) -> np.ndarray:
    """Reads all columns, `[rows, 31]`, float64."""
    lines = list(files.lines(files.as_text(read_bytes(path), path)))
    header = [cell.strip('"') for cell in lines[0][1].split(",")] if lines else []
    rule = "begin with a line of the columns Time, V1 to V28, Amount and Class"
    checks.require(tuple(header) == HEADER, str(path), rule, ",".join(header[:4]))
    rows = lines[1:]
    checks.require(bool(rows), str(path), "hold rows", "none")
    for number, line in rows:
        width = line.count(",") + 1
        rule = f"have {len(HEADER)} columns"
        checks.require(width == len(HEADER), files.at_line(path, number), rule, width)
    try:
        # Classes are in quotation marks in the published file.
        table = np.loadtxt(
            [line for _, line in rows], delimiter=",", quotechar='"', comments=None, ndmin=2
        )
    except ValueError as error:
        raise _first_bad_cell(path, rows, dict(enumerate(map(repr, HEADER))), '"') from error
    if not np.isfinite(table).all() or np.abs(table).max() > np.finfo(np.float32).max:
        raise _first_bad_cell(path, rows, dict(enumerate(map(repr, HEADER))), '"')
    wrong = np.flatnonzero(~np.isin(table[:, -1], (0, 1)))
    if len(wrong):
        place = f"{files.at_line(path, rows[wrong[0]][0])}, column 'Class'"
        checks.require(False, place, "hold 0 or 1", table[wrong[0], -1])
    count = int(table[:, -1].sum())
    rule = "hold at least two rows of each class"
    checks.require(2 <= count <= len(table) - 2, str(path), rule, (len(table) - count, count))
    return table
