"""The HTTP routes in front of one served model.

An endpoint reads its body, has it checked and turned into a job, and answers; every refusal leaves here in
OpenAI's shape. Serving the application on a socket is `serving`'s business.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from twinjet import __version__
from twinjet.core.errors import Overloaded
from twinjet.orchestrator.interface import Health
from twinjet.server import requests as bodies
from twinjet.server.body import ClientGone, decode_body, read_body
from twinjet.server.errors import answer_error, answer_status
from twinjet.server.generation import Generation
from twinjet.server.intake import Intake, Job
from twinjet.server.metrics import ServerMetrics
from twinjet.server.openai import ChatReply, CompletionReply, Reply
from twinjet.server.responses import Detokenized, Model, ModelList, Tokens
from twinjet.server.service import ServedModel, ServerLimits
from twinjet.server.serving import run_server
from twinjet.server.stream import json_response

__all__ = ["ServedModel", "ServerLimits", "create_app", "run_server"]

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_GONE = 499


def create_app(service: ServedModel, limits: ServerLimits | None = None) -> FastAPI:
    """The application; works before the engines are ready, then refusing to generate with 503."""
    routes = Routes(service, limits or ServerLimits())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            routes.close()

    app = FastAPI(
        title="Twinjet",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        # Their pages load scripts from a third party.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.service = service
    app.state.routes = routes
    for method, path, endpoint in (
        ("POST", "/v1/completions", routes.completions),
        ("POST", "/v1/chat/completions", routes.chat_completions),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{name:path}", routes.model),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("POST", "/v1/tokenize", routes.tokenize),
        ("POST", "/v1/detokenize", routes.detokenize),
        ("GET", "/health", routes.health),
        ("GET", "/metrics", routes.metrics_page),
        ("GET", "/", routes.index),
    ):
        app.add_route(path, routes.guarded(endpoint), methods=[method])
    app.add_exception_handler(HTTPException, routes.refuse_status)
    app.add_exception_handler(Exception, routes.refuse_error)
    return app


class Index(msgspec.Struct):
    """/"""

    name: str
    version: str
    model: str
    routes: list[str]


class HealthAnswer(msgspec.Struct):
    """/health"""

    status: str
    reason: str


class Routes:
    """The endpoints, bound to a served model."""

    def __init__(self, service: ServedModel, limits: ServerLimits) -> None:
        self._service = service
        self._limits = limits
        self._metrics = ServerMetrics(service)
        self._intake = Intake(service, limits)
        self._draining = False

    def stop_admitting(self) -> None:
        """From now on new requests and /health are answered 503, and what runs goes on."""
        self._draining = True

    def close(self) -> None:
        self._intake.close()

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint`, with whatever it raises answered."""

        async def run(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ClientGone:
                return Response(status_code=_CLIENT_GONE)
            except Exception as error:
                return await self.refuse_error(request, error)

        return run

    async def refuse_error(self, request: Request, error: Exception) -> Response:
        answer = answer_error(error, serving=self._health().ok)
        self._metrics.errors[answer.status] += 1
        return answer.response()

    async def refuse_status(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return await self.refuse_error(request, error)
        headers = dict(error.headers or {})
        answer = answer_status(error.status_code, request.method, request.url.path, headers.get("Allow"))
        self._metrics.errors[answer.status] += 1
        return answer.response(headers)

    # --- generation -----------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        arrived = monotonic()
        job = await self._intake.completion(await self._read(request, bodies.COMPLETION))
        return await self._generate(request, job, arrived, CompletionReply)

    async def chat_completions(self, request: Request) -> Response:
        arrived = monotonic()
        job = await self._intake.chat(await self._read(request, bodies.CHAT))
        return await self._generate(request, job, arrived, ChatReply)

    async def _read(self, request: Request, decoder: "msgspec.json.Decoder[T]") -> T:
        return decode_body(decoder, await read_body(request, self._limits.max_body_bytes))

    async def _generate(self, request: Request, job: Job, arrived: float, shape: type[Reply]) -> Response:
        if self._draining:
            raise Overloaded("the server is stopping and takes no new requests; send it to another")
        generation = Generation(self._service, job, self._metrics, arrived)
        reply = shape(self._service, generation, self._metrics)
        if job.stream:
            return reply.streamed()
        answer = await reply.gathered(request.receive)
        if answer is None:
            raise ClientGone
        return answer

    # --- text -----------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, bodies.TOKENIZE)
        ids = await self._intake.tokenize(body)
        strings = [self._service.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        return json_response(Tokens(len(ids), self._context(), ids, strings))

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, bodies.DETOKENIZE)
        self._service.check_name(body.model)
        return json_response(Detokenized(await self._intake.detokenize(bytes(body.tokens))))

    # --- about ----------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return json_response(ModelList("list", [self._model()]))

    async def model(self, request: Request) -> Response:
        self._service.check_name(request.path_params["name"])
        return json_response(self._model())

    def _model(self) -> Model:
        return Model(self._service.name, "model", self._service.created, "twinjet", self._context())

    def _context(self) -> int | None:
        info = self._service.ready_info()
        return None if info is None else info.context

    def _health(self) -> Health:
        return Health(False, "draining") if self._draining else self._service.orchestrator.health()

    async def health(self, request: Request) -> Response:
        health = self._health()
        status = "ok" if health.ok else "unavailable"
        return json_response(HealthAnswer(status, health.reason), 200 if health.ok else 503)

    async def metrics_page(self, request: Request) -> Response:
        return Response(self._metrics.page(), headers={"content-type": _METRICS_TYPE})

    async def index(self, request: Request) -> Response:
        routes = [
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/models",
            "/tokenize",
            "/detokenize",
            "/health",
            "/metrics",
        ]
        return json_response(Index("twinjet", __version__, self._service.name, routes))
