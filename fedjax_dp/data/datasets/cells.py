"""Tables in CSV, JSON Lines, Parquet and Arrow files as columns of numbers and strings."""

import codecs
import collections
import csv
import datetime
import decimal
import functools
import gzip
import io
import itertools
import os
import pathlib
import re
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.core.disclosure import GuardedError, require_of_file
from fedjax_dp.core.packages import needed_for
from fedjax_dp.core.ranges import LARGEST, SMALLEST, fits_float32
from fedjax_dp.data import tables
from fedjax_dp.data.arrays import APART, EXACT, equal_in_float32, is_large

# How CSV files write a missing value.
MISSING_VALUES = (
    *("", "NA", "N/A", "n/a", "#N/A", "#NA", "<NA>"),
    *("NaN", "nan", "-NaN", "-nan", "null", "NULL", "None"),
)
_CSV, _PARQUET, _ARROW = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".arrow", ".feather")
_JSON = (".jsonl", ".ndjson")
_ENDINGS = (*_CSV, *_JSON, *_PARQUET, *_ARROW)
# Names of numbers with more digits before the point, or zeros after it, have an exponent.
_MOST_DIGITS, _MOST_ZEROS = 20, 5
_EXACTLY = decimal.Context(
    prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[]
)
# Characters that take the place of a space or an apostrophe between groups of digits.
_ALIKE = {" ": "[ \u00a0\u2009\u202f]", "'": "['\u2019]"}
_DAY = datetime.timedelta(days=1)
# What is taken for a marker of missing values, if the other values of a column do not.
_MARKER = re.compile(
    r"[\W_]+|#[A-Z0-9/]+[!?]?|\\N|n[./]?a\.?|nil|nat|not (?:available|applicable|known)"
    r"|[(<\[]?(?:null|nan|n/?a|missing|blank|empty)[)>\]]?",
    re.IGNORECASE,
)
# The characters that may separate cells, and the part of a file that shows it.
_SEPARATORS = ",;\t|: "
_MOST_BYTES = (1 << 31) - 1
# Characters of a row that surely fit into a block of Arrow, of 2^20 bytes.
_USUAL_ROW = 1 << 17
_SHOWN_TEXT, _SHOWN_ROWS = 1 << 16, 20
# More values than this that occur once are not taken for names of categories, if they are most.
_MOST_ONCE = 5
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_SIGNS = "[a-z]{0,2}[$€£¥₹₺₽₩₪₫₱%‰]"
_UNITS = (
    "usd|eur|gbp|chf|jpy|brl|cny|inr|kr|sek|nok|dkk|pln|zł|kč"
    "|kg|mg|µg|cm|mm|km|ml|min|°c|°f|mmhg|bpm"
)
_MORE_UNITS = (
    "lbs?|oz|ft|inch(?:es)?|in|yds?|mi|miles?|mph|gal|dl|cl|ng|pg|mmol|mol|i?u|kcal|cal|kj|kwh|kw|mhz"
    "|ghz|khz|hz|kb|mb|gb|tb|px|pts?|pp|sq|m2|km2|m3|ms|secs?|seconds?|mins|minutes?|hrs?|hours?"
    "|days?|wks?|weeks?|mos?|months?|yrs?|years?|k|mn?|mio|bn?|thousand|millions?|billions?"
)
_UNIT = rf"(?:(?:{_SIGNS}|{_UNITS}|{_MORE_UNITS}|(?<=\s)[a-z])\.?[²³]?)"
_PART = "\u00bc-\u00be\u2150-\u215e"
_AMOUNT = (
    rf"[-+\u2212±]?\s*(?:(?:{_SIGNS}|{_UNITS})\.?)?\s*[-+\u2212]?"
    rf"(?:[.,]?\d[\d.,'\u2019_\s]*[²³{_PART}]?|[{_PART}])(?:e[-+\u2212]?\d+|[×x*]\s*10\^?[-+\u2212]?\d+)?"
    rf"\s*(?:{_UNIT}(?:\s?/?\s?{_UNIT})?)?"
)
_BOUND = "[=<>≤≥~≈]=?|ca\\.?|about|over|under|above|below|up to|(?:less|more) than"
_END = '[)\\]"\u2019\u2032\u2033+-]|(?:and|or) (?:more|over|less|under|above|below|older|younger)'
# Amounts such as 1,5, 12 %, $5, 1.5k, 5 kg, 120/80, <5, 3-4 and (1,234); dates such as 2.1.2020,
# 2020-01-02T12:30, 2020-W01 and 2 January; times; infinity.
_NOTATIONS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?=.{{1,40}}$)['\u2018]?(?:{_BOUND})?\s*[\[(]?{_AMOUNT}"
        rf"(?:\s*(?:[-\u2013\u2014\u2212/:±x×]|to|of|\.\.+|\u2026)\s*{_AMOUNT})?\s*(?:{_END})?",
        r"[-+]?inf(inity)?|0x[0-9a-f]+|P(?:T?\d+[YMWDHS])+",
        r"(?=.{1,40}$)(?:\d+\s*(?:d|days?|h|hrs?|hours?|m|mins?|minutes?|s|secs?)\b\.?,?\s*){2,}",
        r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ,].*)?|\d{4}[-/]\d{1,2}|\d{4}-?[QW]\d{1,2}",
        r"\d{4}年\d{1,2}月(\d{1,2}日)?",
        r"\d{8}T\d{4,6}Z?|\d{1,2}\.?\s+\w{3,9}\.?,?\s+\d{2,4}",
        rf"(?=.{{1,40}}$)(?:.*\b({_MONTHS})[a-z]*\b.*\d.*|.*\d.*\b({_MONTHS})[a-z]*\b.*)",
        r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?(\s*[ap]\.?m\.?)?",
    )
)


class Notation(NamedTuple):
    """How text writes numbers: the decimal mark, and the mark between groups of digits or ""."""

    decimal: str = "."
    thousands: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression for the whole of a number."""
        mark, digits = re.escape(self.decimal), "[0-9]+"
        if self.thousands:
            # Groups of two are those of India.
            group = _ALIKE.get(self.thousands, re.escape(self.thousands))
            digits = f"(?:[0-9]{{1,3}}(?:{group}[0-9]{{2,3}})*{group}[0-9]{{3}}|[0-9]+)"
        return f"^[+-]?(?:{digits}(?:{mark}[0-9]*)?|{mark}[0-9]+)(?:[eE][+-]?[0-9]+)?$"

    def plain(self, text: str) -> str:
        """Rewrites a number without groups and with a decimal point."""
        if self.thousands:
            text = re.sub(_ALIKE.get(self.thousands, re.escape(self.thousands)), "", text)
        return text.replace(self.decimal, ".")

    def name(self, text: str) -> str:
        """Writes equal numbers alike, such as 0, 0.0 and +0, and truth values in lower case.

        Other text stays as it is in the normal form NFC, also numbers with leading zeros: 007.
        """
        text = unicodedata.normalize("NFC", text)
        if text.lower() in ("true", "false"):
            return text.lower()
        if not re.match(self.pattern, text) or re.match("[+-]?0[0-9]", text):
            return text
        value = _EXACTLY.create_decimal(self.plain(text)).normalize(_EXACTLY)
        if not value.is_finite():
            return text
        if -_MOST_ZEROS <= value.adjusted() < _MOST_DIGITS:
            return format(abs(value) if value == 0 else value, "f")
        return str(value).lower()


class DateRule(NamedTuple):
    """How dates become numbers: days since one, read by a `strptime` format where they are text."""

    since: datetime.datetime
    format: str | None


class Reading(NamedTuple):
    """How the cells of files are read, and by which rule each column of dates."""

    missing: Sequence[str] = MISSING_VALUES
    separator: str = ","
    encoding: str = "utf-8"
    notation: Notation = Notation()
    dates: Mapping[str, DateRule] = {}


class Column:
    """One column of a table: which cells are missing, and the others as numbers or strings."""

    def __init__(self, name: str, chunks: Sequence[Any], table: "Table", reading: Reading):
        """Reads the Arrow arrays of one column, one for each file."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self.name, self._table = name, table
        self._notation, self._date = reading.notation, reading.dates.get(name)
        self._arrays = []
        for array in chunks:
            if pa.types.is_dictionary(array.type):
                array = array.cast(array.type.value_type)
            if pa.types.is_string_view(array.type):
                # As Polars writes text.
                array = array.cast(pa.string())
            kind = array.type
            if tables.is_text(kind):
                trimmed = pc.utf8_trim_whitespace(array.cast(pa.string()))
                is_in = pc.is_in(trimmed, value_set=pa.array(reading.missing, pa.string()))
                array = pc.if_else(is_in, pa.scalar(None, pa.string()), trimmed)
            elif pa.types.is_floating(kind):
                array = pc.if_else(pc.is_nan(array), pa.scalar(None, kind), array)
            self._arrays.append(array)

    @functools.cached_property
    def is_missing(self) -> np.ndarray:
        """Which cells are missing, `[rows]`."""
        return np.concatenate([np.asarray(a.is_null(), bool) for a in self._arrays])

    @functools.cached_property
    def is_boolean(self) -> bool:
        """Whether the cells are booleans, read as the numbers 0 and 1."""
        import pyarrow as pa

        kinds = {array.type for array in self._arrays} - {pa.null()}
        return kinds == {pa.bool_()}

    @property
    def is_text(self) -> bool:
        """Whether all files have text in it."""
        return all(tables.is_text(array.type) for array in self._arrays)

    @property
    def is_date(self) -> bool:
        """Whether all files have dates or times in it, not as text."""
        return all(_is_date(array.type) for array in self._arrays)

    @functools.cached_property
    def is_number(self) -> np.ndarray:
        """Which cells are numbers, `[rows]`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        parts = []
        for array in self._arrays:
            if tables.is_text(array.type):
                is_match = pc.match_substring_regex(array, self._notation.pattern).fill_null(False)
                parts.append(np.asarray(is_match))
            else:
                can_be = self.is_boolean or not pa.types.is_boolean(array.type)
                parts.append(np.asarray(array.is_valid()) & can_be)
        return np.concatenate(parts)

    @functools.cached_property
    def texts(self) -> np.ndarray:
        """The cells as strings, equal numbers alike, `[rows]`, objects; None for missing ones."""
        import pyarrow as pa

        columns: list[np.ndarray] = []
        for array in self._arrays:
            if pa.types.is_floating(array.type):
                infinite = np.flatnonzero(np.isinf(array.to_numpy(zero_copy_only=False)))
                if len(infinite):
                    row = sum(map(len, columns)) + int(infinite[0])
                    self.refuse(row, "hold finite numbers", np.inf)
            is_text = tables.is_text(array.type)
            coded = (array.cast(pa.string()) if not is_text else array).dictionary_encode()
            notation = self._notation if is_text else Notation()
            names = [notation.name(text) for text in coded.dictionary.to_pylist()]
            values = np.array([*names, None], object)
            columns.append(values[np.asarray(coded.indices.fill_null(len(names)))])
        return np.concatenate(columns)

    def strings(self) -> list[str]:
        """Returns cells of text as the files have them, but for space around it."""
        for path, array in zip(self._table.files, self._arrays, strict=True):
            what, is_text = f"column {self.name!r},", tables.is_text(array.type)
            disclosure.require(is_text, what, "hold text", str(array.type), where=path)
        return [text for array in self._arrays for text in array.to_pylist()]

    @functools.cached_property
    def numbers(self) -> np.ndarray | None:
        """The cells as numbers, `[rows]`, float64, NaN for missing ones; None for strings."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._date is not None:
            return self._days(self._date)
        if not np.all(self.is_number | self.is_missing):
            return None
        parts: list[np.ndarray] = []
        for array in self._arrays:
            is_text = tables.is_text(array.type)
            if is_text and self._notation != Notation():
                coded = array.dictionary_encode()
                plain = [self._notation.plain(text) for text in coded.dictionary.to_pylist()]
                array = pa.array(plain, pa.string()).take(coded.indices)
            numbers = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            parts.append(np.asarray(numbers, np.float64))
            if is_text or pa.types.is_integer(array.type):
                self._require_exact(array, parts[-1], sum(map(len, parts[:-1])))
        return np.concatenate(parts)

    def _days(self, rule: DateRule) -> np.ndarray:
        """Counts the days from a date to each cell, `[rows]`, float64, NaN for missing ones."""
        days: list[float] = []
        for path, array in zip(self._table.files, self._arrays, strict=True):
            if _is_date(array.type):
                days += self._days_of_times(path, array, rule.since).tolist()
                continue
            known = {None: np.nan}
            for value in array.to_pylist():
                if value not in known:
                    date = value
                    if isinstance(value, str | int):
                        try:
                            date = datetime.datetime.strptime(str(value), rule.format or "")
                        except ValueError:
                            form = f"written as {rule.format!r}" if rule.format else "of a format"
                            self.refuse(len(days), f"be a date {form}, as dates says", value)
                    if not isinstance(date, datetime.datetime):
                        self.refuse(len(days), "be a date, as dates says", value)
                    # Of a zone, the time of UTC; it may be outside of the years that dates have.
                    ahead = date.utcoffset() or 0 * _DAY
                    known[value] = (date.replace(tzinfo=None) - rule.since - ahead) / _DAY
                days.append(known[value])
        return np.asarray(days, np.float64)

    def _days_of_times(self, path: str, array: Any, since: datetime.datetime) -> np.ndarray:
        """Counts the days of dates and times as Arrow has them, those of a zone in UTC."""
        import pyarrow as pa

        kind = array.type
        rule = "hold times that 64 bits of microseconds can count"
        with files.reading(f"{path}, column {self.name!r},", rule, pa.ArrowException):
            # Nanoseconds are cut; no other unit has more digits.
            times = pa.timestamp("us", getattr(kind, "tz", None))
            made = array.cast(times, safe=getattr(kind, "unit", "") != "ns")
        counts = made.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        origin = (since - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1)
        days = np.subtract(counts, origin, dtype=np.float64) / 86_400e6
        return np.where(np.asarray(array.is_null(), bool), np.nan, days)

    def _require_exact(self, array: Any, numbers: np.ndarray, start: int) -> None:
        """Refuses an integer that float64 would round, since it is usually an identifier."""
        for row in np.flatnonzero(np.abs(numbers) >= EXACT):
            text = str(array[int(row)].as_py())
            if text.lstrip("+-").isdigit():
                rule = (
                    "hold integers below 2^53, so that float64 is exact; name a column of names in "
                    "categories, or leave it out of features"
                )
                self.refuse(start + int(row), rule, text)

    def require_readable(self) -> None:
        """Refuses cells that are neither numbers, strings nor booleans, nor dates with a rule."""
        rule = "hold numbers, strings or Booleans, or dates that dates names; else leave it out of "
        for path, array in zip(self._table.files, self._arrays, strict=True):
            kind = array.type
            is_readable = _is_readable(kind) or (self._date is not None and _is_date(kind))
            what = f"column {self.name!r},"
            disclosure.require(is_readable, what, rule + "features", str(kind), where=path)

    def require_float32(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Requires numbers `[rows]` that float32 can represent."""
        sizes = np.abs(numbers)
        most = np.nanmax(sizes, initial=0.0)
        if np.isinf(most) or not fits_float32(most):
            row = int(rows[np.argmax(np.where(np.isnan(sizes), 0.0, sizes))])
            rule = (
                f"hold finite numbers that float32 can represent, {SMALLEST:.2g} to {LARGEST:.2g} "
                "(rescale them)"
            )
            self.refuse(row, rule)

    def require_apart(self, rows: np.ndarray, made: np.ndarray, other_ways: str = "") -> None:
        """Requires large numbers `[rows]` to stay apart in float32, in which they are `made`."""
        assert self.numbers is not None
        large = is_large(self.numbers[rows])
        # Scaled to the range that they fill, times are as exact as models need.
        is_scaled = not np.array_equal(made[large], self.numbers[rows[large]])
        if not large.any() or (is_scaled and np.ptp(made) >= np.max(np.abs(made)) / 16):
            return
        if found := equal_in_float32(made[large]):
            row = int(rows[large][np.argmax(made[large] == found[0])])
            self.refuse(row, APART + other_ways)

    def require_no_dates(self) -> None:
        """Refuses numbers such as 20200131, which float32 would round to another day."""
        assert self.numbers is not None
        known = self.numbers[~self.is_missing]
        is_year = (known >= 19000101) & (known < 21010101) & (known == np.rint(known))
        if self._date is not None or not len(known) or not np.all(is_year):
            return
        month, day = known // 100 % 100, known % 100
        if np.all((month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)):
            rule = "hold no dates as numbers; read them by dates, with format = '%Y%m%d'"
            self.refuse(int(np.argmin(self.is_missing)), rule)

    def require_one_kind(self) -> None:
        """Refuses strings among numbers: typing errors, or markers of a missing value."""
        is_number = self.is_number[~self.is_missing]
        if self.numbers is not None or not is_number.any():
            return
        known, share = np.flatnonzero(~self.is_missing), np.mean(is_number)
        row = int(known[np.argmin(is_number)])
        has_numbers = share >= 0.5 or _is_notation(str(self.written(row)))
        if not has_numbers:
            row = int(known[np.argmax(is_number)])
        kind = f"numbers, as {share:.0%} of its cells do," if has_numbers else "strings"
        rule = (
            "throughout; list the markers of missing values in missing_values, or the values of "
            "the column in categories; decimal and thousands say how numbers are written"
        )
        self.refuse(row, f"hold {kind} {rule}", public=f"hold numbers or strings {rule}")

    def require_one_spelling(self, rows: np.ndarray) -> None:
        """Refuses a number with and without leading zeros: it may be one name, or two."""
        rows, spellings = rows[~self.is_missing[rows]], dict[str, str]()
        for text in dict.fromkeys(self.texts[rows].tolist()):
            number = self._notation.name(re.sub("^([+-]?)0+(?=[0-9])", r"\1", text))
            if spellings.setdefault(number, text) != text:
                rule = (
                    "write each number in one way in all rows, with leading zeros or without, "
                    "since it is a name"
                )
                self.refuse(int(rows[np.argmax(self.texts[rows] == text)]), rule)

    def require_no_markers(self, rows: np.ndarray, other_way: str = "") -> None:
        """Refuses names such as "?" among others: they usually stand for a missing value."""
        rows = rows[~self.is_missing[rows]]
        if markers := self.markers(rows):
            rule = "hold no marker of a missing value as a name; list the markers in missing_values"
            self.refuse(int(rows[np.argmax(self.texts[rows] == markers[0])]), rule + other_way)

    def markers(self, rows: np.ndarray) -> list[str]:
        """Lists the texts, such as "?" among names, that usually stand for a missing value."""
        values = np.unique(self.texts[rows].astype(str))
        found = [str(value) for value in values if _MARKER.fullmatch(value)]
        return found if len(found) < len(values) else []

    def require_categories(self, rows: np.ndarray, other_way: str) -> None:
        """Refuses text that is no small set of names: dates, amounts, identifiers, sentences."""
        rows = rows[~self.is_missing[rows]]
        if not len(rows):
            return
        self.require_no_markers(rows, ", or the values of the column in categories")
        values, counts = np.unique(self.texts[rows].astype(str), return_counts=True)
        ways = f"list its values in categories, or {other_way}"
        is_odd = np.array([_is_notation(value) for value in values])
        if self.numbers is None and 2 * is_odd.sum() > len(values):
            rule = (
                "hold names or plain numbers, not amounts, ranges or dates in another notation; "
                "write plain numbers, say how they are written by decimal, thousands or dates, "
                f"{ways}"
            )
            self.refuse(int(rows[np.argmax(self.texts[rows] == values[np.argmax(is_odd)])]), rule)
        num_once = int(np.sum(counts == 1))
        if num_once > max(len(values) / 2, _MOST_ONCE):
            rule = (
                "hold names that recur, since each becomes a category, and not identifiers, dates "
                f"or sentences, most of which occur once; {ways}"
            )
            got = f"{num_once} of {len(values)} values that occur once"
            disclosure.require(False, f"column {self.name!r}", rule, got)

    def written(self, row: int) -> Any:
        """Returns a cell as the file has it."""
        import pyarrow as pa

        file = self._table.file_of(row)
        cell = self._arrays[file][row - int(self._table.starts[file])]
        # Python has fewer times than Arrow.
        return (cell.cast(pa.string()) if pa.types.is_timestamp(cell.type) else cell).as_py()

    def refuse(self, row: int, rule: str, found: Any = None, *, public: str | None = None) -> None:
        """Raises an error that names file, row, column, rule and what was found, else the cell."""
        what, place = f"column {self.name!r},", self._table.place(row)
        value = self.written(row) if found is None else found
        disclosure.require(False, what, rule, value, where=place, public=public)

    def require_present(self, rows: np.ndarray, rule: str) -> None:
        """Requires that none of these cells is missing, or names how many and the first."""
        wrong = rows[self.is_missing[rows]]
        if len(wrong):
            missing = f"{len(wrong)} missing cells of {len(rows)}"
            self.refuse(int(wrong[0]), rule, missing)


class Table:
    """The rows of one file, or of several with the same columns, one after another."""

    def __init__(
        self,
        paths: Sequence[pathlib.Path],
        reading: Reading = Reading(),
        tests: Sequence[pathlib.Path] = (),
        inputs_of: Callable[[Sequence[str]], Sequence[str]] = lambda names: names,
    ):
        """Reads files, which must have the same columns; `tests` need only those of the inputs.

        Cells of a column that a file of test rows lacks are missing.
        """
        self.reading = reading
        self.files = tuple(os.fspath(path) for path in (*paths, *tests))
        parts = [_read(path, reading) for path in (*paths, *tests)]
        names = parts[0].column_names
        for i, (path, part) in enumerate(zip(self.files, parts, strict=True)):
            present = part.column_names
            twice = sorted(n for n, count in collections.Counter(present).items() if count > 1)
            require_of_file(not twice, path, "name every column once", twice)
            needed, rule = set(names), f"have the columns of {paths[0]}, {checks.shown(names)}"
            if i >= len(paths) and set(inputs_of(names)) < needed:
                needed = set(inputs_of(names))
                inputs = checks.shown([name for name in names if name in needed])
                rule = f"have the input columns of {paths[0]}, {inputs}, and no unknown ones"
            fits, public = needed <= set(present) <= set(names), "have the columns of the others"
            require_of_file(fits, path, rule, present, public=public)
            require_of_file(part.num_rows > 0, path, "hold rows", "none")
        self.starts = np.cumsum([0, *(part.num_rows for part in parts)])
        self.columns: Mapping[str, Column] = {
            name: Column(name, [_cells(part, name) for part in parts], self, reading)
            for name in names
        }

    @property
    def num_rows(self) -> int:
        """The number of rows of all files."""
        return int(self.starts[-1])

    def file_of(self, row: int) -> int:
        """Returns the number of the file that holds a row."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def place(self, row: int) -> str:
        """Names a row: its file, and its number below the header, from 1."""
        file = self.file_of(row)
        return f"{self.files[file]}, row {row - self.starts[file] + 1}"


def _cells(part: Any, name: str) -> Any:
    """Returns a column of one file as an Arrow array, of missing cells if there is none."""
    import pyarrow as pa

    if (i := part.schema.get_field_index(name)) < 0:
        return pa.nulls(part.num_rows, pa.string())
    return part.column(i).combine_chunks()


def _read(path: pathlib.Path, reading: Reading) -> Any:
    """Reads one file as an Arrow table; all columns of CSV as strings."""
    pa = import_pyarrow(path)
    name = path.name.lower().removesuffix(".gz")
    mark = "\t" if name.endswith(".tsv") else reading.separator
    readers = (
        (_CSV, lambda: _csv(path, mark, reading.encoding), f"separated by {mark!r}"),
        (_JSON, lambda: _json(path), "hold an object of one level in each line"),
        (_PARQUET, lambda: _parquet(path), "be a Parquet file"),
        (_ARROW, lambda: _arrow(path), "be an Arrow file or stream"),
    )
    rule = f"have one of the suffixes {', '.join(_ENDINGS)}"
    require_of_file(name.endswith(_ENDINGS), str(path), rule, path.suffix)
    ((read, rule),) = [(read, rule) for endings, read, rule in readers if name.endswith(endings)]
    if name.endswith(_CSV):
        rule = f"be a table whose cells are {rule}"
    damage = (pa.ArrowException, UnicodeDecodeError, OSError, EOFError, zlib.error)
    with files.reading(path, rule, *damage):
        table = read()
        # Offsets and strings of a damaged file, which would be read beyond their ends.
        table.validate(full=True)
        # Reading the names decodes them, and so finds those that are damaged.
        return table.rename_columns(table.column_names)


def without_ending(file: str) -> str:
    """Removes the suffixes of a table's format from the name of a file."""
    name = file[:-3] if file.lower().endswith(".gz") else file
    return next((name[: -len(e)] for e in _ENDINGS if name.lower().endswith(e)), name)


def is_csv(path: pathlib.Path) -> bool:
    """Whether a file is read as CSV, by its name."""
    return path.name.lower().removesuffix(".gz").endswith(_CSV)


def _csv(path: pathlib.Path, mark: str, encoding: str) -> Any:
    """Reads the columns of a CSV file as strings."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    content = _content(path)
    text = _decoded(path, content, encoding)
    names_mark = _require_separator(path, text, mark)
    longest = _longest_row(path, text, mark)
    content = text.encode()
    parse = arrow_csv.ParseOptions(delimiter=mark, newlines_in_values=True)
    block = min(len(content) + 1, _MOST_BYTES) if longest > _USUAL_ROW else None
    read = arrow_csv.ReadOptions(skip_rows=int(names_mark), block_size=block)
    with arrow_csv.open_csv(pa.BufferReader(content), read, parse) as reader:
        names = reader.schema.names
    kinds = dict.fromkeys(names, pa.string())
    convert = arrow_csv.ConvertOptions(column_types=kinds, strings_can_be_null=False)
    table = arrow_csv.read_csv(pa.BufferReader(content), read, parse, convert)
    return table.rename_columns([name.strip() for name in names])


def _longest_row(path: pathlib.Path, text: str, mark: str) -> int:
    """Counts the characters of the longest row; refuses quotes that are never closed."""
    lines = io.StringIO(text, newline="")
    if '"' not in text:
        return max(map(len, lines), default=0)
    # Arrow takes the rest of a file after a quote that is never closed as one cell.
    rows = csv.reader(lines, delimiter=mark, strict=True)
    before = csv.field_size_limit(len(text))
    try:
        return max((len(row) + sum(map(len, row)) for row in rows), default=0)
    except csv.Error as error:
        place = files.at_line(path, rows.line_num)
        rule = f"must close each quote before {mark!r}"
        raise GuardedError(f"{place} {rule}: {error}", f"a file of the data {rule}") from None
    finally:
        csv.field_size_limit(before)


def _require_separator(path: pathlib.Path, text: str, mark: str) -> bool:
    """Refuses a file that another separator divides; returns whether its first line names it."""
    guess, why, is_named = _guess(text, mark)
    public = f"be separated by {mark!r}, its separator"
    way = f"give separator = {guess!r}, {why}"
    if path.name.lower().removesuffix(".gz").endswith(".tsv"):
        way = f"name it .csv, since .tsv stands for tabs, and {way}"
    require_of_file(
        guess == mark, str(path), f"{public} ({way})", text.split("\n", 1)[0], public=public
    )
    return is_named


def guess_separator(path: pathlib.Path, encoding: str) -> str:
    """Guesses what separates the cells of a CSV file, a comma if that is possible."""
    return _guess(_decoded(path, _content(path), encoding), ",")[0]


def _guess(text: str, mark: str) -> tuple[str, str, bool]:
    """Returns the likely separator, the reason if it is not `mark`, and whether line 1 names it."""
    if named := re.match(r'"?sep=(.)"?[\r\n]', text, re.IGNORECASE):
        return named[1], "as its first line says", True
    if _num_columns(text, mark) == 1:
        widths = {other: _num_columns(text, other) for other in _SEPARATORS if other != mark}
        # Names and cells of two words are no two columns.
        likely = [other for other, num in widths.items() if num > 1 + (other in ": ")]
        if likely:
            return likely[0], f"which gives each line {widths[likely[0]]} cells", False
    return mark, "", False


def _num_columns(text: str, mark: str) -> int:
    """Counts the cells of the first rows; 1 if their numbers differ."""
    if len(text) > _SHOWN_TEXT:
        text = text[: text.rfind("\n", 0, _SHOWN_TEXT) + 1]
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
    sizes = {len(row) for row in itertools.islice(filter(None, rows), _SHOWN_ROWS)}
    return max(sizes) if len(sizes) == 1 else 1


def _decoded(path: pathlib.Path, content: bytes, encoding: str) -> str:
    """Decodes a text file; an error names the encoding and, if they show it, that of the bytes."""
    marks = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
    marks |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    marked = next((name for mark, name in marks.items() if content.startswith(mark)), "")
    what = f"{path}, read in the encoding {encoding!r},"
    public = f"be text in its encoding {encoding!r}"
    hint = f"; it begins like {marked}" if marked else "; others are latin-1, cp1252 and utf-16"
    try:
        text = content.decode(encoding)
        # Some encodings, such as utf-7 and unicode_escape, write halves of characters.
        text.encode()
    except UnicodeError as error:
        line = content.count(b"\n", 0, getattr(error, "start", 0)) + 1
        text = f"{what} must be text, got other bytes in line {line}{hint}"
        raise GuardedError(text, f"a file of the data must {public}") from None
    rule = f"hold no NUL{hint}"
    require_of_file("\0" not in text, what, rule, "text with NUL", public=public)
    if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig"):
        try:
            is_other = not content.isascii() and bool(content.decode("utf-8"))
        except UnicodeDecodeError:
            is_other = False
        rule = "not be text in utf-8"
        require_of_file(not is_other, what, rule, "text in utf-8", public=public)
    return text.removeprefix("\ufeff")


def _content(path: pathlib.Path) -> bytes:
    """Reads a file of text, decompressed by its name."""
    content = path.read_bytes()
    return gzip.decompress(content) if path.name.lower().endswith(".gz") else content


def _json(path: pathlib.Path) -> Any:
    """Reads objects, one a line; a name that a line lacks is a missing cell."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    content = _content(path)
    # In one block: types are those of its first rows, and no line may be longer than it.
    block = arrow_json.ReadOptions(block_size=min(len(content) + 1, _MOST_BYTES))
    return arrow_json.read_json(pa.BufferReader(content), block)


def _parquet(path: pathlib.Path) -> Any:
    from pyarrow import parquet

    # Unlike in `read_table`, folders of the path are not columns.
    with parquet.ParquetFile(path) as file:
        return file.read()


def _arrow(path: pathlib.Path) -> Any:
    import pyarrow as pa
    from pyarrow import ipc

    with pa.memory_map(os.fspath(path)) as source:
        try:
            return ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return ipc.open_stream(source).read_all()


def import_pyarrow(path: pathlib.Path) -> Any:
    """Imports pyarrow for a file, or says how to install it."""
    with needed_for(f"reading {path}", "table"):
        import pyarrow
    return pyarrow


def _is_date(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_date(kind) or pa.types.is_timestamp(kind)


def _is_notation(text: str) -> bool:
    """Whether text is a number or a date in a notation that is not that of plain numbers."""
    return any(pattern.fullmatch(text) for pattern in _NOTATIONS)


def _is_readable(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_null)
    return tables.is_text(kind) or any(test(kind) for test in tests)
