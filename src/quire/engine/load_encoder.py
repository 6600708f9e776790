"""From options to a model that reads whole texts: an encoder, or a decoder without its head."""

from dataclasses import replace
from typing import cast

from quire.engine.options import EngineOptions
from quire.engine.start import refuse_gpu_options, uses_gpu
from quire.models.config import ModelConfig
from quire.models.registry import Purpose, decoder_of, family
from quire.ops.opset import OpSet
from quire.runtime.encoder import EncoderRunner
from quire.runtime.headless import load_headless
from quire.runtime.kv import longest
from quire.weights.checkpoint import Checkpoint
from quire.weights.decoder_body import as_decoder


def load_encoder(
    checkpoint: Checkpoint, options: EngineOptions, most: int | None
) -> tuple[ModelConfig, int, EncoderRunner]:
    """-> what the model is, tokens of a text at most, and what runs texts. `most`: what the checkpoint says of texts,
    which counts unless a length is asked for."""
    ops = _ops(options)
    decoder = decoder_of(checkpoint.config.architecture)
    if decoder is not None:
        checkpoint = as_decoder(checkpoint, decoder)
    generators: tuple[Purpose, ...] = ("generate",) if decoder is not None else ()
    module = family(checkpoint.config.architecture, *generators, "embed", "score")
    config = module.config(checkpoint.config)
    length = longest(config, options.max_model_len)
    if options.max_model_len is None and most is not None:
        length = min(length, most)
    if decoder is not None:
        model = load_headless(ops, module, checkpoint, length)
    else:
        model = module.load(ops, checkpoint, config, length)
    runner = EncoderRunner(
        ops,
        model,
        max_tokens=options.max_num_batched_tokens,
        max_rows=options.max_num_seqs,
        max_model_len=length,
        kv_dtype=_kv_dtype(options),
    )
    return config, length, runner


def _ops(options: EngineOptions) -> OpSet:
    if uses_gpu(options.device):
        from quire.ops.gpu.opset import GpuOps

        return GpuOps(
            dtype="bfloat16" if options.dtype == "auto" else options.dtype,
            quantization=options.quantization,
            batch_invariant=options.batch_invariant,
            graphs=False,  # these are of steps in which every sequence has one token
        )
    halves = options.dtype == "float16"
    refuse_gpu_options(replace(options, dtype="auto") if halves else options)
    from quire.ops.native import NativeOps

    return cast(
        OpSet, NativeOps(options.threads, options.quantization, halves)
    )  # what is missing is in the recorder of a forward pass


def _kv_dtype(options: EngineOptions) -> str:
    if options.kv_cache_dtype != "auto" or not uses_gpu(options.device):
        return options.kv_cache_dtype
    return "bfloat16" if options.dtype == "auto" else options.dtype
