"""A chain of drafts goes on behind what is accepted, as it would if the host had known how much that is."""

import numpy as np
import pytest
import torch

from quire.ops.gpu.accepted import continue_behind_accepted
from quire.ops.gpu.aligned import pack, views
from quire.ops.gpu.sampling.job import FIELDS, NUM_TOKENS

pytestmark = pytest.mark.slow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 4
TABLES = np.random.default_rng(0).permutation(60).reshape(3, 20).astype(np.int32)
KNOWN = [9, 30, 17]  # tokens before the drafts
SAMPLED = [3, 1, 2]  # what the device accepts, and the token behind
TOKENS = np.array([50, 51, 52, 53, 60, 61, 62, 70, 71], np.int32)
FIRSTS = [0, 4, 7]  # lines of the sequences
NUM_LINES = [4, 3, 2]
ROWS = [5, 2, 0]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("is_told", [False, True])
def test_what_depends_on_the_accepted_drafts_is_found_on_the_device(num_steps: int, is_told: bool) -> None:
    """Two of three sequences, in another order than their lines, and a sequence that is padding."""
    order, num_seqs = [2, 0], 3
    starts = np.array([0, 2, 6, 6], np.int32)
    lines = np.concatenate([FIRSTS[i] + np.arange(NUM_LINES[i]) for i in order]).astype(np.int32)
    rows = np.array([*(ROWS[i] for i in order), -1], np.int32)
    known = np.array([*(KNOWN[i] for i in order), 0], np.int32)
    lengths = np.array([*(KNOWN[i] + SAMPLED[i] if is_told else -1 for i in order), -1], np.int32)
    tables = np.concatenate([TABLES[order], np.zeros_like(TABLES[:1])])
    of_tokens, of_seqs = np.zeros(12, np.int32), np.full(num_seqs, -7, np.int32)
    steps = [of_seqs] * (3 * num_steps)
    arrays = [of_tokens, rows, of_seqs, starts, *steps, tables, lines, known, lengths]
    on_device = views(pack(arrays).to(DEVICE), [array.shape for array in arrays])
    ids, of_rows, logit_rows, seq_starts, *of_steps, on_device_tables, a, b, c = on_device
    target, draft = (torch.zeros(6, FIELDS.value, dtype=torch.int64, device=DEVICE) for _ in range(2))
    for i, row in enumerate(ROWS):
        target[row, NUM_TOKENS.value] = 0 if is_told else KNOWN[i] + SAMPLED[i]
    continue_behind_accepted(
        ids,
        of_rows,
        logit_rows,
        seq_starts,
        [of_steps[i * num_steps :][:num_steps] for i in range(3)],
        on_device_tables,
        (a, b, c),
        torch.from_numpy(TOKENS).to(DEVICE),
        target,
        draft,
        BLOCK,
    )
    assert ids[:6].tolist() == TOKENS[lines].tolist()
    assert logit_rows.tolist() == [starts[n] + SAMPLED[i] - 1 for n, i in enumerate(order)] + [-7]
    assert draft[:, NUM_TOKENS.value].tolist() == [19, 0, 0, 0, 0, 12]
    for step in range(num_steps):
        positions, contexts, slots = (of_steps[i * num_steps + step].tolist() for i in range(3))
        truth = [KNOWN[i] + SAMPLED[i] - 1 + step for i in order]
        assert positions == [*truth, -7] and contexts == [*(p + 1 for p in truth), -7]
        assert slots[:2] == [TABLES[i, p // BLOCK] * BLOCK + p % BLOCK for i, p in zip(order, truth, strict=True)]
