"""GET / and the files of the web page, which need no key. The policy below makes the browser load nothing from
elsewhere."""

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
    "cache-control": "no-cache",  # cached and revalidated: an updated server has an updated page
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
    """All files by their path. Nothing else is served, so no path leads out of the folder."""
    by_path = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            by_path[path.relative_to(FOLDER).as_posix()] = File(content, MEDIA_TYPES[path.suffix], etag)
    return by_path


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
