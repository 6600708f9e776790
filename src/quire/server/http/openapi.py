"""/openapi.json, made from the types that decode bodies and encode responses."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

import msgspec
from starlette.routing import Route

from quire import __version__
from quire.server.http.wire_format import ErrorShape

Described = TypeVar("Described", bound=Callable[..., Any])

JSON = "application/json"
EVENTS = "text/event-stream"

_OPERATION = "__quire_operation__"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")  # as Starlette writes it
_REFERENCE = "#/components/schemas/{name}"


@dataclass(slots=True)
class Operation:
    """What the decorators below say of one endpoint or parser."""

    body: Any = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # fields of the body -> the values they may have
    responses: Mapping[str, Any] = field(default_factory=dict)  # media type -> a type; for a stream, of one item
    also: tuple[int, ...] = ()  # statuses beside 200 that have the same response
    query: Mapping[str, Any] = field(default_factory=dict)  # name -> a type


def request_body(
    body: type[msgspec.Struct], only: Mapping[str, tuple[Any, ...]] | None = None
) -> Callable[[Described], Described]:
    """The body that a route's endpoint, or a dialect's parser, takes. `only`: fields that are not supported, each with
    the values that are accepted nevertheless."""
    return _describe(body=body, only=only or {})


def responses(by_media_type: Mapping[str, Any], also: tuple[int, ...] = ()) -> Callable[[Described], Described]:
    return _describe(responses=by_media_type, also=also)


def query_parameters(**query: Any) -> Callable[[Described], Described]:
    return _describe(query=query)


def _describe(**values: Any) -> Callable[[Described], Described]:
    def mark(function: Described) -> Described:
        operation = getattr(function, _OPERATION, None) or Operation()
        for name, value in values.items():
            setattr(operation, name, value)
        setattr(function, _OPERATION, operation)
        return function

    return mark


def openapi(
    routes: Iterable[Route],
    readers: Mapping[str, Sequence[tuple[Any, Callable[..., Any]]]],
    shapes: Mapping[str, ErrorShape],
    default_shape: ErrorShape,
) -> dict[str, Any]:
    """`readers`: path -> dialects with the parsers of its bodies, where the endpoint has no decorators. `shapes`: path
    -> its errors."""
    operations: list[tuple[Route, str, Operation, Any]] = []
    for route in routes:
        error = get_type_hints(shapes.get(route.path, default_shape))["return"]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            functions = [parse for _, parse in readers.get(route.path, ()) if method == "POST"] or [route.endpoint]
            operations.append((route, method, _either(functions), error))
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for route, method, operation, error in operations:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[method.lower()] = _operation(route, method, operation, error, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Types of dialects that share a path. msgspec has no unions of types that carry no tag."""

    kinds: tuple[Any, ...]


def _either(functions: Sequence[Callable[..., Any]]) -> Operation:
    """What is said of one function, or of several that share a route."""
    several = [getattr(function, _OPERATION, None) or Operation() for function in functions]
    if len(several) == 1:
        return several[0]
    media_types = dict.fromkeys(media_type for each in several for media_type in each.responses)
    return Operation(
        body=AnyOf(tuple(each.body for each in several)),
        responses={
            media_type: AnyOf(tuple(each.responses[media_type] for each in several if media_type in each.responses))
            for media_type in media_types
        },
    )


class _Schemas:
    """The schemas of all types that the operations name."""

    def __init__(self, operations: Iterable[tuple[Route, str, Operation, Any]]) -> None:
        self._types: list[Any] = []
        for _, _, operation, error in operations:
            for described in (operation.body, *operation.responses.values(), *operation.query.values(), error):
                for kind in described.kinds if isinstance(described, AnyOf) else (described,):
                    if kind is not None and kind not in self._types:
                        self._types.append(kind)
        self._schemas, self.components = msgspec.json.schema_components(self._types, ref_template=_REFERENCE)
        for _, _, operation, _ in operations:
            for name, values in operation.only.items():
                body = self.components[self.of(operation.body)["$ref"].rpartition("/")[2]]
                body["properties"][name] = {"enum": [None, *values], "default": None}

    def of(self, kind: Any) -> dict[str, Any]:
        if isinstance(kind, AnyOf):
            return {"anyOf": [self.of(each) for each in kind.kinds]}
        return self._schemas[self._types.index(kind)]


def _operation(route: Route, method: str, operation: Operation, error: Any, schemas: _Schemas) -> dict[str, Any]:
    answer = {"description": "the answer", "content": _content(operation.responses, schemas)}
    problem = {"description": "an error, in the dialect's own shape", "content": _content({JSON: error}, schemas)}
    described: dict[str, Any] = {
        "operationId": f"{method.lower()}_{re.sub(r'[^a-zA-Z0-9]+', '_', route.path).strip('_') or 'root'}",
        "responses": {str(status): answer for status in (200, *operation.also)} | {"4XX": problem, "5XX": problem},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ] + [{"name": name, "in": "query", "schema": schemas.of(kind)} for name, kind in operation.query.items()]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.of(operation.body)}}}
    return described


def _content(by_media_type: Mapping[str, Any], schemas: _Schemas) -> dict[str, Any]:
    """Before version 3.2, OpenAPI cannot describe the items of a stream; `x-itemSchema` does."""
    content: dict[str, Any] = {}
    for media_type, kind in by_media_type.items():
        whole = media_type == JSON or kind is str
        content[media_type] = {"schema" if whole else "x-itemSchema": schemas.of(kind)}
    return content
