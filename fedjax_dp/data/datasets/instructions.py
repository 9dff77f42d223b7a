"""Prompts and responses by client, as tokens for the tuning of a language model."""

import pathlib
import string
from typing import Literal

import numpy as np

from fedjax_dp.core import checks, disclosure
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.data import tokenizers
from fedjax_dp.data.datasets.base import Dataset
from fedjax_dp.data.datasets.cells import Table, is_csv
from fedjax_dp.data.datasets.table import (
    Cells,
    Gaps,
    Testing,
    client_ids,
    find_files,
    reading_of,
    rows_of_parts,
)
from fedjax_dp.data.tokenizers import Tokenizer

IGNORE_LABEL = -1


@checked
def load(
    data_dir: pathlib.Path | None,
    *,
    path: str,
    tokenizer: str,
    client: str,
    template: str = "{instruction}\n",
    response: str = "response",
    sequence_length: Count = 128,
    longer: Literal["refuse", "truncate"] = "refuse",
    num_classes: Count | None = None,
    testing: Testing = Testing(),
    separator: str = ",",
    encoding: str = "utf-8",
) -> Dataset:
    """Loads prompts with their responses; a row of the table is one example, and so one record.

    A text is the template with the cells of its row, the response, and the token that ends a text,
    if the tokenizer names one. The loss of a model counts the tokens of the response and the end
    alone, all alike; the prompt and what fills up short texts are no targets.

    Guarantee: each example depends on its own row, the options and the tokenizer alone, so the
    guarantee of a training holds for the table. No guarantee covers the text that a tokenizer was
    made from: it should be public.

    Args:
      data_dir: where to search for a relative path that is not in the current folder.
      path: the file, ending in .jsonl, .csv, .tsv, .parquet or .arrow (.jsonl.gz and .csv.gz too),
        or a pattern of several with the same columns.
      tokenizer: "bytes", or the path of a `tokenizer.json`, as of a checkpoint.
      client: the column that names the client of each row.
      template: the prompt, with names of columns in braces. A response follows it directly, so it
        must end where a token does, in every row: with a line break or a colon, say, not with a
        space.
      response: the column of responses.
      sequence_length: tokens of an example, at least 1; a text may have one more.
      longer: of texts that are longer: "refuse" them, or "truncate" their responses, which then
        have no end.
      num_classes: the number of tokens of the model, if it has more than the tokenizer.
      testing: which rows are test data, as for `table`.
      separator: the ASCII character between the cells of a CSV file.
      encoding: that of CSV files, by a name that Python knows.

    Returns:
      Inputs and targets `[rows, sequence_length]`, int32. `x` are tokens, 0 after the end, and `y`
      the token after each, -1 where there is none or it is the prompt's. Space around cells is left
      out.

    Raises:
      ValueError: naming file, row, rule and value.
      ImportError: if pyarrow, or the package that reads the tokenizer, is not installed.

    Example:
      `load(None, path="rows.jsonl", tokenizer="gpt2/tokenizer.json", client="author")`
    """
    chosen = tokenizers.tokenizer(tokenizer)
    size = chosen.size if num_classes is None else num_classes
    tokenizers.require_classes(chosen, size)
    paths = find_files("path", path, data_dir)
    given = testing.test_path
    tests = find_files("test_path", given, data_dir) if given is not None else []
    has_csv = any(map(is_csv, (*paths, *tests)))
    reading = reading_of(Cells(separator, encoding), (), has_text=has_csv)
    parsed = _parsed(template)
    inputs = list(dict.fromkeys(name for _, name in parsed if name is not None))
    rule = "name a column in braces, such as {instruction}"
    checks.require(bool(inputs), "template", rule, template)
    table = Table(paths, reading, tests, lambda names: [*inputs, response, client])
    options = {"template": inputs, "response": [response], "client": [client]}
    options["split"] = [] if testing.split is None else [testing.split]
    for option, names in options.items():
        for name in names:
            disclosure.require_column(option, name, table.files[0], table.columns)
    rule = "be another column than those of the template"
    checks.require(response not in inputs, "response", rule, response)
    table.columns[client].require_readable()
    rows = np.arange(table.num_rows)
    for name in (*inputs, response, client):
        table.columns[name].require_present(rows, "have a value in every row")
    parts = rows_of_parts(table, int(table.starts[len(paths)]), inputs, Gaps(), testing)
    cells = {name: table.columns[name].strings() for name in (*inputs, response)}
    prompts = [
        "".join(text + ("" if name is None else cells[name][row]) for text, name in parsed)
        for row in rows
    ]
    for row in rows:
        if not cells[response][row]:
            table.columns[response].refuse(int(row), "hold text")
    x, y = _examples(table, chosen, prompts, cells[response], sequence_length, longer)
    ids = client_ids(table, client, None, table.num_rows)
    assert ids is not None
    train, test = ({"x": x[part], "y": y[part]} for part in parts)
    return Dataset(
        "instructions",
        train,
        test,
        num_classes=size,
        task="next_token",
        train_clients=ids[parts[0]],
        test_clients=ids[parts[1]],
        origin=", ".join(table.files),
    )


def _parsed(template: str) -> list[tuple[str, str | None]]:
    """Divides a template into texts, each with the column after it."""
    parts: list[tuple[str, str | None, str | None, str | None]] = []
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        rule = f"have braces around names of columns, and {{{{ for a brace ({error})"
        checks.require(False, "template", rule, template)
    for _, name, form, conversion in parts:
        rule = "have names of columns alone in braces, and {{ for a brace"
        is_plain = name is None or (name != "" and not form and conversion is None)
        checks.require(is_plain, "template", rule, template)
    return [(text, name) for text, name, *_ in parts]


def _examples(
    table: Table,
    chosen: Tokenizer,
    prompts: list[str],
    responses: list[str],
    length: int,
    longer: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Makes inputs and targets of texts, `[rows, length]`."""
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    # In one piece: a response of its own may begin with other tokens.
    wholes, heads = (chosen.encode(each, table.place) for each in (texts, prompts))
    end = chosen.special.end
    x = np.zeros((len(texts), length), np.int32)
    y = np.full((len(texts), length), IGNORE_LABEL, np.int32)
    for row, (whole, head) in enumerate(zip(wholes, heads, strict=True)):
        place, given = table.place(row), len(whole)
        # What a file puts behind a text.
        if end is not None and len(head) and head[-1] == end:
            head = head[:-1]
        if end is not None and not (given and whole[-1] == end):
            whole = np.append(whole, np.int32(end))
        rule = (
            "end where a token does, as with a line break or a colon, so that prompts without a "
            "response have the same tokens"
        )
        is_prefix = 0 < len(head) < given and np.array_equal(whole[: len(head)], head)
        disclosure.require(is_prefix, "template", rule, "a token across its end", where=place)
        rule = f"have at most {length + 1} tokens, one more than sequence_length"
        way = "choice: longer = 'truncate'"
        fits = longer == "truncate" or len(whole) <= length + 1
        disclosure.require(fits, "text", f"{rule} ({way})", len(whole), where=place)
        rule = f"leave room for a response in sequence_length = {length} tokens"
        disclosure.require(len(head) <= length, "prompt", rule, len(head), where=place)
        whole = whole[: length + 1]
        x[row, : len(whole) - 1] = whole[:-1]
        y[row, len(head) - 1 : len(whole) - 1] = whole[len(head) :]
    return x, y
