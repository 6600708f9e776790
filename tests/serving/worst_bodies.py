"""The worst bodies that a client can send, made from /openapi.json.

For every field of every route: the longest text, the longest list, the most members and the deepest nesting; and for
every two fields of a completion, the largest values that are allowed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from typing import Any

SIZE = 24 << 20  # bytes, below the server's limit
DEPTH = 200_000

# A valid body for each route, by the fields that its schema has.
VALID: dict[str, Any] = {
    "model": "smollm2",
    "prompt": "Hi",
    "inputs": "Hi",
    "input": "Hi",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 2,
    "max_output_tokens": 2,
    "query": "Hi",
    "documents": ["Hi"],
    "text_1": "Hi",
    "text_2": "Hi",
    "tokens": [5],
    "request_ids": ["x"],
    "lora_name": "x",
    "lora_path": "x",
    "parameters": {"max_new_tokens": 2},
}

# The largest values that are allowed, for products of two fields.
LARGEST: dict[str, Any] = {
    "prompt": ["a"] * 2048,
    "n": 16,  # a step with 128 sequences takes long on two cores: --max-num-seqs is the bound of that
    "best_of": 16,
    "echo": True,
    "return_token_ids": True,
    "logprobs": 20,
    "prompt_logprobs": 20,
    "use_beam_search": True,
    "stop": ["a" * 1024 for _ in range(64)],
    "stop_token_ids": list(range(4096)),
    "logit_bias": {str(token): 1 for token in range(4096)},
    "allowed_token_ids": list(range(49_000)),
    "bad_words": [f"w{number}" for number in range(256)],
    "guided_choice": [f"w{number}" for number in range(20_000)],
    "repetition_penalty": 2.0,
}


@dataclass(frozen=True, slots=True)
class WorstBody:
    name: str
    path: str
    make: Callable[[], bytes]  # called when it is sent: each has megabytes


def worst_bodies(openapi: dict[str, Any]) -> Iterator[WorstBody]:
    schemas = openapi["components"]["schemas"]
    for path, methods in openapi["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for media in content.values():
            fields = _properties(media["schema"], schemas)
            valid = {name: value for name, value in VALID.items() if name in fields}
            for name, schema in fields.items():
                rest = {key: value for key, value in valid.items() if key != name}
                for kind, make in _worst_values(schema, schemas):
                    yield WorstBody(f"{path} {name}: {kind}", path, partial(_body, name, make, rest))
    for first, second in combinations(LARGEST, 2):
        body = {"prompt": "a", "max_tokens": 2, first: LARGEST[first], second: LARGEST[second]}
        yield WorstBody(f"{first} x {second}", "/v1/completions", json.dumps(body).encode)


def _body(name: str, make: Callable[[], bytes], rest: dict[str, Any]) -> bytes:
    members = [b'"%b":%b' % (name.encode(), make()), *([json.dumps(rest)[1:-1].encode()] if rest else [])]
    return b"{" + b",".join(members) + b"}"


def _properties(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return _resolved(schema, schemas).get("properties", {})


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _worst_values(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for one in schema.get("anyOf", [schema]):
        each = _resolved(one, schemas)
        kind = each.get("type")
        if kind == "string":
            yield "text", lambda: b'"' + b"word " * (SIZE // 5) + b'"'
        elif kind == "array":
            element = _smallest(each.get("items", {}), schemas)
            yield "list", partial(_list, element)
            if b"{" in element or b"[" in element:
                yield "shorter list", partial(_list, element, 20_000)
        elif kind == "object" and "properties" not in each:
            yield "members", _members
        elif kind == "object":
            for name, inner in each["properties"].items():
                for what, make in _inner_values(inner, schemas):
                    yield f"{name}: {what}", partial(_body, name, make, {})
        elif kind in ("integer", "number"):
            yield "digits", lambda: b"1" * 5000
            yield "exponent", lambda: b"1e999"
        elif kind is None and "enum" not in each:
            yield "empty lists", partial(_list, b"[]")
            yield "nesting", lambda: b"[" * DEPTH + b"]" * DEPTH


def _inner_values(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Of the fields of an object that is a field: only what is not an object itself."""
    for each in schema.get("anyOf", [schema]):
        if _resolved(each, schemas).get("type") != "object":
            yield from _worst_values(each, schemas)


@cache
def _members() -> bytes:
    return b"{" + b",".join(b'"%d":1' % number for number in range(SIZE // 12)) + b"}"


def _smallest(schema: dict[str, Any], schemas: dict[str, Any]) -> bytes:
    """The shortest value of a schema, as JSON."""
    each = _resolved(schema.get("anyOf", [schema])[0], schemas)
    if each.get("type") == "object":
        required = each.get("required", [])
        members = [b'"%b":%b' % (name.encode(), _smallest(each["properties"][name], schemas)) for name in required]
        return b"{" + b",".join(members) + b"}"
    if "enum" in each:
        return json.dumps(each["enum"][0]).encode()
    return {"string": b'"a"', "integer": b"5", "number": b"5", "array": b"[]", "boolean": b"true"}.get(
        each.get("type", ""), b"[]"
    )


def _list(element: bytes, number: int | None = None) -> bytes:
    count = number or SIZE // (len(element) + 1)
    return b"[" + (element + b",") * (count - 1) + element + b"]"
