"""What a head is taught and how drafts are counted, against plain arithmetic and transformers."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.train.acceptance import measure, walk
from quire.train.eagle3 import Eagle3Head, aux_layers, state_scales
from quire.train.medusa import MedusaHeads
from quire.train.options import TrainError
from quire.train.target import TargetModel
from quire.train.texts import Example
from quire.train.trainable_head import TextBatch, coverage, frequent_tokens, loss, num_accepted
from quire.weights.checkpoint import open_checkpoint

VOCABULARY = [*range(40), *range(60, 259, 3)]


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> TargetModel:
    return TargetModel(open_checkpoint(tiny_model), "cpu", 64)


@pytest.fixture(scope="module")
def head(target: TargetModel) -> Eagle3Head:
    """Random, also where a new one is zero, in numbers that fp16 has."""
    batch = TextBatch.of([Example(random_ids(40), 3)], "cpu")
    scales = state_scales(target, (0, 1, 2), batch)
    assert scales.min() < 0.7 * scales.max()
    head = Eagle3Head(target, VOCABULARY, (0, 1, 2), 3, scales, intermediate=48)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.weights.values():
            weight.copy_((weight + 0.2 * torch.randn(weight.shape, generator=generator)).half().float())
    return head


def random_ids(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_hidden_states_are_those_of_transformers(tiny_model: Path, target: TargetModel) -> None:
    from transformers import LlamaForCausalLM

    ids = torch.tensor([random_ids(20), random_ids(20, seed=4)])
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
    states = target.hidden_states(ids, (0, 1, 2))
    for layer in (0, 1):  # the third that transformers gives is normed already
        torch.testing.assert_close(states.layers[layer], expected.hidden_states[layer], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.last, expected.hidden_states[2], rtol=1e-4, atol=1e-4)
    shares = target.probabilities(states.last[0], torch.tensor([7, 3]))
    torch.testing.assert_close(shares, expected.logits[0].softmax(-1)[:, [7, 3]], rtol=1e-3, atol=1e-5)


class PlainEagle3:
    """A published head, one sequence and one token after the other."""

    def __init__(self, tensors: dict[str, Tensor], config: dict, embedding: Tensor) -> None:
        self.t = {name: tensor.float() for name, tensor in tensors.items()}
        self.maps, self.c, self.embedding = tensors["d2t"], config["transformer_layer_config"], embedding
        self.layers = config["eagle_aux_hidden_state_layer_ids"]
        assert config["norm_before_residual"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.c["rms_norm_eps"]) * self.t[name]

    def rope(self, heads: Tensor, position: int) -> Tensor:
        half = self.c["head_dim"] // 2
        angles = position * self.c["rope_theta"] ** -(torch.arange(half) / half)
        a, b = heads[:, :half], heads[:, half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=1)

    def layer(self, x: Tensor, token: int, position: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        prefix, dim = "layers.0.", self.c["head_dim"]
        hidden = self.norm(x, prefix + "hidden_norm.weight")
        both = torch.cat([self.norm(self.embedding[token], prefix + "input_layernorm.weight"), hidden])
        q, k, v = ((self.t[f"{prefix}self_attn.{n}_proj.weight"] @ both).view(-1, dim) for n in "qkv")
        cache.append((self.rope(k, position), v))
        q, group = self.rope(q, position), self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        out = []
        for index, query in enumerate(q):
            keys, values = (torch.stack([entry[part][index // group] for entry in cache]) for part in (0, 1))
            out.append(((keys @ query) / dim**0.5).softmax(0) @ values)
        h = hidden + self.t[prefix + "self_attn.o_proj.weight"] @ torch.cat(out)
        n = self.norm(h, prefix + "post_attention_layernorm.weight")
        gate, up = (self.t[f"{prefix}mlp.{name}_proj.weight"] @ n for name in ("gate", "up"))
        return h + self.t[prefix + "mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def draft(self, states: Tensor, ids: list[int], count: int) -> list[int]:
        """states [len(ids) - 1, 3 * hidden]: of all tokens but the last."""
        cache: list[tuple[Tensor, Tensor]] = []
        for position, state in enumerate(states):
            x = self.layer(self.t["fc.weight"] @ state, ids[position + 1], position, cache)
        drafts: list[int] = []
        for step in range(count):
            index = int((self.t["lm_head.weight"] @ self.norm(x, "norm.weight")).argmax())
            drafts.append(index + int(self.maps[index]))
            x = self.layer(x, drafts[-1], len(states) + step, cache)
        return drafts


def test_drafts_are_those_of_the_published_head_run_token_by_token(target: TargetModel, head: Eagle3Head) -> None:
    plain = PlainEagle3(head.published(), head.config("tiny"), target.embedding)
    seen = set()
    for length in (2, 3, 9, 17):
        ids = random_ids(length, seed=length)
        states = target.hidden_states(torch.tensor([ids]), plain.layers)
        joined = torch.cat([states.layers[layer] for layer in plain.layers], dim=-1)[0, :-1]
        drafts = plain.draft(joined, ids, 3)
        seen.update(drafts)
        start = length - 2  # the target has read all but the last token
        for wrong in (0, 1, 2, 3):  # the text goes on as drafted, up to there
            text = [*ids, *drafts[:wrong], *((token + 1) % 259 for token in drafts[wrong:])]
            batch = TextBatch.of([Example(text, 1), Example(random_ids(length + 5), 1)], "cpu")
            assert num_accepted(head, target, batch)[0, start] == wrong
    assert len(seen) > 3 and seen <= set(VOCABULARY)


def test_the_loss_is_the_cross_entropy_with_the_target(target: TargetModel) -> None:
    """A Medusa head that is new repeats the target's own logits: what it drafts is one, or two, tokens late."""
    heads = MedusaHeads(target, range(259), num_drafts=2)
    ids = torch.tensor([random_ids(12)])
    written = torch.zeros_like(ids, dtype=torch.bool)
    written[0, 5:] = True
    shares = target.probabilities(target.hidden_states(ids, ()).last[0], heads.vocabulary)
    expected = [
        torch.stack([-(shares[i + 1 + step] * shares[i].log()).sum() for i in range(3 - step, 10 - step)]).mean()
        for step in (0, 1)
    ]
    total = (expected[0] + 0.8 * expected[1]) / 1.8
    torch.testing.assert_close(loss(heads, target, TextBatch(ids, written)).detach(), total, rtol=1e-4, atol=1e-5)


def test_a_text_does_not_depend_on_those_beside_it(target: TargetModel, head: Eagle3Head) -> None:
    texts = [Example(random_ids(length, seed=length), 2) for length in (7, 30, 12)]
    alone = [measure(head, target, [text], 3, 1) for text in texts]
    together = measure(head, target, texts, 3, 3)
    assert together.num_steps == sum(one.num_steps for one in alone)
    assert together.num_tokens == sum(one.num_tokens for one in alone) == 4 + 27 + 9


def test_steps_are_walked_as_a_verifier_takes_them() -> None:
    # The first token (2) comes from the prefill. Start 1: 2 drafts and a token; start 4: none; start 5: 3.
    accepted = [9, 2, 9, 9, 0, 3, 9, 9, 9, 9]
    assert walk(accepted, start=2, length=11) == [2, 0, 3]
    assert walk(accepted, start=2, length=3) == []
    assert walk([1, 1, 1], start=0, length=3) == [1], "a text that begins at 0 has a token before it"


def test_the_draft_vocabulary_is_what_is_written_most_often() -> None:
    texts = [Example([9, 9, 9, 5, 5, 7, 3], 3), Example([9, 5, 7, 7], 1)]
    assert frequent_tokens(texts, 2, 10) == [5, 7]
    assert frequent_tokens(texts, 5, 10) == [0, 1, 3, 5, 7]
    assert frequent_tokens(texts, 99, 10) == list(range(10))
    assert coverage(texts, [5, 7]) == 6 / 7


def test_auxiliary_layers_are_those_that_others_take() -> None:
    assert aux_layers((), 30) == (2, 15, 27)
    assert aux_layers((), 32) == (2, 16, 29)
    assert aux_layers((), 2) == (0, 1, 2)
    assert aux_layers((0, 3, 4), 4) == (0, 3, 4)
    for wrong in ((1, 2), (2, 1, 3), (1, 2, 5), (-1, 0, 1), (1, 1, 2)):
        with pytest.raises(TrainError, match="--aux-layers"):
            aux_layers(wrong, 4)
    with pytest.raises(TrainError, match="3 layers, and the model has 1"):
        aux_layers((), 1)


def test_published_names_and_shapes_of_eagle3(head: Eagle3Head) -> None:
    tensors, config = head.published(), head.config("tiny")
    hidden, drafted = 72, len(VOCABULARY)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "fc.weight": (hidden, 3 * hidden),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (96, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (48, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (48, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, 96),
        "layers.0.mlp.gate_proj.weight": (48, hidden),
        "layers.0.mlp.up_proj.weight": (48, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 48),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
        "d2t": (drafted,),
        "t2d": (259,),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (torch.arange(drafted) + tensors["d2t"]).tolist() == VOCABULARY == tensors["t2d"].nonzero()[:, 0].tolist()
    assert {tensor.dtype for name, tensor in tensors.items() if "weight" in name} == {torch.float16}
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == drafted
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    assert json.loads(json.dumps(config)) == config


def test_published_names_and_shapes_of_medusa(target: TargetModel) -> None:
    whole = MedusaHeads(target, range(259), num_drafts=2)
    names = {f"medusa_head.{n}.{name}" for n in (0, 1) for name in ("0.linear.weight", "0.linear.bias", "1.weight")}
    assert set(whole.published()) == names and whole.config("tiny")["medusa_num_heads"] == 2
    cut = MedusaHeads(target, VOCABULARY, num_drafts=2).published()
    assert set(cut) == {*names, "token_map"} and cut["token_map"].tolist() == VOCABULARY
    assert cut["medusa_head.1.1.weight"].shape == (len(VOCABULARY), 72)
