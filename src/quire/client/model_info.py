"""What is told of a model whose engine is ready."""

from pathlib import Path

from quire.client.generation_config import GenerationConfig
from quire.client.service import ModelInfo
from quire.engine.messages import Ready
from quire.engine.options import EngineOptions
from quire.engine.start import uses_gpu


def model_info(options: EngineOptions, name: str, path: Path, ready: Ready, generation: GenerationConfig) -> ModelInfo:
    """`name`: the model's own."""
    capacity = ready.capacity
    return ModelInfo(
        name=options.served_model_name or name,
        max_model_len=capacity.max_model_len,
        vocab_size=capacity.vocab_size,
        weight_bytes=capacity.weight_bytes,
        cache_bytes=capacity.cache_bytes,
        num_blocks=capacity.num_blocks,
        block_size=options.block_size,
        task=ready.task,
        dimensions=ready.dimensions,
        path=str(path),
        generation=generation,
        structured_defaults=options.structured_defaults,
        max_requests=options.max_num_seqs + options.max_queued_requests,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        on_gpu=options.device == "cuda" if options.distributed_executor_backend == "ray" else uses_gpu(options.device),
    )
