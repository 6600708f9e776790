"""Which prompts the kernel of prefill_wide.py is for."""

import torch
from torch import Tensor

from quire.ops.gpu.attention.pages import Pages, Scoring
from quire.ops.gpu.linear.wide_config import has_wide_kernel

ROWS = 128  # of a program: tokens times the query heads of a KV head
ROUND = 128  # positions
HEAD_DIM = 128  # with heads of 64 numbers the softmax takes as long as the products, and nothing is gained
MIN_TOKENS = 256  # of a step: a program begins later than one of prefill.py, and only one fits a multiprocessor
BLOCK_SIZES = (16, 32, 64, 128)  # of pages that a round is made of


def can_prefill_wide(q: Tensor, pages: Pages, scoring: Scoring) -> bool:
    """On Hopper, in 16 bits, where a position sees all before it and scores are plain."""
    plain = not scoring.window and not scoring.soft_cap and scoring.slopes is None and scoring.biases is None
    stored = pages.k.dtype == q.dtype and q.dtype in (torch.float16, torch.bfloat16)
    sized = pages.head_dim == HEAD_DIM and pages.block_size in BLOCK_SIZES and len(q) >= MIN_TOKENS
    if not (plain and stored and sized and q.shape[1] // pages.num_kv_heads <= ROWS):
        return False
    return can_copy(pages.k) and can_copy(pages.v) and has_wide_kernel(q.device)


def can_copy(page: Tensor) -> bool:
    """Whether its slots are the rows of a matrix, which the TMA unit copies."""
    return bool(page.is_contiguous() and page.data_ptr() % 16 == 0)
