"""GET / and what it needs: the files of the page, from the package, to anybody. They hold no secret and load nothing
from elsewhere; the policy below has the browser see to that."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.errors import UnknownPath
from quire.server.http.openapi import responses

FOLDER = Path(__file__).parent.parent / "page"
FIRST = "index.html"
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # kept, and asked about: an update of the server is an update of the page
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    etag: str


@cache
def files() -> dict[str, File]:
    """All of them, by their path. What is not in here is not served, so no path can lead out of the folder."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            found[path.relative_to(FOLDER).as_posix()] = File(content, MEDIA_TYPES[path.suffix], etag)
    return found


@responses(dict.fromkeys(MEDIA_TYPES.values(), str))
async def page(http: Request) -> Response:
    name = http.path_params.get("name", FIRST)
    file = files().get(name)
    if file is None:
        raise UnknownPath(f"GET {http.url.path}: there is nothing here", "the page is at /")
    headers = {**HEADERS, "etag": file.etag}
    known = http.headers.get("if-none-match", "")
    if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def page_routes() -> list[Route]:
    return [Route("/", page), Route("/page/{name:path}", page)]
