"""Quire's engine without a server or text, as a worker that generates and says how long it took (see tiers_worker.py).

python -m benchmarks.peers.quire_offline FOLDER '{"quantization": "fp8", "max_num_seqs": 512}'"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from benchmarks.peers.tiers_worker import answer
from benchmarks.peers.worker import claim_stdout
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor


class Quire:
    """`Engine`, as `LLM` steps it."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        given = EngineOptions.of({"model": folder, "load_format": "dummy", "enable_prefix_caching": False, **options})
        self._engine = Engine(new_executor(Path(folder), given), given)
        self._ids = itertools.count()

    def generate(self, prompts: list[list[int]], num_output: int) -> list[int]:
        """No token is cached."""
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, seed=0)
        for ids in prompts:
            self._engine.submit(Request(id=str(next(self._ids)), prompt_ids=ids, params=params))
        gained = 0
        while self._engine.has_work:
            gained += sum(len(event.tokens) for event in self._engine.step())
        assert gained == len(prompts) * num_output, f"{gained} tokens of {len(prompts)} x {num_output}"
        return []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("options", type=json.loads, help="of EngineOptions, as JSON")
    arguments = parser.parse_args()
    answers = claim_stdout()
    answer(Quire(arguments.folder, arguments.options), answers)
