"""A step on the device: the arrays of a `StepBatch`, the pages, and the plans of attention."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.ops.gpu.attention.decode import DecodeLaunch, decode, decode_launch, num_tiles, tile_rows
from quire.ops.gpu.attention.mla import mla_decode
from quire.ops.gpu.attention.mla_plan import LatentPlan, plan_latent, plan_sparse
from quire.ops.gpu.attention.page_tables import find_pages
from quire.ops.gpu.attention.pages import Pages, Runs, Scoring
from quire.ops.gpu.attention.paths import Paths
from quire.ops.gpu.attention.plan import DecodePlan, PrefillPlan, num_workers, plan_decode, plan_prefill
from quire.ops.gpu.attention.prefill import PrefillLaunch, invariant_launch, prefill, prefill_launch
from quire.ops.gpu.attention.top_k import SeenPositions, seen_positions
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.deferred import ColumnSlice
from quire.ops.gpu.linear.lora import sort_by_slot
from quire.ops.gpu.moe.sorting import RoutedTokens
from quire.ops.gpu.states.segments import DeviceSegments
from quire.ops.opset import WORD_BITS


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """ids [T]. An id below zero stands for last[~id]: the token that the step before sampled for that row."""

    ids: Tensor
    last: Tensor | None


@dataclass(slots=True, eq=False)
class GpuBatch:
    """Int32 on the device. A padding token has slot -1; a padding sequence has no context."""

    ids: TokenIds
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    runs: Runs
    logit_rows: Tensor  # [R]
    cache: GpuCache
    max_model_len: int
    decodes: bool  # some sequence has one token, or up to max_queries
    prefills: bool  # some sequence has more
    batch_invariant: bool = False
    all_logits: bool = False  # every token's logits are wanted
    adapters: Tensor | None = None  # [T] the slot of each token's adapter, or -1; None: no token has one
    ancestors: Tensor | None = None  # [T] int64: `StepBatch.ancestors`
    max_queries: int = 1  # tokens of a sequence that the decode kernel takes: more than one where drafts are trees
    paths: Paths | None = None  # if batch_invariant: of trees, each of whose tokens is a sequence
    adapts: bool = False  # set by a forward pass that has LoRA slots
    hidden: Tensor | None = None  # [T, columns] rows that `hidden_states` reads
    kept: Tensor | None = None  # [T, columns] rows that the forward pass keeps
    sources: "GpuBatch | None" = None  # for cross-attention: each token is a sequence whose context is its source
    segments: DeviceSegments | None = None  # of models with states
    pending_kv: tuple[int, ColumnSlice, ColumnSlice] | None = None  # layer, k and v (or latent, k_rope)
    window_slots: Tensor = field(init=False)  # [T] of layers in window pages
    window_runs: Runs = field(init=False)  # the same, with tables of window pages
    _decode_plans: dict[int, DecodePlan] = field(default_factory=dict)  # by window
    _prefill_plans: dict[int, PrefillPlan] = field(default_factory=dict)  # by tokens of a tile
    _latent_plan: LatentPlan | None = None
    _seen: SeenPositions | None = None
    _sparse_plan: LatentPlan | None = None
    _tokens_by_slot: RoutedTokens | None = None

    def __post_init__(self) -> None:
        """Long before the kernels that read them without waiting for the kernel right before."""
        self.window_slots, self.window_runs = self.slots, self.runs
        if self.cache.windowed is not None:
            tables = self.runs.block_tables
            self.window_slots, tables = find_pages(self.cache.page_of, self.slots, tables, self.cache.spec.block_size)
            self.window_runs = Runs(self.runs.seq_starts, self.runs.context_lens, tables)

    def slots_of(self, layer: int) -> Tensor:
        return self.window_slots if self.cache.has_window(layer) else self.slots

    def runs_of(self, layer: int) -> Runs:
        return self.window_runs if self.cache.has_window(layer) else self.runs

    def tokens_by_slot(self, num_slots: int) -> RoutedTokens | None:
        """Tokens sorted by adapter slot, for all layers. None: no token has an adapter."""
        if self._tokens_by_slot is None and self.adapters is not None:
            self._tokens_by_slot = sort_by_slot(self.adapters, num_slots, self.batch_invariant)
        return self._tokens_by_slot

    @property
    def only_decodes(self) -> bool:
        return self.decodes and not self.prefills and self.max_queries == 1 and self.ancestors is None

    def decode_plan(self, window: int, num_heads: int) -> tuple[DecodePlan, bool]:
        """-> the step's plan for layers of this window, and whether it was made just now."""
        if is_new := window not in self._decode_plans:
            spec, per = self.cache.spec, self._decode_launch(num_heads).per_multiprocessor
            lanes = spec.num_kv_heads * num_tiles(num_heads // spec.num_kv_heads, self.max_queries)
            workers = num_workers(self.slots.device, per, lanes, self.runs.num_seqs, self.max_model_len)
            tree_places = 0 if self.ancestors is None else WORD_BITS
            self._decode_plans[window] = plan_decode(
                self.runs, workers, max_queries=self.max_queries, window=window, tree_places=tree_places
            )
        return self._decode_plans[window], is_new

    def _decode_launch(self, num_heads: int) -> DecodeLaunch:
        spec = self.cache.spec
        rows = tile_rows(num_heads // spec.num_kv_heads, self.max_queries)
        by_itself = self.prefills or self.max_queries > 1  # `decode`, not `decode_step`
        return decode_launch(spec.head_dim, rows, self.cache.k.dtype, self.runs.num_seqs, with_prompts=by_itself)

    def attend(self, q: Tensor, layer: int, scoring: Scoring, overlap: bool = False) -> Tensor:
        """q [T, heads, head_dim] -> the same."""
        pages, runs = self.cache.pages_of(layer), self.runs_of(layer)
        shape = pages.head_dim, q.shape[1], pages.num_kv_heads, q.dtype
        if self.batch_invariant:  # one kernel for every token; it leaves padding rows alone
            return self._prefill(q, pages, runs, scoring, invariant_launch(*shape), torch.zeros_like(q), above=0)
        out = torch.empty_like(q)
        if self.decodes:
            plan, _ = self.decode_plan(scoring.window, q.shape[1])
            launch = self._decode_launch(q.shape[1])
            tree = {} if self.ancestors is None else {"tree": self.ancestors, "positions": self.positions}
            decode(q, pages, runs, plan, scoring, **tree, out=out, launch=launch, overlap=overlap)
        if self.prefills:
            above = self.max_queries if self.decodes else 0
            self._prefill(q, pages, runs, scoring, prefill_launch(*shape), out, above=above)
        return out

    def _prefill(
        self, q: Tensor, pages: Pages, runs: Runs, scoring: Scoring, launch: PrefillLaunch, out: Tensor, above: int
    ) -> Tensor:
        tile = launch.tile(q.shape[1], pages.num_kv_heads)
        if tile not in self._prefill_plans:
            self._prefill_plans[tile] = plan_prefill(self.runs, len(q), tile, above=above)
        plan = self._prefill_plans[tile]
        return prefill(q, pages, runs, plan, scoring, paths=self.paths, out=out, launch=launch)

    def latent_page(self, layer: int) -> Tensor:
        """[blocks, block_size, head_dim]"""
        return self.cache.k[layer, :, :, 0]

    def seen_positions(self) -> SeenPositions:
        """For sparse attention."""
        spec = self.cache.spec
        assert spec.index is not None, "the model has no indexer"
        if self._seen is None:
            self._seen = seen_positions(self.runs, self.positions, self.slots, spec.block_size, spec.index.top_k)
        return self._seen

    def attend_latent(self, q: Tensor, layer: int, scale: float, chosen: Tensor | None = None) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads, latent]. chosen [T, top_k]: the slots that tokens attend to, if not to
        all."""
        latent, page = self.cache.spec.latent, self.latent_page(layer)
        plan = self._plan_latent(q) if chosen is None else self._plan_sparse(q)
        out = q.new_zeros(*q.shape[:2], latent) if self.prefills else None  # no run has the padding tokens
        parts = q, page, plan.runs, plan.pieces, scale
        return mla_decode(*parts, latent=latent, launch=plan.launch, out=out, chosen=chosen)

    def _plan_latent(self, q: Tensor) -> LatentPlan:
        if self._latent_plan is None:
            self._latent_plan = plan_latent(
                self.runs,
                self.positions,
                prefills=self.prefills,
                num_heads=q.shape[1],
                dtype=q.dtype,
                max_model_len=self.max_model_len,
                batch_invariant=self.batch_invariant,
            )
        return self._latent_plan

    def _plan_sparse(self, q: Tensor) -> LatentPlan:
        if self._sparse_plan is None:
            invariant = self.batch_invariant
            self._sparse_plan = plan_sparse(
                self.seen_positions(), num_heads=q.shape[1], dtype=q.dtype, batch_invariant=invariant
            )
        return self._sparse_plan
