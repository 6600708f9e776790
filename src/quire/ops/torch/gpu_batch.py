"""A step on the device: the arrays of a `StepBatch`, the pages, and how attention divides its work."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.ops.torch.cache import TorchCache
from quire.ops.torch.gpu_values import Columns
from quire.ops.torch.kernels.attention_decode import decode
from quire.ops.torch.kernels.attention_pages import Pages, Runs, Scoring
from quire.ops.torch.kernels.attention_plan import DecodePlan, PrefillPlan, plan_decode, plan_prefill
from quire.ops.torch.kernels.attention_prefill import prefill, prefill_launch


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """Tokens [T]. One below zero stands for last[~id], which the step before has drawn."""

    given: Tensor
    last: Tensor | None


@dataclass(slots=True, eq=False)
class GpuBatch:
    """Int32 on the device. A padding token has slot -1; a padding sequence has no context."""

    ids: Ids
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    runs: Runs
    logit_rows: Tensor  # [R]
    cache: TorchCache
    max_model_len: int
    decodes: bool  # whether some sequence has one token
    prefills: bool  # whether some sequence has more
    batch_invariant: bool = False
    all_logits: bool = False  # whether logits are wanted of all tokens
    unwritten: tuple[int, Columns, Columns] | None = None  # a layer's k and v, until its q comes
    _decode_plans: dict[int, DecodePlan] = field(default_factory=dict)  # by window
    _prefill_plan: PrefillPlan | None = None

    def pages(self, layer: int) -> Pages:
        k, v, *units = (page[layer] for page in self.cache.pages)
        return Pages(k, v, *units)

    def attend(self, q: Tensor, layer: int, scoring: Scoring, overlap: bool = False) -> Tensor:
        """q [T, heads, head_dim] -> the same."""
        out, pages = torch.empty_like(q), self.pages(layer)
        if self.decodes:
            if scoring.window not in self._decode_plans:
                self._decode_plans[scoring.window] = plan_decode(
                    self.runs, self.max_model_len, window=scoring.window, batch_invariant=self.batch_invariant
                )
            decode(q, pages, self.runs, self._decode_plans[scoring.window], scoring, out=out, overlap=overlap)
        if self.prefills:
            launch = prefill_launch(pages.head_dim, q.shape[1], pages.num_kv_heads, q.dtype)
            if self._prefill_plan is None:
                tile = launch.tile(q.shape[1], pages.num_kv_heads)
                self._prefill_plan = plan_prefill(self.runs, len(q), tile, above=1 if self.decodes else 0)
            prefill(q, pages, self.runs, self._prefill_plan, scoring, out=out, launch=launch)
        return out
