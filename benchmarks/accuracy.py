"""How closely Quire agrees with llama.cpp and with transformers on the same GGUF file.

    python -m benchmarks.accuracy [MODEL.gguf] --llama-python .venv-llama/bin/python

Greedy tokens: the share of positions, over several prompts, before the first difference. Perplexity: over chunks of
prose (the language reference that every Python carries), every token after the first of its chunk. transformers runs
in fp32 on the dequantized weights, so it is the truth that both engines' integer arithmetic is held against."""

import argparse
import json
import math
import pydoc_data.topics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from quire import LLM, SamplingParams
from quire.hub import resolve_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The three laws of motion were described by",
    "To make bread you need",
    "In 1969, astronauts",
    "A prime number is a number that",
]
CHUNK = 512


def make_job(llm: LLM, num_chunks: int, max_tokens: int) -> dict[str, Any]:
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    ids = llm.tokenizer.encode(text[: num_chunks * CHUNK * 6], add_special_tokens=False)
    chunks = [ids[i * CHUNK : (i + 1) * CHUNK] for i in range(num_chunks)]
    assert len(chunks[-1]) == CHUNK, "the text is too short for that many chunks"
    return {"prompts": [llm.tokenizer.encode(p) for p in PROMPTS], "chunks": chunks, "max_tokens": max_tokens}


def by_quire(llm: LLM, job: dict[str, Any]) -> dict[str, Any]:
    greedy = llm.generate(job["prompts"], SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True))
    scored = llm.generate(job["chunks"], SamplingParams(max_tokens=1, prompt_logprobs=0))
    losses = []
    for result in scored:
        for token, row in zip(result.prompt_token_ids[1:], (result.prompt_logprobs or [])[1:], strict=True):
            assert row is not None
            losses.append(-row[token].logprob)
    return {"greedy": [result.outputs[0].token_ids for result in greedy], "loss": math.fsum(losses) / len(losses)}


def by_llama(python: str, path: str, job: dict[str, Any]) -> dict[str, Any]:
    words = [python, "-m", "benchmarks.peers.llama_cpp_accuracy", path]
    done = subprocess.run(words, input=json.dumps(job), cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_transformers(path: Path, job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from benchmarks.reference import reference_model

    model = reference_model(path)
    greedy, losses = [], []
    with torch.no_grad():
        for prompt in job["prompts"]:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job["max_tokens"],
                min_new_tokens=job["max_tokens"],
                do_sample=False,
                pad_token_id=0,
            )
            greedy.append(out[0, len(prompt) :].tolist())
        for chunk in job["chunks"]:
            logprobs = model(torch.tensor([chunk])).logits[0, :-1].double().log_softmax(-1)
            losses.append(-logprobs.gather(1, torch.tensor(chunk[1:])[:, None]).mean().item())
    return {"greedy": greedy, "loss": math.fsum(losses) / len(losses)}


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of tokens before the first difference of each continuation."""
    same = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(one, other, strict=True)
    ]
    return sum(same) / sum(len(a) for a in one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    path = resolve_model(args.model).path
    llm = LLM(path, enable_prefix_caching=False)
    job = make_job(llm, args.chunks, args.max_tokens)
    found = {"transformers fp32": by_transformers(path, job), "quire": by_quire(llm, job)}
    if args.llama_python:
        found["llama.cpp"] = by_llama(args.llama_python, str(path), job)

    truth = found["transformers fp32"]
    print(
        f"{'':20}{'perplexity':>12}{'greedy tokens as':>26}{'greedy tokens as':>20}\n"
        f"{'':20}{'':12}{'transformers':>26}{'quire':>20}"
    )
    for name, result in found.items():
        shares = [agreement(result["greedy"], found[other]["greedy"]) for other in ("transformers fp32", "quire")]
        print(f"{name:20}{math.exp(result['loss']):12.4f}{shares[0]:26.1%}{shares[1]:20.1%}")
    summary = {name: math.exp(result["loss"]) for name, result in found.items()}
    agreed = {name: agreement(result["greedy"], truth["greedy"]) for name, result in found.items()}
    print(
        json.dumps(
            {"benchmark": "accuracy", "model": path.name, "perplexity": summary, "greedy_as_transformers": agreed}
        )
    )


if __name__ == "__main__":
    main()
