"""An engine on a GPU with a random Llama, what it says, and what transformers thinks of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor
from quire.executors.protocol import Executor

VOCAB, MAX_LEN, BLOCK = 1000, 384, 16
LAYERS, KV_HEADS, GROUP = 2, 2, 4
NUM_NEW = 24

Tokens = dict[str, list[int]]  # by request
NewExecutor = Callable[[Path, EngineOptions], Executor]


def save_llama(folder: Path, head_dim: int) -> Path:
    """A random one, there."""
    torch.manual_seed(head_dim)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=KV_HEADS * GROUP * head_dim,
        intermediate_size=1344,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def engine(path: Path, new_executor: NewExecutor = new_executor, **given: Any) -> Iterator[Engine]:
    options = EngineOptions(
        model=str(path),
        device="cuda",
        **{
            "max_model_len": MAX_LEN,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 1024,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 256 << 20,
            **given,
        },
    )
    made = Engine(new_executor(path, options), options)
    try:
        yield made
    finally:
        made.stop()
        del made
        torch.cuda.empty_cache()


def run(served: Engine, wanted: Sequence[Request]) -> Tokens:
    for request in wanted:
        served.submit(request)
    tokens: Tokens = {request.id: [] for request in wanted}
    while served.has_work:
        for event in served.step():
            assert event.finish_reason in (None, "length"), event.reason
            tokens[event.request_id] += event.tokens
    assert all(len(found) == NUM_NEW for found in tokens.values())
    return tokens


def missed(
    exact: LlamaForCausalLM, rounded: LlamaForCausalLM | None, ids: list[int], num_new: int, times: float = 2
) -> tuple[Any, Any]:
    """How far below the best token each of the last `num_new` lies, and what rounding may account for: so many times
    what it does to transformers' own logits."""
    tokens = torch.tensor([ids], device="cuda")
    with torch.inference_mode():
        logits = exact(tokens).logits[0, -num_new - 1 : -1].double()
        noise = torch.full((num_new,), 1e-3, dtype=torch.float64, device="cuda")
        if rounded is not None:
            noise += times * (rounded(tokens).logits[0, -num_new - 1 : -1].double() - logits).abs().amax(-1)
    chosen = logits.gather(1, tokens[0, -num_new:, None])[:, 0]
    return logits.amax(-1) - chosen, noise


def in_halves(model: LlamaForCausalLM, dtype: str) -> LlamaForCausalLM | None:
    """As transformers computes in 16 bits; the frequencies of its positions stay fp32, as when it loads a model."""
    if dtype == "float32":
        return None
    model = model.to("cuda", getattr(torch, dtype))
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to("cuda")
    return model


def check_tokens(tokens: Tokens, wanted: Sequence[Request], exact: Any, rounded: Any, times: float = 2) -> None:
    below, allowed = zip(
        *(missed(exact, rounded, [*r.prompt_ids, *tokens[r.id]], len(tokens[r.id]), times) for r in wanted), strict=True
    )
    margins, bounds = torch.cat(below), torch.cat(allowed)
    assert (margins <= bounds).all(), f"a token lies {(margins / bounds).max():.2f} times what rounding may do below"
    best = float((margins == 0).double().mean())
    assert best > (0.99 if rounded is None else 0.7), f"only {best:.0%} of the tokens are transformers' own"
