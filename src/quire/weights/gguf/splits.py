"""GGUF in parts: model-00001-of-00003.gguf and its siblings. Metadata is in the first, tensors are in all of them.

Standard library only: the HTTP process finds its tokenizer with it."""

import re
from pathlib import Path

from quire.core.errors import BadCheckpoint
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.container import GGUFFile

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def first_part(path: Path) -> Path:
    """Of the file that `path` is a part of; or `path`, where it is none."""
    match = PART.fullmatch(path.name)
    return path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf") if match else path


def all_parts(first: GGUFFile) -> list[GGUFFile]:
    metadata = CheckpointConfig(first.path, first.metadata)
    count = metadata.int("split.count", default=1)
    match = PART.fullmatch(first.path.name)
    if count <= 1:
        return [first]
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        raise BadCheckpoint(
            f"{first.path} is one of {count} parts", f"their names end in -00001-of-{count:05}.gguf, and so on"
        )
    paths = [first.path.with_name(f"{match[1]}-{part:05}-of-{match[3]}.gguf") for part in range(2, count + 1)]
    if missing := [path.name for path in paths if not path.exists()]:
        raise BadCheckpoint(
            f"{first.path} is one of {count} parts, and there is no {', '.join(missing)}", "download it"
        )
    parts = [first, *map(GGUFFile, paths)]
    wanted, found = metadata.get("split.tensors.count"), sum(part.num_tensors for part in parts)
    if wanted is not None and wanted != found:
        raise BadCheckpoint(f"{first.path}: split.tensors.count is {wanted}, and the parts have {found}")
    return parts
