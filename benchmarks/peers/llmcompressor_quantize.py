"""A checkpoint in one of llm-compressor's schemes, run by an interpreter that has llmcompressor.

    python -m benchmarks.peers.llmcompressor_quantize SOURCE OUT W4A16 [--gptq IDS.json] [--group-size 64]

IDS.json: sequences of token ids, to calibrate GPTQ with; ranges are then weighted by importance, its best observer.
Weights are fp32: fp16 is many times slower on a CPU."""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from llmcompressor import oneshot  # type: ignore[import-not-found]
from llmcompressor.modifiers.quantization import (  # type: ignore[import-not-found]
    GPTQModifier,
    QuantizationModifier,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("scheme")
    parser.add_argument("--gptq", type=Path)
    parser.add_argument("--group-size", type=int, default=128, help="of W4A16")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.float32, device_map="cpu")
    common = {"targets": "Linear", "scheme": args.scheme, "ignore": ["lm_head"]}
    if args.scheme == "W4A16":
        integers = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": args.group_size}
        if args.gptq is not None:
            integers["observer"] = "imatrix_mse"
        common = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": integers}}, "ignore": ["lm_head"]}
    if args.gptq is None:
        oneshot(model=model, recipe=QuantizationModifier(**common))
    else:
        ids = json.loads(args.gptq.read_text())
        rows = [{"input_ids": sequence, "attention_mask": [1] * len(sequence)} for sequence in ids]
        oneshot(
            model=model,
            dataset=Dataset.from_list(rows),
            recipe=GPTQModifier(**common),
            max_seq_length=max(map(len, ids)),
            num_calibration_samples=len(ids),
        )
    model.save_pretrained(args.out, save_compressed=True)
    AutoTokenizer.from_pretrained(args.source).save_pretrained(args.out)
