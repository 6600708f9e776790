"""What this machine could do at best, and what of that a model's tokens need.

    python -m benchmarks.ceilings [--threads 2]

Memory is read and int8 products are summed by a small C program (ceiling.c), compiled where it runs."""

import argparse
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, progress
from quire.weights.checkpoint import open_checkpoint

KEPT = ROOT / "build" / "bench"  # what benchmarks make and use again


@dataclass(frozen=True, slots=True)
class Ceilings:
    gigabytes: float  # read from memory in a second
    int8_gigamacs: float  # multiply-adds in a second, in units of 10^9; 0 where no instruction for them is known
    instruction: str


@dataclass(frozen=True, slots=True)
class Work:
    """What computing one token takes, embedding lookups, norms and attention's own products left out."""

    weight_bytes: int  # read for every step
    layer_macs: int  # for every token
    head_macs: int  # for every token that is drawn
    kv_bytes: int  # read for every token of context, at 16 bits a number


def measure_ceilings(threads: int) -> Ceilings | None:
    compiler = shutil.which("cc")
    if compiler is None:
        progress("there is no C compiler (cc): shares of the machine's bandwidth and peak are left out")
        return None
    KEPT.mkdir(parents=True, exist_ok=True)
    program = KEPT / "ceiling"
    source = Path(__file__).with_name("ceiling.c")
    subprocess.run([compiler, "-O3", "-march=native", "-pthread", source, "-o", program], check=True)
    said = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout
    gigabytes, gigamacs, instruction = said.split(maxsplit=2)
    return Ceilings(float(gigabytes), float(gigamacs), instruction.strip())


def work_of(path: Path) -> Work:
    """Of a checkpoint, as it is stored."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    tied = "lm_head.weight" not in checkpoint.names()
    weight_bytes = layer_macs = head_macs = 0
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        embedding = name.endswith("embed_tokens.weight")
        if len(tensor.shape) < 2 or (embedding and not tied):
            continue
        num_weights = tensor.num_rows * tensor.num_columns
        weight_bytes += tensor.data.nbytes
        if embedding or name == "lm_head.weight":
            head_macs += num_weights
        else:
            layer_macs += num_weights
    num_heads = config.int("num_attention_heads")
    head_dim = config.int("head_dim", default=config.int("hidden_size") // num_heads)
    kv_numbers = 2 * config.int("num_hidden_layers") * config.int("num_key_value_heads", default=num_heads) * head_dim
    return Work(weight_bytes, layer_macs, head_macs, 2 * kv_numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    found = measure_ceilings(parser.parse_args().threads)
    if found:
        print(
            f"{found.gigabytes:.1f} GB/s, {found.int8_gigamacs:.0f} billion int8 multiply-adds/s ({found.instruction})"
        )


if __name__ == "__main__":
    main()
