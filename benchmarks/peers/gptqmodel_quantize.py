"""A checkpoint in GPTQ's layout, 4 bits in groups, run by an interpreter that has gptqmodel.

    python -m benchmarks.peers.gptqmodel_quantize SOURCE OUT IDS.json

IDS.json: sequences of token ids, to calibrate with."""

import argparse
import json
import os
from pathlib import Path

# With two cores it takes one worker by itself, and then fails to start its two loaders.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

from gptqmodel import GPTQModel, QuantizeConfig  # type: ignore[import-not-found]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("ids", type=Path)
    parser.add_argument("--group-size", type=int, default=128)
    args = parser.parse_args()
    ids = json.loads(args.ids.read_text())
    model = GPTQModel.load(args.source, QuantizeConfig(bits=4, group_size=args.group_size, sym=True), device="cpu")
    rows = [{"input_ids": sequence, "attention_mask": [1] * len(sequence)} for sequence in ids]
    model.quantize(rows, batch_size=1)
    model.save(args.out)
