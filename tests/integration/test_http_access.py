"""Who may ask what over HTTP: API keys, origins, the metrics' own port, the inventory of routes."""

import json
import socket
from collections.abc import Generator
from pathlib import Path

import httpx
import openai
import pytest
from fastapi.routing import iter_route_contexts

from server.settings import SettingsError, load_settings
from tests.http_server import MODEL, RunningServer, chat, http_client, image_part, running_server

FIRST, SECOND = "first-key-0001", "second-key-0002"
BEARER = {"authorization": f"Bearer {FIRST}"}

# Every route there is. None changes the server: there is nothing to administer over HTTP.
OPEN = {"/health", "/health/live", "/health/ready", "/livez", "/readyz", "/metrics"}
# Probes that some load balancers send as HEAD.
HEAD = {"/health", "/health/live", "/health/ready"}
# The page's own files; it asks its user for the key.
PAGE = {"/", "/web/{name}"}
NEED_KEY = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model:path}"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/web/status"),
}


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    with running_server(tiny_checkpoint, api_keys=(FIRST, SECOND)) as server:
        yield server


def routes_of(server: RunningServer) -> set[tuple[str, str]]:
    return {
        (method, context.path)
        for context in iter_route_contexts(server.app.routes)
        for method in context.methods or ("?",)
    }


def test_inventory_of_routes(server: RunningServer) -> None:
    read = {("GET", path) for path in OPEN | PAGE} | {("HEAD", path) for path in HEAD | PAGE}
    assert routes_of(server) == NEED_KEY | read


def test_routes_that_need_a_key_say_so(server: RunningServer) -> None:
    for method, path in NEED_KEY:
        for headers in ({}, {"authorization": "Bearer wrong-key-0000"}, {"authorization": FIRST}, {"api-key": FIRST}):
            response = server.http.request(method, path.replace("{model:path}", MODEL), headers=headers)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


def test_open_routes_need_none(server: RunningServer) -> None:
    for path in (*OPEN, "/", "/web/app.js"):
        assert server.get(path).status_code == 200


@pytest.mark.parametrize("host", ["a/health?x=", "a/health", "a:80/health?", "a#/health"])
def test_host_header_does_not_change_which_route_is_asked(server: RunningServer, host: str) -> None:
    body = json.dumps(chat()).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert connection.recv(1000).startswith((b"HTTP/1.1 401", b"HTTP/1.1 400"))
    assert server.engine.requests == []


def test_each_key_is_accepted(server: RunningServer) -> None:
    for key in (FIRST, SECOND):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            assert client.chat.completions.create(**chat()).choices
            assert client.models.retrieve(MODEL).id == MODEL
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=FIRST[:-1], max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.chat.completions.create(**chat())
    assert caught.value.code == "invalid_api_key"
    assert FIRST[:-1] not in caught.value.message
    assert server.post(chat(), headers={"authorization": f"bearer   {FIRST}"}).status_code == 200
    assert server.metric("fovea_requests_rejected_total", reason="unauthorized") > 0


def test_keys_share_no_cache(server: RunningServer) -> None:
    server.engine.requests.clear()
    body = chat([image_part()])
    asked = [BEARER, BEARER, {"authorization": f"Bearer {SECOND}"}]
    for headers in asked:
        assert server.post(body, headers=headers).status_code == 200
    assert server.post({**body, "cache_salt": "mine"}, headers=BEARER).status_code == 200
    first, again, other, salted = server.engine.requests
    assert first.cache_salt == again.cache_salt
    assert first.images == again.images
    assert len({first.cache_salt, other.cache_salt, salted.cache_salt}) == 3
    assert len({request.images[0].image_hash for request in (first, other, salted)}) == 3
    assert FIRST not in first.cache_salt


def test_without_keys_requests_share_the_cache(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint) as server:
        server.post(chat())
        server.post(chat(), headers=BEARER)
        assert [request.cache_salt for request in server.engine.requests] == ["", ""]


def test_keys_from_a_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# team a\n{FIRST}\n\n  {SECOND}  \n")
    with running_server(tiny_checkpoint, api_keys_file=path) as server:
        for key, status in ((FIRST, 200), (SECOND, 200), ("# team a", 401), ("team", 401)):
            assert server.post(chat(), headers={"authorization": f"Bearer {key}"}).status_code == status


@pytest.mark.parametrize("content", [None, "", "# nothing\n", "short\n", "with space 1234\n"])
def test_file_without_good_keys_stops_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        load_settings({"api_keys_file": path}, environ={})
    assert "short" not in str(caught.value)


def test_keys_are_never_printed() -> None:
    settings = load_settings({}, environ={"FOVEA_API_KEYS": f"{FIRST},{SECOND}"})
    assert settings.all_api_keys() == (FIRST, SECOND)
    assert FIRST not in repr(settings)
    assert FIRST not in settings.model_dump_json()
    with pytest.raises(SettingsError) as caught:
        load_settings({}, environ={"FOVEA_API_KEYS": "secret1"})
    assert "secret1" not in str(caught.value)


def preflight(server: RunningServer, origin: str) -> httpx.Response:
    headers = {"origin": origin, "access-control-request-method": "POST",
               "access-control-request-headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
    return server.http.options("/v1/chat/completions", headers=headers)


def test_no_origin_is_allowed_by_default(server: RunningServer) -> None:
    assert "access-control-allow-origin" not in preflight(server, "https://app.example").headers
    response = server.post(chat(), headers={**BEARER, "origin": "https://app.example"})
    assert "access-control-allow-origin" not in response.headers


def test_named_origins_are_allowed(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, api_keys=(FIRST,), cors_origins=("https://app.example",)) as server:
        allowed = preflight(server, "https://app.example")
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed.headers
        assert "access-control-allow-origin" not in preflight(server, "https://evil.example").headers
        answer = server.post(chat(), headers={**BEARER, "origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = server.post(chat(), headers={"origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_metrics_on_a_port_of_their_own(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, metrics_port=0) as server:
        assert server.get("/metrics").status_code == 404
        port = server.service.metrics_port
        assert port
        with http_client(f"http://127.0.0.1:{port}") as beside:
            scraped = beside.get("/metrics")
            assert scraped.headers["content-type"].startswith("text/plain; version=")
            assert "fovea_ready 1.0" in scraped.text
            assert beside.get("/v1/models").status_code == 404
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_root_path_of_a_proxy(tiny_checkpoint: Path) -> None:
    """Whether the proxy strips its prefix or not."""
    with running_server(tiny_checkpoint, root_path="/fovea", api_keys=(FIRST,)) as server:
        for prefix in ("", "/fovea"):
            assert server.get(f"{prefix}/health").status_code == 200
            assert server.post(chat(), f"{prefix}/v1/chat/completions", headers=BEARER).status_code == 200
            assert server.post(chat(), f"{prefix}/v1/chat/completions").status_code == 401
        assert server.get("/elsewhere/health").status_code == 404
        document = server.http.get("/openapi.json", headers=BEARER).json()
        assert document["servers"] == [{"url": "/fovea"}]


def test_nothing_is_believed_of_a_proxy_or_a_host(server: RunningServer) -> None:
    forged = {"x-forwarded-for": "1.2.3.4", "x-forwarded-proto": "https", "x-forwarded-prefix": "/health",
              "x-original-url": "/health", "x-rewrite-url": "/health"}  # fmt: skip
    assert server.post(chat(), headers=forged).status_code == 401
    # A redirect to the route without its slash would be made from the Host header.
    assert server.post(chat(), "/v1/chat/completions/", headers={**BEARER, "host": "evil.example"}).status_code == 404
