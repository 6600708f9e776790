"""Logits of a checkpoint, computed by the library whose format it has, run by an interpreter that has that library.

    python -m benchmarks.peers.native_logits transformers CHECKPOINT IDS.json OUT.npy

Readers: transformers (with compressed-tensors or bitsandbytes), gptqmodel, llama.cpp. IDS.json: one sequence of token
ids. Prints the versions of what it used, as JSON."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

PACKAGES = ("transformers", "compressed-tensors", "bitsandbytes", "gptqmodel", "llama-cpp-python", "torch")


def by_transformers(path: str, ids: Sequence[int]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    settings = json.loads((Path(path) / "config.json").read_text())["quantization_config"]
    # Its floats in small groups become bf16, whatever the model is in.
    dtype = torch.bfloat16 if settings.get("format", "").startswith(("mxfp", "nvfp")) else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map="cpu").eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def by_gptqmodel(path: str, ids: Sequence[int]) -> np.ndarray:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # see gptqmodel_quantize.py
    import torch
    from gptqmodel import BACKEND, GPTQModel  # type: ignore[import-not-found]

    awq = json.loads((Path(path) / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"
    backend = BACKEND.TORCH_AWQ if awq else BACKEND.TORCH
    model = GPTQModel.load(path, device="cpu", backend=backend, dtype=torch.float16)  # by itself bf16; it has no fp32
    with torch.no_grad():
        return model.model(torch.tensor([ids])).logits[0].float().numpy()


def by_llama_cpp(path: str, ids: Sequence[int]) -> np.ndarray:
    from benchmarks.peers.llama_cpp import Context

    context = Context(path, threads=os.cpu_count() or 1, num_seqs=1, length=len(ids))
    context.decode(ids, range(len(ids)), [0] * len(ids), [True] * len(ids))
    return np.stack([context.logits(row).copy() for row in range(len(ids))])


READERS: dict[str, Callable[[str, Sequence[int]], np.ndarray]] = {
    "transformers": by_transformers,
    "gptqmodel": by_gptqmodel,
    "llama.cpp": by_llama_cpp,
}


def versions() -> dict[str, str]:
    known = {}
    for package in PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            continue
    return known


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("checkpoint")
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    np.save(args.out, READERS[args.reader](args.checkpoint, json.loads(args.ids.read_text())))
    print(json.dumps(versions()))
