"""Steps in which every sequence has an adapter of its own."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from models.checking import BLOCK_SIZE, MAX_LEN, on_host
from quire.models.registry import family
from quire.ops.opset import OpSet, ProgramSpec, StepBatch
from quire.runtime.adapters import LoraAdapters
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint

NONE = ""  # the model as it is


class Together:
    """One sequence for each adapter, and one without, in the same steps."""

    def __init__(self, ops: OpSet, path: Path, adapters: Mapping[str, Path], max_rank: int = 64) -> None:
        checkpoint = open_checkpoint(path)
        module = family(checkpoint.config.architecture)
        config = module.config(checkpoint.config)
        model = module.load(ops, checkpoint, config, MAX_LEN)
        self.names = [NONE, *adapters]
        self.slots = {name: slot for slot, name in enumerate(sorted(adapters))} | {NONE: -1}
        held = LoraAdapters(ops, model, num_slots=len(adapters) + 1, max_rank=max_rank)
        for name, path in adapters.items():
            held.add(name, held.load(path))
            held.put(self.slots[name], name)
        self.blocks = -(-MAX_LEN // BLOCK_SIZE)
        num_blocks = self.blocks * len(self.names)
        cache = ops.new_cache(kv_spec(config, BLOCK_SIZE, "float32"), num_blocks)
        self.program = ops.compile(
            held.forward, cache, ProgramSpec(MAX_LEN * len(self.names), len(self.names), MAX_LEN)
        )
        self.tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(-1, self.blocks)

    def run(self, ids: dict[str, list[int]], start: int) -> dict[str, np.ndarray]:
        """The logits of all ids from `start` on."""
        logits = on_host(self.program.run(self.batch(ids, start)))
        ends = np.cumsum([len(tokens) - start for tokens in ids.values()])
        return dict(zip(ids, np.split(logits, ends[:-1]), strict=True))

    def batch(self, ids: dict[str, list[int]], start: int) -> StepBatch:
        tables = {name: table for name, table in zip(self.names, self.tables, strict=True) if name in ids}
        counts = [len(tokens) - start for tokens in ids.values()]
        positions = [np.arange(start, len(tokens), dtype=np.int32) for tokens in ids.values()]
        slots = [
            tables[name][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for name, p in zip(ids, positions, strict=True)
        ]
        return StepBatch(
            ids=np.concatenate([np.array(tokens[start:], np.int32) for tokens in ids.values()]),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
            seq_starts=np.cumsum([0, *counts], dtype=np.int32),
            context_lens=np.array([len(tokens) for tokens in ids.values()], np.int32),
            block_tables=np.stack([tables[name] for name in ids]),
            logit_rows=np.arange(sum(counts), dtype=np.int32),
            adapters=np.repeat(np.array([self.slots[name] for name in ids], np.int32), counts),
        )
