"""Downloads from a server on this machine, interrupted, damaged, and out of reach."""

import hashlib
import http.server
import io
import tarfile
import threading

import numpy as np
import pytest

from fedjax_dp.data import datasets
from fedjax_dp.data.datasets import registry
from fedjax_dp.data.datasets.catalog import DatasetInfo, Download, Source
from fedjax_dp.data.datasets.registry import FetchError, fetch_source

CONTENT = np.random.default_rng(0).bytes(700_000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves bytes by path, and records what was asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}
        self.requests = []
        self.cut_after = None

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        name = self.path[1:]
        self.server.requests.append((name, self.headers["Accept-Encoding"]))
        content = self.server.files.get(name)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.cut_after])
        if self.server.cut_after is not None:
            self.close_connection = True


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def source(*urls, sha256=DIGEST, name="data.bin", unpack=()):
    download = Download(name, sha256, urls, unpack)
    return Source("test", unpack or (name,), ("folder",), (download,))


def test_a_file_is_fetched_with_progress(server, tmp_path):
    server.files["data.bin"] = CONTENT
    seen = []
    fetched = fetch_source(
        source(server.url("data.bin")), tmp_path, lambda *step: seen.append(step), timeout=5
    )
    assert fetched == [tmp_path / "folder" / "data.bin"]
    assert fetched[0].read_bytes() == CONTENT
    assert [path.name for path in fetched[0].parent.iterdir()] == ["data.bin"]
    assert {name for name, _, _ in seen} == {"data.bin"}
    done = [count for _, count, _ in seen]
    assert done == sorted(done) and len(done) > 1 and done[-1] == len(CONTENT)
    assert {total for _, _, total in seen} == {len(CONTENT)}
    assert fetched[0].stat().st_mode & 0o777 == 0o644
    # Once it is there, no server is asked again.
    assert fetch_source(source(server.url("data.bin")), tmp_path, timeout=5) == []
    assert server.requests == [("data.bin", "identity")]


def test_a_damaged_file_is_fetched_anew(server, tmp_path):
    server.files["data.bin"] = CONTENT
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data.bin").write_bytes(CONTENT[:-1] + b"?")
    path = tmp_path / "folder" / "data.bin"
    # Out of reach, what is there stays.
    with pytest.raises(FetchError):
        fetch_source(source("http://127.0.0.1:9/data.bin"), tmp_path, timeout=5)
    assert path.read_bytes() == CONTENT[:-1] + b"?"
    assert fetch_source(source(server.url("data.bin")), tmp_path, timeout=5) == [path]
    assert path.read_bytes() == CONTENT


def test_an_interrupted_transfer_leaves_nothing(server, tmp_path):
    server.files["data.bin"] = CONTENT
    server.cut_after = 300_000
    wanted = source(server.url("data.bin"))
    with pytest.raises(FetchError, match="300000 bytes read, 400000 more expected"):
        fetch_source(wanted, tmp_path, timeout=5)
    assert list((tmp_path / "folder").iterdir()) == []
    server.cut_after = None
    fetch_source(wanted, tmp_path, timeout=5)
    assert (tmp_path / "folder" / "data.bin").read_bytes() == CONTENT


def test_wrong_bytes_never_take_the_name(server, tmp_path):
    server.files["bad"] = CONTENT[::-1]
    with pytest.raises(FetchError, match=f"does not match the known hash: expected {DIGEST}"):
        fetch_source(source(server.url("bad")), tmp_path, timeout=5)
    assert list((tmp_path / "folder").iterdir()) == []
    server.files["good"] = CONTENT
    fetch_source(source(server.url("bad"), server.url("good")), tmp_path, timeout=5)
    assert (tmp_path / "folder" / "data.bin").read_bytes() == CONTENT


def test_every_address_is_named_with_its_reason(server, tmp_path):
    # Port 9 of this machine is closed.
    closed = "http://127.0.0.1:9/data.bin"
    with pytest.raises(FetchError) as caught:
        fetch_source(source(closed, server.url("nowhere")), tmp_path, timeout=5)
    message = str(caught.value)
    assert f"{closed}: no connection" in message
    assert f"{server.url('nowhere')}: the server answered 404" in message
    assert DIGEST in message and f"into {tmp_path / 'folder'}" in message


def test_wanted_members_are_unpacked_and_nothing_else(server, tmp_path):
    buffer = io.BytesIO()
    members = {"one.h5": b"1" * 1000, "../escape.txt": b"no", "./two.h5": b"2" * 10}
    with tarfile.open(fileobj=buffer, mode="w:bz2") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    server.files["data.tar.bz2"] = buffer.getvalue()
    wanted = source(
        server.url("data.tar.bz2"),
        sha256=hashlib.sha256(buffer.getvalue()).hexdigest(),
        name="data.tar.bz2",
        unpack=("one.h5", "two.h5"),
    )
    fetch_source(wanted, tmp_path, timeout=5)
    folder = tmp_path / "folder"
    assert (folder / "one.h5").read_bytes() == members["one.h5"]
    assert {path.name for path in folder.iterdir()} == {"one.h5", "two.h5", "data.tar.bz2"}
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    # A file that was unpacked and is gone is unpacked again, without a download.
    (folder / "one.h5").unlink()
    assert fetch_source(wanted, tmp_path, timeout=5) == []
    assert (folder / "one.h5").read_bytes() == members["one.h5"]
    assert len(server.requests) == 1


def test_fetch_by_name(server, tmp_path, monkeypatch):
    server.files["data.bin"] = CONTENT
    local = DatasetInfo("local", "for this test", "none", (source(server.url("data.bin")),))
    monkeypatch.setitem(registry.CATALOG, "local", local)
    assert [path.name for path in datasets.fetch("local", tmp_path)] == ["data.bin"]
    assert datasets.fetch("local", tmp_path) == []
    assert datasets.fetch("digits", tmp_path) == []
    with pytest.raises(ValueError, match="did you mean 'mnist'"):
        datasets.fetch("mnits", tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="cannot make the folder"):
        fetch_source(source("http://127.0.0.1:9/x"), tmp_path / "file", timeout=1)
