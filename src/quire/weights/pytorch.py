"""One file of torch.save: a zip archive of a pickle and the bytes of every storage.

    archive/data.pkl   describes the tensors: storage, offset, shape, strides
    archive/data/0     the bytes of storage "0", not compressed

The pickle is never loaded: `pickle_machine` interprets the opcodes that torch.save writes for a state dict, builds
dictionaries and descriptions of tensors, and refuses everything else. torch is not needed. Tensors are views of the
mapped file."""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from quire.core.errors import BadCheckpoint, Unsupported
from quire.weights.mapped_file import MappedFile
from quire.weights.pickle_machine import MAX_PICKLE_BYTES, PickleRefused, unpickle_data
from quire.weights.raw import RawEntry

LOCAL_HEADER_BYTES = 30
MAX_DIMENSIONS, MAX_COUNT = 8, 1 << 63  # of a shape, and of a number in it

# torch's names -> safetensors' names, and bytes of an item
STORAGES = {
    "FloatStorage": ("F32", 4), "HalfStorage": ("F16", 2), "BFloat16Storage": ("BF16", 2), "DoubleStorage": ("F64", 8),
    "CharStorage": ("I8", 1), "ByteStorage": ("U8", 1), "ShortStorage": ("I16", 2), "IntStorage": ("I32", 4),
    "LongStorage": ("I64", 8), "BoolStorage": ("BOOL", 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TorchStorage:
    dtype: str
    itemsize: int
    key: str


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A description, as torch's own functions would have rebuilt it."""

    storage: TorchStorage
    offset: int  # items
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PytorchFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        members = self._members()
        pickles = [name for name in members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self._bad(f"holds {len(pickles)} files named data.pkl, and one is expected")
        self._folder = pickles[0].removesuffix("data.pkl")
        self._members_by_name = members
        if (member := f"{self._folder}byteorder") in members:
            offset, size = self._locate(member)
            if (order := self.file.buffer[offset : offset + min(size, 16)]) != b"little":
                raise Unsupported(
                    f"{path} has numbers in the byte order {order!r}", "save it on a little-endian machine"
                )
        self.entries = {name: self._entry(name, tensor) for name, tensor in self._read(pickles[0]).items()}

    def _members(self) -> dict[str, ZipInfo]:
        try:
            with ZipFile(self.path) as archive:
                return {member.filename: member for member in archive.infolist()}
        except (BadZipFile, OSError, NotImplementedError, ValueError, OverflowError, struct.error) as error:
            raise Unsupported(
                f"{self.path} is not an archive of torch.save: {error}",
                "files from before torch 1.6 are not read: convert them to safetensors",
            ) from error

    def _read(self, pickle: str) -> dict[str, TorchTensor]:
        """Name -> tensor: the state dict, or the one under "state_dict" that some trainers wrap it in."""
        offset, size = self._locate(pickle)
        if size > MAX_PICKLE_BYTES:
            raise self._bad(f"has a pickle of {size} bytes, and {MAX_PICKLE_BYTES} are allowed")
        try:
            state = unpickle_data(self.file.buffer[offset : offset + size], _GLOBALS, _storage)
        except PickleRefused as error:
            raise Unsupported(
                f"{self.path}: its pickle, at offset {offset + error.offset}, {error.problem}",
                "convert it to safetensors where you trust it",
            ) from error
        if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
            state = state["state_dict"]
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise self._bad("does not hold a dictionary of tensors by name")
        if wrong := [name for name, value in state.items() if not isinstance(value, TorchTensor)]:
            raise self._bad(f"holds {wrong[0]!r}, which is not a tensor")
        return state

    def _entry(self, name: str, tensor: TorchTensor) -> RawEntry:
        storage, shape = tensor.storage, tensor.shape
        if storage.key != Path(storage.key).name or (member := f"{self._folder}data/{storage.key}") not in (
            self._members_by_name
        ):
            raise self._bad(f"has no storage {storage.key!r}, which tensor {name!r} refers to")
        storage_offset, size = self._locate(member)
        counts = (tensor.offset, *shape, *tensor.strides)
        if len(shape) > MAX_DIMENSIONS or not all(type(count) is int and 0 <= count < MAX_COUNT for count in counts):
            raise self._bad(f"gives tensor {name!r} a shape or strides that are not {MAX_DIMENSIONS} counts at most")
        if len(tensor.strides) != len(shape) or not _is_contiguous(shape, tensor.strides):
            raise Unsupported(
                f"{self.path}: tensor {name!r} is {list(shape)} with strides {list(tensor.strides)}",
                "save it contiguous, or convert it to safetensors",
            )
        begin, nbytes = tensor.offset * storage.itemsize, prod(shape) * storage.itemsize
        if begin + nbytes > size:
            raise self._bad(f"has {size} bytes for tensor {name!r}, which ends at {begin + nbytes}")
        return RawEntry(storage.dtype, shape, storage_offset + begin, nbytes)

    def _locate(self, name: str) -> tuple[int, int]:
        """Offset and size of a member's bytes in the file."""
        member = self._members_by_name[name]
        if member.compress_type != ZIP_STORED or member.flag_bits & 1:
            raise self._bad(f"holds {name!r} compressed or encrypted, which torch.save does not do")
        header = self.file.buffer[member.header_offset : member.header_offset + LOCAL_HEADER_BYTES]
        if len(header) < LOCAL_HEADER_BYTES or header[:4] != b"PK\3\4":
            raise self._bad(f"has no member at offset {member.header_offset}, where {name!r} should be")
        name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        offset = member.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if offset + member.file_size > self.file.size:
            raise self._bad(f"ends at {self.file.size}, before {name!r} does")
        return offset, member.file_size

    def _bad(self, problem: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path} {problem}", "download it again")


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# -- what the pickle may call ------------------------------------------------------------------------------------------


def _storage(identity: Any) -> TorchStorage:
    """A storage by the persistent id of torch.save: ("storage", class, key, device, number of items)."""
    if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
        raise ValueError("names something that is not a storage")
    _, kind, key, _, _ = identity
    if kind not in STORAGES or not isinstance(key, str):
        raise ValueError(f"has a storage of {kind!r}")
    return TorchStorage(*STORAGES[kind], key)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TorchTensor:
    if not (isinstance(storage, TorchStorage) and isinstance(shape, tuple) and isinstance(strides, tuple)):
        raise ValueError("rebuilds a tensor of something that is no storage")
    return TorchTensor(storage, offset, shape, strides)


def _rebuild_parameter(tensor: Any, *_: Any) -> TorchTensor:
    if not isinstance(tensor, TorchTensor):
        raise ValueError("makes a parameter of something that is no tensor")
    return tensor


_GLOBALS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): name for name in STORAGES},
}
