"""A gateway for training scripts in any language: HTTP on this machine alone."""

import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.middleware.trustedhost import TrustedHostMiddleware

from fedjax_dp.core import checks, files
from fedjax_dp.flower.exchange import Exchange, NotOpenError

HOST = "127.0.0.1"
# Names under which a script reaches the gateway; others are of pages in a browser.
_HOSTS = (HOST, "localhost")
_SAFETENSORS = "application/octet-stream"
# The header of a safetensors file may be written with more spaces than ours.
_HEADER_BYTES = 2**16
_MOST_SCORE_BYTES = 2**16
# What a report has; all but scores may be left out.
_REPORT = ("scores", "round", "datalink")


class _TooLargeError(ValueError):
    """A body above its bound."""


_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (NotOpenError, 409),
    (_TooLargeError, 413),
    (FileNotFoundError, 404),
    (ValueError, 400),
)


def gateway_app(exchange: Exchange, token: str) -> FastAPI:
    """Builds the gateway of a node.

    A refusal is a JSON object with `error`, under status 400 (damaged, not finite, or of other
    names, shapes or types), 401 (token), 404 (a model that was not received), 409 (a round that is
    over or not begun, or a second update) or 413 (too large).
    """
    app = FastAPI(openapi_url=None)
    _refuse_others(app, token)

    @app.get("/project")
    def project() -> dict[str, Any]:
        task = exchange.task()
        if task is None:
            return {"current_round": None, "rounds": None, "datalinks": [], "deadline": None}
        return {
            "current_round": task.round,
            "rounds": task.rounds,
            "datalinks": exchange.awaited(),
            "deadline": task.deadline,
        }

    @app.get("/model")
    def model(round: str | None = None) -> Response:
        return Response(exchange.model(_whole("round", round)), media_type=_SAFETENSORS)

    @app.put("/update")
    async def update(
        request: Request, round: str | None = None, datalink: str | None = None
    ) -> dict[str, Any]:
        number, link = _whole("round", round), _whole("datalink", datalink)
        rule = "be given, that of the model which was trained"
        checks.require(number is not None, "round", rule, None)
        assert number is not None
        content = await _body(request, len(exchange.model()) + _HEADER_BYTES)
        stored = await run_in_threadpool(exchange.put, content, link, number)
        return {"round": number, "datalink": stored}

    @app.post("/scores")
    async def scores(request: Request) -> dict[str, Any]:
        body = await _body(request, _MOST_SCORE_BYTES)
        given: Any = files.parse_json(files.as_text(body, "the body"), "the body")
        is_report = isinstance(given, dict) and {"scores"} <= {*given} <= {*_REPORT}
        checks.require(is_report, "the body", f"be an object of {', '.join(_REPORT)}", given)
        return exchange.report(given["scores"], given.get("round"), given.get("datalink"))

    return app


def _refuse_others(app: FastAPI, token: str) -> None:
    """Answers requests without the token, for other hosts, or with errors, by refusals."""
    expected = f"Bearer {token}".encode()

    @app.middleware("http")
    async def refuse(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Any:
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, expected):
            headers = {"WWW-Authenticate": "Bearer"}
            return JSONResponse({"error": "the token must be that of the gateway"}, 401, headers)
        return await proceed(request)

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*_HOSTS])

    async def refused(request: Request, error: Exception) -> JSONResponse:
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        return JSONResponse({"error": str(error)}, status)

    for kind, _ in _STATUS:
        app.add_exception_handler(kind, refused)


def server_of(
    exchange: Exchange, token: str, port: int = 0
) -> tuple[uvicorn.Server, socket.socket]:
    """Builds the server of a gateway, which this machine alone reaches, and its open socket."""
    # Not by uvicorn, which ends the process if a port is in use.
    own = socket.socket()
    try:
        own.bind((HOST, port))
    except OSError as error:
        own.close()
        raise ValueError(f"port must be free on {HOST}, got {port} ({error.strerror})") from None
    own.listen()
    config = uvicorn.Config(gateway_app(exchange, token), log_level="warning", ws="none")
    return uvicorn.Server(config), own


def _whole(name: str, text: str | None) -> int | None:
    """Reads a number of a query."""
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return None if text is None else int(text)


async def _body(request: Request, limit: int) -> bytes:
    """Reads a body of bounded size."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit:
            raise _TooLargeError(f"the body must have at most {limit} bytes, got more")
    return bytes(content)
