"""Checkpoints in Hugging Face's layout become GGUF files, and GGUF files other GGUF files."""

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.head_twins import write_mtp
from quantize.plain_models import FAMILIES, write_plain
from quire.core.errors import QuireError
from quire.ops.dequantize import dequantize
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.file_types import FileTypeContext, tensor_type
from quire.quantize.gptq import GPTQOptions
from quire.quantize.plan import QuantizeOptions
from quire.quantize.quality import last_states
from quire.quantize.run import QuantizeRun
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint

NO_REPORT = CalibrationOptions(measured_tokens=0)


def converted(source: Path, out: Path, method: str, **options: object) -> Path:
    run = QuantizeRun(source, out, QuantizeOptions(method, **options))  # type: ignore[arg-type]
    quantize(run, NO_REPORT, None, GPTQOptions(), lambda phase, done, total: None)
    return out


def values(path: Path, name: str) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    return dequantize(checkpoint.tensor(name)).reshape(checkpoint.shape(name))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_from_gguf_bit_for_bit(family: str, tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_plain(source, family)
    out = converted(source, tmp_path / "model.gguf", "F32")
    before, after = open_checkpoint(source), open_checkpoint(out)
    assert set(after.names()) == set(before.names())
    for name in before.names():
        if "norm" in name:  # Gemma's have 1 added and taken off
            assert np.allclose(values(out, name), values(source, name), atol=1e-6)
        else:
            assert np.array_equal(values(out, name), values(source, name)), name
    old, new = Tokenizer.load(source), Tokenizer.load(out)
    text = "Hello there, 12 naïve <|im_end|> words"
    assert new.encode(text) == old.encode(text)
    assert (new.chat_template, new.eos_ids[:1], new.bos_id) == (old.chat_template, old.eos_ids, old.bos_id)


def test_the_library_reads_the_keys_and_the_types(plain_llama: Path, tmp_path: Path) -> None:
    out = converted(plain_llama, tmp_path / "model.gguf", "Q4_K_M")
    reader = gguf.GGUFReader(out)
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert reader.fields["llama.rope.dimension_count"].contents() == 32
    kinds = types(out)
    assert kinds["output.weight"] == kinds["blk.1.ffn_down.weight"] == "Q6_K"
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == "Q4_K"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    down = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight")
    theirs = gguf.dequantize(down.data, down.tensor_type)
    assert np.array_equal(theirs, values(out, "model.layers.0.mlp.down_proj.weight"))


def test_a_gguf_file_keeps_its_keys_and_tokenizer(plain_llama: Path, tmp_path: Path) -> None:
    plain = converted(plain_llama, tmp_path / "plain.gguf", "BF16")
    out = converted(plain, tmp_path / "small.gguf", "Q5_K_S")
    before, after = gguf.GGUFReader(plain), gguf.GGUFReader(out)
    assert before.fields.keys() == after.fields.keys()
    changed = {key for key in before.fields if before.fields[key].contents() != after.fields[key].contents()}
    assert changed == {"general.file_type"}
    direct = converted(plain_llama, tmp_path / "direct.gguf", "Q5_K_S")
    assert out.stat().st_size == direct.stat().st_size


def test_a_gguf_file_becomes_a_folder_and_a_file_again(plain_llama: Path, tmp_path: Path) -> None:
    first = converted(plain_llama, tmp_path / "first.gguf", "F32")
    folder = converted(first, tmp_path / "folder", "F32")
    again = converted(folder, tmp_path / "again.gguf", "F32")
    for name in open_checkpoint(plain_llama).names():
        assert np.array_equal(values(folder, name), values(plain_llama, name)), name
        assert np.array_equal(values(again, name), values(plain_llama, name)), name
    text = "round and 2 round <|im_end|>"
    assert Tokenizer.load(folder).encode(text) == Tokenizer.load(plain_llama).encode(text)
    assert Tokenizer.load(folder).eos_ids == Tokenizer.load(plain_llama).eos_ids


def test_layers_that_predict_further_tokens_are_written_as_llama_cpp_names_them(
    plain_llama: Path, tmp_path: Path
) -> None:
    source = write_mtp(tmp_path / "model", "glm", plain_llama)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    file = converted(source, tmp_path / "model.gguf", "F32")
    assert [*counts(file)] == [layers + 1, 1]
    parts = {name.removeprefix(f"blk.{layers}.nextn.") for name in types(file) if ".nextn." in name}
    assert parts == {
        f"{part}.weight"
        for part in ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm")
    }
    folder = converted(file, tmp_path / "folder", "F32")
    for path in (file, folder):
        assert set(open_checkpoint(path).names()) == set(open_checkpoint(source).names())
    for name in open_checkpoint(source).names():
        assert np.array_equal(values(folder, name), values(source, name)), name
    small = converted(file, tmp_path / "small.gguf", "COPY", pruned=(0,))
    assert [*counts(small)] == [layers, 1]
    norm = "model.layers.{}.shared_head.norm.weight"
    assert np.array_equal(values(small, norm.format(layers - 1)), values(source, norm.format(layers)))
    tensors = load_file(source / "model.safetensors")
    tensors = {name: data for name, data in tensors.items() if f"layers.{layers}." not in name}
    save_file(tensors, source / "model.safetensors")  # as some save it: config.json has the layer, and no file
    assert [*counts(converted(source, tmp_path / "without.gguf", "F32"))] == [layers, 0]


def counts(path: Path) -> Iterator[int]:
    fields = gguf.GGUFReader(path).fields
    for key in ("block_count", "nextn_predict_layers"):
        yield fields[f"glm4moe.{key}"].contents()


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def test_rows_that_are_no_whole_blocks_get_another_type() -> None:
    context = FileTypeContext(num_layers=30)
    shapes = {"blk.0.attn_q.weight": (576, 576), "blk.0.ffn_down.weight": (576, 1536), "output.weight": (99, 576)}
    types = {name: tensor_type("Q4_K_M", name, shape, context) for name, shape in shapes.items()}
    assert types == {"blk.0.attn_q.weight": "Q5_0", "blk.0.ffn_down.weight": "Q6_K", "output.weight": "Q8_0"}
    assert tensor_type("Q2_K", "blk.0.ffn_up.weight", (8, 96), context) == "IQ4_NL"
    assert tensor_type("Q4_K_M", "blk.0.ffn_up.weight", (8, 72), context) == "F16"


def test_q4_k_m_of_32_layers_has_the_types_that_llama_cpp_gives() -> None:
    context = FileTypeContext(num_layers=32, heads_a_kv_head=4)
    six = [
        layer for layer in range(32)
        if tensor_type("Q4_K_M", f"blk.{layer}.ffn_down.weight", (4096, 14336), context) == "Q6_K"
    ]  # fmt: skip
    assert six == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert tensor_type("Q4_K_M", "token_embd.weight", (128256, 4096), context) == "Q4_K"
    assert tensor_type("Q2_K", "blk.9.attn_v.weight", (1024, 4096), context) == "Q4_K"
    assert tensor_type("Q3_K_M", "blk.1.attn_v.weight", (1024, 4096), context) == "Q5_K"
    assert tensor_type("Q4_K_M", "blk.1.ffn_gate_inp.weight", (8, 4096), context) == "F32"


def test_i_quants_have_the_types_that_llama_cpp_gives() -> None:
    context = FileTypeContext(num_layers=32, heads_a_kv_head=4, has_importance=True)

    def types(method: str, layer: int) -> list[str]:
        parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down")
        return [tensor_type(method, f"blk.{layer}.{part}.weight", (4096, 4096), context) for part in parts]

    assert types("IQ1_S", 9) == ["IQ1_S", "IQ1_S", "Q4_K", "IQ2_XXS", "IQ1_S", "IQ1_S"]
    assert types("TQ1_0", 0) == ["TQ1_0"] * 6
    assert types("IQ2_XXS", 0) == ["IQ2_XXS", "IQ2_XXS", "Q4_K", "IQ2_XXS", "IQ2_XXS", "Q2_K"]
    assert types("IQ2_M", 9) == ["IQ2_S", "IQ2_S", "Q4_K", "IQ3_S", "IQ2_S", "IQ2_S"]
    assert types("IQ3_XXS", 9) == ["IQ2_S", "IQ2_S", "Q4_K", "IQ3_S", "IQ3_XXS", "IQ3_XXS"]
    assert types("IQ3_XS", 9) == ["IQ3_XXS", "IQ3_XXS", "Q4_K", "IQ3_S", "IQ3_XXS", "IQ3_S"]
    assert types("IQ4_XS", 0) == ["IQ4_XS", "IQ4_XS", "Q5_K", "IQ4_XS", "IQ4_XS", "IQ4_XS"]
    assert tensor_type("IQ2_XS", "output.weight", (32000, 4096), context) == "Q5_K"
    assert tensor_type("IQ3_XXS", "token_embd.weight", (32000, 4096), context) == "IQ3_S"
    assert tensor_type("IQ3_S", "blk.0.attn_q.weight", (576, 576), context) == "IQ4_NL"


def test_splits_are_read_back_by_quire_and_by_the_library(plain_llama: Path, tmp_path: Path) -> None:
    whole = converted(plain_llama, tmp_path / "whole.gguf", "Q8_0")
    first = tmp_path / "model-00001-of-00003.gguf"
    converted(plain_llama, tmp_path / "model.gguf", "Q8_0", split_bytes=500_000)
    files = sorted(tmp_path.glob("model-*.gguf"))
    assert files[0] == first and len(files) == 3 and not [*tmp_path.glob("*.partial")]
    assert all(file.stat().st_size < 520_000 for file in files)
    for index, file in enumerate(files):
        fields = gguf.GGUFReader(file).fields
        assert (fields["split.no"].contents(), fields["split.count"].contents()) == (index, 3)
        assert fields["split.tensors.count"].types == [gguf.GGUFValueType.INT32]
        assert ("general.architecture" in fields) == (index == 0)
    for name in open_checkpoint(whole).names():
        assert np.array_equal(values(first, name), values(whole, name)), name
    assert Tokenizer.load(first).encode("as before") == Tokenizer.load(whole).encode("as before")
    again = converted(first, tmp_path / "again.gguf", "Q8_0", requantize=True)
    assert again.stat().st_size == whole.stat().st_size
    with pytest.raises(QuireError, match=r"model-00001-of-00003\.gguf exists already"):
        converted(plain_llama, tmp_path / "model.gguf", "Q8_0", split_bytes=500_000)


def sentencepiece_tokenizer(folder: Path) -> None:
    """BPE over characters with bytes to fall back on, as Llama 2 and Gemma have it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    merges = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("l", "o"), ("▁hel", "lo"), ("▁", "w"), ("o", "r")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd"]
    vocab = {piece: index for index, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.save_pretrained(folder)


def test_a_sentencepiece_tokenizer_goes_to_gguf_and_back(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_plain(source)
    for file in source.glob("*token*"):
        file.unlink()
    (source / "chat_template.jinja").unlink(missing_ok=True)
    sentencepiece_tokenizer(source)
    file = converted(source, tmp_path / "model.gguf", "F16")
    folder = converted(file, tmp_path / "folder", "F16")
    assert gguf.GGUFReader(file).fields["tokenizer.ggml.model"].contents() == "llama"
    old, new, back = (Tokenizer.load(path) for path in (source, file, folder))
    for text in ("hello world", "hell  or \n low</s>ed", "naïve"):
        assert old.encode(text) == new.encode(text) == back.encode(text), text
        assert back.decode(back.encode(text)) == old.decode(old.encode(text))


def test_a_tokenizer_that_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    source = tmp_path / "model"
    write_plain(source)
    backend = Backend.from_file(str(source / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("q", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.save(str(source / "tokenizer.json"))
    with pytest.raises(QuireError, match="the pre-tokenizer is none that GGUF has a name for"):
        converted(source, tmp_path / "out.gguf", "F16")


@pytest.mark.parametrize(("factor", "original", "high"), [(8.0, 8192, 4.0), (32.0, 8192, 4.0), (4.0, 2048, 8.0)])
def test_the_rope_scaling_of_llama_3_comes_back_from_gguf(
    factor: float, original: int, high: float, tmp_path: Path
) -> None:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    source = tmp_path / "model"
    write_plain(source, num_hidden_layers=1, max_position_embeddings=32768)
    config = json.loads((source / "config.json").read_text())
    config.pop("rope_parameters", None)
    (source / "config.json").write_text(json.dumps({**config, "rope_theta": 500000.0, "rope_scaling": scaling}))
    folder = converted(converted(source, tmp_path / "model.gguf", "F32"), tmp_path / "folder", "F32")
    back = json.loads((folder / "config.json").read_text())["rope_scaling"]
    if original == 8192:
        assert back == scaling
    assert set(open_checkpoint(folder).names()) == set(open_checkpoint(source).names())
    ids = [[*range(3, 40)]]
    before, after = (last_states(open_checkpoint(path), ids).rows(0, 37) for path in (source, folder))
    assert np.allclose(before, after, atol=1e-4)


def test_other_factors_of_rotary_frequencies_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_plain(source, num_hidden_layers=1)
    config = json.loads((source / "config.json").read_text())
    config.pop("rope_parameters", None)
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 100,
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    file = converted(source, tmp_path / "model.gguf", "F32")
    with pytest.raises(QuireError, match="which are not Llama 3's"):
        converted(file, tmp_path / "folder", "F32")
