"""What rounding activations to 8 bits costs: LLM.int8() beside groups of 32, with the activations of a real model.

    python -m benchmarks.outliers [MODEL.gguf]

Weights are rounded as LLM.int8() stores them, 8 bits with a scale for each output. The products of these weights with
activations as they are, in fp32, are what every way is held against; an error is the norm of the difference as a share
of the norm of the product. `rows`: a scale for each token. `columns apart`: the same, but inputs that reach 6 anywhere
are multiplied in fp16: LLM.int8(). `groups`: a scale for every 32 inputs of a token, as Quire's CPU kernels have them.
`groups apart`: the same, but a token's inputs that reach 6 are multiplied as they are, which Quire does for LLM.int8().

Small models have few outliers. So everything is done again with six inputs of every matrix enlarged: as many columns,
and about as large, as models of 6.7 billion weights and more have."""

import argparse
import json
import pydoc_data.topics
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.reference import reference_model
from quire import LLM
from quire.hub import resolve_model

THRESHOLD = 6.0  # bitsandbytes' default
GROUP = 32
COLUMNS, LARGEST = 6, 60.0


def rounded(x: Tensor) -> Tensor:
    """To 8 bits, with a scale for each run of the last dimension."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, x)


def columns_apart(x: Tensor, w: Tensor) -> Tensor:
    apart = (x.abs() >= THRESHOLD).any(0)
    rest = rounded(x.masked_fill(apart, 0)) @ w.T
    return rest + x[:, apart].half().float() @ w[:, apart].half().float().T


def groups(x: Tensor, w: Tensor) -> Tensor:
    return rounded(x.unflatten(-1, (-1, GROUP))).flatten(-2) @ w.T


def groups_apart(x: Tensor, w: Tensor) -> Tensor:
    apart = x.abs() >= THRESHOLD
    return groups(x.masked_fill(apart, 0), w) + x.masked_fill(~apart, 0) @ w.T


WAYS = {
    "rows": lambda x, w: rounded(x) @ w.T,
    "columns apart": columns_apart,
    "groups": groups,
    "groups apart": groups_apart,
}


def enlarged(x: Tensor) -> Tensor:
    """A few columns are made as large as outliers are."""
    x = x.clone()
    columns = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(x.shape[1]))[:COLUMNS]
    x[:, columns] *= LARGEST / x[:, columns].abs().amax(0).clamp_min(1e-6)
    return x


def inputs(model: Any, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Of every matrix of the layers: what it is multiplied with, and its weights in 8 bits."""
    found: list[tuple[Tensor, Tensor]] = []

    def take(module: Any, args: tuple[Tensor, ...]) -> None:
        found.append((args[0][0].float(), rounded(module.weight.float())))

    matrices = [part for part in model.model.layers.modules() if isinstance(part, torch.nn.Linear)]
    hooks = [matrix.register_forward_pre_hook(take) for matrix in matrices]
    with torch.inference_mode():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    path = Path(resolve_model(args.model).path)
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    ids = LLM(str(path)).tokenizer.encode(text[: args.tokens * 8], add_special_tokens=False)[: args.tokens]
    matrices = inputs(reference_model(path), ids)
    result: dict[str, Any] = {"matrices": len(matrices), "tokens": len(ids)}
    for kind, change in (("as they are", lambda x: x), ("enlarged", enlarged)):
        errors: dict[str, list[float]] = {way: [] for way in WAYS}
        outliers, of_tokens = [], []
        for plain, w in matrices:
            x = change(plain)
            truth = x @ w.T
            apart = x.abs() >= THRESHOLD
            outliers.append(int(apart.any(0).sum()))
            of_tokens.append(float(apart.float().sum(1).mean()))
            for way, product in WAYS.items():
                errors[way].append(float((product(x, w) - truth).norm() / truth.norm()))
        less = [ours / theirs for ours, theirs in zip(errors["groups apart"], errors["columns apart"], strict=True)]
        result[kind] = {
            "outlier columns": {"median": median(outliers), "most": max(outliers)},
            "outliers of a token": {"median": median(of_tokens), "most": max(of_tokens)},
            "error": {way: {"median": median(of), "most": max(of)} for way, of in errors.items()},
            "groups apart to columns apart": {"least": min(less), "median": median(less), "most": max(less)},
        }
        print(f"{kind}: {median(outliers):.0f} columns reach {THRESHOLD:.0f} (median), {max(outliers)} at most")
        print(f"  a token has {median(of_tokens):.2f} outliers on average (median), {max(of_tokens):.2f} at most")
        for way, of in errors.items():
            print(f"  {way:14} {median(of):8.2%} (median) {max(of):8.2%} (most)")
        print(
            f"  groups apart err {median(less):.2f} times as much as columns apart ({min(less):.2f} - {max(less):.2f})"
        )
    print(json.dumps({"benchmark": "outliers", "machine": describe(), "model": path.name, **result}))


if __name__ == "__main__":
    main()
