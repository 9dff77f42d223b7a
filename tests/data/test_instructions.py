"""Prompts and responses by client: what is an input, a target, a record, and what is refused."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fedjax_dp.data import datasets

ROWS = [
    {"who": "anna", "instruction": "to be", "context": "a", "response": "or not"},
    {"who": "ben", "instruction": "ü", "context": "", "response": "what?"},
    {"who": "anna", "instruction": "to", "context": "bb", "response": "be"},
]
LENGTH, END = 20, 256


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(rows=ROWS, file="rows.jsonl", **options):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / file).write_text(text, encoding="utf-8")
        given = {"path": file, "tokenizer": "bytes", "client": "who", "sequence_length": LENGTH}
        return datasets.load("instructions", **(given | options))

    return load


def tokens(text):
    return [*text.encode(), END]


def test_a_row_is_an_example_whose_response_alone_is_a_target(load):
    data = load(template="{instruction} [{context}]{{\n", sequence_length=LENGTH)
    assert data.num_classes == 257 and data.task == "next_token"
    assert data.train_clients.tolist() == ["anna", "ben", "anna"]
    for x, y, row in zip(data.train["x"], data.train["y"], ROWS, strict=True):
        prompt = f"{row['instruction']} [{row['context']}]{{\n"
        whole = tokens(prompt + row["response"])
        first, last = len(prompt.encode()), len(whole)
        expected = [whole[t + 1] if first <= t + 1 < last else -1 for t in range(LENGTH)]
        assert y.tolist() == expected
        assert x.tolist() == [whole[t] if t < last - 1 else 0 for t in range(LENGTH)]


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl.gz"])
def test_other_formats_hold_the_same_rows(load, tmp_path, ending):
    expected, path = load(), tmp_path / f"others.{ending}"
    if ending == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif ending == "csv":
        names = list(ROWS[0])
        path.write_text("\n".join(",".join(r) for r in [names, *(r.values() for r in ROWS)]))
    else:
        path.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    found = load(path=path.name)
    np.testing.assert_array_equal(found.train["x"], expected.train["x"])
    np.testing.assert_array_equal(found.train["y"], expected.train["y"])
    assert found.train_clients.tolist() == expected.train_clients.tolist()


def test_longer_texts_are_refused_or_their_responses_cut(load):
    # 6 bytes of the prompt with its line break, 6 of the response, and the end.
    assert load(sequence_length=12).train["y"][0, 11] == END
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1, text must have at most 12 .*got 13"):
        load(sequence_length=11)
    cut = load(sequence_length=8, longer="truncate")
    assert cut.train["y"][0].tolist() == [-1] * 5 + list(b"or ")
    assert cut.train["x"][0].tolist() == list(b"to be\nor")
    assert END in cut.train["y"][2]
    with pytest.raises(ValueError, match=r"row 1, prompt must leave room .* = 5 tokens, got 6"):
        load(sequence_length=5, longer="truncate")


def test_a_file_of_tokens_has_its_own_marks_and_no_token_across_a_prompt_s_end(load, tmp_path):
    package = pytest.importorskip("tokenizers")
    vocabulary = {"?": 0, "to": 1, "be": 2, "or": 3, "not": 4, "\n": 5, "tobe": 6}
    own = package.Tokenizer(package.models.WordLevel(vocabulary, unk_token="?"))
    split = package.pre_tokenizers.Split(package.Regex(r"\n|\w+"), "isolated")
    own.pre_tokenizer = split
    own.add_special_tokens(["<s>", "</s>"])
    begin, end = (own.token_to_id(name) for name in ("<s>", "</s>"))
    own.post_processor = package.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    rows = [{"who": 1, "instruction": "to", "response": "be"}]
    data = load(rows, tokenizer="tokenizer.json", sequence_length=6, num_classes=16)
    assert data.num_classes == 16 and data.train_clients.tolist() == [1]
    assert data.train["x"].tolist() == [[begin, 1, 5, 2, 0, 0]]
    assert data.train["y"].tolist() == [[-1, -1, 2, end, -1, -1]]
    with pytest.raises(ValueError, match="row 1, template must end where a token does"):
        load(rows, tokenizer="tokenizer.json", template="{instruction}")
    with pytest.raises(ValueError, match="num_classes must be at least 9"):
        load(rows, tokenizer="tokenizer.json", num_classes=8)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"template": "none\n"}, "template must name a column in braces"),
        ({"template": "{instruction\n"}, "template must have braces around names of columns"),
        ({"template": "{instruction!r}\n"}, "names of columns alone in braces"),
        ({"template": "{}\n"}, "names of columns alone in braces"),
        ({"template": "{instructions}\n"}, "did you mean 'instruction'"),
        ({"template": "{response}\n"}, "response must be another column"),
        ({"client": "whom"}, "did you mean 'who'"),
        ({"tokenizer": "none.json"}, "none.json"),
        ({"longer": "cut"}, "longer must be"),
    ],
)
def test_options_that_cannot_be_are_refused(load, options, rule):
    with pytest.raises(ValueError, match=rule):
        load(**options)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"response": " "}, r"row 4, column 'response', must hold text"),
        ({"response": None}, r"row 4, column 'response', must have a value in every row"),
        ({"who": None}, r"row 4, column 'who', must have a value in every row"),
        ({"response": 3}, "hold an object of one level in each line"),
        ({"instruction": "longer than any that has been here before"}, "row 4, text must have at"),
    ],
)
def test_rows_that_cannot_be_are_refused_by_their_place(load, row, rule):
    with pytest.raises(ValueError, match=rule):
        load([*ROWS, ROWS[0] | row])


def test_test_rows_are_those_of_another_file(load, tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps(ROWS[1]))
    data = load(test_path="test.jsonl")
    assert data.test_clients.tolist() == ["ben"] and len(data.train["x"]) == 3
    np.testing.assert_array_equal(data.test["x"][0], data.train["x"][1])
