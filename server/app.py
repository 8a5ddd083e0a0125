"""Puts the application together. Takes the engine client, so that HTTP is tested without a model."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
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
from server.middleware import RequestContextMiddleware
from server.routes import chat_schemas, router
from server.service import Service
from server.settings import Settings


def create_app(engine_client: EngineClient, settings: Settings) -> FastAPI:
    """The ASGI application. Its lifespan starts the engine in the background and ends it; `app.state.service` holds
    the parts."""
    service = Service(engine_client, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="Fovea", version=service.version, lifespan=lifespan, docs_url=None, redoc_url=None,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected_error},
    )  # fmt: skip
    app.state.service = service
    app.include_router(router)
    if settings.web:
        app.state.page = page.Page()
        app.include_router(status.router)
        app.include_router(page.router)
    app.add_middleware(RequestContextMiddleware, metrics=service.metrics, lifecycle=service.lifecycle)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
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


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        document.setdefault("components", {}).setdefault("schemas", {}).update(chat_schemas())
        app.openapi_schema = document
    return app.openapi_schema
