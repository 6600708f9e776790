"""A directory in Hugging Face's layout: config.json, and weights in one file or in shards that an index lists."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.ops.tensors import StoredTensor
from quire.weights.formats import NOT_WEIGHTS, read_quantized
from quire.weights.huggingface import read_config, read_json
from quire.weights.raw import RawTensors, TensorFile
from quire.weights.safetensors import SafetensorsFile


def _pytorch(path: Path) -> TensorFile:
    from quire.weights.pytorch import PytorchFile

    return PytorchFile(path)


KV_SCALE = re.compile(r"\blayers\.(\d+)\.(?:.*\.)?([kv])_scale$")

# Single file -> its reader; the first that exists is read. FILE.index.json lists shards.
CONTAINERS: dict[str, Callable[[Path], TensorFile]] = {
    "model.safetensors": SafetensorsFile,
    "pytorch_model.bin": _pytorch,
    "medusa_lm_head.safetensors": SafetensorsFile,
    "medusa_lm_head.pt": _pytorch,
}


class HuggingFaceCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_config(path)
        self._raw = read_tensors(path)
        self._derived = read_quantized(config, self._raw)
        self._names = self._names_in_file_order()
        # The key is often left out, and its default differs between families: the tensors decide. Not so in
        # encoder-decoders, because T5 means by the key how logits are scaled.
        tied = {"tie_word_embeddings": not any(name.endswith("lm_head.weight") for name in self._names)}
        given = "tie_word_embeddings" in config or config.bool("is_encoder_decoder", False)
        self.config = config if given else config.with_values(tied)

    def _names_in_file_order(self) -> list[str]:
        hidden = {source for derived in self._derived.values() for source in derived.sources}
        if self._derived:
            hidden |= {name for name in self._raw.names() if name.endswith(NOT_WEIGHTS)}
        order = {name: index for index, name in enumerate(self._raw.names())}
        order |= {name: min(order[source] for source in derived.sources) for name, derived in self._derived.items()}
        return sorted(order.keys() - (hidden - self._derived.keys()), key=order.__getitem__)

    def names(self) -> list[str]:
        return self._names

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """What an fp8 KV cache is scaled by, keys and values, of each layer that has both. Of scales by head the
        largest is taken, with which no head saturates."""
        found: dict[int, dict[str, float]] = {}
        for name in self._raw.names():
            if (match := KV_SCALE.search(name)) is not None:
                scale = float(self._raw.floats(name).max(initial=0.0))
                if not 0 < scale < float("inf"):
                    raise self._raw.bad(name, f"is {scale}, and scales are positive")
                found.setdefault(int(match[1]), {})[match[2]] = scale
        return {layer: (scales["k"], scales["v"]) for layer, scales in found.items() if len(scales) == 2}

    @property
    def nbytes(self) -> int:
        return sum(self._raw.nbytes(name) for name in self._raw.names())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._derived[name].shape if name in self._derived else self._raw.shape(name)

    def tensor(self, name: str) -> StoredTensor:
        return self._derived[name].derive() if name in self._derived else self._raw.tensor(name)

    def integers(self, name: str) -> NDArray[Any]:
        """A tensor that is no weight, such as the tokens that a head drafts from."""
        return self._raw.integers(name)

    def drop_pages(self) -> None:
        self._raw.drop_pages()


def read_tensors(directory: Path) -> RawTensors:
    """The tensors of a checkpoint, or of a module that sentence-transformers adds to one."""
    return RawTensors(directory, _find_files(directory))


def _find_files(directory: Path) -> dict[str, TensorFile]:
    for single, read in CONTAINERS.items():
        if (index := directory / f"{single}.index.json").exists():
            return _from_index(index, read)
        if (path := directory / single).exists():
            file = read(path)
            return dict.fromkeys(file.entries, file)
    raise BadCheckpoint(f"{directory} has neither {' nor '.join(CONTAINERS)}, nor an index of shards of them")


def _from_index(index: Path, read: Callable[[Path], TensorFile]) -> dict[str, TensorFile]:
    directory = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index} has no weight_map")
    shards: dict[str, TensorFile] = {}
    files: dict[str, TensorFile] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise BadCheckpoint(f"{index}: tensor {name!r} is listed in {shard!r}, which is not a file beside it")
        if shard not in shards:
            if not (directory / shard).exists():
                raise BadCheckpoint(f"{index}: the shard {shard!r} with tensor {name!r} is missing", "download it")
            shards[shard] = read(directory / shard)
        if name not in shards[shard].entries:
            raise BadCheckpoint(f"{directory / shard} has no tensor {name!r}, which {index.name} says it has")
        files[name] = shards[shard]
    return {name: file for file in shards.values() for name in file.entries if files.get(name) is file}
