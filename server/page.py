"""Serves the built-in page: its files, with their ETags and security headers. Knows nothing of what the page shows.

The files hold no data of the service, so they need no key; what the page shows comes from the API and from
`GET /web/status` (server/status.py), as the reader's key allows.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.errors import RouteNotFoundError

FOLDER = Path(__file__).parent / "web"
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Everything from here, nothing inline, and no string ever becomes markup or code (trusted types). `blob:` are the
# reader's own pictures.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, kw_only=True)
class PageFile:
    """One file as it is served. `etag` is made of the contents."""

    content: bytes
    content_type: str
    etag: str


class Page:
    """The page's files by name, read once: they are few and small."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """
        Raises:
            FileNotFoundError: there is no page in `folder`.
        """
        self.files = {path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in CONTENT_TYPES}
        if INDEX not in self.files:
            raise FileNotFoundError(
                f"{folder} holds no {INDEX}: the installation is incomplete (--no-web does without)"
            )

    def response(self, name: str, *, if_none_match: str | None = None) -> Response:
        """A file, or 304 if the client has it.

        Raises:
            RouteNotFoundError: there is no such file.
        """
        file = self.files.get(name)
        if file is None:
            raise RouteNotFoundError("There is no such route.")
        # A browser asks each time whether its copy is still good: a new version of the server is seen at once.
        headers = {"etag": file.etag, "cache-control": "no-cache", **SECURITY_HEADERS}
        if if_none_match is not None and matches(if_none_match, file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "content-type": file.content_type})


def matches(if_none_match: str, etag: str) -> bool:
    """Whether an `If-None-Match` header names this entity tag (RFC 9110, 13.1.2: weak comparison)."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or "*" in tags


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(
        content=content,
        content_type=CONTENT_TYPES[path.suffix],
        etag=f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    )


router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    return _file(request, INDEX)


@router.api_route("/web/{name}", methods=["GET", "HEAD"])
async def page_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name == INDEX:
        # Its addresses are relative to the root.
        raise RouteNotFoundError("There is no such route.")
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    page = request.app.state.page
    assert isinstance(page, Page)
    return page.response(name, if_none_match=request.headers.get("if-none-match"))
