"""Tokens of text: bytes, and files of the Hugging Face format."""

import json
import re

import numpy as np
import pytest

from fedjax_dp import data
from fedjax_dp.core import disclosure
from fedjax_dp.data import tokenizers

VOCABULARY = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 9}
TEXTS = ["to be or not", "", "be   whoever"]


def write(folder, *, config=None, change=lambda content: content):
    """Writes a tokenizer of whole words, with a mark before each text."""
    package = pytest.importorskip("tokenizers")
    own = package.Tokenizer(package.models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    own.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens(["<s>", "</s>"])
    begin = own.token_to_id("<s>")
    own.post_processor = package.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    # Limits of the file, which the texts of a run must not be cut by.
    own.enable_truncation(2)
    own.enable_padding(length=7, pad_token="</s>", pad_id=own.token_to_id("</s>"))
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(own.to_str()))))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def place(i):
    return f"row {i}"


def test_bytes_are_those_of_utf_8():
    chosen = data.tokenizer("bytes")
    texts = ["to be", "", "ü€\0"]
    for text, ids in zip(texts, chosen.encode(texts, place), strict=True):
        np.testing.assert_array_equal(ids, list(text.encode()))
        assert ids.dtype == np.int32
        assert chosen.decode([*ids, chosen.special.end]) == text
    assert (chosen.size, *chosen.special) == (257, None, 256, 256)
    assert chosen.decode([0xC3, 65]) == "�A"


def test_a_file_gives_the_numbers_of_its_vocabulary(tmp_path):
    path = write(tmp_path, config={"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    chosen = data.tokenizer(str(path))
    special = {t["content"]: t["id"] for t in json.loads(path.read_text())["added_tokens"]}
    begin, end = special["<s>"], special["</s>"]
    for text, ids in zip(TEXTS, chosen.encode(TEXTS, place), strict=True):
        np.testing.assert_array_equal(ids, [begin, *(VOCABULARY.get(w, 0) for w in text.split())])
    # A gap in the vocabulary counts.
    assert chosen.size == max(*VOCABULARY.values(), begin, end) + 1 > len(VOCABULARY) + 2
    assert chosen.special == (begin, end, end)
    assert chosen.decode([begin, 1, 2, end]) == "to be"
    tokenizers.require_classes(chosen, chosen.size)
    with pytest.raises(ValueError, match=rf"vocab_size must be at least {chosen.size}, .*got 9"):
        tokenizers.require_classes(chosen, 9, "vocab_size")


def test_the_digest_is_that_of_what_determines_ids(tmp_path):
    first = data.tokenizer(str(write(tmp_path / "a", config={"eos_token": "</s>"})))
    moved = data.tokenizer(str(write(tmp_path / "b", config={"eos_token": "</s>"})))
    other_end = data.tokenizer(str(write(tmp_path / "c", config={"eos_token": "<s>"})))

    def renumbered(content):
        content["model"]["vocab"]["not"] = 8
        return content

    other = write(tmp_path / "d", config={"eos_token": "</s>"}, change=renumbered)
    digests = [each.digest for each in (moved, other_end, data.tokenizer(str(other)))]
    assert [digest == first.digest for digest in digests] == [True, False, False]


def without_vocabulary(content):
    content["model"]["vocab"], content["added_tokens"] = {}, []
    return content


def beyond_the_vocabulary(content):
    content["post_processor"]["special_tokens"]["<s>"]["ids"] = [123456]
    return content


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ([], None, "must hold an object"),
        ({"eos_token": "<end>"}, None, "name as eos_token a token of tokenizer.json, got '<end>'"),
        ({"pad_token": 3}, None, "name as pad_token a token of tokenizer.json, got 3"),
        (None, lambda content: {}, "must be a tokenizer.json that .* reads: .*Model missing"),
        (None, lambda content: [1], "must be a tokenizer.json that"),
        (None, without_vocabulary, "must hold a vocabulary, got 'none'"),
    ],
)
def test_wrong_files_are_refused(tmp_path, config, change, message):
    path = write(tmp_path, config=config, change=change or (lambda content: content))
    with pytest.raises(disclosure.GuardedError, match=message) as raised:
        data.tokenizer(str(path))
    assert str(tmp_path) not in raised.value.public


def test_missing_files_and_wrong_ids_are_refused(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"tokenizer must be a file that can be read.*no such"):
        data.tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"latin must be a tokenizer.json"):
        data.tokenizer(str(tmp_path / "latin"))
    for ids, rule in (
        ([257], r"be in \[0, 257\), got \[257\]"),
        ([[1]], "be integers"),
        ([-1], ""),
    ):
        with pytest.raises(ValueError, match=f"ids must {rule}"):
            data.tokenizer("bytes").decode(ids)
    chosen = data.tokenizer(str(write(tmp_path, change=beyond_the_vocabulary)))
    with pytest.raises(ValueError, match=rf"give ids below {chosen.size}, .*got 123456"):
        chosen.encode(["to be"], place)


def test_errors_of_a_text_hold_no_text(tmp_path):
    chosen = data.tokenizer(str(write(tmp_path)))
    with pytest.raises(ValueError, match=re.escape("row 1, read by")) as raised:
        chosen.encode(["to", "secret \ud800"], place)
    assert "secret" not in str(raised.value)
