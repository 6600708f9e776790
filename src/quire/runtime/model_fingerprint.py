"""A digest of a model's files: KV blocks of one model are never taken for those of another."""

from pathlib import Path

import xxhash

WHOLE_BYTES = 2**30  # models up to this size are read whole: 0.1 s a GB
SAMPLE_EVERY = 2**20  # of a larger one, one sample of so many bytes
SAMPLE_BYTES = 4096
SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def fingerprint(path: Path, described: str, with_times: bool = True) -> str:
    """Hex. `path`: a .gguf file or a directory. `described`: what else decides the bits of a KV cache. `with_times`:
    copies of a large model differ."""
    digest = xxhash.xxh3_128(described.encode())
    files = _weight_files(path)
    total = sum(file.stat().st_size for file in files)
    for file in files:
        status = file.stat()
        digest.update(f"{file.name} {status.st_size}".encode())
        if with_times and total > WHOLE_BYTES:  # a change between samples changes this time
            digest.update(str(status.st_mtime_ns).encode())
        _add_file(digest, file, whole=total <= WHOLE_BYTES)
    return digest.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        stem = path.name.split("-00001-of-")[0]  # a GGUF file may have others beside it that continue it
        return sorted(file for file in path.parent.glob("*.gguf") if file == path or file.name.startswith(stem + "-0"))
    return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES or file.name == "config.json")


def _add_file(digest: xxhash.xxh3_128, path: Path, whole: bool) -> None:
    with path.open("rb") as file:
        if whole:
            while part := file.read(SAMPLE_EVERY):
                digest.update(part)
            return
        for start in range(0, path.stat().st_size, SAMPLE_EVERY):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
