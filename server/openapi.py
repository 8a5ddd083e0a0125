"""What /openapi.json says beyond the request bodies: answers, errors, parameters in paths. Knows the wire's documents
as JSON schemas; serves nothing.

The handlers read and write the wire by hand, so that the framework cannot know these.
"""

from typing import Any

METHODS = frozenset({"get", "post", "put", "patch", "delete"})

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
COUNT = {"type": "integer", "minimum": 0}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def document(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these keys; others may come."""
    return {"type": "object", "required": [*required], "properties": {**required, **(optional or {})}}


FINISH_REASON = {"enum": ["stop", "length", "tool_calls"]}

SCHEMAS: dict[str, Any] = {
    "Error": document(
        {
            "error": document(
                {"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)},
            )
        }
    ),
    "Usage": document(
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
        {
            "prompt_tokens_details": document({"cached_tokens": COUNT, "image_tokens": COUNT, "text_tokens": COUNT}),
            "completion_tokens_details": document({"reasoning_tokens": COUNT, "text_tokens": COUNT}),
        },
    ),
    "TopLogprob": document({"token": STRING, "logprob": {"type": "number"}, "bytes": array(COUNT)}),
    "TokenLogprob": document(
        {
            "token": STRING,
            "logprob": {"type": "number"},
            "bytes": array(COUNT),
            "top_logprobs": array(reference("TopLogprob")),
        }
    ),
    "Logprobs": document({"content": nullable(array(reference("TokenLogprob"))), "refusal": {"type": "null"}}),
    "ChatCompletion": document(
        {
            "id": STRING,
            "object": {"const": "chat.completion"},
            "created": INTEGER,
            "model": STRING,
            "choices": array(
                document(
                    {
                        "index": COUNT,
                        "message": document(
                            {"role": {"const": "assistant"}, "content": nullable(STRING), "refusal": nullable(STRING)}
                        ),
                        "logprobs": nullable(reference("Logprobs")),
                        "finish_reason": FINISH_REASON,
                    }
                )
            ),
            "usage": reference("Usage"),
        }
    ),
    "ChatCompletionChunk": document(
        {
            "id": STRING,
            "object": {"const": "chat.completion.chunk"},
            "created": INTEGER,
            "model": STRING,
            "choices": array(
                document(
                    {
                        "index": COUNT,
                        "delta": document({}, {"role": {"const": "assistant"}, "content": nullable(STRING)}),
                        "finish_reason": nullable(FINISH_REASON),
                    },
                    {"logprobs": nullable(reference("Logprobs"))},
                )
            ),
        },
        {"usage": nullable(reference("Usage"))},
    ),
    "Model": document(
        {"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING},
        {"root": STRING, "max_model_len": nullable(COUNT)},
    ),
    "ModelList": document({"object": {"const": "list"}, "data": array(reference("Model"))}),
    "Health": document({"status": {"enum": ["starting", "ready", "draining"]}}),
    "Version": document({"version": STRING}),
}

JSON = "application/json"
EVENTS = {
    "type": "string",
    "description": "Server-sent events: `data: ` and a chunk each, `data: [DONE]` at the end. An answer that fails "
    'on the way ends with `data: {"error": {...}}` instead.',
}

# What a success looks like, by path.
ANSWERS: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {JSON: reference("ChatCompletion"), "text/event-stream": EVENTS},
    "/v1/models": {JSON: reference("ModelList")},
    "/v1/models/{model}": {JSON: reference("Model")},
    "/health": {JSON: reference("Health")},
    "/health/live": {JSON: reference("Health")},
    "/health/ready": {JSON: reference("Health")},
    "/metrics": {"text/plain": STRING},
    "/version": {JSON: reference("Version")},
}

ERROR = {"description": "An error, in OpenAI's shape", "content": {JSON: {"schema": reference("Error")}}}


def complete(openapi: dict[str, Any]) -> dict[str, Any]:
    """Adds answers, errors and path parameters to the framework's document, in place."""
    openapi.setdefault("components", {}).setdefault("schemas", {}).update(SCHEMAS)
    for path, item in openapi["paths"].items():
        for method, operation in item.items():
            if method in METHODS:
                _complete_operation(path, operation)
    return openapi


def _complete_operation(path: str, operation: dict[str, Any]) -> None:
    responses = operation.setdefault("responses", {})
    # Of the framework's own validation, which nothing here uses.
    responses.pop("422", None)
    if path in ANSWERS:
        content = {media_type: {"schema": schema} for media_type, schema in ANSWERS[path].items()}
        responses["200"] = {"description": "Success", "content": content}
    responses["default"] = ERROR
    known = {parameter["name"] for parameter in operation.get("parameters", ())}
    for part in path.split("/"):
        name = part[1:-1]
        if part.startswith("{") and name not in known:
            parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            operation.setdefault("parameters", []).append(parameter)
