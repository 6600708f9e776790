"""Steps of several sequences through an op set, for comparing the GPU's with the plain one."""

import numpy as np

from quire.models.registry import family
from quire.ops.opset import ProgramSpec, StepBatch
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint

LENGTH, BLOCK = 64, 16


def logits_of(ops, path, dtype, steps):
    """The logits of every step of [(ids, start)], one entry a sequence."""
    checkpoint = open_checkpoint(path)
    kind = family(checkpoint.config.architecture)
    config = kind.config(checkpoint.config)
    model = kind.load(ops, checkpoint, config, LENGTH)
    return run_steps(ops, model.forward, kv_spec(config, BLOCK, dtype), steps)


def run_steps(ops, forward, spec, steps):
    num_seqs, width = len(steps[0]), LENGTH // BLOCK
    cache = ops.new_cache(spec, num_seqs * width)
    program = ops.compile(forward, cache, ProgramSpec(64, num_seqs, LENGTH))
    tables = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width)[:, ::-1].copy()
    found = []
    for step in steps:
        counts = [len(ids) for ids, _ in step]
        positions = np.concatenate([np.arange(start, start + len(ids)) for ids, start in step]).astype(np.int32)
        owner = np.repeat(np.arange(num_seqs), counts)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        batch = StepBatch(
            ids=np.concatenate([ids for ids, _ in step]).astype(np.int32),
            positions=positions,
            slots=(tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
            seq_starts=starts,
            context_lens=np.array([start + len(ids) for ids, start in step], np.int32),
            block_tables=tables,
            logit_rows=(starts[1:] - 1).astype(np.int32),
        )
        found.append(program.run(batch).float().cpu().numpy().copy())
    return np.concatenate(found)
