"""The routes: what is served where. Each handler is a few lines; the work is in the modules they call."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from server.errors import ModelNotFoundError, ServiceUnavailableError
from server.exchange import ChatExchange
from server.schemas import ChatCompletionRequest
from server.service import Service
from server.watchdog import is_hung, is_responsive

router = APIRouter()

_CHAT_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatCompletionRequest"}}},
    }
}


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


@router.post("/v1/chat/completions", openapi_extra=_CHAT_BODY, summary="Answer a conversation with pictures")
async def create_chat_completion(request: Request) -> Response:
    service = service_of(request)
    return ChatExchange(service.chat, service.settings, service.lifecycle, service.metrics)


@router.get("/v1/models", summary="The models served here")
async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": model_cards(service_of(request))})


@router.get("/v1/models/{model:path}", summary="One model")
async def get_model(request: Request) -> Response:
    wanted = request.path_params["model"]
    for card in model_cards(service_of(request)):
        if card["id"] == wanted:
            return json_response(card)
    raise ModelNotFoundError()


@router.get("/health", summary="200 while the engine is alive; 503 while it loads, and when it is gone")
async def health(request: Request) -> Response:
    service = service_of(request)
    if service.client.state == "starting":
        raise ServiceUnavailableError("The model is still loading.", reason="not_ready")
    return live_response(service)


@router.get("/health/live", summary="503 when the engine is dead or hung")
@router.get("/livez", include_in_schema=False)
async def health_live(request: Request) -> Response:
    return live_response(service_of(request))


@router.get("/health/ready", summary="200 while requests are taken")
@router.get("/readyz", include_in_schema=False)
async def health_ready(request: Request) -> Response:
    service = service_of(request)
    if service.lifecycle.phase != "ready":
        raise ServiceUnavailableError(f"The server is {service.lifecycle.phase}.", reason="not_ready")
    if not is_responsive(service.client, service.settings.watchdog_seconds):
        raise ServiceUnavailableError("The engine gives no sign of life.", reason="engine_dead")
    return live_response(service)


@router.get("/metrics", summary="Prometheus metrics")
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


def chat_schemas() -> dict[str, Any]:
    """OpenAPI components of the request body, which is parsed by hand."""
    schema = ChatCompletionRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs", {}), "ChatCompletionRequest": schema}
