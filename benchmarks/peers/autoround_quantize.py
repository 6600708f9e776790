"""A checkpoint in GPTQ's layout, 4 bits in groups, rounded by AutoRound's light recipe, run by an interpreter that has
auto-round.

    python -m benchmarks.peers.autoround_quantize SOURCE OUT IDS.json

IDS.json: sequences of token ids, to calibrate with. All is fp32: bf16 is many times slower on most CPUs."""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from auto_round import AutoRound  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

LIGHT_STEPS, LIGHT_RATE = 50, 5e-3

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("ids", type=Path)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument(
        "--steps", type=int, default=LIGHT_STEPS, help="for each layer (default: %(default)s, its light)"
    )
    args = parser.parse_args()
    ids = json.loads(args.ids.read_text())
    model = AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.float32)
    given = [torch.tensor([sequence]) for sequence in ids]
    rows = [{"input_ids": tensor, "attention_mask": torch.ones_like(tensor)} for tensor in given]
    rounding = AutoRound(
        model, AutoTokenizer.from_pretrained(args.source), bits=4, group_size=args.group_size, sym=True,
        iters=args.steps, lr=LIGHT_RATE, batch_size=8, dataset=rows, nsamples=len(rows), seqlen=max(map(len, ids)),
        device_map="cpu", amp=False,
    )  # fmt: skip
    with TemporaryDirectory(dir=Path(args.out).absolute().parent) as folder:
        rounding.quantize_and_save(folder, format="auto_gptq")
        written = next(Path(folder).rglob("config.json")).parent  # in a folder that it names after the settings
        written.rename(args.out)
