"""GGUF splits: model-00001-of-00003.gguf and its siblings. The first has the metadata, all have tensors.

Standard library only: the HTTP process finds its tokenizer with it."""

import re
from pathlib import Path

from quire.core.errors import BadCheckpoint
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.container import GGUFFile

SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def first_split(path: Path) -> Path:
    """The first split of the model that `path` is a split of; `path` itself if it is none."""
    match = SPLIT_NAME.fullmatch(path.name)
    return path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf") if match else path


def all_splits(first: GGUFFile) -> list[GGUFFile]:
    metadata = CheckpointConfig(first.path, first.metadata)
    count = metadata.int("split.count", default=1)
    match = SPLIT_NAME.fullmatch(first.path.name)
    if count <= 1:
        return [first]
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        raise BadCheckpoint(
            f"{first.path} is one of {count} splits", f"their names end in -00001-of-{count:05}.gguf, and so on"
        )
    paths = [first.path.with_name(f"{match[1]}-{split:05}-of-{match[3]}.gguf") for split in range(2, count + 1)]
    if missing := [path.name for path in paths if not path.exists()]:
        raise BadCheckpoint(
            f"{first.path} is one of {count} splits, and there is no {', '.join(missing)}", "download it"
        )
    splits = [first, *map(GGUFFile, paths)]
    expected, stored = metadata.get("split.tensors.count"), sum(split.num_tensors for split in splits)
    if expected is not None and expected != stored:
        raise BadCheckpoint(
            f"{first.path}: split.tensors.count is {expected}, and the {count} splits have {stored} tensors",
            "the splits may be of different models: download them again",
        )
    return splits
