"""The routes: what is served where. Each handler is a few lines; the work is in the modules they call."""

from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response

from server.byte_budget import Hold
from server.dialects import ChatDialect, ResponsesDialect, TextDialect
from server.errors import ModelNotFoundError, ServiceUnavailableError, UnauthorizedError, still_loading
from server.exchange import CompletionExchange, DocumentExchange
from server.responses import ResponsesRequest
from server.schemas import ChatCompletionRequest
from server.security import header
from server.service import Service
from server.text_completion import TextCompletionRequest
from server.tokenization import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from server.watchdog import is_hung, is_responsive

BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    TextCompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def require_key(request: Request) -> None:
    """Lets a request pass if it brings an API key, or none is needed. Asked by route, never by the text of a path.

    Raises:
        UnauthorizedError: it brings none, or one that is not known.
    """
    service = service_of(request)
    if not service.api_keys.are_needed:
        return
    key = service.api_keys.find(header(request.scope, b"authorization"))
    if key is None:
        service.metrics.rejected["unauthorized"].inc()
        raise UnauthorizedError()
    request.scope["state"]["key_salt"] = key.cache_salt


# Open to everybody: what probes and scrapers ask, none of it about requests. All else needs a key where keys are set.
open_router = APIRouter()
router = APIRouter(dependencies=[Depends(require_key)])
metrics_router = APIRouter()


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI of a body that is parsed by hand."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.post(
    "/v1/chat/completions", openapi_extra=takes(ChatCompletionRequest), summary="Answer a conversation with pictures"
)
async def create_chat_completion(request: Request) -> Response:
    return CompletionExchange(service_of(request), ChatDialect())


@router.post("/v1/completions", openapi_extra=takes(TextCompletionRequest), summary="Continue a text")
async def create_completion(request: Request) -> Response:
    return CompletionExchange(service_of(request), TextDialect())


@router.post("/v1/responses", openapi_extra=takes(ResponsesRequest), summary="Answer text and pictures, statelessly")
async def create_response(request: Request) -> Response:
    return CompletionExchange(service_of(request), ResponsesDialect())


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest), summary="The tokens of a text or a conversation")
async def create_tokens(request: Request) -> Response:
    service = service_of(request)

    async def answer(wanted: TokenizeRequest, hold: Hold) -> bytes:
        side, info = service.chat.model_side, service.client.info
        assert side is not None, "requests come only once the service is ready"
        assert info is not None, "requests come only once the engine is ready"
        if wanted.model is not None:
            service.chat.check_model(wanted.model)
        return await tokenize(side, info.max_model_len, wanted, hold)

    return DocumentExchange(service, TokenizeRequest, answer)


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest), summary="The text of tokens")
async def create_text(request: Request) -> Response:
    service = service_of(request)

    async def answer(wanted: DetokenizeRequest, hold: Hold) -> bytes:
        side = service.chat.model_side
        assert side is not None, "requests come only once the service is ready"
        if wanted.model is not None:
            service.chat.check_model(wanted.model)
        return await detokenize(side, wanted)

    return DocumentExchange(service, DetokenizeRequest, answer)


@router.get("/v1/models", summary="The models served here")
async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": model_cards(service_of(request))})


@router.get("/v1/models/{model:path}", summary="One model")
async def get_model(request: Request) -> Response:
    wanted = request.path_params["model"]
    for card in model_cards(service_of(request)):
        if card["id"] == wanted:
            return json_response(card)
    raise ModelNotFoundError(wanted, service_of(request).settings.model_names)


@open_router.get("/health", summary="200 while the engine is alive; 503 while it loads, and when it is gone")
@open_router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    service = service_of(request)
    if service.client.state == "starting":
        raise still_loading()
    return live_response(service)


@open_router.get("/health/live", summary="503 when the engine is dead or hung")
@open_router.head("/health/live", include_in_schema=False)
@open_router.get("/livez", include_in_schema=False)
async def health_live(request: Request) -> Response:
    return live_response(service_of(request))


@open_router.get("/health/ready", summary="200 while requests are taken")
@open_router.head("/health/ready", include_in_schema=False)
@open_router.get("/readyz", include_in_schema=False)
async def health_ready(request: Request) -> Response:
    service = service_of(request)
    if service.lifecycle.phase != "ready":
        raise ServiceUnavailableError(f"The server is {service.lifecycle.phase}.", reason="not_ready")
    if not is_responsive(service.client, service.settings.watchdog_seconds):
        raise ServiceUnavailableError("The engine gives no sign of life.", reason="engine_dead")
    return live_response(service)


@metrics_router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/version", summary="Version of the server")
async def version(request: Request) -> Response:
    return json_response({"version": service_of(request).version})


def live_response(service: Service) -> Response:
    """
    Raises:
        ServiceUnavailableError: the engine is dead, or gave no sign of life for `watchdog_seconds`.
    """
    client = service.client
    if client.state == "dead" or service.lifecycle.phase == "dead":
        raise ServiceUnavailableError("The engine has stopped.", reason="engine_dead")
    if is_hung(client, service.settings.watchdog_seconds):
        raise ServiceUnavailableError("The engine gives no sign of life.", reason="engine_dead")
    return json_response({"status": service.lifecycle.phase})


def model_cards(service: Service) -> list[dict[str, Any]]:
    info = service.client.info
    names = service.settings.model_names
    return [
        {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "fovea",
            "root": names[0],
            "max_model_len": info.max_model_len if info else None,
        }
        for name in names
    ]


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def body_schemas() -> dict[str, Any]:
    """OpenAPI components of the bodies, which are parsed by hand."""
    schemas: dict[str, Any] = {}
    for model in BODIES:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
    return schemas
