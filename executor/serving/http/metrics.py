"""Metrics over HTTP, beside the API or on an address of their own."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from executor.serving.http.bearer_token import BearerTokenMiddleware
from executor.serving.metrics import CONTENT_TYPE, Metrics


def metrics_response(metrics: Metrics) -> Response:
    """What a Prometheus server scrapes."""
    return Response(metrics.exposition(), media_type=CONTENT_TYPE)


def metrics_app(metrics: Metrics, bearer_token: str | None) -> ASGIApp:
    """An application of /metrics alone; with a token, it asks for it."""

    async def scrape(_request: Request) -> Response:
        return metrics_response(metrics)

    app = Starlette(routes=[Route("/metrics", scrape)])
    return app if bearer_token is None else BearerTokenMiddleware(app, bearer_token)
