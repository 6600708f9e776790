"""Ranks whose op set is a GPU's: every rank has some outputs of each matrix, and gathers where all columns are needed.

Where each rank has a GPU of its own, NCCL gathers, through torch, and CUDA graphs have it. Ranks that share a GPU
gather through memory of the host: NCCL refuses them. A gather moves columns and adds nothing up, so results have the
bits of one device wherever a matmul's outputs do not depend on how many there are."""

import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quire.core.errors import EngineFailed
from quire.ops.gpu.batch import GpuBatch
from quire.ops.gpu.deferred import (
    ActivatedRows,
    ColumnSlice,
    DeferredConv,
    DeferredDecay,
    GpuValue,
    HeadNorm,
    as_columns,
    materialize,
)
from quire.ops.gpu.moe.moe import moe_mlp
from quire.ops.gpu.opset import GpuOps, in_vocabulary, num_outputs
from quire.ops.opset import Activation
from quire.ops.ranks.cuts import Cut
from quire.ops.reference.exchange import RankExchange
from quire.ops.tensors import PackedExperts, PackedWeight

if TYPE_CHECKING:
    from quire.ops.ranks.group import RankGroup

START_TIMEOUT = timedelta(minutes=5)  # until all ranks have come to the first gather
POLL_SECONDS = 0.01
LOOK_INTERVAL = 0.1  # seconds
MAX_SIZES = 255  # of graphs
MAX_FIELDS = 16  # of a value that is cut


class ColumnExchange(Protocol):
    in_graphs: bool  # whether CUDA graphs can have it

    def all_columns(self, x: Tensor, cuts: Sequence[Cut]) -> Tensor:
        """x [T, columns of this rank] -> [T, columns of all]"""

    def all_rows(self, x: Tensor, own: Tensor) -> Tensor:
        """x [T, n], of which the rows `own` [T] are this rank's, and each row is one rank's -> [T, n]"""


class HostExchange:
    """Through memory that all ranks map. It waits for the device, and is for ranks that share one."""

    in_graphs = False

    def __init__(self, group: "RankGroup") -> None:
        self._exchange = RankExchange(group)

    def all_columns(self, x: Tensor, cuts: Sequence[Cut]) -> Tensor:
        """The columns of all ranks. They travel in fp32, which holds 16-bit floats exactly."""
        return self._exchange.all_columns(x.cpu(), cuts).to(x.device, x.dtype)

    def all_rows(self, x: Tensor, own: Tensor) -> Tensor:
        return self._exchange.all_rows(x.cpu().float(), own.cpu()).to(x.device, x.dtype)


class GroupExchange:
    """The exchange between ranks by a process group of torch's: NCCL."""

    in_graphs = True

    def __init__(self, processes: Any, group: "RankGroup") -> None:
        self._processes, self._group = processes, group
        self._table = group.allocate(16 * group.size * MAX_FIELDS).view(np.int64)
        self._known: dict[tuple[Cut, ...], list[list[tuple[int, int]]]] = {}
        watch = weakref.ref(self), group
        threading.Thread(target=_abort_with_group, args=watch, name="ranks of GPUs", daemon=True).start()

    def abort(self) -> None:
        self._processes.abort()

    def all_columns(self, x: Tensor, cuts: Sequence[Cut]) -> Tensor:
        """Parts may differ in size: all are sent as wide as the widest."""
        places = self._places(tuple(cuts))
        widest = max(sum(count for _, count in own) for own in places)
        sent = F.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = sent.new_empty(self._group.size * len(sent), widest)
        self._processes._allgather_base(parts, sent).wait()
        out = x.new_empty(len(x), sum(cut.total for cut in cuts))
        for part, own in zip(parts.view(self._group.size, len(sent), widest), places, strict=True):
            start = 0
            for first, count in own:
                out[:, first : first + count] = part[:, start : start + count]
                start += count
        return out

    def all_rows(self, x: Tensor, own: Tensor) -> Tensor:
        """A sum whose other parts are zeros is exact."""
        rows = torch.where(own[:, None], x, 0.0).contiguous()
        self._processes.allreduce([rows]).wait()
        return rows

    def _places(self, cuts: tuple[Cut, ...]) -> list[list[tuple[int, int]]]:
        """(first, count) of the columns of each rank. They are told once, before a graph is captured."""
        if cuts not in self._known:
            assert len(cuts) <= MAX_FIELDS
            starts = accumulate((cut.total for cut in cuts), initial=0)
            table = self._table[: 2 * self._group.size * MAX_FIELDS].reshape(self._group.size, MAX_FIELDS, 2)
            own = [(start + cut.first, cut.count) for cut, start in zip(cuts, starts, strict=False)]
            table[self._group.rank, : len(own)] = own
            self._group.barrier()
            self._known[cuts] = [[(int(a), int(b)) for a, b in table[r, : len(own)]] for r in range(self._group.size)]
            self._group.barrier()
        return self._known[cuts]


def _abort_with_group(watched: "weakref.ref[GroupExchange]", group: "RankGroup") -> None:
    """A gather on the device would wait for ever for a rank that is gone. It ends with the exchange."""
    while watched() is not None:
        if group.native.aborted:
            if (exchange := watched()) is not None:
                exchange.abort()
            return
        time.sleep(LOOK_INTERVAL)


def new_exchange(group: "RankGroup", sharing: int) -> ColumnExchange:
    """`sharing`: processes that share a GPU."""
    if sharing > 1:
        return HostExchange(group)
    from torch import distributed

    options = distributed.ProcessGroupNCCL.Options()
    return GroupExchange(distributed.ProcessGroupNCCL(_new_store(group), group.rank, group.size, options), group)


def _new_store(group: "RankGroup") -> Any:
    """Where ranks find each other: rank 0 listens, and leaves its port in memory that all map."""
    from torch.distributed import TCPStore

    ports = group.counters()
    if group.rank == 0:
        store = TCPStore("127.0.0.1", 0, group.size, is_master=True, wait_for_workers=False, timeout=START_TIMEOUT)
        ports[0] = store.port
        return store
    end = time.monotonic() + START_TIMEOUT.total_seconds()
    while not ports[0]:
        if time.monotonic() > end:
            raise EngineFailed(f"rank {group.rank} has not heard of rank 0 for {START_TIMEOUT.total_seconds():.0f} s")
        time.sleep(POLL_SECONDS)
    return TCPStore("127.0.0.1", int(ports[0]), group.size, is_master=False, timeout=START_TIMEOUT)


class GpuRankOps(GpuOps):
    """The op set of one rank. `cut` of an op: the part that this rank has."""

    divides_tables = False  # every rank looks tokens up itself: no gather

    def __init__(self, group: "RankGroup", exchange: ColumnExchange, **options: Any) -> None:
        """`options`: of GpuOps."""
        options["graphs"] = options.get("graphs", True) and exchange.in_graphs
        super().__init__(**options)
        self.group, self._exchange = group, exchange
        self._sizes: NDArray[np.int64] | None = None  # how many, and which

    def _agree_on_sizes(self, sizes: list[int]) -> list[int]:
        """The sizes of rank 0's graphs: ranks wait for each other in a graph, so they replay the same."""
        if self._sizes is None:
            self._sizes = self.group.allocate(8 * (MAX_SIZES + 1)).view(np.int64)
        if self.group.rank == 0:
            self._sizes[0], self._sizes[1 : 1 + len(sizes)] = len(sizes), sizes
        self.group.barrier()
        agreed = [int(size) for size in self._sizes[1 : 1 + self._sizes[0]]]
        self.group.barrier()
        return agreed

    def all_gather(self, x: GpuValue, cuts: Sequence[Cut]) -> GpuValue:
        if isinstance(x, DeferredDecay):
            return replace(x, log=self._exchange.all_columns(x.log, cuts))
        # What follows these takes them before they are rounded, on one device and so here.
        if isinstance(x, ActivatedRows):
            return self.activate(self._exchange.all_columns(x.source, cuts), x.kind)
        if isinstance(x, DeferredConv):
            return DeferredConv(x.num_rows, lambda kind: self._exchange.all_columns(x.compute(kind), cuts))
        if isinstance(x, ColumnSlice) and (x.norm or x.angles is not None):  # which then are those of all heads
            whole = self._exchange.all_columns(x.stored(), cuts)
            return replace(x, whole=whole, first=0, size=whole.shape[1])
        return self._exchange.all_columns(materialize(x), cuts)

    def deferred_columns(self, x: GpuValue, cut: Cut) -> GpuValue | None:
        """The columns of `cut`, of what a multiplication behind it takes before it is rounded; None: x is none such."""
        if isinstance(x, ActivatedRows):
            return self.activate(ColumnSlice(x.source, cut.first, cut.count), x.kind)
        if isinstance(x, ColumnSlice) and x.norm and x.angles is None and cut.count % len(x.norm.weight) == 0:
            return replace(x, first=x.first + cut.first, size=cut.count)
        return None

    def rms_norm_of_heads(self, x: GpuValue, weight: Tensor, eps: float, groups: int = 1) -> GpuValue:
        """Of a single head, too, which looks like a whole row: it is rotated before it is rounded, as beside others."""
        columns = as_columns(x) if groups == 1 and isinstance(x, Tensor | ColumnSlice) else None
        if columns is None or columns.size != len(weight) or columns.norm or columns.angles is not None:
            return self.rms_norm(x, weight, eps, groups)
        return replace(columns, norm=HeadNorm(weight, eps))

    def split(self, x: GpuValue, sizes: Sequence[int]) -> tuple[GpuValue, ...]:
        if isinstance(x, DeferredDecay):
            return tuple(replace(x, log=part) for part in x.log.split(list(sizes), dim=1))
        return super().split(x, sizes)

    def _all_outputs(self, w: PackedWeight) -> Sequence[int | None]:
        """Where the batch must not matter, neither may the number of ranks: sums are divided as for all outputs."""
        cuts: Sequence[Cut] = getattr(w, "cuts", ())
        if not (cuts and self.batch_invariant):
            return super()._all_outputs(w)
        return all_outputs([num_outputs(segment) for segment in w.packed], cuts)

    def logits(
        self,
        x: GpuValue,
        head: PackedWeight,
        batch: GpuBatch,
        softcap: float = 0.0,
        vocabulary: tuple[Tensor, int] | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        if cut is None:
            return super().logits(x, head, batch, softcap, vocabulary)
        return in_vocabulary(self._exchange.all_columns(super().logits(x, head, batch, softcap), [cut]), vocabulary)

    def _experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        kind: Activation,
        limit: float = 0.0,
        cut: Cut | None = None,
        experts: Cut | None = None,
    ) -> Tensor:
        """`cut`: this rank's columns of every expert. `experts`: those that are this rank's."""
        packed = gate_up.packed, down.packed, kind, gate_up.biases, down.biases
        if experts is not None:
            here = ids - experts.first
            own = ((here >= 0) & (here < experts.count)).flatten()
            gated = gate_up.num_outputs != down.num_inputs
            computed = (ids < experts.total).flatten()[:, None]  # others pass on their input

            def all_routes(parts: Tensor) -> Tensor:
                return torch.where(computed, self._exchange.all_rows(parts, own), 0.0)

            return moe_mlp(x, here, weights, *packed, gated, all_routes=all_routes, limit=limit, overlap=self._overlap)
        if cut is None:
            return super()._experts(x, ids, weights, gate_up, down, kind, limit)
        all_hidden = partial(self._exchange.all_columns, cuts=[cut])
        return moe_mlp(x, ids, weights, *packed, all_hidden=all_hidden, limit=limit, overlap=self._overlap)


def all_outputs(sizes: Sequence[int], cuts: Sequence[Cut]) -> list[int]:
    """For each segment, which has so many outputs here, how many its fields have on all ranks."""
    ends = list(accumulate(cut.count for cut in cuts))
    bounds = pairwise(accumulate(sizes, initial=0))
    return [
        sum(cut.total for cut, last in zip(cuts, ends, strict=True) if last - cut.count < end and first < last)
        for first, end in bounds
    ]


def rank_arguments(group: "RankGroup", sharing: int) -> tuple[type[GpuRankOps], dict[str, Any]]:
    """The op set of a rank, and how it is made. `sharing`: processes that share a GPU."""
    return GpuRankOps, {"group": group, "exchange": new_exchange(group, sharing)}
