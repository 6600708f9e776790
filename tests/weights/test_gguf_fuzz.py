"""A file with any bytes changed gives an error that is ours, in bounded time and memory."""

import random
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.registry import family, read_model_config
from quire.ops.dequantize import dequantize
from quire.ops.reference import TorchOps
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint
from trials import rounds
from weights.gguf_files import HIDDEN, VOCAB, add_tokenizer, llama_tensors, write_llama

BIG = [0, 1, 255, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole small model with a tokenizer."""
    path = tmp_path_factory.mktemp("fuzz") / "valid.gguf"
    tensors = llama_tensors(np.random.default_rng(0), tied=True)
    small = {name: tensors[name] for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")}
    return write_llama(path, small, configure=add_tokenizer).read_bytes()


def mutate(rng: random.Random, content: bytes) -> bytes:
    header = len(content) - 4 * HIDDEN * (VOCAB + 64)  # bytes before the data; damage there is what matters
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(header)
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(BIG))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(BIG) & 0xFFFFFFFF)
            case 4:
                del data[at : at + rng.randint(1, 64)]
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.15 else data)


def read_everything(path: Path) -> bool:
    """Whether it could be read."""
    good = True
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            dequantize(checkpoint.tensor(name))
        read_model_config(family(checkpoint.config.architecture), checkpoint.config)
    except (BadCheckpoint, Unsupported):
        good = False
    try:
        Tokenizer.load(path).encode("!!!a")
    except (BadCheckpoint, Unsupported):
        good = False
    return good


def fuzz(valid: bytes, path: Path, seeds: range) -> int:
    readable = 0
    for seed in seeds:
        path.write_bytes(mutate(random.Random(seed), valid))
        readable += read_everything(path)
    return readable


def test_the_file_to_damage_is_whole(valid: bytes, tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(valid)
    assert read_everything(tmp_path / "whole.gguf")


@contextmanager
def assert_memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.mark.trial
def test_changed_bytes_give_our_errors_only(valid: bytes, tmp_path: Path) -> None:
    num_files = rounds(600)
    with assert_memory_below(16 << 20):
        readable = fuzz(valid, tmp_path / "damaged.gguf", range(num_files))
    assert 0 < readable < num_files, "either nothing was damaged, or everything was damaged in the first bytes"


def test_a_file_cut_anywhere_is_refused(valid: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in [*range(64), *range(64, len(valid), 997), len(valid) - 1]:
        path.write_bytes(valid[:length])
        with pytest.raises(BadCheckpoint):
            open_checkpoint(path)


def test_huge_counts_allocate_nothing(valid: bytes, tmp_path: Path) -> None:
    """Any 8 bytes of the beginning, replaced by the largest number."""
    path = tmp_path / "huge.gguf"
    with assert_memory_below(16 << 20):
        for at in range(8, 300):
            path.write_bytes(valid[:at] + b"\xff" * 8 + valid[at + 8 :])
            read_everything(path)


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("llama", "block_count"),
        ("gpt-oss", "block_count"),
        ("exaone4", "block_count"),
        ("llama", "attention.head_count"),
        ("qwen3moe", "expert_count"),
    ],
)
def test_a_count_of_a_billion_does_not_hang_the_loader(tmp_path: Path, architecture: str, key: str) -> None:
    tensors = llama_tensors(np.random.default_rng(0), tied=True)
    sizes = {f"{architecture}.expert_count": 4, f"{architecture}.expert_used_count": 2} if "q" in architecture else {}
    wrong = {**sizes, f"{architecture}.attention.sliding_window": 4, f"{architecture}.{key}": 10**9}
    path = write_llama(tmp_path / "huge.gguf", tensors, arch=architecture, extra=wrong)
    with assert_memory_below(16 << 20), pytest.raises(BadCheckpoint, match="is 1000000000, and at most"):
        checkpoint = open_checkpoint(path)
        read_model_config(family(checkpoint.config.architecture), checkpoint.config)


def test_layers_that_a_file_does_not_have_are_missing_tensors(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", llama_tensors(np.random.default_rng(0)), extra={"llama.block_count": 5000})
    checkpoint = open_checkpoint(path)
    module = family("LlamaForCausalLM")
    with pytest.raises(BadCheckpoint, match="44991 are missing"):
        module.load(TorchOps(), checkpoint, read_model_config(module, checkpoint.config), 16)
