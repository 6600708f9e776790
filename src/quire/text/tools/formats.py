"""The known formats of tool calls, a row each. Names are those of vLLM where it has the format."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from quire.text.harmony import HarmonyToolParser
from quire.text.tools.call_body import CallBody, JsonBody
from quire.text.tools.gemma import gemma_calls
from quire.text.tools.glm4 import Glm4ToolParser
from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.marked_parser import CallMarkers, MarkedToolParser
from quire.text.tools.mistral import BEGIN as MISTRAL_BEGIN
from quire.text.tools.mistral import MistralToolParser
from quire.text.tools.parser import Schemas, ToolFormat
from quire.text.tools.pythonic import PythonicToolParser, python_calls, write_python_calls
from quire.text.tools.tagged_body import TaggedBody, Tags
from quire.text.tools.whole_body import Parse, WholeBody


def _json(
    begin: str,
    end: str = "",
    *,
    others: tuple[str, ...] = (),
    signs: tuple[str, ...] = (),
    special: bool = False,
    json_end: str | None = None,
    **more: Any,
) -> ToolFormat:
    """`begin {"name": ..., "arguments": {...}} end`, or a list of such objects; `others` may stand for `begin`."""
    begins = (begin, *others)

    def write(calls: list[dict[str, Any]]) -> str:
        return f"{begin}{json.dumps(calls, ensure_ascii=False)}{end}"

    return ToolFormat(
        lambda schemas: JsonToolParser(*begins, end=end, **more),
        signs or begins,
        begins,
        special,
        write=write,
        json_end=json_end,
    )


def _marked(
    markers: CallMarkers, body: Callable[[int, Schemas], CallBody], signs: tuple[str, ...], special: bool
) -> ToolFormat:
    def parser(schemas: Schemas) -> MarkedToolParser:
        return MarkedToolParser(markers, lambda index: body(index, schemas))

    return ToolFormat(parser, signs or markers.begins[:1], markers.begins, special)


def _named(markers: CallMarkers, head: str, *, signs: tuple[str, ...] = (), special: bool = False) -> ToolFormat:
    """`begin name {"city": "Paris"} end`; `head` is the regex between `begin` and the arguments."""
    pattern = re.compile(head)
    return _marked(markers, lambda index, schemas: JsonBody(index, pattern), signs, special)


def _tagged(
    markers: CallMarkers, head: str, tags: Tags, *, signs: tuple[str, ...] = (), special: bool = False
) -> ToolFormat:
    """`begin name <parameter=city>Paris</parameter> end`."""
    pattern = re.compile(head)
    return _marked(markers, lambda index, schemas: TaggedBody(index, pattern, tags, schemas), signs, special)


def _whole(begin: str, end: str, parse: Parse, *, signs: tuple[str, ...] = (), special: bool = False) -> ToolFormat:
    """Calls that are parsed when `end` has come."""
    return _marked(CallMarkers(begin), lambda index, schemas: WholeBody(index, end, parse, schemas), signs, special)


def _python(begin: str, end: str, *, signs: tuple[str, ...] = ()) -> ToolFormat:
    def write(calls: list[dict[str, Any]]) -> str:
        return f"{begin}{write_python_calls(calls)}{end}"

    row = _whole(begin, end, lambda text, schemas: python_calls(text), signs=signs, special=True)
    return replace(row, write=write)


def _invoke(prefix: str, section: str, kind: str = "") -> ToolFormat:
    """`<invoke name="f"><parameter name="city">Paris</parameter></invoke>`, tags with a prefix, within a section."""
    tag = re.escape(prefix)
    tags = Tags(rf'<{tag}parameter\s+name="?(?P<key>[^">]+)"?{kind}\s*>', f"</{prefix}parameter>", f"</{prefix}invoke>")
    markers = CallMarkers(f"<{prefix}invoke", section=f"<{section}>", section_end=f"</{section}>")
    return _tagged(markers, r'\s+name\s*=\s*"?(?P<name>[^">]+?)"?\s*>', tags, signs=(f"<{section}>",))


def _arg_keys(suffix: str, markers: CallMarkers, separator: str = "") -> ToolFormat:
    """`<tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>`."""
    end = f"</tool_call{suffix}>"
    between = rf"\s*{separator}\s*" if separator else r"\s*"
    head = rf"\s*(?P<name>[^\s<>{{}}\[\]\"]+){between}(?=<arg_key{suffix}>|{end})"
    value = rf"<arg_key{suffix}>(?P<key>[^<]+)</arg_key{suffix}>\s*<arg_value{suffix}>"
    return _tagged(markers, head, Tags(value, f"</arg_value{suffix}>", end), signs=(f"<arg_key{suffix}>",))


def _write_glm4(calls: list[dict[str, Any]]) -> str:
    return "\n".join(f"{call['name']}\n{json.dumps(call['arguments'], ensure_ascii=False)}" for call in calls)


_FUNCTION_TAGS = Tags(r"<parameter=(?P<key>[^>\n]+)>", "</parameter>", "</function>", newlines=True)
_FUNCTION_HEAD = r"(?P<name>[^>\n]+)>"

# In the order in which their `template_markers` are looked for in a chat template.
FORMATS: dict[str, ToolFormat] = {
    "mistral": ToolFormat(
        lambda schemas: MistralToolParser(), (MISTRAL_BEGIN,), (MISTRAL_BEGIN,), special=True, short_ids=True
    ),
    "openai": ToolFormat(
        lambda schemas: HarmonyToolParser(), ("<|channel|>commentary",), special=True, stops=("<|call|>",)
    ),
    "minimax_m2": _invoke("", "minimax:tool_call"),
    "deepseek_v32": _invoke("｜DSML｜", "｜DSML｜function_calls", kind=r'(?:\s+string="(?P<kind>\w+)")?'),
    "deepseek_v4": _invoke("｜DSML｜", "｜DSML｜tool_calls", kind=r'(?:\s+string="(?P<kind>\w+)")?'),
    "dots": _invoke("", "dots_function_call"),
    "seed_oss": _tagged(
        CallMarkers("<function=", section="<seed:tool_call>", section_end="</seed:tool_call>"),
        _FUNCTION_HEAD,
        Tags(_FUNCTION_TAGS.value, "</parameter>", "</function>"),
        special=True,
    ),
    "qwen3_coder": _tagged(
        CallMarkers("<function=", section="<tool_call>", section_end="</tool_call>"),
        _FUNCTION_HEAD,
        _FUNCTION_TAGS,
        signs=("<parameter=",),
    ),
    "functionary": _named(CallMarkers("<function=", "</function>"), _FUNCTION_HEAD + r"\s*(?=\{|</function>)"),
    "minicpm5": _tagged(
        CallMarkers("<function name="),
        r'"?(?P<name>[^">]+)"?\s*>',
        Tags(r'<param\s+name="?(?P<key>[^">]+)"?\s*>', "</param>", "</function>", cdata=True),
    ),
    "hy_v3": _arg_keys(
        ":opensource",
        CallMarkers(
            "<tool_call:opensource>", section="<tool_calls:opensource>", section_end="</tool_calls:opensource>"
        ),
        "<tool_sep:opensource>",
    ),
    "glm45": _arg_keys("", CallMarkers("<tool_call>")),
    "kimi_k3": _tagged(
        CallMarkers("<|open|>call tool=", section="<|open|>tools<|sep|>", section_end="<|close|>tools<|sep|>"),
        r'"(?P<name>[^"]+)"[^<]*<\|sep\|>',
        Tags(
            r'<\|open\|>argument key="(?P<key>[^"]+)"(?: type="(?P<kind>\w+)")?<\|sep\|>',
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>",
        ),
        signs=("<|open|>call tool=", "'<|open|>'"),
        special=True,
    ),
    "kimi_k2": replace(
        _named(
            CallMarkers(
                "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
            ),
            r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
            special=True,
        ),
        function_ids=True,
    ),
    "deepseek_v3": _named(
        CallMarkers("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<{]+)(?:\s|<｜tool▁sep｜>|```json)*(?=\{|<｜tool▁call▁end｜>)",
        special=True,
    ),
    "solar_open": replace(
        _named(
            CallMarkers("<|tool_call:begin|>", "<|tool_call:end|>", "<|tool_calls|>"),
            r"\s*(?P<id>\w*)<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>",
            signs=("<|tool_call:begin|>",),
            special=True,
        ),
        stops=("<|calls|>",),
    ),
    "gemma4": replace(
        _whole("<|tool_call>", "<tool_call|>", partial(gemma_calls, quote='<|"|>'), special=True),
        stops=("<|tool_response>",),
    ),
    "functiongemma": _whole(
        "<start_function_call>", "<end_function_call>", partial(gemma_calls, quote="<escape>"), special=True
    ),
    "lfm2": _python(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        signs=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    ),
    "olmo3": _python("<function_calls>", "</function_calls>"),
    "cohere_command3": _json("<|START_ACTION|>", "<|END_ACTION|>", special=True),
    "command_r": _json("Action:", "```", prefix="```json", signs=("\\nAction:\\n```json", "Action:\n```json")),
    "apertus": _json("<|tools_prefix|>", "<|tools_suffix|>", keyed=True, special=True),
    "nemotron_json": _json("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan_a13b": _json("<tool_calls>", "</tool_calls>"),
    "internlm": _json("<|action_start|><|plugin|>", "<|action_end|>", others=("<|plugin|>",), special=True),
    "gigachat3": _json("function call<|role_sep|>", special=True, others=("<|function_call|>",)),
    "granite-20b-fc": _json("<function_call>"),
    "longcat": _json("<longcat_tool_call>", "</longcat_tool_call>"),
    "glm4": ToolFormat(Glm4ToolParser, ("在调用上述函数时",), write=_write_glm4),
    "granite": _json("<|tool_call|>", special=True, json_end=""),
    "hermes": _json("<tool_call>", "</tool_call>", json_end="</tool_call>"),
    "pythonic": ToolFormat(
        lambda schemas: PythonicToolParser(),
        ("[func_name1(", "<|python_start|>"),
        write=write_python_calls,
    ),
    "llama3_json": ToolFormat(
        lambda schemas: JsonToolParser(prefix="<|python_tag|>"),
        ("<|python_tag|>", "Environment: ipython", '{"name": function name, "parameters"'),
        special=True,
        stops=("<|eom_id|>",),
    ),
    "phi4_mini_json": _json("functools", others=("<|tool_call|>",), signs=("functools[", "<|tool|>"), json_end=""),
}

# Names of vLLM's, and one of an older Quire, for formats that have another name here.
ALIASES = {
    "cohere_command4": "cohere_command3",
    "deepseek_v31": "deepseek_v3",
    "ernie45": "hermes",
    "glm47": "glm45",
    "granite4": "hermes",
    "jamba": "hunyuan_a13b",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "minimax": "hunyuan_a13b",
    "phi4": "phi4_mini_json",
    "poolside_v1": "glm45",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "xlam": "llama3_json",
}

NAMES = (*FORMATS, *ALIASES)


def load(name: str) -> ToolFormat:
    return FORMATS[ALIASES.get(name, name)]


def detect(text: str) -> ToolFormat | None:
    """The format whose markers are in the text of a chat template, or in what it renders."""
    return next((each for each in FORMATS.values() if any(mark in text for mark in each.template_markers)), None)
