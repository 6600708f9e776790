"""A directory in Hugging Face's layout: config.json, and model.safetensors or shards that an index lists."""

from pathlib import Path

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.tensors import StoredTensor
from quire.weights.huggingface import read_config, read_json
from quire.weights.safetensors import SafetensorsFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class HuggingFaceCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_config(path)
        self._files: dict[str, SafetensorsFile] = _from_index(path) if (path / INDEX).exists() else _from_single(path)
        # The key is often left out, and its default differs between families. The tensors know.
        tied = {"tie_word_embeddings": "lm_head.weight" not in self._files}
        self.config = config if "tie_word_embeddings" in config else config.with_values(tied)

    def names(self) -> list[str]:
        return list(self._files)

    @property
    def nbytes(self) -> int:
        return sum(file.entries[name].nbytes for name, file in self._files.items())

    def tensor(self, name: str) -> StoredTensor:
        if name not in self._files:
            raise BadCheckpoint(f"{self.path} has no tensor {name!r}")
        return self._files[name].tensor(name)


def _from_single(directory: Path) -> dict[str, SafetensorsFile]:
    path = directory / SINGLE
    if not path.exists():
        if list(directory.glob("*.bin")) + list(directory.glob("*.pt")) + list(directory.glob("*.pth")):
            raise Unsupported(
                f"{directory} has pickled weights only, which are never loaded",
                "convert them to safetensors where you trust them",
            )
        raise BadCheckpoint(f"{directory} has neither {SINGLE} nor {INDEX}")
    file = SafetensorsFile(path)
    return dict.fromkeys(file.entries, file)


def _from_index(directory: Path) -> dict[str, SafetensorsFile]:
    index = directory / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index} has no weight_map")
    shards: dict[str, SafetensorsFile] = {}
    files: dict[str, SafetensorsFile] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise BadCheckpoint(f"{index}: tensor {name!r} is said to be in {shard!r}, which is not a file beside it")
        if shard not in shards:
            if not (directory / shard).exists():
                raise BadCheckpoint(f"{index}: the shard {shard!r} with tensor {name!r} is missing", "download it")
            shards[shard] = SafetensorsFile(directory / shard)
        if name not in shards[shard].entries:
            raise BadCheckpoint(f"{directory / shard} has no tensor {name!r}, which {INDEX} says it has")
        files[name] = shards[shard]
    return files
