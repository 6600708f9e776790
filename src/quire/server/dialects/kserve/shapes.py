"""The objects that a server of the Open Inference Protocol sends."""

from typing import Any, TypedDict

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import QuireError
from quire.server.http.wire_format import WireFormat

MODEL_VERSION = "1"  # a model that is served has one version

_encode = msgspec.json.Encoder().encode


class TensorMetadata(Struct):
    name: str
    datatype: str
    shape: list[int]  # -1: any


class ServerMetadata(Struct):
    name: str
    version: str
    extensions: list[str]


class ModelMetadata(Struct, kw_only=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelNames(Struct):
    models: list[str]


class ServerLive(Struct):
    live: bool


class ServerReady(Struct):
    ready: bool


class ModelReady(Struct):
    name: str
    ready: bool


class GeneratedText(Struct, kw_only=True):
    """Of /generate, and of each event of /generate_stream."""

    id: str | UnsetType = UNSET
    model_name: str
    model_version: str = MODEL_VERSION
    text_output: str
    finish_reason: str | UnsetType = UNSET  # of the last event


class OutputTensor(Struct, kw_only=True):
    name: str
    datatype: str = "BYTES"
    shape: list[int]
    data: list[Any]


class InferResponse(Struct, kw_only=True):
    id: str | UnsetType = UNSET
    model_name: str
    model_version: str = MODEL_VERSION
    outputs: list[OutputTensor]


class KServeErrorBody(TypedDict):
    error: str


def error_body(error: QuireError) -> KServeErrorBody:
    return {"error": f"{error.message} ({error.hint})" if error.hint else error.message}


def sse(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


WIRE = WireFormat(error=error_body, frame=sse, keep_alive=b": \n\n")
