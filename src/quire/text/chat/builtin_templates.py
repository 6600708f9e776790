"""Chat templates by name, for models that come without one, and templates from files."""

from pathlib import Path

from quire.core.errors import BadRequest

MAX_BYTES = 1 << 20  # of a template in a file

_TURNS = "{{% for m in messages %}}{}{{% endfor %}}{{% if add_generation_prompt %}}{}{{% endif %}}"

BUILTIN_TEMPLATES = {
    "chatml": _TURNS.format("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama2": (
        "{% set text = namespace(system='') %}{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set text.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
        "{% elif m.role == 'user' %}{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
        "{{ bos_token }}{% endif %}[INST] {{ text.system + m.content }} [/INST]{% set text.system = '' %}"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": "{{ bos_token }}"
    + _TURNS.format(
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + _TURNS.format(
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
    "phi3": _TURNS.format("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n"),
    "vicuna": _TURNS.format(
        "{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}USER: {{ m.content }}\n"
        "{% else %}ASSISTANT: {{ m.content }}{{ eos_token }}\n{% endif %}",
        "ASSISTANT:",
    ),
    "zephyr": _TURNS.format("<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n", "<|assistant|>\n"),
}


def read_chat_template(given: str) -> str:
    """`given` is the name of a template above, a template itself, or the path of a file with one."""
    if given in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[given]
    if "{{" in given or "{%" in given:
        return given
    path = Path(given)
    if not path.is_file():
        names = ", ".join(BUILTIN_TEMPLATES)
        raise BadRequest(
            f"chat_template is `{given}`, and there is no such file",
            f"give the path of a template, a template itself, or one of {names}",
            param="chat_template",
        )
    if (size := path.stat().st_size) > MAX_BYTES:
        raise BadRequest(f"{given} has {size} bytes, and a chat template at most {MAX_BYTES}", param="chat_template")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise BadRequest(f"{given} cannot be read as a chat template: {error}", param="chat_template") from None
