"""What /openapi.json says beyond the request bodies: answers, errors, parameters in paths. Knows the wire's documents
as JSON schemas; serves nothing.

The handlers read and write the wire by hand, so that the framework cannot know these.
"""

from typing import Any

METHODS = frozenset({"get", "post", "put", "patch", "delete"})

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
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


# `function_call` where the request has the older `functions`.
FINISH_REASON = {"enum": ["stop", "length", "tool_calls", "function_call"]}
TEXT_FINISH_REASON = {"enum": ["stop", "length"]}
RESPONSE_STATUS = {"enum": ["completed", "incomplete"]}

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
    "TopLogprob": document({"token": STRING, "logprob": NUMBER, "bytes": array(COUNT)}),
    "TokenLogprob": document(
        {
            "token": STRING,
            "logprob": NUMBER,
            "bytes": array(COUNT),
            "top_logprobs": array(reference("TopLogprob")),
        }
    ),
    "Logprobs": document({"content": nullable(array(reference("TokenLogprob"))), "refusal": {"type": "null"}}),
    "FunctionCall": document({"name": STRING, "arguments": STRING}),
    "ToolCall": document({"id": STRING, "type": {"const": "function"}, "function": reference("FunctionCall")}),
    # The first delta of a call has its id, type and name, the others have arguments alone.
    "ToolCallDelta": document(
        {"index": COUNT, "function": document({"arguments": STRING}, {"name": STRING})},
        {"id": STRING, "type": {"const": "function"}},
    ),
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
                            {"role": {"const": "assistant"}, "content": nullable(STRING), "refusal": nullable(STRING)},
                            {"tool_calls": array(reference("ToolCall")), "function_call": reference("FunctionCall")},
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
                        "delta": document(
                            {},
                            {
                                "role": {"const": "assistant"},
                                "content": nullable(STRING),
                                "refusal": nullable(STRING),
                                "tool_calls": array(reference("ToolCallDelta")),
                                "function_call": document({"arguments": STRING}, {"name": STRING}),
                            },
                        ),
                        "finish_reason": nullable(FINISH_REASON),
                    },
                    {"logprobs": nullable(reference("Logprobs"))},
                )
            ),
        },
        {"usage": nullable(reference("Usage"))},
    ),
    "TextLogprobs": document(
        {
            "tokens": array(STRING),
            "token_logprobs": array(NUMBER),
            "top_logprobs": array({"type": "object", "additionalProperties": NUMBER}),
            "text_offset": array(COUNT),
        }
    ),
    "TextCompletion": document(
        {
            "id": STRING,
            "object": {"const": "text_completion"},
            "created": INTEGER,
            "model": STRING,
            "choices": array(
                document(
                    {
                        "index": COUNT,
                        "text": STRING,
                        "logprobs": nullable(reference("TextLogprobs")),
                        "finish_reason": TEXT_FINISH_REASON,
                    }
                )
            ),
            "usage": reference("Usage"),
        }
    ),
    "ResponseUsage": document(
        {
            "input_tokens": COUNT,
            "input_tokens_details": document({"cached_tokens": COUNT, "image_tokens": COUNT, "text_tokens": COUNT}),
            "output_tokens": COUNT,
            "output_tokens_details": document({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
        }
    ),
    "ResponseCall": document(
        {
            "id": STRING,
            "type": {"const": "function_call"},
            "status": RESPONSE_STATUS,
            "call_id": STRING,
            "name": STRING,
            "arguments": STRING,
        }
    ),
    "ResponseMessage": document(
        {
            "id": STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "status": RESPONSE_STATUS,
            "content": array(
                document(
                    {
                        "type": {"const": "output_text"},
                        "text": STRING,
                        "annotations": array({}),
                        "logprobs": array(reference("TokenLogprob")),
                    }
                )
            ),
        }
    ),
    "Response": document(
        {
            "id": STRING,
            "object": {"const": "response"},
            "created_at": INTEGER,
            "completed_at": nullable(INTEGER),
            "model": STRING,
            "status": RESPONSE_STATUS,
            "error": {"type": "null"},
            "incomplete_details": nullable(document({"reason": {"const": "max_output_tokens"}})),
            "output": array({"anyOf": [reference("ResponseMessage"), reference("ResponseCall")]}),
            "tools": array(document({"type": {"const": "function"}, "name": STRING, "strict": {"type": "boolean"}})),
            "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, document({"type": STRING})]},
            "parallel_tool_calls": {"type": "boolean"},
            "usage": reference("ResponseUsage"),
            "instructions": nullable(STRING),
            "max_output_tokens": nullable(INTEGER),
            "temperature": NUMBER,
            "top_p": NUMBER,
            "metadata": {"type": "object", "additionalProperties": STRING},
            "store": {"const": False},
            "text": document({"format": document({"type": {"enum": ["text", "json_object", "json_schema"]}})}),
        }
    ),
    "Tokens": document(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": array(COUNT),
            "image_tokens": COUNT,
            "token_strs": nullable(array(STRING)),
        }
    ),
    "Text": document({"prompt": STRING}),
    "Model": document(
        {"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING},
        {"root": STRING, "max_model_len": nullable(COUNT)},
    ),
    "ModelList": document({"object": {"const": "list"}, "data": array(reference("Model"))}),
    "Health": document({"status": {"enum": ["starting", "ready", "draining"]}}),
    "Version": document({"version": STRING}),
}

JSON = "application/json"
# Without a type: readers of OpenAPI 3.1 hold it against the whole text of a stream, or against each of its events.
EVENTS = {
    "description": "Server-sent events: `data: ` and a chunk each, `data: [DONE]` at the end. An answer that fails "
    'on the way ends with `data: {"error": {...}}` instead.',
}
# An answer of the responses API names its events, and its last event says by its type that it is the last.
RESPONSE_EVENTS = {
    "description": "Server-sent events in OpenAI's order, numbered from 0: `response.created` ... "
    "`response.completed` or `response.incomplete`. An answer that fails on the way ends with `error` instead.",
}

# What a success looks like, by path.
ANSWERS: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {JSON: reference("ChatCompletion"), "text/event-stream": EVENTS},
    "/v1/completions": {JSON: reference("TextCompletion"), "text/event-stream": EVENTS},
    "/v1/responses": {JSON: reference("Response"), "text/event-stream": RESPONSE_EVENTS},
    "/tokenize": {JSON: reference("Tokens")},
    "/detokenize": {JSON: reference("Text")},
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
