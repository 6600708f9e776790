"""/openapi.json: what can be asked where and what is answered, from the types that read and write it."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

import msgspec
from starlette.routing import Route

from quire import __version__

Reader = TypeVar("Reader", bound=Callable[..., Any])
Shape = Callable[..., object]  # of errors; its return type says how they look

JSON = "application/json"
EVENTS = "text/event-stream"

_OPERATION = "__quire_operation__"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")  # as Starlette writes it
_REFERENCE = "#/components/schemas/{name}"


@dataclass(slots=True)
class Operation:
    """What is known of one operation."""

    body: Any = None
    only: Mapping[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # fields of it that are taken with these values only
    answers: Mapping[str, Any] = field(default_factory=dict)  # media type -> a type; of a stream, that of its pieces
    also: tuple[int, ...] = ()  # statuses beside 200 that have the same answer
    query: Mapping[str, Any] = field(default_factory=dict)  # name -> a type


def reads(body: type[msgspec.Struct], only: Mapping[str, tuple[Any, ...]] | None = None) -> Callable[[Reader], Reader]:
    """Says of a function which body it reads: of a route's endpoint, or of a dialect's parser. `only`: fields that are
    known and not supported, each with the values that are taken all the same."""
    return _described(body=body, only=only or {})


def answers(by_media_type: Mapping[str, Any], also: tuple[int, ...] = ()) -> Callable[[Reader], Reader]:
    return _described(answers=by_media_type, also=also)


def asks(**query: Any) -> Callable[[Reader], Reader]:
    """Parameters that may stand in the query."""
    return _described(query=query)


def _described(**what: Any) -> Callable[[Reader], Reader]:
    def mark(reader: Reader) -> Reader:
        told = getattr(reader, _OPERATION, None) or Operation()
        for name, value in what.items():
            setattr(told, name, value)
        setattr(reader, _OPERATION, told)
        return reader

    return mark


def openapi(
    routes: Iterable[Route], parsers: Mapping[str, Callable[..., Any]], shapes: Mapping[str, Shape], shape: Shape
) -> dict[str, Any]:
    """`parsers`: path -> what reads the body posted there, for the routes whose endpoint leaves that to another.
    `shapes`: path -> how an error looks there; `shape`: elsewhere."""
    operations: list[tuple[Route, str, Operation, Any]] = []
    for route in routes:
        error = get_type_hints(shapes.get(route.path, shape))["return"]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            speaker = parsers.get(route.path, route.endpoint) if method == "POST" else route.endpoint
            operations.append((route, method, getattr(speaker, _OPERATION, None) or Operation(), error))
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for route, method, told, error in operations:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[method.lower()] = _operation(route, method, told, error, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


class _Schemas:
    """The schemas of all types that the operations name."""

    def __init__(self, operations: Iterable[tuple[Route, str, Operation, Any]]) -> None:
        self._kinds: list[Any] = []
        for _, _, told, error in operations:
            for kind in (told.body, *told.answers.values(), *told.query.values(), error):
                if kind is not None and kind not in self._kinds:
                    self._kinds.append(kind)
        self._schemas, self.components = msgspec.json.schema_components(self._kinds, ref_template=_REFERENCE)
        for _, _, told, _ in operations:
            for name, values in told.only.items():
                of_body = self.components[self.of(told.body)["$ref"].rpartition("/")[2]]
                of_body["properties"][name] = {"enum": [None, *values], "default": None}

    def of(self, kind: Any) -> dict[str, Any]:
        return self._schemas[self._kinds.index(kind)]


def _operation(route: Route, method: str, told: Operation, error: Any, schemas: _Schemas) -> dict[str, Any]:
    answer = {"description": "the answer", "content": _content(told.answers, schemas)}
    problem = {"description": "an error, in the dialect's own shape", "content": _content({JSON: error}, schemas)}
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{re.sub(r'[^a-zA-Z0-9]+', '_', route.path).strip('_') or 'root'}",
        "responses": {str(status): answer for status in (200, *told.also)} | {"4XX": problem, "5XX": problem},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ] + [{"name": name, "in": "query", "schema": schemas.of(kind)} for name, kind in told.query.items()]
    if parameters:
        operation["parameters"] = parameters
    if told.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.of(told.body)}}}
    return operation


def _content(by_media_type: Mapping[str, Any], schemas: _Schemas) -> dict[str, Any]:
    """Before 3.2, OpenAPI has no word for the pieces of a stream."""
    content: dict[str, Any] = {}
    for media_type, kind in by_media_type.items():
        whole = media_type == JSON or kind is str
        content[media_type] = {"schema" if whole else "x-itemSchema": schemas.of(kind)}
    return content
