"""The combinations of `benchmarks.plan_memory`: model, format, KV cache, lengths, adapters, draft tokens."""

from dataclasses import dataclass
from typing import Any

from quire.planning.shapes import SHAPES


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """`format`: of a GGUF file that is written for the benchmark; None: random weights in bfloat16, or the default
    model's own file."""

    model: str = "dense"
    format: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    users: int = 4
    context: int = 256
    max_num_batched_tokens: int = 512
    num_loras: int = 0
    rank: int = 0
    num_drafts: int = 0

    @property
    def is_dummy(self) -> bool:
        return self.format is None and self.model != "default"

    @property
    def name(self) -> str:
        words = [self.model, self.format or self.quantization or ("own" if self.model == "default" else "bf16")]
        words += [] if self.kv_cache_dtype == "auto" else [self.kv_cache_dtype]
        words += [f"{self.users}x{self.context}"]
        words += [] if self.max_num_batched_tokens == 512 else [f"step {self.max_num_batched_tokens}"]
        words += [f"{self.num_loras} loras of {self.rank}"] if self.num_loras else []
        words += [f"{self.num_drafts} drafts"] if self.num_drafts else []
        return " ".join(words)


def _sized(shape: str, **sizes: Any) -> dict[str, Any]:
    """The family of a shape, in other sizes."""
    return {**SHAPES[shape], **sizes}


def _dense(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    return _sized(
        "llama-3.1-8b", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied,
        head_dim=64, max_position_embeddings=32768,
    )  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "dense": _dense(1024, 3072, 8, 16, 4, 32000, tied=False),
    "mha": _dense(768, 2048, 12, 12, 12, 32000, tied=True),
    "large": _dense(2048, 6144, 12, 32, 8, 64000, tied=False),
    "moe": _sized(
        "qwen3-30b-a3b", hidden_size=768, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=32000, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512,
    ),
    "mla": _sized(
        "deepseek-v3", hidden_size=1024, intermediate_size=2048, num_hidden_layers=5, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=32000, moe_intermediate_size=256, n_routed_experts=16, num_experts_per_tok=4,
        n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=256, kv_lora_rank=256, qk_nope_head_dim=64,
        qk_rope_head_dim=32, v_head_dim=64,
    ),
    "windows": {  # five layers in six have a window
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 768,
        "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 32000, "sliding_window": 256, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 128, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 32768,
    },
    "default": SHAPES["smollm2-135m"],
    **{name: SHAPES[name] for name in ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-4b", "llama-3.1-8b")},
}  # fmt: skip

GGUF_FORMATS = (
    "float32", "float16", "bfloat16", "q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_1", "q3_k_m", "q2_k",
)  # fmt: skip
CPU_CASES = [
    MemoryCase(model="default"),
    MemoryCase(model="default", users=16, context=64),
    MemoryCase(model="default", users=1, context=1024),
    MemoryCase(model="default", kv_cache_dtype="int8", users=2, context=512),
    MemoryCase(model="default", kv_cache_dtype="float32"),
    MemoryCase(model="default", users=8, max_num_batched_tokens=64),
    MemoryCase(model="default", num_loras=2, rank=16, users=32, context=32),
    MemoryCase(model="mha", format="q8_0", num_drafts=4, users=8),
    *(
        MemoryCase(format=name, users=8)
        for name in GGUF_FORMATS
    ),
    *(MemoryCase(quantization=name) for name in (None, "int8", "int4", "nf4")),
    *(MemoryCase(kv_cache_dtype=name, users=2, context=512) for name in ("float16", "bfloat16", "float32", "int8")),
    MemoryCase(users=32, context=32),
    MemoryCase(users=1, context=1024, max_num_batched_tokens=1024),
    MemoryCase(num_loras=4, rank=16, users=32, context=32),
    MemoryCase(format="q4_k_m", num_loras=2, rank=64, users=32, context=32),
    MemoryCase(format="q8_0", num_drafts=3, users=8),
    *(MemoryCase(model="mha", kv_cache_dtype=name, users=8, context=128) for name in ("auto", "int8", "float32")),
    MemoryCase(model="mha", quantization="int4", users=2, context=512),
    MemoryCase(model="mha", format="q4_k_m", users=2, context=512),
    MemoryCase(model="large", quantization="int8", users=4, context=256),
    MemoryCase(model="large", format="q4_k_m", users=4, context=256),
    *(MemoryCase(model="moe", quantization=name) for name in (None, "int8")),
    MemoryCase(model="moe", users=16, context=64, max_num_batched_tokens=256),
    *(MemoryCase(model="mla", quantization=name) for name in (None, "int8")),
    MemoryCase(model="mla", kv_cache_dtype="float32", users=8, context=128),
    MemoryCase(model="windows", users=4, context=2048),
    MemoryCase(model="windows", users=8, context=1024),
    MemoryCase(model="windows", kv_cache_dtype="int8", users=2, context=4096),
    MemoryCase(model="smollm2-135m", quantization="int8", users=4, context=128),
]  # fmt: skip

GPU_CASES = [
    MemoryCase(model="llama-3.1-8b", users=32, context=2048),
    MemoryCase(model="llama-3.1-8b", quantization="fp8", users=64, context=1024),
    MemoryCase(model="llama-3.1-8b", quantization="int4", users=8, context=8192, max_num_batched_tokens=2048),
    MemoryCase(model="llama-3.1-8b", kv_cache_dtype="fp8", users=64, context=2048),
    MemoryCase(model="llama-3.1-8b", kv_cache_dtype="int8", users=16, context=2048),
    MemoryCase(model="llama-3.1-8b", users=8, context=1024, max_num_batched_tokens=8192),
    MemoryCase(model="llama-3.1-8b", users=8, context=1024, num_loras=4, rank=64),
    MemoryCase(model="llama-3.1-8b", users=256, context=512),
    MemoryCase(model="default", users=64, context=2048),
    MemoryCase(model="default", users=8, context=1024, num_drafts=4),
    MemoryCase(model="llama-3.2-1b", users=64, context=2048),
    MemoryCase(model="llama-3.2-1b", quantization="int8", users=16, context=4096),
    MemoryCase(model="llama-3.2-1b", quantization="nf4", users=16, context=4096),
    MemoryCase(model="llama-3.2-1b", format="q4_k_m", users=16, context=2048),
    MemoryCase(model="llama-3.2-1b", format="q6_k", users=16, context=2048),
    MemoryCase(model="llama-3.2-1b", kv_cache_dtype="float32", users=4, context=1024),
    MemoryCase(model="llama-3.2-1b", num_loras=8, rank=16, users=16, context=1024),
    MemoryCase(model="llama-3.2-1b", users=1, context=131072),
    MemoryCase(model="qwen3-4b", users=32, context=2048),
    MemoryCase(model="qwen3-4b", quantization="int4", users=32, context=2048),
    MemoryCase(model="moe", users=64, context=1024),
    MemoryCase(model="moe", quantization="int8", users=64, context=1024),
    MemoryCase(model="mla", users=64, context=1024),
    MemoryCase(model="mla", kv_cache_dtype="fp8", users=64, context=1024),
]
