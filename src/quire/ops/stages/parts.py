"""How the layers of a model are divided into stages, and what belongs to one."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from quire.core.errors import BadRequest, Unsupported
from quire.ops.kv_spec import KVSpec, WindowSpec
from quire.ops.stages.trace import BEFORE_LAYERS, LayerTrace, ModelTrace

MAX_STAGES = 64  # as many processes as a group has room for


@dataclass(frozen=True, slots=True)
class CarriedValue:
    """One that goes from a stage to the next, in rows of a step: the hidden states, or what else layers read of layers
    before the one before them."""

    number: int  # in the trace
    columns: int


@dataclass(frozen=True, slots=True)
class StagePart:
    """Layers first .. end of a model, and what comes before the first and after the last."""

    first: int
    end: int
    num_layers: int  # of the model
    weights: frozenset[int]  # their numbers, in the order in which they are packed
    kv_layers: tuple[int, ...]  # of the KV cache
    state_layers: tuple[int, ...]  # that have states, in the blocks or in slots
    received: tuple[CarriedValue, ...] = ()  # of the stage before; of the first stage: none
    handed_on: tuple[CarriedValue, ...] = ()  # to the next; of the last stage: none

    @property
    def handed_columns(self) -> int:
        """Of a row that is handed on."""
        return sum(value.columns for value in self.handed_on)

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers

    def own_spec(self, spec: KVSpec) -> KVSpec:
        """Of this stage's part of a block. `spec`: of all layers."""
        count = len(self.state_layers)
        conv = replace(spec.conv, num_layers=count) if spec.conv and count else None
        states = replace(spec.states, num_layers=count) if spec.states and count else None
        # A stage without attention keeps the room of one layer: a cache has at least one, if the model has attention.
        num_layers = max(min(1, spec.num_layers), len(self.kv_layers))
        scales = tuple(spec.fp8_scales[layer] for layer in self.kv_layers) if spec.fp8_scales else ()
        own = replace(spec, num_layers=num_layers, fp8_scales=scales, conv=conv, states=states)
        if (compressed := spec.compressed) is not None:
            layers = tuple(compressed.layers[layer] for layer in self.kv_layers)
            own = replace(own, compressed=replace(compressed, layers=layers))
        return replace(own, windows=self._own_windows(spec.windows) if spec.windows else None)

    def _own_windows(self, windows: WindowSpec) -> WindowSpec | None:
        """Of this stage's layers with a window; None: it has no such layer."""
        layers = tuple(own for own, layer in enumerate(self.kv_layers) if layer in windows.layers)
        return replace(windows, layers=layers) if layers else None


def check_stages(size: int, num_layers: int) -> None:
    """Refuse more stages than layers, or than a group has room for."""
    most = min(num_layers, MAX_STAGES)
    if size > most:
        raise BadRequest(
            f"pipeline_parallel_size is {size}, and the model has {num_layers} layers, which are not divided"
            if most == num_layers
            else f"pipeline_parallel_size is {size}, and there are {MAX_STAGES} stages at most",
            f"use 1 to {most}",
            param="pipeline_parallel_size",
        )


def divide(trace: ModelTrace, num_layers: int, size: int) -> list[StagePart]:
    """The parts of all stages: the largest has as few weights as possible."""
    layers = _layers(trace, num_layers)
    costs = [sum(trace.sizes[number] for number in layer.weights) for layer in layers]
    cuts = [layer for layer in range(1, num_layers) if _separates_keys(layers, layer)]
    if size > len(cuts) + 1:
        raise Unsupported(
            f"layers of this model share keys and values: {_listed(cuts)}",
            f"use a pipeline_parallel_size of {len(cuts) + 1}" if cuts else "leave out pipeline_parallel_size",
        )
    return _parts(trace, layers, [*_starts(tuple(costs), size, cuts), num_layers])


def divide_at(trace: ModelTrace, num_layers: int, layer: int) -> list[StagePart]:
    """The parts of two stages: the layers before `layer`, and the others."""
    layers = _layers(trace, num_layers)
    if not _separates_keys(layers, layer):
        cuts = [other for other in range(1, num_layers) if _separates_keys(layers, other)]
        raise Unsupported(
            f"{layer} layers on the CPU, and layers of this model share keys and values: {_listed(cuts)}",
            f"use {' or '.join(map(str, cuts[-1:]))} of them" if cuts else "leave out cpu_layers and gpu_layers",
        )
    return _parts(trace, layers, [0, layer, num_layers])


def _separates_keys(layers: list[LayerTrace], first: int) -> bool:
    """Whether no layer from `first` on reads keys and values of a layer before it."""
    before, behind = (set[int]().union(*(layer.kv for layer in own)) for own in (layers[:first], layers[first:]))
    return before.isdisjoint(behind)


def _listed(cuts: list[int]) -> str:
    return f"stages may begin at layers {cuts[0]} to {cuts[-1]}" if cuts else "no stage may begin between them"


def _layers(trace: ModelTrace, num_layers: int) -> list[LayerTrace]:
    """Of every layer. What comes before the first belongs to it, and to the last what comes after it."""
    if not trace.layers.keys() >= {*range(num_layers + 1)}:
        raise Unsupported("the layers of this model are not divided into stages", "leave out pipeline_parallel_size")
    indices = [[index] for index in range(num_layers)]
    indices[0].append(BEFORE_LAYERS)
    indices[-1] += [index for index in trace.layers if index >= num_layers]
    return [_merged(trace, of_layer) for of_layer in indices]


def _parts(trace: ModelTrace, layers: list[LayerTrace], bounds: list[int]) -> list[StagePart]:
    """`bounds`: the first layer of every stage, and the number of layers."""
    num_layers, parts = len(layers), []
    carried = [(), *(_carried(trace, first) for first in bounds[1:-1]), ()]
    for (first, end), (received, handed_on) in zip(pairwise(bounds), pairwise(carried), strict=True):
        own = layers[first:end]
        weights = frozenset[int]().union(*(layer.weights for layer in own))
        kv, states = (set[int]().union(*(getattr(layer, kind) for layer in own)) for kind in ("kv", "states"))
        caches = tuple(sorted(kv)), tuple(sorted(states))
        parts.append(StagePart(first, end, num_layers, weights, *caches, received, handed_on))
    return parts


def _carried(trace: ModelTrace, first: int) -> tuple[CarriedValue, ...]:
    """What goes into the stage that begins at a layer."""
    return tuple(CarriedValue(number, trace.columns[number]) for number in trace.carried(first))


def _merged(trace: ModelTrace, indices: list[int]) -> LayerTrace:
    merged = LayerTrace()
    for layer in (trace.layers[index] for index in indices):
        merged.weights |= layer.weights
        merged.kv |= layer.kv
        merged.states |= layer.states
    return merged


def _starts(costs: tuple[int, ...], size: int, cuts: list[int]) -> list[int]:
    """The first layer of every stage: 0, or one of `cuts`."""

    sums = [0, *accumulate(costs)]

    @cache
    def best(first: int, num_stages: int) -> tuple[int, tuple[int, ...]]:
        """(the largest cost of a stage, the first layer of each) of the layers from `first` on."""
        if num_stages == 1:
            return sums[-1] - sums[first], (first,)
        found = []
        behind = [cut for cut in cuts if cut > first]
        for end in behind[: len(behind) - num_stages + 2]:
            largest, starts = best(end, num_stages - 1)
            found.append((max(sums[end] - sums[first], largest), (first, *starts)))
        return min(found)

    return list(best(0, size)[1])
