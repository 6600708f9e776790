"""What drafts give on a GPU: a model's shape with random weights and a head whose drafts are accepted as often as told.

    python -m benchmarks.speculation_gpu [--length 2.9 | --rates 0.79 0.62 0.49] [--drafts 3] [--sequences 1 64 256]
    python -m benchmarks.speculation_gpu --tree-nodes 32 --sequences 1 8      milliseconds of steps with trees

The shape of Llama 3.1 8B and that of an EAGLE-3 head for it. Acceptance is synthetic: the tokens are not the model's,
and their number is; every pass of the model and of the head is computed. One engine after the other, each with the
same requests; a figure is the median of the rounds. Times are those of decoding. With --tree-nodes, trees are beside
chains, and drafts are accepted as they happen to be: hardly ever, so that a token is a step.

Prints a table and ends in one line of JSON."""

import argparse
import gc
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.machine import describe
from quire import LLM, SamplingParams
from quire.hub import DEFAULT_MODEL, resolve_model
from quire.planning.shapes import SHAPES

VOCAB = 49152  # of the default model, whose tokenizer this one has
DRAFT_VOCAB = 32000
PROMPT = 128


def write_target(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    config = {**SHAPES["llama-3.1-8b"], "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def write_head(folder: Path, target: dict[str, Any]) -> None:
    folder.mkdir()
    hidden, inner = target["hidden_size"], target["intermediate_size"]
    heads, kv_heads = target["num_attention_heads"], target["num_key_value_heads"]
    head_dim = hidden // heads
    matrices = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (DRAFT_VOCAB, hidden),
    }
    vectors = ["norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))]
    tensors = {f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) * 0.02 for name, shape in matrices.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in vectors}
    tensors["d2t"] = torch.zeros(DRAFT_VOCAB, dtype=torch.int64)
    tensors["t2d"] = torch.arange(VOCAB) < DRAFT_VOCAB
    save_file(tensors, folder / "model.safetensors")
    layer = {**target, "num_hidden_layers": 1, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "config.json").write_text(json.dumps({**layer, "draft_vocab_size": DRAFT_VOCAB}))


def rate(llm: LLM, sequences: int, tokens: int, number: int) -> float:
    """Decoded tokens a second."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [[100 + (7 * user + 13 * number + 3 * i) % 20_000 for i in range(PROMPT)] for user in range(sequences)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    records = [output.metrics for output in outputs]
    firsts = [record.first_token for record in records if record and record.first_token is not None]
    lasts = [record.last_token for record in records if record and record.last_token is not None]
    return (tokens - 1) * sequences / (max(lasts) - min(firsts))


def measure(folder: Path, args: argparse.Namespace, config: dict[str, Any] | None) -> dict[int, dict[str, float]]:
    llm = LLM(
        str(folder / "target"), device="cuda", load_format="dummy", tokenizer=str(resolve_model(DEFAULT_MODEL).path),
        max_model_len=PROMPT + args.tokens + 16, max_num_seqs=max(args.sequences), quantization=args.quantization,
        kv_cache_memory_bytes=24 << 30, speculative_config=config,
    )  # fmt: skip
    found = {}
    for sequences in args.sequences:
        rate(llm, sequences, args.tokens, 0)  # kernels and graphs
        before = llm.engine.stats()
        rates = [rate(llm, sequences, args.tokens, number) for number in range(1, args.rounds + 1)]
        after = llm.engine.stats()
        accepted = after.accepted_tokens - before.accepted_tokens
        found[sequences] = {
            "rate": median(rates),
            "of drafts": accepted / (sequences * args.tokens * args.rounds),
        }
    return found


def synthetic(args: argparse.Namespace) -> dict[str, Any]:
    """How drafts are accepted. At a length, the last drafts may never be: 2.9 of 3 are rates of 1, 0.9 and 0."""
    told = {"synthetic_acceptance_rates": args.rates} if args.rates else {"synthetic_acceptance_length": args.length}
    return {"rejection_sample_method": "synthetic", **told}


def configs(args: argparse.Namespace, head: str) -> dict[str, dict[str, Any] | None]:
    """The two engines that are compared, by name."""
    chain: dict[str, Any] = {"method": "eagle3", "model": head, "num_speculative_tokens": args.drafts}
    per_batch_size = "num_speculative_tokens_per_batch_size"
    if args.tree_nodes:
        sizes = [1, max(args.sequences)]
        tree = {**chain, "tree_nodes": args.tree_nodes, per_batch_size: [[*sizes, args.tree_nodes]]}
        return {"chains": {**chain, per_batch_size: [[*sizes, args.drafts]]}, "trees": tree}
    accepted = synthetic(args)
    fixed = {per_batch_size: [[1, max(args.sequences), args.drafts]]} if args.fixed else {}
    return {"without": None, "with": {**chain, **accepted, **fixed}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=float, default=2.9, help="tokens of a step, on average")
    parser.add_argument("--rates", type=float, nargs="+", help="instead: that all drafts up to each are accepted")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fixed", action="store_true", help="drafts at all sizes, whether they pay or not")
    parser.add_argument("--tree-nodes", type=int, default=0, help="compare trees of so many drafts with chains")
    parser.add_argument("--quantization", choices=["fp8"])
    args = parser.parse_args()
    result: dict[str, dict[int, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_head(folder / "head", write_target(folder / "target"))
        for kind, given in configs(args, str(folder / "head")).items():
            result[kind] = measure(folder, args, given)
            gc.collect()
            torch.cuda.empty_cache()
    first, second = result
    print(f"{'sequences':>9} {first:>9} {second:>9} {'times':>6} {'of drafts':>10} {'ms a step':>16}")
    for sequences in args.sequences:
        both = result[first][sequences], result[second][sequences]
        steps = [1e3 * sequences / (one["rate"] * (1 - one["of drafts"])) for one in both]
        print(
            f"{sequences:9} {both[0]['rate']:9.0f} {both[1]['rate']:9.0f} {both[1]['rate'] / both[0]['rate']:6.2f} "
            f"{both[1]['of drafts']:10.0%} {steps[0]:7.2f} {steps[1]:8.2f}"
        )
    print(json.dumps({"benchmark": "speculation_gpu", "machine": describe(), **vars(args), **result}))


if __name__ == "__main__":
    main()
