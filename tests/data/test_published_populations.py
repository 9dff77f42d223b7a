"""Stack Overflow and FLAIR, on small files in their published formats that are written here."""

import json

import h5py
import numpy as np
import pytest
from published_files import (
    COARSE,
    SENTENCES,
    color_of,
    write_flair_files,
    write_flair_hdf5,
    write_stackoverflow,
)

from fedjax_dp.data import datasets, partition
from fedjax_dp.data.federated import FederatedData


def by_hand(sentence, length, words):
    """Numbers of one sentence by the rule of pfl-research's `_process_user`."""
    names = ["PAD", *words, "UNK", "BOS", "EOS"]
    marked = ["BOS", *sentence.decode().split(" "), "EOS"][: length + 1]
    known = [names.index(w) if w in names else names.index("UNK") for w in marked]
    padded = known + [0] * (length + 1 - len(known))
    return padded[:-1], [token or -1 for token in padded[1:]]


class TestStackOverflow:
    @pytest.mark.parametrize("length", [3, 6, 12])
    def test_sentences_by_user(self, tmp_path, length):
        write_stackoverflow(tmp_path / "stackoverflow")
        found = datasets.load("stackoverflow", tmp_path, vocabulary_size=3, sequence_length=length)
        assert found.num_classes == 7 and found.task == "next_token"
        assert isinstance(found.train["x"], np.memmap) and found.train["x"].dtype == np.int32
        assert "vocabulary" in found.exact_statistics[0]
        order = sorted(SENTENCES)
        rows = [by_hand(s, length, ["the", "sort", "list"]) for u in order for s in SENTENCES[u]]
        np.testing.assert_array_equal(found.train["x"], [x for x, _ in rows])
        np.testing.assert_array_equal(found.train["y"], [y for _, y in rows])
        store = FederatedData.from_indices(found.train, partition.natural(found.train_clients))
        assert store.sizes.tolist() == [1, 1, 2] and isinstance(store.examples["x"], np.memmap)
        assert found.client_names == ("10", "800", "9")
        assert found.train_clients.tolist() == [0, 1, 2, 2]
        assert found.test_clients.tolist() == [0, 1, 2]
        assert len(found.test["y"]) == 3

    def test_a_public_vocabulary_and_limits(self, tmp_path):
        write_stackoverflow(tmp_path / "stackoverflow")
        (tmp_path / "mine.txt").write_text("list\nhow\nnever\n")
        options = {"vocabulary": str(tmp_path / "mine.txt"), "vocabulary_size": 2}
        found = datasets.load(
            "stackoverflow", tmp_path, max_sentences=1, max_test_clients=2, **options
        )
        assert found.exact_statistics == () and len(found.train["y"]) == 3
        assert len(found.test["y"]) == 2 and found.num_classes == 6
        # "how do i sort", by hand: 0 padding, 1 list, 2 how, 3 unknown, 4 begin, 5 end.
        assert found.train["x"][2].tolist() == [4, 2, 3, 3, 3, 5] + [0] * 14
        assert found.train["y"][2].tolist() == [2, 3, 3, 3, 5] + [-1] * 15
        with pytest.raises(ValueError, match="hold 9 words or more, got 4"):
            datasets.load("stackoverflow", tmp_path, vocabulary_size=9)

    def test_damaged_files(self, tmp_path):
        folder = tmp_path / "stackoverflow"
        write_stackoverflow(folder)
        (folder / "stackoverflow.word_count").write_text("sort 5\nthe\n")
        with pytest.raises(ValueError, match="line 2 must hold a word and its count"):
            datasets.load("stackoverflow", tmp_path, vocabulary_size=2)
        (folder / "stackoverflow.word_count").write_text("sort 5\nthe 4\n")
        with h5py.File(folder / "stackoverflow_train.h5", "w") as file:
            file["examples/7/tokens"] = [1, 2]
        with pytest.raises(ValueError, match="user '7', must hold strings in `tokens`"):
            datasets.load("stackoverflow", tmp_path, vocabulary_size=2)
        (folder / "stackoverflow_train.h5").write_bytes(b"no")
        with pytest.raises(ValueError, match="must be an intact HDF5 file"):
            datasets.load("stackoverflow", tmp_path, vocabulary_size=2)
        assert not any((folder / "stores").glob("*")), "nothing unfinished is left"


class TestFlair:
    @pytest.mark.parametrize("write", [write_flair_files, write_flair_hdf5])
    def test_images_by_user_with_several_labels(self, tmp_path, write):
        write(tmp_path / "flair")
        found = datasets.load("flair", tmp_path)
        assert found.num_classes == 3 and found.class_names == COARSE
        assert found.client_names == ("a@N01", "b@N00", "d@N03")
        assert found.train_clients.tolist() == [0, 1, 1] and found.test_clients.tolist() == [2]
        assert found.train["y"].tolist() == [[0, 1, 0], [0, 1, 1], [0, 0, 1]]
        for row, name in enumerate(["12", "11", "13"]):
            error = np.abs(found.train["x"][row].astype(int) - color_of(name)).max()
            assert error <= 1
        assert found.test["y"].tolist() == [[1, 1, 0]] and found.train["x"].dtype == np.uint8
        assert isinstance(found.train["x"], np.memmap)

    @pytest.mark.parametrize("write", [write_flair_files, write_flair_hdf5])
    def test_fine_labels_and_limits(self, tmp_path, write):
        write(tmp_path / "flair")
        found = datasets.load(
            "flair", tmp_path, labels="fine", test_part="val", max_images=1, max_clients=2
        )
        assert found.class_names == ("bread", "cat", "plant", "tree", "waffle")
        assert found.train["y"].tolist() == [[1, 0, 0, 0, 1], [0, 0, 0, 1, 0]]
        assert found.test["y"].tolist() == [[0, 1, 0, 0, 0]]
        one = datasets.load("flair", tmp_path, max_clients=1)
        assert len(set(one.train_clients)) == 1

    def test_damaged_files(self, tmp_path):
        folder = tmp_path / "flair"
        write_flair_files(folder)
        (folder / "small_images" / "12.jpg").write_bytes(b"no")
        with pytest.raises(ValueError, match=r"12\.jpg must be an image"):
            datasets.load("flair", tmp_path)
        entries = json.loads((folder / "labels_and_metadata.json").read_text())
        del entries[3]["labels"]
        (folder / "labels_and_metadata.json").write_text(json.dumps(entries))
        with pytest.raises(ValueError, match="image 3, must hold strings in user_id"):
            datasets.load("flair", tmp_path)
        write_flair_hdf5(tmp_path / "second" / "flair")
        with h5py.File(tmp_path / "second" / "flair" / "flair_federated.hdf5", "a") as file:
            file["/train/b@N00/labels_row"][0] = 7
        with pytest.raises(ValueError, match="user 'b@N00', must hold a known image and label"):
            datasets.load("flair", tmp_path / "second")
