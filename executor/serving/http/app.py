"""The ASGI application: routes, and what surrounds them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from executor.api.errors import InvalidRequestError, RequestError
from executor.serving.generation import GenerationService
from executor.serving.http.answer import Answer
from executor.serving.http.api import Api, ChatCompletionsApi, CompletionsApi
from executor.serving.http.bearer_token import BearerTokenMiddleware
from executor.serving.http.body import Body
from executor.serving.http.errors import error_response, plain_error
from executor.serving.http.metrics import metrics_response
from executor.serving.http.parameters import take_parameters
from executor.serving.metrics import Metrics
from executor.serving.progress import ProgressMonitor


class HttpApi:
    """Endpoints over a generation service."""

    def __init__(
        self,
        generation: GenerationService,
        progress: ProgressMonitor,
        metrics: Metrics,
        *,
        model_name: str,
        max_body_bytes: int,
    ) -> None:
        self._generation = generation
        self._progress = progress
        self._metrics = metrics
        self._model_name = model_name
        self._max_body_bytes = max_body_bytes

    def app(self, bearer_token: str | None) -> ASGIApp:
        """The application; with a token, every path but /health asks for it."""
        app = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{model:path}", self.model),
                Route("/health", self.health),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
            ],
            exception_handlers={RequestError: _request_error, HTTPException: _http_error},
        )
        return app if bearer_token is None else BearerTokenMiddleware(app, bearer_token)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionsApi())

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, ChatCompletionsApi())

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def health(self, _request: Request) -> Response:
        if self._generation.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        if self._progress.is_paused:
            return JSONResponse({"status": "paused"}, 503)
        if self._progress.is_stalled:
            seconds = round(self._progress.seconds_since_progress(), 3)
            return JSONResponse({"status": "stalled", "seconds_since_progress": seconds}, 503)
        return JSONResponse({"status": "serving"})

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": version("inflight-executor")})

    async def metrics(self, _request: Request) -> Response:
        return metrics_response(self._metrics)

    async def _answer(self, request: Request, api: Api) -> Response:
        body = Body(await self._json(request))
        model = body.text("model")
        if model is not None:
            self._check_model(model)
        parameters = take_parameters(body)
        asked = api.take(body)
        body.finish()
        requests = parameters.requests(
            asked.prompts,
            max_tokens=asked.max_tokens,
            num_top_log_probs=asked.num_top_log_probs,
            request_id=request.headers.get("x-request-id"),
            trace_parent=request.headers.get("traceparent"),
        )
        with ExitStack() as started:
            streams = [started.enter_context(await self._generation.start(one)) for one in requests]
            started.pop_all()  # all are queued: from here on the answer owns them
        return Answer(
            api,
            streams,
            model_name=self._model_name,
            tokenizer=self._generation.tokenizer,
            streaming=parameters.streaming,
            usage_reports=parameters.usage_reports,
            prompt_tokens=sum(stream.accepted.prompt_tokens for stream in streams),
            outputs_each=parameters.num_return_sequences,
        )

    async def _json(self, request: Request) -> object:
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > self._max_body_bytes:
                raise HTTPException(413, f"the body has more than {self._max_body_bytes} bytes")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the body is not JSON: {error}") from None

    def _model(self) -> dict[str, object]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": 0,
            "owned_by": "inflight-executor",
            "max_model_len": self._generation.executor.longest_sequence,
        }

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise HTTPException(404, f"there is no model {name!r} here, only {self._model_name!r}")


async def _request_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), "registered for this type"
    return error_response(error)


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this type"
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    return plain_error(error.status_code, error.detail, codes.get(error.status_code, "http_error"))
