"""Puts the application together. Takes the engine client, so that HTTP is tested without a model."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from runtime.client import EngineClient
from server import page, status
from server.errors import (
    ApiError,
    InternalServerError,
    InvalidRequestError,
    MethodNotAllowedError,
    RouteNotFoundError,
)
from server.metrics_port import metrics_listener
from server.middleware import RequestContextMiddleware
from server.openapi import complete
from server.routes import body_schemas, json_response, metrics_router, open_router, require_key, router
from server.service import Service
from server.settings import Settings


def create_app(engine_client: EngineClient, settings: Settings) -> FastAPI:
    """The ASGI application. Its lifespan starts the engine in the background and ends it; `app.state.service` holds
    the parts."""
    service = Service(engine_client, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with metrics_listener(service):
            service.start()
            try:
                yield
            finally:
                await service.stop()

    app = FastAPI(
        title="Fovea", version=service.version, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        # A redirect would be made from the Host header, which is the client's text.
        redirect_slashes=False,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected_error},
    )  # fmt: skip
    app.state.service = service
    app.include_router(router)
    app.include_router(open_router)
    if settings.metrics_port is None:
        app.include_router(metrics_router)

    @app.get("/openapi.json", include_in_schema=False, dependencies=[Depends(require_key)])
    async def openapi_document(request: Request) -> Response:
        return json_response(app.openapi())

    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "openai-processing-ms"],
        )
    if settings.web:
        app.state.page = page.Page()
        app.include_router(status.router, dependencies=[Depends(require_key)])
        app.include_router(page.router)
    app.add_middleware(
        RequestContextMiddleware, metrics=service.metrics, lifecycle=service.lifecycle, root_path=settings.root_path
    )
    app.openapi = lambda: _openapi(app, settings.root_path)  # type: ignore[method-assign]
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """The framework's own errors (no such route, wrong method), in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return RouteNotFoundError("There is no such route.", headers=headers).response()
    if error.status_code == 405:
        return MethodNotAllowedError("This route does not take this method.", headers=headers).response()
    if error.status_code < 500:
        return InvalidRequestError("The request is malformed.", headers=headers).response()
    return InternalServerError().response()


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return InternalServerError().response()


def _openapi(app: FastAPI, root_path: str) -> dict[str, Any]:
    if app.openapi_schema is None:
        servers = [{"url": root_path}] if root_path else None
        document = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=servers)
        document.setdefault("components", {}).setdefault("schemas", {}).update(body_schemas())
        app.openapi_schema = complete(document)
    return app.openapi_schema
