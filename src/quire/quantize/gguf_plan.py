"""A GGUF file: the type of every tensor, its keys, and how its blocks are made."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.ops.native.cpus import compute_threads
from quire.ops.tensors import GGUF_TYPES, StoredTensor, stored_floats
from quire.quantize import gguf_source
from quire.quantize.file_types import FILE_TYPES, FileTypeContext, is_matrix, tensor_type
from quire.quantize.gguf_changes import overridden, without_layers
from quire.quantize.gguf_files import cut_by_bytes, encoded, gguf_layouts, planned, stored_keys
from quire.quantize.gguf_metadata import check_metadata, gguf_architecture, metadata_of, rope_freqs
from quire.quantize.gguf_source import FURTHER, GGUFTensor
from quire.quantize.gguf_tokenizer import tokenizer_keys
from quire.quantize.gguf_types import ENCODERS
from quire.quantize.methods import COPY
from quire.quantize.output import PlannedTensor
from quire.quantize.plan import Floats, Importance, QuantizeError, QuantizeOptions, Task, WritePlan, count
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

QUANTIZATION_VERSION = 2
READ_WEIGHTS = 1 << 22  # read as fp32 at once
ENCODE_WEIGHTS = 1 << 17  # encoded at once on one thread
SPLIT = re.compile(r"split\..*")
WRITTEN_ANEW = re.compile(r"general\.(file_type|quantization_version)|split\..*|quantize\.imatrix\..*")
FLOATS = ("F32", "F16", "BF16")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def plan_gguf(
    checkpoint: Checkpoint, is_gguf: bool, out: Path, options: QuantizeOptions, importance: Importance
) -> WritePlan:
    """`is_gguf`: whether the source is a GGUF file, whose keys are kept as they are."""
    config, method = checkpoint.config, options.method
    if is_gguf:
        gguf, tensors = gguf_source.of_gguf(checkpoint.path)
        anew = SPLIT if method == COPY else WRITTEN_ANEW
        keys = {key: value for key, value in stored_keys(gguf).items() if not anew.fullmatch(key)}
    else:
        tensors, metadata = _converted(checkpoint)
        keys = {key: encoded(value) for key, value in metadata.items()}
    if options.pruned:
        tensors = without_layers(tensors, keys, config.int("num_hidden_layers"), options.pruned)
    if method != COPY:
        keys["general.file_type"] = encoded(FILE_TYPES[method][0])
        keys["general.quantization_version"] = encoded(QUANTIZATION_VERSION)
    keys |= overridden(keys, options.overrides)
    if importance:
        keys["quantize.imatrix.file"] = encoded(importance.source)
        keys["quantize.imatrix.entries_count"] = encoded(len(importance.sums))
    context, mix = _context(config, tensors, options, bool(importance)), dict(options.types)
    types = [mix.get(tensor.name) or _type(tensor, context, options) for tensor in tensors]
    tasks = [_task(checkpoint, *each, importance) for each in zip(tensors, types, strict=True)]
    layouts = gguf_layouts(out.name, keys, _splits(tasks, tensors, options))
    notes = []
    if fallen := [t for t in tasks if _fell_back(t, options.method)]:
        notes.append(
            f"{len(fallen)} of {len(tasks)} tensors have rows that are not whole blocks of 256, and get a type with "
            "blocks of 32"
        )
    return WritePlan(out.with_name(layouts[0].name), layouts, tasks, None, notes)


def _splits(
    tasks: Sequence[Task], tensors: Sequence[GGUFTensor], options: QuantizeOptions
) -> Sequence[Sequence[PlannedTensor]]:
    if not options.keep_split:
        return cut_by_bytes([output for task in tasks for output in task.outputs], options.split_bytes)
    files: dict[int, list[PlannedTensor]] = {}
    for task, tensor in zip(tasks, tensors, strict=True):
        files.setdefault(tensor.split, []).extend(task.outputs)
    return [files[index] for index in sorted(files)]


def gguf_tensors(checkpoint: Checkpoint) -> list[GGUFTensor]:
    """The model's tensors under their names in GGUF."""
    if not checkpoint.path.is_dir():
        return gguf_source.of_gguf(checkpoint.path)[1]
    return gguf_source.of_checkpoint(checkpoint, gguf_architecture(checkpoint.config)[1])


def quantized_tensors(checkpoint: Checkpoint, options: QuantizeOptions) -> list[GGUFTensor]:
    """The tensors whose type a mix may choose: no flag keeps or names it."""
    tensors = gguf_tensors(checkpoint)
    context = _context(checkpoint.config, tensors, options, has_importance=False)
    fixed = {"token_embd.weight"} if options.table_type else set()
    if options.head_type:
        fixed |= {"output.weight"} if context.has_head else {"token_embd.weight"}
    return [
        tensor
        for tensor in tensors
        if tensor.name not in fixed
        and tensor_type(options.method, tensor.name, tensor.shape, context) != "F32"
        and not any(re.search(pattern, tensor.name) for pattern in options.ignore)
    ]


def _converted(checkpoint: Checkpoint) -> tuple[list[GGUFTensor], dict[str, Any]]:
    arch, row = gguf_architecture(checkpoint.config)
    config = checkpoint.config.with_values({FURTHER: gguf_source.num_further_layers(checkpoint, row)})
    tensors = gguf_source.of_checkpoint(checkpoint, row)
    if (factors := rope_freqs(config)) is not None:
        stored = stored_floats("rope_freqs", factors)
        tensors.insert(0, GGUFTensor("rope_freqs.weight", ("rope_freqs",), factors.shape, lambda: [stored]))
    metadata = metadata_of(config, arch, row)
    metadata["general.name"] = checkpoint.path.resolve().name
    check_metadata(config, row, metadata, {tensor.name: None for tensor in tensors})
    return tensors, metadata | tokenizer_keys(checkpoint.path, config.int("vocab_size"))


def _context(
    config: CheckpointConfig, tensors: Sequence[GGUFTensor], options: QuantizeOptions, has_importance: bool
) -> FileTypeContext:
    heads = config.get("num_attention_heads", config.get("n_head", 1))
    experts = next((config.int(key) for key in EXPERT_COUNTS if key in config), 0)
    layers = {match[1] for tensor in tensors if (match := re.match(r"blk\.(\d+)\.", tensor.name))}
    return FileTypeContext(
        num_layers=len(layers),
        heads_a_kv_head=int(heads) // max(int(config.get("num_key_value_heads", heads)), 1),
        num_experts=experts,
        has_head=any(tensor.name == "output.weight" for tensor in tensors),
        has_importance=has_importance,
        pure=options.pure,
        head_type=options.head_type,
        table_type=options.table_type,
    )


def _type(tensor: GGUFTensor, context: FileTypeContext, options: QuantizeOptions) -> str:
    named = options.named_format(tensor.name)
    if named is not None and is_matrix(tensor.name, tensor.shape):
        if tensor.shape[-1] % GGUF_TYPES[named].block:
            raise QuantizeError(
                f"{tensor.name} has rows of {tensor.shape[-1]}, no whole blocks of {named} ({GGUF_TYPES[named].block})",
                "give it a type with blocks of 32, such as Q4_0, Q5_0, Q8_0 or IQ4_NL",
            )
        return named
    if options.method == COPY:
        assert tensor.type is not None
        return tensor.type
    chosen = tensor_type(options.method, tensor.name, tensor.shape, context)
    ignored = any(re.search(pattern, tensor.name) for pattern in options.ignore)
    if ignored and chosen != "F32":
        return tensor.type or "F16"
    if chosen == "F32" and options.method != "F32" and tensor.type is not None:
        return tensor.type  # what is not quantized stays as the file has it
    if options.method in FLOATS and len(tensor.shape) > 1 and tensor.type is None and chosen != "F32":
        return options.method
    return chosen


def _fell_back(task: Task, method: str) -> bool:
    if method == COPY:
        return False
    most = GGUF_TYPES[FILE_TYPES[method][1]]
    return most.block == 256 and bool(task.outputs[0].shape[-1] % 256) and task.type not in FLOATS


def _task(checkpoint: Checkpoint, tensor: GGUFTensor, kind: str, importance: Importance) -> Task:
    copied = kind == tensor.type
    pieces = partial(_copied, tensor) if copied else partial(_encoded, tensor, kind, importance)
    output = planned(tensor.name, kind, tensor.shape)
    return Task((output,), count(tensor.shape), pieces, kind, tensor.published, checkpoint.drop_pages)


def _copied(tensor: GGUFTensor) -> Iterator[tuple[str, int, Any]]:
    first = 0
    for part in tensor.parts():
        data = np.ascontiguousarray(part.data).reshape(-1)
        yield tensor.name, first, data
        first += data.nbytes


def _encoded(tensor: GGUFTensor, kind: str, importance: Importance) -> Iterator[tuple[str, int, Any]]:
    vectors = [importance.of(name) for name in tensor.published] or [None]
    columns, first = tensor.shape[-1], 0
    rows = max(READ_WEIGHTS // columns, 1)
    rows_of_part = tensor.num_rows // max(len(vectors), 1)
    done = 0
    with ThreadPoolExecutor(compute_threads()) as pool:
        for chunk in tensor.chunks(rows):
            vector = vectors[min(done // max(rows_of_part, 1), len(vectors) - 1)]
            step = max(ENCODE_WEIGHTS // columns, 1)
            cuts = [chunk[cut : cut + step] for cut in range(0, len(chunk), step)]
            for blocks in pool.map(partial(encode_rows, kind, vector), cuts):
                yield tensor.name, first, blocks
                first += blocks.nbytes
            done += len(chunk)


def encode_rows(kind: str, importance: Floats | None, rows: Floats) -> np.ndarray:
    """Rows of weights as blocks of a GGUF type; `importance` [columns]."""
    size = GGUF_TYPES[kind].block
    weights = None
    if importance is not None and size > 1:
        weights = np.broadcast_to(importance, rows.shape).reshape(-1, size)
    encode: Callable[..., Any] = ENCODERS[kind]
    return np.asarray(encode(rows.reshape(-1, size), weights)).reshape(-1)


def stored_as(name: str, values: Floats, kind: str, importance: Floats | None = None) -> StoredTensor:
    """A matrix in a GGUF type, in memory."""
    data = encode_rows(kind, importance, values).reshape(len(values), -1)
    return StoredTensor(name, values.shape, GGUF_TYPES[kind], data)


def is_quantized(path: Path) -> bool:
    """Whether a GGUF file has other types than floats."""
    return any(tensor.type not in FLOATS for tensor in gguf_source.of_gguf(path)[1])
