"""Files of torch.save: read without torch, and without ever running what a pickle asks for."""

import io
import json
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.core.errors import BadCheckpoint, QuireError, Unsupported
from quire.ops.dequantize import dequantize
from quire.weights.checkpoint import open_checkpoint
from quire.weights.pytorch import PytorchFile

TENSORS = {
    "a": torch.arange(24.0).reshape(4, 6),
    "half": torch.arange(8).half(),
    "bfloat": torch.arange(15.0).reshape(3, 5).bfloat16(),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
}


def write(path: Path, value: Any, **options: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    torch.save(value, path / "pytorch_model.bin", **options)
    return path


def assert_holds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(path)
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        found = dequantize(checkpoint.tensor(name)).reshape(checkpoint.shape(name))
        np.testing.assert_array_equal(found, tensor.detach().float().numpy())


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_are_those_that_were_saved(tmp_path: Path, protocol: int) -> None:
    assert_holds(write(tmp_path, TENSORS, pickle_protocol=protocol), TENSORS)
    assert_holds(write(tmp_path, {"state_dict": TENSORS, "epoch": 3}, pickle_protocol=protocol), TENSORS)


def test_the_state_of_a_module(tmp_path: Path) -> None:
    """Which is an ordered dictionary with attributes, and has tensors that share a storage."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    state = module.state_dict()
    state["tied"], state["part"] = state["0.weight"], state["0.weight"][1:]
    assert_holds(write(tmp_path, state), state)


def test_shards(tmp_path: Path) -> None:
    write(tmp_path, {})
    weight_map = {name: f"pytorch_model-{index % 2}.bin" for index, name in enumerate(TENSORS)}
    for shard in set(weight_map.values()):
        torch.save({name: TENSORS[name] for name in TENSORS if weight_map[name] == shard}, tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_holds(tmp_path, TENSORS)


def test_safetensors_come_first(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write(tmp_path, {"old": torch.zeros(1)})
    save_file({"new": torch.ones(2)}, tmp_path / "model.safetensors")
    assert_holds(tmp_path, {"new": torch.ones(2)})


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize(
    "evil",
    [Evil(os.mkdir, "made-by-a-pickle"), Evil(eval, "1"), Evil(getattr, dict, "update"), Evil(torch.load, "x")],
    ids=["mkdir", "eval", "getattr", "load"],
)
def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evil: Evil) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unsupported, match="which a dictionary of tensors has no need of"):
        open_checkpoint(write(tmp_path, {"a": evil}))
    assert not (tmp_path / "made-by-a-pickle").exists()


WRONG = {
    "a list": ([1, 2], "does not hold a dictionary"),
    "a number": ({"a": 1}, "'a', which is not a tensor"),
    "strides": ({"a": torch.zeros(4, 6).T}, r"\[6, 4\] with strides \[1, 6\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_state_dict_is_named(tmp_path: Path, case: str) -> None:
    value, message = WRONG[case]
    with pytest.raises(QuireError, match=message):
        open_checkpoint(write(tmp_path, value))


def archive(path: Path, code: bytes, storage: bytes = b"\0" * 16, compression: int = zipfile.ZIP_STORED) -> Path:
    (path / "config.json").write_text("{}")
    with zipfile.ZipFile(path / "pytorch_model.bin", "w", compression) as file:
        file.writestr("archive/data.pkl", code)
        file.writestr("archive/data/0", storage)
    return path / "pytorch_model.bin"


def tensor_code(
    storage: str = "FloatStorage", key: str = "0", shape: str = "K\x04\x85", strides: str = "K\x01\x85"
) -> bytes:
    """{"a": a tensor} by hand."""
    parts = ["\x80\x02}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n", storage]
    parts += ["\nX", chr(len(key)), "\0\0\0", key, "X\x03\0\0\0cpuK\x04tQK\0", shape, strides, "\x89NtRs."]
    return "".join(parts).encode("latin-1")


CODES = {
    "one tensor": (tensor_code(), None),
    "an unknown storage": (tensor_code("ComplexStorage"), "ComplexStorage"),
    "a key that is a path": (tensor_code(key="../x"), "no storage '../x'"),
    "more than there is": (tensor_code(shape="K\x05\x85"), "16 bytes for tensor 'a', which ends at 20"),
    "a negative shape": (tensor_code(shape="J\xff\xff\xff\xff\x85"), "a shape"),
    "nothing": (b"\x80\x02.", "makes nothing"),
    "an end too early": (tensor_code()[:-9], "ends in the middle|opcode|mark"),
    "a value it never kept": (b"\x80\x02h\x07.", "value 7, which it has not kept"),
    "an instance": (b"\x80\x02(cos\nsystem\no.", "names `os.system`"),
    "another opcode": (b"\x80\x02(i", "uses the opcode b'i'"),
    "text longer than the file": (b"\x80\x02X\xff\xff\xff\x7fa.", "bytes of text"),
}


@pytest.mark.parametrize("case", CODES)
def test_a_pickle_by_hand(tmp_path: Path, case: str) -> None:
    code, message = CODES[case]
    path = archive(tmp_path, code)
    if message is None:
        assert PytorchFile(path).entries["a"].shape == (4,)
        return
    with pytest.raises(QuireError, match=message) as raised:
        PytorchFile(path)
    assert "pytorch_model.bin" in raised.value.message


def test_what_torch_does_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="compressed or encrypted"):
        PytorchFile(archive(tmp_path, tensor_code(), compression=zipfile.ZIP_DEFLATED))
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(Unsupported, match=r"before torch 1\.6"):
        PytorchFile(path)


def test_changed_bytes_give_our_errors_only(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer)
    whole, path = buffer.getvalue(), tmp_path / "pytorch_model.bin"
    dice, readable = random.Random(4), 0
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            changed[dice.randrange(len(whole))] = dice.randrange(256)
        path.write_bytes(changed[: dice.choice([len(whole), dice.randrange(1, len(whole))])])
        try:
            PytorchFile(path)
            readable += 1
        except QuireError:
            continue
    assert 0 < readable < 400, "either nothing was damaged, or everything"
