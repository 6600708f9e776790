"""The op set on an NVIDIA GPU: Triton kernels, and cuBLAS where many rows are multiplied.

Activations are 16-bit floats (or fp32, for comparisons). Ops return values that wait (`gpu_values`), so that
neighbours become one kernel; nothing here synchronizes, so a forward pass can be captured in a CUDA graph."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import Unsupported
from quire.ops.opset import Float32, KVCache, KVSpec, Sampler
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.ops.torch.cache import TorchCache
from quire.ops.torch.gpu_batch import GpuBatch
from quire.ops.torch.gpu_program import GpuProgram, one_long_run
from quire.ops.torch.gpu_values import Columns, Rows, Sum, tensor_of
from quire.ops.torch.gpu_weights import QUANTIZERS, Segment, load_floats, load_segments
from quire.ops.torch.kernels.activation import Activation, activate_and_mul_quantized, silu_and_mul
from quire.ops.torch.kernels.attention_pages import Scoring
from quire.ops.torch.kernels.embedding import embedding
from quire.ops.torch.kernels.kv_write import kv_write
from quire.ops.torch.kernels.linear import linear
from quire.ops.torch.kernels.linear_splits import new_tickets
from quire.ops.torch.kernels.norm import add_rms_norm, add_rms_norm_quantized, rms_norm, rms_norm_quantized
from quire.ops.torch.kernels.quant_gemv import x_group
from quire.ops.torch.kernels.quant_layout import GroupedWeight
from quire.ops.torch.kernels.quant_linear import grouped_linear, takes_codes
from quire.ops.torch.kernels.quant_rows import Quantized, quantize_rows
from quire.ops.torch.kernels.quant_scaled import ScaledWeight, scaled_linear
from quire.ops.torch.ops import Frequencies

GRAPH_BYTES = 3 * 2**29  # for graphs and the sampler's tables: not measured, as they come after the pages
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class GpuOps:
    def __init__(
        self,
        device: str = "cuda",
        dtype: str = "bfloat16",
        quantization: str | None = None,
        batch_invariant: bool = False,
        graphs: bool = True,
        overlap: bool = True,
        utilization: float = 0.9,  # of the device's memory, all together
        threads: int | None = None,  # of the host: all of it happens on the device
    ) -> None:
        if quantization is not None and quantization not in QUANTIZERS:
            raise Unsupported(f"quantization `{quantization}`", f"use one of {', '.join(QUANTIZERS)}")
        self.device, self.dtype = torch.device(device), DTYPES[dtype]
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise Unsupported(
                f"torch {torch.__version__} finds no GPU it can use",
                "see whether `nvidia-smi` lists one and its driver is new enough for this torch, or use device cpu",
            )
        self.quantization, self.batch_invariant, self.graphs = quantization, batch_invariant, graphs
        overlap = overlap and self.device.type == "cuda"
        self._products = {"batch_invariant": batch_invariant, "overlap": overlap, "tickets": new_tickets(device)}
        self._overlap = overlap
        self._utilization = utilization

    # -- when a model is loaded ------------------------------------------------------------------------------------

    def pack(self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None) -> PackedWeight:
        is_head = parts[0].name in ("lm_head.weight", "model.embed_tokens.weight")  # kept, as everyone does
        quantization = None if is_head else self.quantization
        segments = load_segments(parts, self.dtype, self.device, quantization)
        vector = torch.cat([self.vector(part) for part in bias]).to(self.dtype) if bias else None
        return PackedWeight(
            num_outputs=sum(part.num_rows for part in parts),
            num_inputs=parts[0].num_columns,
            nbytes=sum(segment.nbytes for segment in segments) + (vector.nbytes if vector is not None else 0),
            packed=segments,
            bias=vector,
        )

    def vector(self, tensor: StoredTensor) -> Tensor:
        return load_floats(tensor, torch.float32, self.device)

    def table(self, tensor: StoredTensor) -> Tensor:
        return load_floats(tensor, self.dtype, self.device)

    def frequencies(self, inv_freq: Float32, scale: float) -> Frequencies:
        return Frequencies(torch.tensor(inv_freq, device=self.device), scale)

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> TorchCache:
        return TorchCache(spec, num_blocks, num_host_blocks, str(self.device))

    def new_sampler(self, num_rows: int, vocab_size: int) -> Sampler:
        from quire.ops.torch.device_sampler import DeviceSampler

        return DeviceSampler(num_rows, vocab_size, self.device)

    def compile(
        self, forward: Callable[[Any, Any], Any], cache: KVCache, max_tokens: int, max_rows: int, max_model_len: int
    ) -> GpuProgram:
        assert isinstance(cache, TorchCache)
        model = partial(forward, self)
        return GpuProgram(model, cache, max_tokens, max_rows, max_model_len, self.graphs, self.batch_invariant)

    def room(self, forward: Callable[[Any, Any], Any], spec: KVSpec, max_tokens: int) -> int:
        """Bytes for pages: this process's share of the device, less what it holds and the most that a step takes."""
        program = GpuProgram(partial(forward, self), self.new_cache(spec, 1), max_tokens, 1, max_tokens, False)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        program.run(one_long_run(max_tokens, spec.block_size))
        torch.cuda.synchronize()
        peak: int = torch.cuda.max_memory_allocated() - held
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return max(int(free - (1 - self._utilization) * total) - peak - GRAPH_BYTES, 0)

    # -- in a forward pass -----------------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return embedding(ids, table)

    def rms_norm(self, x: Tensor | Sum, weight: Tensor, eps: float) -> Rows:
        if isinstance(x, Tensor) or x.total is not None:
            row = tensor_of(x)
            return Rows(
                len(row),
                partial(rms_norm, row, weight, eps, self._overlap),
                lambda dtype, group: rms_norm_quantized(row, weight, eps, dtype, group, self._overlap),
            )
        add_norm, quantized = partial(self._add_norm, x, weight, eps), partial(self._add_norm_quantized, x, weight, eps)
        return Rows(len(x.y), add_norm, quantized)

    def _add_norm(self, x: Sum, weight: Tensor, eps: float) -> Tensor:
        if x.total is not None:
            return rms_norm(x.total, weight, eps, self._overlap)
        normed, x.total = add_rms_norm(x.y, tensor_of(x.x), weight, eps, self._overlap)
        return normed

    def _add_norm_quantized(self, x: Sum, weight: Tensor, eps: float, dtype: torch.dtype, group: int) -> Quantized:
        if x.total is not None:
            return rms_norm_quantized(x.total, weight, eps, dtype, group, self._overlap)
        codes, x.total = add_rms_norm_quantized(x.y, tensor_of(x.x), weight, eps, dtype, group, self._overlap)
        return codes

    def linear(self, x: Tensor | Rows, w: PackedWeight) -> Tensor:
        products, first = [], 0
        for segment in w.packed:
            size = _num_outputs(segment)
            bias = None if w.bias is None else w.bias[first : first + size]
            products.append(self._multiply(x, segment, bias))
            first += size
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def _multiply(self, x: Tensor | Rows, w: Segment, bias: Tensor | None) -> Tensor:
        if isinstance(w, ScaledWeight):
            codes = self._codes(x, w.codes.dtype, 128 if w.by_blocks else 0)
            return scaled_linear(codes, w, bias, self.dtype, **self._products)
        if isinstance(w, GroupedWeight):
            num_rows = x.num_rows if isinstance(x, Rows) else len(x)
            by_codes = takes_codes(num_rows, w, self.batch_invariant)
            rows = self._codes(x, torch.int16, x_group(w)) if by_codes else tensor_of(x)
            return grouped_linear(rows, w, bias, self.dtype, **self._products)
        return linear(tensor_of(x), w, bias, **self._products)

    def _codes(self, x: Tensor | Rows, dtype: torch.dtype, group: int) -> Quantized:
        return x.codes(dtype, group) if isinstance(x, Rows) else quantize_rows(x, dtype, group, self._overlap)

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Columns, ...]:
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(Columns(x, first, size) for first, size in zip(firsts, sizes, strict=True))

    def rope_angles(self, positions: Tensor, frequencies: Frequencies) -> Tensor:
        angles = positions[:, None].float() * frequencies.inv_freq
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * frequencies.scale

    def rope(self, x: Columns, angles: Tensor, head_dim: int) -> Columns:
        return Columns(x.whole, x.first, x.size, angles)

    def write_kv(self, k: Columns, v: Columns, batch: GpuBatch, layer: int) -> None:
        """Turns q as well: it lies before k in the same rows, and is wanted next."""
        assert k.whole is v.whole and k.first + k.size == v.first, "k and v lie side by side, behind q"
        head_dim = batch.cache.spec.head_dim
        pages, num_heads = batch.pages(layer), k.first // head_dim
        q = kv_write(k.whole, k.angles, batch.slots, pages, num_heads, overlap=self._overlap)
        batch.turned = (k.whole, k.angles, q)

    def paged_attention(
        self, q: Columns, batch: GpuBatch, layer: int, head_dim: int, scale: float, window: int = 0
    ) -> Tensor:
        assert batch.turned is not None, "K and V are written before they are attended to"
        whole, angles, turned = batch.turned
        assert q.whole is whole and q.angles is angles and q.first == 0
        return batch.attend(turned, layer, Scoring(scale, window), self._overlap).flatten(1)

    def silu_and_mul(self, x: Tensor) -> Rows:
        return Rows(
            len(x),
            partial(silu_and_mul, x, self._overlap),
            lambda dtype, group: activate_and_mul_quantized(x, Activation.SILU, dtype, group, self._overlap),
        )

    def add(self, x: Tensor | Sum, y: Tensor) -> Sum:
        return Sum(x, y)

    def logits(self, x: Tensor | Rows, head: PackedWeight, batch: GpuBatch) -> Tensor:
        rows = tensor_of(x)
        return self.linear(rows if batch.all_logits else rows[batch.logit_rows], head)


def _num_outputs(segment: Segment) -> int:
    if isinstance(segment, ScaledWeight):
        return len(segment.codes)
    return segment.num_outputs if isinstance(segment, GroupedWeight) else len(segment)
