"""What a model advises, from every place that it can be written in."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from quire.client.generation_config import GenerationConfig, read_generation_config
from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.engine.options import EngineOptions

ADVICE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 100}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path, {**ADVICE, "do_sample": True, "eos_token_id": [1, 2], "num_beams": 4})
    return tmp_path


def write(folder: Path, values: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def read(path: Path, **options: Any) -> dict[str, Any]:
    return read_generation_config(EngineOptions.of({"model": str(path), **options}), path).as_dict()


def test_generation_config_json(model: Path) -> None:
    expected = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in ADVICE.items()}
    assert read(model) == expected
    (model / "generation_config.json").unlink()
    assert read(model) == {}


def test_none_and_vllm_leave_it_out(model: Path) -> None:
    assert read(model, generation_config="none") == read(model, generation_config="vllm") == {}


def test_another_file_can_be_named(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write(other, {"temperature": 0.1})
    assert read(model, generation_config=str(other)) == {"temperature": 0.1}
    assert read(model, generation_config=str(other / "generation_config.json")) == {"temperature": 0.1}
    with pytest.raises(BadRequest, match="does not exist"):
        read(model, generation_config=str(other / "nothing"))


def test_an_override_wins_field_by_field(model: Path) -> None:
    overridden = read(model, override_generation_config={"temperature": 0.3, "top_k": 5.0, "max_new_tokens": 7})
    assert overridden == {"temperature": 0.3, "top_k": 5, "top_p": 0.95, "repetition_penalty": 1.05, "max_tokens": 7}
    assert read(model, generation_config="none", override_generation_config='{"min_p": 0.1}') == {"min_p": 0.1}


def test_impossible_advice_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"temperature": -1, "top_p": "high", "top_k": None, "min_p": 0.2, "max_new_tokens": True})
    assert read(tmp_path) == {"min_p": 0.2}
    assert [message.split(": ")[1].split(" is ")[0] for message in caplog.messages] == [
        "temperature",
        "top_p",
        "max_new_tokens",
    ]


def test_gguf_metadata(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 30)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read(file) == {"temperature": 0.5, "top_k": 30, "repetition_penalty": 1.25}


def test_the_default_model_is_sampled_as_its_card_says(default_model: Path) -> None:
    config = read_generation_config(EngineOptions(), default_model)
    assert config.params() == SamplingParams(temperature=0.2, top_p=0.9)
    by_path = EngineOptions(model=str(default_model))
    assert read_generation_config(by_path, default_model) == config
    assert read_generation_config(EngineOptions(generation_config="none"), default_model) == GenerationConfig()
