"""The page's certificates are those that the strictest Python accepts."""

import pathlib
import shutil
import socket
import ssl
import subprocess
import threading

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "deploy" / "trust.md"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_certificates_of_the_page_pass_strict_verification(tmp_path):
    part = PAGE.read_text().partition("## Certificates and keys")[2]
    block = part.partition("```sh\n")[2].partition("\n```")[0]
    commands = block.partition("ssh-keygen")[0].replace("rsa:4096", "rsa:2048")
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    client = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    # The default of Python 3.13.
    client.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with listening.accept()[0] as one, server.wrap_socket(one, server_side=True) as served:
                served.sendall(b"here")

        answering = threading.Thread(target=serve)
        answering.start()
        address = listening.getsockname()
        with (
            socket.create_connection(address, timeout=30) as plain,
            client.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            assert secured.recv(4) == b"here"
        answering.join()
