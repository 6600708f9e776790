"""Formats of one model: size, memory, speed, and how much of its predictions each loses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.cli.bench.compare.charts import BarChart
from quire.cli.bench.compare.lab import Lab, NotHere, in_turn
from quire.cli.bench.compare.result import Column, Figure, Result, Row, bars, doubt, times, value
from quire.cli.bench.prompts import random_prompts
from quire.cli.parser import UsageError
from quire.core.errors import QuireError, Unsupported
from quire.engine.engine import Engine
from quire.engine.options import QUANTIZE
from quire.executors.backends import ON_GPU_ONLY
from quire.hub import resolve_model

TITLE = "formats of one model"
CHUNK = 256  # tokens that are scored together
MAX_TEXT_BYTES = 1 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Variant:
    """A format, and the engine options that give it."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)


def compare(lab: Lab) -> Result:
    sizes = lab.sizes
    variants, what = find_variants(lab)
    chunk = min(CHUNK, sizes.text_len)
    length = max(chunk, sizes.input_len + sizes.output_len)
    engines = {v.name: _start(lab, v, length, max(chunk, sizes.input_len)) for v in variants}
    ids = _text_ids(lab, variants[0])[: sizes.text_len]
    vocab_size = min(engine.capacity.vocab_size for engine in engines.values())
    if len({engine.capacity.vocab_size for engine in engines.values()}) > 1:
        raise UsageError("the files have different vocabularies", "give formats of one model")
    scores = _score(list(engines.values()), ids, chunk)
    request = random_prompts(1, sizes.input_len, sizes.output_len, vocab_size, lab.seed)

    def one_round(number: int) -> dict[str, tuple[float, float]]:
        done = {}
        for name in in_turn(number, list(engines)):
            trace = lab.run(engines[name], request).requests[0]
            decode = (len(trace.times) - 1) / (trace.times[-1] - trace.times[0])
            done[name] = decode, sizes.input_len / trace.ttft
        return done

    rounds = lab.rounds(one_round)
    rows: list[Row] = []
    for variant, score in zip(variants, scores, strict=True):
        options = replace(lab.options, **variant.changes)
        capacity = engines[variant.name].capacity
        rows.append(
            {
                "side": variant.name,
                "file": _file_bytes(options.model, options.revision) / MIB,
                "weights": capacity.weight_bytes / MIB,
                "kv": capacity.cache_bytes / capacity.num_blocks / options.block_size / 1024,
                "decode": Figure.of([done[variant.name][0] for done in rounds]),
                "prefill": Figure.of([done[variant.name][1] for done in rounds]),
                "perplexity": math.exp(score.loss),
                "divergence": score.divergence,
                "same_top": 100 * score.same_top,
            }
        )
    return Result(
        title=TITLE,
        columns=[
            Column("side", "format"),
            Column("file", "file MiB", 1),
            Column("weights", "weights MiB", 1),
            Column("kv", "KV KiB a token", 1),
            Column("decode", "decode tok/s", 1),
            Column("prefill", "prefill tok/s", 0),
            Column("perplexity", "perplexity", 3),
            Column("divergence", "KL nats", 5),
            Column("same_top", "same top token %", 1),
        ],
        rows=rows,
        conclusion=_conclusion(rows),
        held_fixed=f"the text ({len(ids)} tokens in chunks of {chunk}), the machine, one sequence, prompts of "
        f"{sizes.input_len} and outputs of {sizes.output_len} tokens; {what}",
        notes=[
            f"KL is KL({rows[0]['side']} || format) over the whole vocabulary, the mean of all tokens; perplexity of "
            "so short a text compares formats of one model, and not models",
        ],
        charts=[
            BarChart("decode", "tokens/s, higher is better", bars(rows, "decode")),
            BarChart("weights in memory", "MiB, lower is better", bars(rows, "weights")),
            BarChart(f"KL against {rows[0]['side']}", "nats, lower is better", bars(rows, "divergence")),
        ],
        rounds=len(rounds),
    )


def find_variants(lab: Lab) -> tuple[list[Variant], str]:
    """-> the formats, the one that the others are held against first, and a few words on where they come from."""
    if lab.files:
        if len(lab.files) < 2:
            raise UsageError("one file is given, and a comparison needs two", "give several formats of one model")
        names = [Path(file).name for file in lab.files]
        if len(set(names)) < len(names):
            names = list(lab.files)
        if len(set(names)) < len(names):
            raise UsageError("a file is given twice", "give several formats of one model")
        return [Variant(name, {"model": file}) for name, file in zip(names, lab.files, strict=True)], "files"
    if lab.options.quantization is None and _can_quantize(lab):
        methods = [method for method in QUANTIZE if lab.on_gpu or method not in ON_GPU_ONLY]
        stored = Variant("as stored")
        return [stored, *(Variant(m, {"quantization": m}) for m in methods)], "weights quantized while they are loaded"
    if lab.model.latent:
        raise NotHere("the model is quantized and its cache is latent: there is one format of it", "name several files")
    if lab.options.kv_cache_dtype != "auto":
        raise UsageError(
            "--kv-cache-dtype is given, and the model is compared in formats of its KV cache",
            "leave it out, or name files",
        )
    dtypes = ("bfloat16", "fp8", "int8") if lab.on_gpu else ("float32", "float16", "int8")
    return (
        [Variant(f"KV cache {dtype}", {"kv_cache_dtype": dtype}) for dtype in dtypes],
        "weights as they are stored, which is quantized already, and formats of the KV cache (name several files to "
        "compare formats of weights)",
    )


def _can_quantize(lab: Lab) -> bool:
    """Whether the weights are plain numbers: of safetensors, or of a GGUF file in floats."""
    from quire.weights.formats import stored_format

    if stored_format(lab.checkpoint.config, lab.checkpoint.path) not in ("", "gguf"):
        return False
    try:
        lab.engine(length=16, num_seqs=1, quantization="int8")
    except Unsupported:
        return False
    finally:
        lab.close()
    return True


def _start(lab: Lab, variant: Variant, length: int, max_tokens: int) -> Engine:
    try:
        return lab.engine(length=length, num_seqs=1, max_num_batched_tokens=max_tokens, **variant.changes)
    except QuireError as error:
        error.add_note(f"while `{variant.name}` was loaded")
        raise


def _score(engines: Sequence[Engine], ids: Sequence[int], chunk: int) -> list[Any]:
    from quire.executors.text_score import score_text

    return list(score_text([engine.executor for engine in engines], ids, chunk))


def _text_ids(lab: Lab, first: Variant) -> list[int]:
    """The text as tokens of the first format's tokenizer."""
    from quire.engine.start import load_tokenizer

    options = replace(lab.options, **first.changes)
    tokenizer = load_tokenizer(resolve_model(options.model, revision=options.revision).path, options)
    ids = tokenizer.encode(_text(lab.sizes.text))
    if len(ids) < 16:
        raise UsageError(f"the text has {len(ids)} tokens", "give --text a file of at least 16")
    return list(ids)


def _text(file: str | None) -> str:
    if file is None:
        from pydoc_data.topics import topics  # the language reference that every Python carries

        return "\n\n".join(topic for _, topic in sorted(topics.items()))[:65536]
    try:
        with Path(file).open(encoding="utf-8") as opened:
            return opened.read(MAX_TEXT_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {file} cannot be read: {error}", "give a file of plain text") from error


def _file_bytes(model: str, revision: str | None) -> int:
    path = resolve_model(model, revision=revision).path
    if path.is_file():
        return path.stat().st_size
    kinds = ("*.safetensors", "*.gguf", "*.bin")
    return sum(file.stat().st_size for kind in kinds for file in path.glob(kind))


def _conclusion(rows: Sequence[Row]) -> str:
    first, others = rows[0], rows[1:]
    fastest = max(rows, key=lambda row: value(row, "decode"))
    nearest = min(others, key=lambda row: value(row, "divergence"))
    text = f"{nearest['side']} is nearest to {first['side']} (KL {value(nearest, 'divergence'):.2g}); "
    if fastest is first:
        return text + f"none decodes faster than {first['side']}"
    faster = times(fastest["decode"], first["decode"])
    perplexities = " instead of ".join(f"{value(row, 'perplexity'):.2f}" for row in (fastest, first))
    return (
        text
        + f"{fastest['side']} decodes fastest, {faster} times {first['side']}, with perplexity {perplexities}"
        + doubt((fastest["decode"], first["decode"]))
    )
