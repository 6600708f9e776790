"""What rank 0 says to the other ranks, and what they answer: typed messages in msgpack."""

from typing import Any

import msgspec
import numpy as np

from quire.core import errors
from quire.core.errors import EngineFailed, QuireError
from quire.ops.opset import Int32, StepBatch
from quire.runtime.spec.config import SpecConfig


class StartRank(msgspec.Struct, tag=True):
    """Load the weights. -> RankLoaded; or RankReady, of a model that encodes"""

    path: str
    options: dict[str, str | int | float | bool | None]  # fields of ExecutorOptions
    speculation: SpecConfig | None = None  # where a model or a head drafts
    encodes: bool = False
    stage: int = 0  # whose layers it has a part of
    num_stages: int = 1
    turn: int = 0  # of rank 0 of the stage, among the processes that take GPUs in turn
    num_turns: int = 1  # how many these are


class AllocateRank(msgspec.Struct, tag=True):
    """Allocate the KV cache that all ranks have room for. -> RankReady"""

    num_blocks: int
    num_host_blocks: int
    num_slots: int  # state slots
    num_checkpoint_slots: int
    num_host_slots: int
    num_pages: int  # window pages
    max_model_len: int


class RunStep(msgspec.Struct, tag=True, omit_defaults=True):
    """A plan as arrays, with the tokens that were sampled last. Programs are numbered as they were compiled."""

    program: int
    ids: bytes
    positions: bytes
    slots: bytes
    seq_starts: bytes
    context_lens: bytes
    block_tables: bytes
    logit_rows: bytes
    adapters: bytes | None = None
    source_lens: bytes | None = None
    source_tables: bytes | None = None
    ancestors: bytes | None = None  # 64-bit words
    hidden_rows: bytes | None = None
    states: bytes | None = None

    @classmethod
    def of(cls, program: int, batch: StepBatch) -> "RunStep":
        given = {name: getattr(batch, name) for name in _ARRAYS}
        return cls(program, **{name: array.tobytes() for name, array in given.items() if array is not None})

    def batch(self) -> StepBatch:
        arrays = {name: _array(name, getattr(self, name)) for name in _ARRAYS}
        num_seqs = len(arrays["context_lens"])
        for name in ("block_tables", "source_tables"):
            table = arrays[name]
            arrays[name] = None if table is None else table.reshape(num_seqs, -1)
        arrays["states"] = None if arrays["states"] is None else arrays["states"].reshape(-1, 3)
        return StepBatch(**arrays)


_OPTIONAL = ("adapters", "source_lens", "source_tables", "ancestors", "hidden_rows", "states")
_ARRAYS = ("ids", "positions", "slots", "seq_starts", "context_lens", "block_tables", "logit_rows", *_OPTIONAL)


def _array(name: str, data: bytes | None) -> Any:
    return None if data is None else np.frombuffer(data, np.int64 if name == "ancestors" else np.int32)


MOVES = (
    "copy", "swap_out", "swap_in", "swap_states_out", "swap_states_in", "copy_states", "move", "attach_pages",
    "copy_pages", "swap_pages_in", "swap_pages_out",
)  # fmt: skip


class MoveBlocks(msgspec.Struct, tag=True):
    """Move KV blocks, window pages or states of a cache; caches are numbered as they were made."""

    cache: int
    how: str  # one of MOVES
    pairs: list[tuple[int, int]]


class PutHiddenStates(msgspec.Struct, tag=True):
    """Copy `lines` of what a program kept to `rows` of some hidden states, which are numbered as they were made."""

    hidden: int
    program: int
    rows: bytes
    lines: bytes

    @property
    def places(self) -> tuple[Int32, Int32]:
        return np.frombuffer(self.rows, np.int32), np.frombuffer(self.lines, np.int32)


class LoadRankAdapter(msgspec.Struct, tag=True):
    """Read a LoRA adapter. -> RankReady"""

    key: str
    path: str


class PutRankAdapter(msgspec.Struct, tag=True):
    slot: int
    key: str


class RemoveRankAdapter(msgspec.Struct, tag=True):
    key: str


class RankLoaded(msgspec.Struct, tag=True):
    num_blocks: int
    num_host_blocks: int
    num_slots: int
    num_checkpoint_slots: int
    num_host_slots: int
    num_pages: int
    max_model_len: int
    weight_bytes: int


class RankReady(msgspec.Struct, tag=True):
    pass


class RankFailed(msgspec.Struct, tag=True):
    """A rank cannot do what it was asked for."""

    kind: str
    message: str
    hint: str = ""
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> "RankFailed":
        if isinstance(error, QuireError):
            return cls(type(error).__name__, error.message, error.hint, error.param)
        return cls("EngineFailed", f"{type(error).__name__}: {error}")

    def exception(self) -> QuireError:
        error: QuireError = getattr(errors, self.kind, EngineFailed)(self.message, self.hint)
        error.param = self.param
        return error


RankAdapter = LoadRankAdapter | PutRankAdapter | RemoveRankAdapter
ToRank = StartRank | AllocateRank | RunStep | MoveBlocks | PutHiddenStates | RankAdapter
FromRank = RankLoaded | RankReady | RankFailed

_encoder = msgspec.msgpack.Encoder()
_to_rank: Any = msgspec.msgpack.Decoder(ToRank)
_from_rank: Any = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    message: ToRank = _to_rank.decode(data)
    return message


def decode_from_rank(data: bytes) -> FromRank:
    message: FromRank = _from_rank.decode(data)
    return message
