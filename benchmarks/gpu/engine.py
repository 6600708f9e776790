"""The whole engine on a GPU with random weights: how long a token takes, a prompt, and many requests at once.

    python -m benchmarks.gpu.engine [--shape qwen3-30b-a3b] [--quantization w4a8] [--requests 1000]
    python -m benchmarks.gpu.engine --requests 1000 --max-num-seqs 400 --max-model-len 2048    nothing is preempted
    python -m benchmarks.gpu.engine --shape qwen3-next-quarter --short    a hybrid: decode of 1 and 64, a long prompt
    python -m benchmarks.gpu.engine --stored q4_k_m                       weights in the types of a GGUF file
    python -m benchmarks.gpu.engine --shape gpt-oss-20b-mxfp4 --requests 1000 --kv-cache-dtype fp8

The shape is Llama-3.1-8B's, or that of an MoE model or a hybrid. Times are of steps, from the end of one to the end of
the next, medians after a warm-up. A gap is the time in which the GPU has nothing to do between a step's tokens and the
next forward pass. The share is that of an H200's bandwidth or bf16 operations, whichever bounds the step as `quire
plan` counts it."""

import argparse
import json
import statistics
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.stored_checkpoint import StoredExecutor
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 102400,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
}


GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "vocab_size": 201088,
}
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
SHAPES = {
    "llama-8b": LLAMA_8B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-20b-mxfp4": {**GPT_OSS_20B, **MXFP4},  # as it is published
    "qwen3-next": QWEN3_NEXT,  # 80B-A3B: with --quantization int4
    "qwen3-next-half": {**QWEN3_NEXT, "num_hidden_layers": 24},  # in bf16
    "qwen3-next-quarter": {**QWEN3_NEXT, "num_hidden_layers": 12},  # in bf16, loaded in half the time
}
BANDWIDTH, BF16_RATE = 4.8e12, 989e12  # of an H200


def least_seconds(shape: dict[str, Any], kv_dtype: str, num_seqs: int, new_tokens: int, context: int) -> float | None:
    """Of a step on an H200, with weights as config.json says they are stored; None where the package that counts it is
    not built."""
    if find_spec("quire._native") is None:
        return None
    from quire.planning.packed_bytes import GpuFormat
    from quire.planning.planned_model import plan_model
    from quire.planning.shape_checkpoint import quantized_checkpoint, shape_checkpoint
    from quire.planning.step_counter import StepShape
    from quire.planning.stored_types import config_format
    from quire.weights.config import CheckpointConfig

    config = CheckpointConfig(Path("config.json"), shape)
    stored = config_format(config, config.source.parent)
    checkpoint = quantized_checkpoint(config, stored) if stored else shape_checkpoint(config)
    model = plan_model("shape", checkpoint, GpuFormat())
    count = model.step(StepShape(num_seqs, new_tokens, context), model.kv_spec(kv_dtype)).count.total
    return max(count.nbytes / BANDWIDTH, count.flops / BF16_RATE)


class Bench:
    def __init__(
        self,
        options: dict[str, Any],
        max_model_len: int,
        max_num_seqs: int,
        max_tokens: int,
        shape: str = "llama-8b",
        stored: str | None = None,
    ) -> None:
        self._shape, self._max_num_seqs = SHAPES[shape], max_num_seqs
        is_quantized = stored is not None or "quantization_config" in self._shape
        self._kv_dtype = options["kv_cache_dtype"]
        self._counted = options["quantization"] is None and stored is None
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name)
        (path / "config.json").write_text(json.dumps(self._shape))
        begin = time.perf_counter()
        executor_options = ExecutorOptions(
            backend="cuda",
            load_format="dummy",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            **options,
        )
        engine_options = EngineOptions(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens, enable_prefix_caching=False
        )
        executor = LocalExecutor(path, executor_options)
        if is_quantized:
            executor = StoredExecutor(path, executor_options)
            executor.stored = stored
        self.engine = Engine(executor, engine_options)
        self.started = time.perf_counter() - begin
        self._ids = np.random.default_rng(0)
        self._count = 0
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # around the work of each step
        self._mark(executor)

    def _mark(self, executor: LocalExecutor) -> None:
        """Let every step record when its work begins and ends on the GPU."""
        runner = executor._runner
        assert runner is not None
        run, begin = runner.program.run, runner.sampler.begin

        def marked_run(batch: Any) -> Any:
            start = torch.cuda.Event(enable_timing=True)
            start.record()
            logits, end = run(batch), torch.cuda.Event(enable_timing=True)
            end.record()  # again behind the sampler, if anything is drawn
            self._marks.append((start, end))
            return logits

        def marked_begin(*given: Any) -> Any:
            finish = begin(*given)
            self._marks[-1][1].record()
            return finish

        runner.program.run, runner.sampler.begin = marked_run, marked_begin  # type: ignore[method-assign]

    def _gaps(self) -> list[float]:
        """Milliseconds between the steps of the last round."""
        torch.cuda.synchronize()
        return [max(end.elapsed_time(start), 0.0) for (_, end), (start, _) in pairwise(self._marks)]

    def submit(self, num_prompt: int, num_new: int) -> None:
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, seed=0)
        ids = self._ids.integers(0, self._shape["vocab_size"], num_prompt).tolist()
        self.engine.submit(Request(id=str(self._count), prompt_ids=ids, params=params))

    def steps(self) -> list[tuple[int, float, float]]:
        """Until all is done: tokens, seconds of the step, seconds of those in the scheduler."""
        timings = []
        self._marks.clear()
        last = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
            if (record := self.engine.record) is None or record.num_tokens == 0:
                continue
            now = time.perf_counter()
            timings.append((record.num_tokens, now - last, record.schedule_seconds + record.update_seconds))
            last = now
        return timings

    def _share(self, seconds: float, num_seqs: int, new_tokens: int, context: int) -> str:
        if not self._counted:
            return ""
        least = least_seconds(self._shape, self._kv_dtype, num_seqs, new_tokens, context)
        return "" if least is None else f", {least / seconds:.0%} of the roofline"

    def decode(self, batch: int, context: int, num_new: int = 40) -> None:
        for _ in range(batch):
            self.submit(context, num_new)
        times = [(seconds, host) for tokens, seconds, host in self.steps() if tokens == batch][5:]
        step = statistics.median(seconds for seconds, _ in times)
        host = statistics.median(host for _, host in times)
        rate = batch / step
        print(
            f"decode {batch:4} x {context:6}: {1e3 * step:8.3f} ms a step, {rate:9.0f} tok/s, "
            f"scheduler {1e3 * host:.3f} ms, gap {statistics.median(self._gaps()[5:]):.3f} ms"
            f"{self._share(step, batch, 1, context + num_new // 2)}"
        )

    def prefill(self, length: int) -> None:
        times = []
        for _ in range(4):
            self.submit(length, 1)
            times.append(sum(seconds for _, seconds, _ in self.steps()))
        best = min(times)
        matrices = 2 * 6.98e9 * length  # all but the head, of which one row is wanted
        attention = 4 * 32 * 32 * 128 * length * length / 2
        rate = f", {(matrices + attention) / best / 1e12:.0f} TFLOP/s" if self._shape is LLAMA_8B else ""
        share = self._share(best, 1, length, length)
        print(f"prefill {length:6}: {1e3 * best:8.2f} ms, {length / best:9.0f} tok/s{rate}{share}")

    def throughput(self, requests: int, num_prompt: int, num_new: int) -> None:
        for _ in range(requests):
            self.submit(num_prompt, num_new)
        begin = time.perf_counter()
        steps = self.steps()
        seconds = time.perf_counter() - begin
        host = sum(host for _, _, host in steps)
        print(
            f"{requests} requests of {num_prompt}/{num_new}: {seconds:.1f} s, {requests * num_new / seconds:.0f} "
            f"output tok/s, {len(steps)} steps, scheduler {host:.1f} s, gaps {sum(self._gaps()) / 1e3:.1f} s"
        )
        for name, kind in (("with prompts", True), ("decoding", False)):
            times = [seconds for tokens, seconds, _ in steps if (tokens > self._max_num_seqs) == kind]
            print(
                f"    {len(times)} steps {name}: {sum(times):.1f} s, median {1e3 * statistics.median(times):.1f} ms, "
                f"longest {1e3 * max(times):.0f} ms"  # of seconds: something was compiled
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4", "w8a8", "w4a8"))
    parser.add_argument("--stored", metavar="FORMAT", help="of the weights, as `quire plan --format` names it: q4_k_m")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--requests", type=int, default=0, help="of 1000 tokens in and 1000 out")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=20000)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument(
        "--short", action="store_true", help="decode of 1 and 64 sequences, and a prompt of 8192 tokens"
    )
    args = parser.parse_args()
    options = {
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "gpu_memory_utilization": args.gpu_memory_utilization,
    }
    bench = Bench(options, args.max_model_len, args.max_num_seqs, args.max_tokens, args.shape, args.stored)
    print(f"started in {bench.started:.1f} s; {bench.engine.capacity}")
    bench.decode(1, 16, 8)
    bench.decode(1, 128, 100)
    if args.short:
        bench.decode(64, 128)
        bench.prefill(8192)
        return
    for batch in (8, 32, 64, 128, 256):
        bench.decode(batch, 128)
    if args.max_model_len > 16128:
        bench.decode(32, 16000, 128)  # the first of them wait for the prompts of the others
    for length in (64, 512, 1024, 2048, 8192):
        if length < args.max_model_len:
            bench.prefill(length)
    if args.requests:
        bench.throughput(args.requests, 1000, 1000)


if __name__ == "__main__":
    main()
