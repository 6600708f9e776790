"""T5 in GGUF files, and its encoder alone, against transformers."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import MT5EncoderModel, PreTrainedModel, T5EncoderModel, UMT5EncoderModel

from models.checking import BACKENDS, assert_close, make_ops
from models.checking_seq2seq import ANSWER, SOURCE, Ours, ask_transformers, random_model
from models.test_seq2seq import CASES as SEQ2SEQ
from models.test_seq2seq import TINY
from quire.models.registry import family
from quire.runtime.encoder import EncodeInput, EncoderRunner
from quire.weights.checkpoint import open_checkpoint
from weights.gguf_files import finish

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "own_head": True}
CASES = {name: SEQ2SEQ[name] for name in ("t5", "umt5")} | {"t5-1.1": (SEQ2SEQ["t5"][0], SEQ2SEQ["t5"][1] | GATED)}
TEXTS = [EncodeInput(ids) for ids in (SOURCE, ANSWER, [5])]


def write_gguf(source: Path, path: Path, arch: Any = gguf.MODEL_ARCH.T5) -> Path:
    c = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(c.get("n_positions", 512))
    writer.add_embedding_length(c["d_model"])
    writer.add_feed_forward_length(c["d_ff"])
    writer.add_block_count(c["num_layers"])
    writer.add_uint32(f"{writer.arch}.decoder_block_count", c["num_decoder_layers"])
    writer.add_head_count(c["num_heads"])
    writer.add_key_length(c["d_kv"])
    writer.add_value_length(c["d_kv"])
    writer.add_layer_norm_eps(c["layer_norm_epsilon"])
    writer.add_layer_norm_rms_eps(c["layer_norm_epsilon"])
    writer.add_relative_attn_buckets_count(c["relative_attention_num_buckets"])
    writer.add_decoder_start_token_id(c.get("decoder_start_token_id") or 0)
    names = gguf.get_tensor_name_map(arch, max(c["num_layers"], c["num_decoder_layers"]))
    for name, data in load_file(source / "model.safetensors").items():
        if name.endswith("embed_tokens.weight"):
            continue
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert translated is not None, name
        writer.add_tensor(translated, data)
    return finish(writer, path)


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    kind, options = CASES[name]
    # The one distance that files do not have is T5's.
    model = random_model(kind, {**TINY, **options, "relative_attention_max_distance": 128}, seed=sum(map(ord, name)))
    theirs = ask_transformers(model, tmp_path)
    ours = Ours(make_ops("torch"), write_gguf(tmp_path, tmp_path / "model.gguf"))
    assert_close(ours.read(SOURCE), theirs.encoded)
    assert_close(ours.write(ANSWER, 0), theirs.logits)


ENCODER = {"vocab_size": 96, "d_model": 64, "d_kv": 12, "d_ff": 80, "num_layers": 3, "num_heads": 4}
GATED_T5 = {"feed_forward_proj": "gated-gelu", "num_layers": 2}
ENCODERS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "t5-encoder": (T5EncoderModel, {}),
    "t5-encoder-gated": (T5EncoderModel, GATED_T5),
    "mt5-encoder": (MT5EncoderModel, GATED_T5),
    "umt5-encoder": (UMT5EncoderModel, {"num_layers": 2}),
}


def named(name: str) -> Any:
    mark = pytest.mark.verifies("safetensors", architecture=ENCODERS[name][0].__name__)
    return pytest.param(name, marks=mark)


@pytest.mark.parametrize("name", [named(name) for name in ENCODERS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_encoder_alone_embeds_texts(backend: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    kind, options = ENCODERS[name]
    model: Any = kind(kind.config_class(**ENCODER | options)).eval()
    for key, parameter in model.named_parameters():
        std = 0.25 * 12**-0.5 if key.endswith(".q.weight") else 0.25  # scores are not divided by anything
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=std)
    model.save_pretrained(tmp_path)
    paths = [tmp_path]
    if kind is T5EncoderModel:
        paths.append(write_gguf(tmp_path, tmp_path / "model.gguf", gguf.MODEL_ARCH.T5ENCODER))
    with torch.inference_mode():
        expected = [model(torch.tensor([text.ids])).last_hidden_state[0].numpy() for text in TEXTS]
    for path in paths:
        for found, wanted in zip(embed(path, backend), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-5 * np.abs(wanted).max())


def embed(path: Path, backend: str) -> Any:
    checkpoint, ops = open_checkpoint(path), make_ops(backend, 1)
    module = family(checkpoint.config.architecture, "embed")
    model = module.load(ops, checkpoint, module.config(checkpoint.config), 64)
    return EncoderRunner(ops, model, max_tokens=64, max_rows=3, max_model_len=64, kv_dtype="float32").run(
        TEXTS, "all", np.copy
    )
