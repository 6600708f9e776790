"""Texts a second, beside transformers on the same checkpoint and cores; and how far the vectors are apart.

    python -m benchmarks.embeddings ./all-MiniLM-L6-v2 [--threads 2]

transformers works as sentence-transformers does: texts sorted by length, 32 at a time, padded, fp32."""

import argparse
import json
import pydoc_data.topics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from quire import Embedder

SETS = {"12 words": (64, 12), "60 words": (24, 60), "120 words": (12, 120)}  # texts, words of each
ROUNDS = 3


def make_texts(count: int, num_words: int) -> list[str]:
    """Neighbouring words of the language reference that every Python carries."""
    words = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).split()
    starts = np.random.default_rng(0).integers(0, len(words) - num_words, count)
    return [" ".join(words[start : start + num_words]) for start in starts]


def by_transformers(path: str, threads: int) -> Callable[[list[str]], np.ndarray]:
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()

    @torch.inference_mode()
    def embed(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[Any] = [None] * len(texts)
        for first in range(0, len(order), 32):
            batch = order[first : first + 32]
            given = tokenizer(
                [texts[i] for i in batch], padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            mask = given["attention_mask"][..., None].float()
            pooled = (model(**given).last_hidden_state * mask).sum(1) / mask.sum(1)
            for place, vector in zip(batch, torch.nn.functional.normalize(pooled, dim=-1).numpy(), strict=True):
                vectors[place] = vector
        return np.array(vectors)

    return embed


def measure(embed: Callable[[list[str]], np.ndarray], texts: list[str]) -> tuple[float, np.ndarray]:
    """-> texts a second, the best of some rounds, and the vectors."""
    embed(texts[:8])
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        vectors = embed(texts)
        best = min(best, time.perf_counter() - start)
    return len(texts) / best, vectors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a directory with an encoder that pools by the mean")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    theirs = by_transformers(arguments.model, arguments.threads)
    ours = {
        dtype: Embedder(arguments.model, threads=arguments.threads, dtype=dtype, normalize=True, device="cpu")
        for dtype in ("auto", "float16")
    }
    results: dict[str, Any] = {}
    print(f"{'texts/s':12} {'transformers':>12} {'quire':>8} {'halves':>8} {'1 - cosine':>12} {'halves':>8}")
    for name, (count, words) in SETS.items():
        texts = make_texts(count, words)
        rates, vectors = {}, {}
        rates["transformers"], vectors["transformers"] = measure(theirs, texts)
        for dtype, embedder in ours.items():
            rates[dtype], vectors[dtype] = measure(lambda texts, e=embedder: e.embed(texts, truncate=True), texts)  # type: ignore[misc]
        apart = {d: float(1 - (vectors[d] * vectors["transformers"]).sum(1).min()) for d in ours}
        results[name] = {"texts_per_s": rates, "one_minus_cosine": apart}
        print(
            f"{name:12} {rates['transformers']:12.1f} {rates['auto']:8.1f} {rates['float16']:8.1f} "
            f"{apart['auto']:12.1e} {apart['float16']:8.1e}"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
