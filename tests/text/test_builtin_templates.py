"""Chat templates by name, as text and from files."""

from pathlib import Path

import pytest

from quire.core.errors import BadRequest
from quire.text.chat.builtin_templates import BUILTIN_TEMPLATES, MAX_BYTES, read_chat_template
from quire.text.chat.chat_format import chat_format
from quire.text.chat.chat_template import ChatTemplate

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "More"},
]

RENDERED = {
    "chatml": "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
    "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nBe short.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] More [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nMore<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nBe short.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nMore<end_of_turn>\n<start_of_turn>model\n",
    "phi3": "<|system|>\nBe short.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nMore<|end|>\n"
    "<|assistant|>\n",
    "vicuna": "Be short.\n\nUSER: Hi\nASSISTANT: Hello</s>\nUSER: More\nASSISTANT:",
    "zephyr": "<|system|>\nBe short.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\nMore</s>\n"
    "<|assistant|>\n",
}


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_a_template_by_its_name(name: str) -> None:
    source = read_chat_template(name)
    messages = chat_format(source).messages(TALK)
    assert ChatTemplate(source, "<s>", "</s>").render(messages) == RENDERED[name]


def test_a_template_as_text_and_from_a_file(tmp_path: Path) -> None:
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }} é", encoding="utf-8")
    assert read_chat_template(str(file)) == "{{ messages[0].content }} é"


def test_what_is_no_template_is_refused_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no such file") as refusal:
        read_chat_template("chatlm")
    assert "chatml" in refusal.value.hint
    (tmp_path / "long").write_bytes(b"x" * (MAX_BYTES + 1))
    with pytest.raises(BadRequest, match=f"{MAX_BYTES + 1} bytes"):
        read_chat_template(str(tmp_path / "long"))
    (tmp_path / "odd").write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequest, match="cannot be read"):
        read_chat_template(str(tmp_path / "odd"))
