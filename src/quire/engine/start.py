"""From options to an executor: the one place that chooses where a model is computed."""

import logging
import os
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from quire.core.encode_request import Task
from quire.core.errors import BadRequest, Unsupported
from quire.engine.options import ROPE, EngineOptions
from quire.executors.options import ExecutorOptions
from quire.executors.protocol import Executor
from quire.hub import resolve_model

if TYPE_CHECKING:
    from quire.executors.encoder import EncoderExecutor
    from quire.runtime.pooling import PoolingMode
    from quire.runtime.score_head import ScoreTokens
    from quire.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("quire.engine")

_PROBE = "Is it 1,024 km?\n    def f(x): return x ** 2  # naïve Übung, 東京, Привет 🙂"


def tokenizer_path(path: Path, options: EngineOptions) -> Path:
    """Where the tokenizer of a checkpoint is."""
    return Path(options.tokenizer) if options.tokenizer else path


def load_tokenizer(path: Path, options: EngineOptions) -> "Tokenizer":
    from quire.text.chat.builtin_templates import read_chat_template
    from quire.text.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_path(path, options))
    if options.chat_template is not None:
        tokenizer.chat_template = read_chat_template(options.chat_template)
    return tokenizer


def new_executor(path: Path, options: EngineOptions, dies_with_ranks: bool = False) -> Executor:
    """`dies_with_ranks`: this process ends when a rank's does, for a parent that starts it again."""
    from quire.engine.memory_check import file_bytes, planned_weight_bytes
    from quire.executors.local import LocalExecutor

    if options.task in ("embed", "score"):
        raise Unsupported(f"task is {options.task}, and this engine generates text", "use Embedder, or leave task out")
    given = executor_options(options)
    cpu_layers = num_cpu_layers(path, options, given)
    if cpu_layers is None:  # all of them
        given, cpu_layers = replace(given, backend="native"), 0
    if given.speculation and given.speculation.model:
        draft = resolve_model(given.speculation.model).path
        if not given.speculation.head:  # a head has no tokenizer
            check_is_model(draft)
            check_same_vocabulary(path, draft, options)
        given = replace(given, speculation=replace(given.speculation, model=str(draft)))
    if options.stage_addresses:  # this machine has a part of the weights
        given = replace(given, weight_bytes=file_bytes(path) // options.num_stages)
    else:
        given = replace(given, weight_bytes=planned_weight_bytes(path, given))
    if given.offload_weight_bytes:
        from quire.executors.offload import OffloadExecutor

        return OffloadExecutor(path, given)
    if cpu_layers:
        from quire.executors.cpu_layers import CpuLayersExecutor

        return CpuLayersExecutor(path, given, cpu_layers)
    if options.num_stages > 1:
        from quire.executors.pipeline.leader import PipelineExecutor

        return PipelineExecutor(path, given, options.num_stages, dies_with_ranks, options.stage_addresses)
    if options.tensor_parallel_size == 1:
        return LocalExecutor(path, given)
    from quire.executors.ranks.leader import RanksExecutor

    return RanksExecutor(path, given, options.tensor_parallel_size, dies_with_ranks)


def num_cpu_layers(path: Path, options: EngineOptions, given: ExecutorOptions) -> int | None:
    """Layers that the CPU computes beside a GPU; None: all of them."""
    if not options.cpu_layers and options.gpu_layers is None:
        return 0
    if not given.on_gpu:
        log.warning("cpu_layers and gpu_layers have no effect without a GPU: all layers are on the CPU")
        return 0
    if options.gpu_layers is None:
        return options.cpu_layers
    if options.gpu_layers == 0:
        return None
    from quire.models.registry import family, read_model_config
    from quire.weights.checkpoint import open_checkpoint

    config = open_checkpoint(path).config
    return max(read_model_config(family(config.architecture), config).layers - options.gpu_layers, 0)


def new_encoder(
    path: Path,
    options: EngineOptions,
    pooling: "PoolingMode | None" = None,
    normalize: bool | None = None,
    tokens: "ScoreTokens | None" = None,
    dies_with_ranks: bool = False,
) -> "EncoderExecutor":
    """Where a model that encodes texts is computed. `tokens`: see `score_tokens`. `dies_with_ranks`: as in
    `new_executor`."""
    given = executor_options(options)
    if options.rope is not None:
        raise Unsupported("RoPE options are for models that generate", f"leave out {', '.join(ROPE)}")
    if options.num_stages > 1:
        raise Unsupported("several stages are for models that generate", "leave out pipeline_parallel_size")
    cpu_layers = num_cpu_layers(path, options, given)
    if cpu_layers or given.offload_weight_bytes:
        raise Unsupported(
            "layers on the CPU and offloaded weights are for models that generate",
            "leave out cpu_layers, gpu_layers and offload_weights",
        )
    if cpu_layers is None:
        given = replace(given, backend="native")
    if options.tensor_parallel_size == 1:
        from quire.executors.encoder import EncoderExecutor

        return EncoderExecutor(path, given, pooling, normalize, tokens)
    from quire.executors.ranks.encoder import RanksEncoder

    return RanksEncoder(path, given, options.tensor_parallel_size, pooling, normalize, tokens, dies_with_ranks)


# Keys that config.json has of a head that drafts from hidden states -> its method.
HEAD_KEYS = {"draft_vocab_size": "eagle3", "speculators_config": "eagle3", "medusa_num_heads": "medusa"}


def check_is_model(draft: Path) -> None:
    from quire.weights.huggingface import read_config

    config = read_config(draft) if draft.is_dir() else ()
    if method := next((method for key, method in HEAD_KEYS.items() if key in config), None):
        raise BadRequest(
            f"{draft.name} is a head, and no model",
            f'say its method: {{"method": "{method}", "model": "{draft}"}}',
            param="speculative_config",
        )


def check_same_vocabulary(path: Path, draft: Path, options: EngineOptions) -> None:
    """Draft tokens are ids: they must mean the same to both models."""
    target, other = load_tokenizer(path, options), load_tokenizer(draft, replace(options, tokenizer=None))
    if target.vocab_size != other.vocab_size or target.encode(_PROBE) != other.encode(_PROBE):
        raise BadRequest(
            f"the draft model {draft.name} has another vocabulary ({other.vocab_size:,} tokens, and {path.name} has "
            f"{target.vocab_size:,})",
            "draft with a smaller model of the same family",
            param="speculative_config",
        )


def executor_options(options: EngineOptions) -> ExecutorOptions:
    """The fields that executors share with the engine have the same names."""
    shared = {field.name for field in fields(ExecutorOptions)} - {
        "backend",
        "swap_space_bytes",
        "offload_bytes",
        "kv_disk_bytes",
        "max_loras",
        "weight_bytes",
        "offload_weight_bytes",
        "verifies_drafts",
        "max_draft_tokens",
    }
    on_gpu = uses_gpu(options.device)
    return ExecutorOptions(
        backend="cuda" if on_gpu else "native",
        max_draft_tokens=options.max_num_batched_tokens if on_gpu and options.speculation else 0,
        swap_space_bytes=int(options.swap_space * 2**30),
        offload_bytes=int(options.kv_offloading_size * 2**30),
        kv_disk_bytes=int(options.kv_disk_size * 2**30),
        max_loras=options.num_loras,
        offload_weight_bytes=int(options.offload_weights * 2**30),
        **{name: getattr(options, name) for name in shared},
    )


def task_of(path: Path, options: EngineOptions) -> Task:
    """What the model is served for: what it was made for, unless another task is asked for."""
    if options.task != "auto":
        return cast(Task, options.task)
    from quire.models.registry import purpose
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.dummy_checkpoint import DummyCheckpoint
    from quire.weights.sentence_modules import read_sentence_modules

    opened = DummyCheckpoint(path) if options.load_format == "dummy" else open_checkpoint(path)
    task = purpose(opened.config.architecture)
    return "score" if task == "generate" and read_sentence_modules(opened.path).score_tokens else task


def score_tokens(path: Path, tokenizer: "Tokenizer") -> tuple[int, int] | None:
    """The answers by whose logits a decoder is to score pairs; None: the checkpoint has a classifier, or names them, or
    is an encoder."""
    from quire.models.registry import BIDIRECTIONAL, decoder_of, purpose
    from quire.text.pair_template import answer_tokens
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.sentence_modules import read_sentence_modules

    checkpoint = open_checkpoint(path)
    architecture = checkpoint.config.architecture
    if decoder_of(architecture) is None or architecture in BIDIRECTIONAL or purpose(architecture) == "score":
        return None
    return None if read_sentence_modules(checkpoint.path).score_tokens else answer_tokens(tokenizer)


def uses_gpu(device: str) -> bool:
    """auto: where there is a driver, torch to reach it with, and a GPU that this process may see. Nothing is imported
    to find out."""
    driver, torch = Path("/dev/nvidiactl").exists(), find_spec("torch") is not None and find_spec("triton") is not None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if device == "cuda":
        if hidden:
            raise Unsupported("CUDA_VISIBLE_DEVICES hides all GPUs", "unset it, or use device cpu")
        if not driver:
            raise Unsupported("there is no NVIDIA driver on this machine", "use device cpu")
        if not torch:
            raise Unsupported("computing on a GPU needs torch and triton", "pip install 'quire[gpu]'")
    return device != "cpu" and driver and torch and not hidden
