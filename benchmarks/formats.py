"""The same model in other formats, made once and kept: GGUF twins by llama.cpp, and a checkpoint that vLLM can read."""

import subprocess
from pathlib import Path

from benchmarks.ceilings import KEPT
from benchmarks.processes import ROOT, progress

FORMATS = ("Q4_0", "Q8_0", "Q4_K_M", "F16")


def twins(source: Path, formats: list[str], llama_python: Path) -> list[Path]:
    """`source` itself, then its twins in llama.cpp's formats of those names."""
    if formats and not llama_python.exists():
        progress(f"{', '.join(formats)} are left out: llama.cpp makes these files, and there is no {llama_python}")
        return [source]
    return [source, *(_twin(source, name, llama_python) for name in formats)]


def _twin(source: Path, name: str, llama_python: Path) -> Path:
    kept = _kept(source, f"{source.name.removesuffix('.gguf')}-as-{name}.gguf")
    if not kept.exists():
        progress(f"making {kept.relative_to(ROOT)}")
        half = kept.with_suffix(".part")
        words: list[str | Path] = [llama_python, "-m", "benchmarks.peers.llama_cpp_quantize", source, name, half]
        subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        half.rename(kept)
    return kept


def float_checkpoint(source: Path) -> Path:
    """A directory in Hugging Face's layout with the dequantized weights in fp32 and the file's tokenizer."""
    kept = _kept(source, f"{source.name.removesuffix('.gguf')}-as-F32")
    if not kept.exists():
        from transformers import PreTrainedTokenizerFast

        from benchmarks.reference import reference_model
        from quire.text.tokenizers.gguf import read_vocabulary

        progress(f"making {kept.relative_to(ROOT)}")
        half = kept.with_suffix(".part")
        reference_model(source).save_pretrained(half)
        backend = read_vocabulary(source).backend
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(half)
        half.rename(kept)
    return kept


def _kept(source: Path, name: str) -> Path:
    """Where `name` is kept; an older one, made of another file, is not taken."""
    KEPT.mkdir(parents=True, exist_ok=True)
    stat = source.stat()
    folder = KEPT / f"{stat.st_size:x}-{int(stat.st_mtime):x}"
    folder.mkdir(exist_ok=True)
    return folder / name
