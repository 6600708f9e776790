"""What passes between the server process and the engine process: typed, tagged, never pickled."""

from collections.abc import Callable
from typing import Any

import msgspec

from quire.core import errors
from quire.core.encode_request import EncodeEvent, EncodeRequest, Task
from quire.core.errors import EngineFailed, QuireError
from quire.core.records import SchedulerStats, StepRecord
from quire.core.request import Request, SequenceEvent
from quire.core.snapshot import Snapshot
from quire.engine.options import EngineOptions
from quire.executors.protocol import Capacity


class Start(msgspec.Struct, tag=True):
    path: str  # the checkpoint, found and fetched
    options: EngineOptions
    adapters: dict[str, str] = {}  # key -> path of its files
    restarted: bool = False  # this engine replaces one that died


class Submit(msgspec.Struct, tag=True):
    request: Request


class Encode(msgspec.Struct, tag=True):
    request: EncodeRequest


class Cancel(msgspec.Struct, tag=True):
    request_id: str
    index: int | None  # one sample, or all


class WatchEngine(msgspec.Struct, tag=True):
    """Send live snapshots, or stop."""

    on: bool


class LoadAdapter(msgspec.Struct, tag=True):
    key: str
    path: str  # of its files


class UnloadAdapter(msgspec.Struct, tag=True):
    """Unload an adapter as soon as no request uses it."""

    key: str


class ResetPrefixCache(msgspec.Struct, tag=True):
    tenant: str


class PrepareGrammars(msgspec.Struct, tag=True):
    """A request with structured output is coming: load what compiling its grammar takes."""


class PingEngine(msgspec.Struct, tag=True):
    """Say that you are there."""


class EngineAnswered(msgspec.Struct, tag=True):
    """The answer to a PingEngine, between two steps."""


class Ready(msgspec.Struct, tag=True):
    capacity: Capacity
    task: Task = "generate"
    dimensions: int = 0  # of an embedding, where the model makes them


class StepDone(msgspec.Struct, tag=True):
    """`tokens` come before the events."""

    events: list[SequenceEvent]
    record: StepRecord | None
    tokens: dict[str, list[int]] = {}  # by request: what its first sample gained, where there is no more to tell


class Encoded(msgspec.Struct, tag=True):
    events: list[EncodeEvent]
    record: StepRecord | None


class EngineIdle(msgspec.Struct, tag=True):
    """All requests in flight have been cancelled; no step follows."""

    scheduler: SchedulerStats


class LiveSnapshot(msgspec.Struct, tag=True):
    """Sent only while the engine is watched."""

    snapshot: Snapshot


class RequestRefused(msgspec.Struct, tag=True):
    """The engine does not take this request."""

    request_id: str
    error: "ErrorInfo"


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, or cannot go on."""

    error: "ErrorInfo"


class AdapterLoaded(msgspec.Struct, tag=True):
    key: str
    error: "ErrorInfo | None" = None  # why it could not be loaded


class AdapterUnloaded(msgspec.Struct, tag=True):
    """No request uses it any more."""

    key: str


class PrefixCacheReset(msgspec.Struct, tag=True):
    """The answer to ResetPrefixCache; answers come in the order of the questions."""

    empty: bool  # no request in flight holds a prefix


class ErrorInfo(msgspec.Struct):
    """A QuireError as it crosses the socket."""

    kind: str
    message: str
    hint: str
    param: str | None

    @classmethod
    def of(cls, error: Exception) -> "ErrorInfo":
        if isinstance(error, QuireError):
            return cls(type(error).__name__, error.message, error.hint, error.param)
        return cls("EngineFailed", f"{type(error).__name__}: {error}", "", None)

    def exception(self) -> QuireError:
        kind = getattr(errors, self.kind, EngineFailed)
        error: QuireError = kind(self.message, self.hint)
        error.param = self.param
        return error


ToEngine = (
    Start
    | Submit
    | Encode
    | Cancel
    | WatchEngine
    | LoadAdapter
    | UnloadAdapter
    | PrepareGrammars
    | ResetPrefixCache
    | PingEngine
)
FromEngine = (
    Ready
    | EngineAnswered
    | StepDone
    | Encoded
    | EngineIdle
    | LiveSnapshot
    | RequestRefused
    | Failed
    | AdapterLoaded
    | AdapterUnloaded
    | PrefixCacheReset
)

encode: Callable[[ToEngine | FromEngine], bytes] = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder[Any](ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder[Any](FromEngine).decode
