"""`quire quantize --device cuda` on a model of 8 billion random weights: seconds, memory of the GPU, bytes.

    python -m benchmarks.quantize_gpu [--shape 8b] [--methods FP8_DYNAMIC "W4A16, GPTQ"] [--json result.json]

The checkpoint is made in a temporary folder (`--folder` keeps it): its weights are normal numbers in bf16, so nothing
is said about quality. Its tokenizer has a token for each byte, and the text is random letters. Each method runs in a
process of its own, as a user starts it. What a run reads is in the page cache, which making the checkpoint filled, and
on the disk, which would otherwise be busy with it while the first method writes."""

import argparse
import json
import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.processes import ROOT, progress
from quire.quantize.safetensors_files import planned, safetensors_layouts

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
LENGTH = 2048
METHODS: dict[str, tuple[str, ...]] = {
    "FP8_DYNAMIC": ("--method", "FP8_DYNAMIC"),
    "FP8_BLOCK": ("--method", "FP8_BLOCK"),
    "W4A16, nearest": ("--method", "W4A16"),
    "W4A16, importance": ("--method", "W4A16", "--calibrate", "{text}"),
    "W4A16, GPTQ": ("--method", "W4A16", "--algorithm", "gptq", "--calibrate", "{text}"),
    "AWQ": ("--method", "AWQ", "--calibrate", "{text}"),
    "W8A8, SmoothQuant": ("--method", "W8A8", "--algorithm", "smoothquant", "--calibrate", "{text}"),
}
PEAK = "peak bytes of the GPU, and of the process: "
RUNNER = f"""
import sys
from quire.cli.bench.resources import own_peak_rss
from quire.cli.main import main
code = main(sys.argv[1:])
torch = sys.modules.get("torch")
used = torch.cuda.max_memory_reserved() if torch is not None and torch.cuda.is_available() else 0
print("{PEAK}", used, own_peak_rss(), file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """A row of the result."""

    method: str
    seconds: float
    peak_gpu_bytes: int
    peak_host_bytes: int
    nbytes: int


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """A Llama of random weights."""
    import torch

    from quire.quantize.gpu.host import to_host

    hidden, inner, vocab = (shape[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    matrices = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    tables = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    layers = shape["num_hidden_layers"]
    files = {
        f"layer-{layer:03}.safetensors": {f"model.layers.{layer}.{name}": size for name, size in matrices.items()}
        for layer in range(layers)
    }
    files["tables.safetensors"] = tables
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def save(seed: int, name: str) -> None:
        progress(f"random weights: {name}")
        generator = torch.Generator(device).manual_seed(seed)
        named = {f"{key}.weight": size for key, size in files[name].items()}
        layout = safetensors_layouts([planned(key, "BF16", *size) for key, size in named.items()], 1 << 40)[0][0]
        with (folder / name).open("wb", buffering=0) as file:
            file.write(layout.header)
            for size in named.values():
                values = torch.ones(size, device=device)
                if len(size) > 1:
                    values.normal_(0, size[-1] ** -0.5, generator=generator)
                data = memoryview(to_host(values.bfloat16().view(torch.uint8))).cast("B")
                while data:
                    data = data[file.write(data) :]

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(len(files)), files))
    index = {f"{key}.weight": name for name, keys in files.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **shape}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 2 * LENGTH}
    config |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 256, "eos_token_id": 257}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    progress("the checkpoint goes to the disk")
    os.sync()


def write_tokenizer(folder: Path) -> None:
    """A token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_text(path: Path, num_tokens: int) -> None:
    """Some more than the calibration takes: a tenth is held out."""
    letters = random.Random(0).choices(string.ascii_lowercase + "     ", k=int(1.2 * num_tokens) + 2 * LENGTH)
    path.write_text("".join(letters))


def run(method: str, source: Path, out: Path, text: Path, tokens: int, length: int, device: str) -> DeviceRun | str:
    """The row, or why there is none."""
    flags = [flag.format(text=text) for flag in METHODS[method]]
    flags += ["--calibration-tokens", str(tokens), "--sequence-length", str(length)]
    flags += ["--report-tokens", "0", "--device", device, "-q"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, "quantize", str(source), str(out), *flags],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.read()
    process.wait()
    seconds = time.perf_counter() - started
    if process.returncode:
        return f"ended with status {process.returncode}: {said[-1500:]}"
    peak, host_peak = map(int, said.rsplit(PEAK, 1)[-1].split()[:2])
    nbytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return DeviceRun(method, round(seconds, 2), peak, host_peak, nbytes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=int, default=128 * LENGTH, help="to calibrate with")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[*METHODS])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is made, and kept")
    parser.add_argument("--json", type=Path, help="keep the result there")
    arguments = parser.parse_args(argv)
    rows: list[DeviceRun] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="quire-quantize-gpu-") as temporary:
        source, text = arguments.folder or Path(temporary) / "source", Path(temporary) / "text.txt"
        if not (source / "config.json").exists():
            write_model(source, SHAPES[arguments.shape])
        write_text(text, arguments.tokens)
        for method in (method for method in METHODS if method in arguments.methods):
            progress(f"{method}:")
            out = Path(temporary) / "out"
            row = run(method, source, out, text, arguments.tokens, arguments.length, arguments.device)
            shutil.rmtree(out, ignore_errors=True)
            if isinstance(row, str):
                failures[method] = row
                progress(f"{method} {row}")
                continue
            rows.append(row)
            gpu, host = row.peak_gpu_bytes / 1e9, row.peak_host_bytes / 1e9
            cells = f"{row.seconds:>8.1f} s  GPU {gpu:>6.1f} GB  host {host:>6.1f} GB {row.nbytes / 1e9:>7.2f} GB"
            print(f"{method:<20} {cells}", flush=True)
    result = {"benchmark": "quantize-gpu", "machine": describe(), "shape": arguments.shape, "tokens": arguments.tokens}
    result |= {"rows": [asdict(row) for row in rows], "failures": failures}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
