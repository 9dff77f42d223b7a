"""`fedjax-dp gateway`: HTTP on this machine for the training script of a node."""

import pathlib
import secrets
from typing import Annotated

import typer

from fedjax_dp.cli.output import Answer, Output, answering, application
from fedjax_dp.core.packages import needed_for

app = application()


@answering(app)
def gateway(
    out: Output,
    state_dir: Annotated[pathlib.Path, typer.Option(help="The node's `state-dir`.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="A port on 127.0.0.1; 0 for a free one.")
    ] = 8765,
) -> Answer:
    """Serve a node's models to a training script: `fedjax-dp gateway --state-dir DIR [--port N]`.

    The node is configured with `training="script"` and the same `state-dir`, a folder that exists.
    Address and token are printed to the error stream, and the token is in the file `project/token`
    of that folder. The gateway listens on this machine alone and ends when it is interrupted.
    """
    with needed_for("fedjax-dp gateway", "flower"):
        from fedjax_dp.flower.exchange import exchange_of
        from fedjax_dp.flower.gateway import HOST, server_of
    exchange, token = exchange_of(state_dir), secrets.token_urlsafe(32)
    server, socket = server_of(exchange, token, port)
    address, file = f"http://{HOST}:{socket.getsockname()[1]}", exchange.token(token)
    typer.echo(f"address {address}\ntoken {token}\ntoken file {file}", err=True)
    server.run(sockets=[socket])
    return Answer({"address": address}, lambda out: out.say("the gateway has ended"), address)
