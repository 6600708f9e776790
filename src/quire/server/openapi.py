"""/openapi.json: what can be posted where, from the types that read it."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route

from quire import __version__

Reader = TypeVar("Reader", bound=Callable[..., Any])

_BODY = "__quire_body__"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")  # as Starlette writes it
_REFERENCE = "#/components/schemas/{name}"


def reads(body: type[msgspec.Struct]) -> Callable[[Reader], Reader]:
    """Says of a function which body it reads: of a route's endpoint, or of a dialect's parser."""

    def mark(reader: Reader) -> Reader:
        setattr(reader, _BODY, body)
        return reader

    return mark


def openapi(routes: Iterable[Route], parsers: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """`parsers`: path -> what reads its body, for the routes whose endpoint leaves that to another."""
    bodies: dict[str, type[msgspec.Struct]] = {}
    for route in routes:
        body = getattr(parsers.get(route.path, route.endpoint), _BODY, None)
        if body is not None:
            bodies[route.path] = body
    kinds = list(dict.fromkeys(bodies.values()))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path, parameters = _path(route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation: dict[str, Any] = {"operationId": _operation_id(method, route.path), "responses": _RESPONSES}
            if parameters:
                operation["parameters"] = parameters
            if route.path in bodies:
                schema = by_kind[bodies[route.path]]
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


_RESPONSES = {"200": {"description": "the answer"}, "default": {"description": "an error, in the dialect's own shape"}}


def _path(declared: str) -> tuple[str, list[dict[str, Any]]]:
    names = _PARAMETER.findall(declared)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return _PARAMETER.sub(r"{\1}", declared), parameters


def _operation_id(method: str, path: str) -> str:
    return f"{method.lower()}_{re.sub(r'[^a-zA-Z0-9]+', '_', path).strip('_')}"
