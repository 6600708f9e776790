"""Texts of every tool format: (what the model writes, the content, the calls)."""

from typing import Any

Case = tuple[str, str, list[tuple[str, dict[str, Any]]]]

SCHEMAS = {
    "f": {
        "type": "object",
        "$defs": {"Zip": {"type": "string"}},
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string"},
            "zip": {"$ref": "#/$defs/Zip"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "deep": {"type": "object"},
            "on": {"type": "boolean"},
        },
    }
}


def _tagged(begin: str, opens: str, closes: str, end: str) -> list[Case]:
    """Cases of a format whose values are bare text; `opens` has a {} for the key."""

    def call(**values: str) -> str:
        return begin.format("f") + "".join(opens.format(key) + value + closes for key, value in values.items()) + end

    return [
        (call(a="3", b="two\nlines"), "", [("f", {"a": 3, "b": "two\nlines"})]),
        (call(b="5123123", zip="02134"), "", [("f", {"b": "5123123", "zip": "02134"})]),
        (call(b="", maybe="null"), "", [("f", {"b": "", "maybe": None})]),
        (call(maybe="12", on="True"), "", [("f", {"maybe": "12", "on": True})]),
        (call(deep='{"x": ["<b>", 1]}', other="7"), "", [("f", {"deep": {"x": ["<b>", 1]}, "other": 7})]),
        (call(deep="{'x': None}"), "", [("f", {"deep": {"x": None}})]),
        (call(b='a "quoted" \\ \t text </'), "", [("f", {"b": 'a "quoted" \\ \t text </'})]),
        (call(a="many"), "", [("f", {"a": "many"})]),
        (f"Let me see.\n{call(a='1')}\n{call(a='2')}\n", "Let me see.", [("f", {"a": 1}), ("f", {"a": 2})]),
        (f"Hm {call()} done", "Hm done", [("f", {})]),
        (f"a < b, no call: {begin[:4]}", f"a < b, no call: {begin[:4]}", []),
    ]


def _json(begin: str, end: str, *, name: str = "name", arguments: str = "arguments") -> list[Case]:
    def call(function: str, inner: str) -> str:
        return f'{{"{name}": "{function}", "{arguments}": {inner}}}'

    one, two = call("f", '{"a": [1, {"b": "}"}]}'), call("g", "{}")
    return [
        (f"{begin}{one}{end}", "", [("f", {"a": [1, {"b": "}"}]})]),
        (f"Yes. {begin}[{one}, {two}]{end}", "Yes.", [("f", {"a": [1, {"b": "}"}]}), ("g", {})]),
        (f"only {begin[:5]}", f"only {begin[:5]}", []),
    ]


_QWEN = _tagged("<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>")
_DSML = (
    '<｜DSML｜invoke name="{}">\n',
    '<｜DSML｜parameter name="{}">',
    "</｜DSML｜parameter>\n",
    "</｜DSML｜invoke>\n",
)
_DSML_KINDS = (
    '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">3</｜DSML｜parameter>'
    '<｜DSML｜parameter name="b" string="false">[4]</｜DSML｜parameter></｜DSML｜invoke>'
)

CASES: dict[str, list[Case]] = {
    "hermes": [
        *_json("<tool_call>\n", "\n</tool_call>"),
        (
            'Let me see.\n\n<tool_call>{"arguments": {"x": "\\"q\\""}, "name": "g"}</tool_call>\n',
            "Let me see.",
            [("g", {"x": '"q"'})],
        ),
        ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>', "", [("f", {}), ("g", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call> ok', " ok", [("f", {"a": 1})]),
        (
            '<tool_call>{"name": "f", "id": 7, "arguments": null}</tool_call>'
            '<tool_call>{"name": "g", "arguments": {"b": 2}}',
            "",
            [("f", {}), ("g", {"b": 2})],
        ),
        ("a < b and <tool_calls> are text", "a < b and <tool_calls> are text", []),
        ("<tool_call>none</tool_call> here", "<tool_call>none</tool_call> here", []),
        ('<tool_call>{"city": "Paris"}</tool_call>', '<tool_call>{"city": "Paris"}</tool_call>', []),
        ("  \n ends with space \n", "  \n ends with space \n", []),
        ("half <tool_", "half <tool_", []),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        (
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
        ("The name is {}", "The name is {}", []),
        ('{"answer": 4} is JSON', '{"answer": 4} is JSON', []),
    ],
    "mistral": [
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
        ('Yes. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": [2]}', "Yes.", [("f", {"a": 1}), ("g", {"b": [2]})]),
        ('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "}"}', "", [("f", {"a": "}"})]),
        ("[TOOL] no", "[TOOL] no", []),
        ("[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ],
    "granite": [
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}\n] So.', " So.", [("f", {"a": 1})]),
    ],
    "phi4_mini_json": [
        ('functools[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
    ],
    "pythonic": [
        ('[f(a=1, b="x"), pkg.g(c=[True, None])]', "", [("f", {"a": 1, "b": "x"}), ("pkg.g", {"c": [True, None]})]),
        ("[f(a=true, b={'c': null})]", "", [("f", {"a": True, "b": {"c": None}})]),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        ("[f(open('x'))]", "[f(open('x'))]", []),
        ("[f(a=open('x'))]", "[f(a=open('x'))]", []),
        ("[f(**{'a': 1})]", "[f(**{'a': 1})]", []),
        ("Hello [f()]", "Hello [f()]", []),
    ],
    "lfm2": [
        ("<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>", "", [("f", {"a": 1}), ("g", {})]),
        ("Now: <|tool_call_start|>[f(b='x\ny')]<|tool_call_end|> done", "Now: done", [("f", {"b": "x\ny"})]),
        ("<|tool_call_start|>hm<|tool_call_end|>", "<|tool_call_start|>hm<|tool_call_end|>", []),
    ],
    "olmo3": [
        ("<function_calls>\nf(a=1)\ng(b='x')\n</function_calls>", "", [("f", {"a": 1}), ("g", {"b": "x"})]),
        ("<function_calls>f(a=1)", "<function_calls>f(a=1)", []),
    ],
    "qwen3_coder": [
        *_QWEN,
        ("<function=f>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>", "", [("f", {"a": 3})]),
        ("Hm <tool_call><function=g></function></tool_call> done", "Hm done", [("g", {})]),
        ("<tool_call> is a marker", "<tool_call> is a marker", []),
    ],
    "seed_oss": _tagged(
        "<seed:tool_call>\n<function={}>\n", "<parameter={}>", "</parameter>\n", "</function>\n</seed:tool_call>"
    ),
    "minicpm5": [
        *_tagged('<function name="{}">', '<param name="{}">', "</param>", "</function>"),
        (
            '<function name="f"><param name="b"><![CDATA[<param>]]></param></function>',
            "",
            [("f", {"b": "<param>"})],
        ),
    ],
    "minimax_m2": _tagged(
        '<minimax:tool_call>\n<invoke name="{}">\n',
        '<parameter name="{}">',
        "</parameter>\n",
        "</invoke>\n</minimax:tool_call>",
    ),
    "dots": _tagged(
        "<dots_function_call><invoke name={}>",
        "<parameter name={}>",
        "</parameter>",
        "</invoke></dots_function_call>",
    ),
    "deepseek_v32": [
        *_tagged("<｜DSML｜function_calls>\n" + _DSML[0], *_DSML[1:3], _DSML[3] + "</｜DSML｜function_calls>"),
        (f"<｜DSML｜function_calls>{_DSML_KINDS}</｜DSML｜function_calls>", "", [("f", {"a": "3", "b": [4]})]),
    ],
    "deepseek_v4": _tagged("<｜DSML｜tool_calls>\n" + _DSML[0], *_DSML[1:3], _DSML[3] + "</｜DSML｜tool_calls>"),
    "glm45": [
        *_tagged("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ],
    "hy_v3": _tagged(
        "<tool_calls:opensource>\n<tool_call:opensource>{}<tool_sep:opensource>\n",
        "<arg_key:opensource>{}</arg_key:opensource>\n<arg_value:opensource>",
        "</arg_value:opensource>\n",
        "</tool_call:opensource>\n</tool_calls:opensource>",
    ),
    "kimi_k3": [
        *_tagged(
            '<|open|>tools<|sep|><|open|>call tool="{}" index="1"<|sep|>',
            '<|open|>argument key="{}"<|sep|>',
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        (
            '<|open|>call tool="g"<|sep|><|open|>argument key="a" type="string"<|sep|>3<|close|>argument<|sep|>'
            '<|open|>argument key="b" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>',
            "",
            [("g", {"a": "3", "b": 3})],
        ),
    ],
    "functionary": [
        ('<function=f>{"a": {"b": "</"}}</function>', "", [("f", {"a": {"b": "</"}})]),
        ('So: <function=f>{"a": 1}</function><function=g>{}</function>', "So:", [("f", {"a": 1}), ("g", {})]),
        ("<function=g></function>", "", [("g", {})]),
        ("<function=", "<function=", []),
    ],
    "kimi_k2": [
        (
            "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            '{"a": "}"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
            "<|tool_call_end|><|tool_calls_section_end|>",
            "Let me see.",
            [("f", {"a": "}"}), ("g", {})],
        ),
        (
            '<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|> ok',
            " ok",
            [("f", {"a": 1})],
        ),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>", []),
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
        (
            "Yes <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
            '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "Yes",
            [("f", {"a": 1})],
        ),
    ],
    "solar_open": [
        (
            '<|tool_calls|><|tool_call:begin|>a1b2<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|>'
            "<|tool_call:begin|>c3d4<|tool_call:name|>g<|tool_call:args|>{}<|tool_call:end|>",
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
    ],
    "gemma4": [
        (
            '<|tool_call>call:f{a:3,b:<|"|>x, {y}<|"|>,deep:{c:[1,<|"|>z<|"|>,true]}}<tool_call|>',
            "",
            [("f", {"a": 3, "b": "x, {y}", "deep": {"c": [1, "z", True]}})],
        ),
        ("Yes <|tool_call>call:g{}<tool_call|><|tool_call>call:g{}<tool_call|>", "Yes", [("g", {}), ("g", {})]),
        ("<|tool_call>call:g{<tool_call|>", "<|tool_call>call:g{<tool_call|>", []),
        ("<|tool_call>nothing<tool_call|>", "<|tool_call>nothing<tool_call|>", []),
    ],
    "functiongemma": [
        (
            "<start_function_call>call:f{b:<escape>4<escape>,a:<escape>3<escape>}<end_function_call>",
            "",
            [("f", {"b": "4", "a": 3})],
        )
    ],
    "cohere_command3": _json("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters"),
    "command_r": [
        (
            'Action:\n```json\n[\n    {\n        "tool_name": "f",\n        "parameters": {"a": 1}\n    }\n]```\n',
            "",
            [("f", {"a": 1})],
        ),
        ("Action: none", "Action: none", []),
    ],
    "apertus": [
        (
            'Yes <|tools_prefix|>[{"f": {"a": "}"}}, {"g": {}}]<|tools_suffix|>',
            "Yes",
            [("f", {"a": "}"}), ("g", {})],
        ),
    ],
    "nemotron_json": _json("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan_a13b": [
        *_json("<tool_calls>", "</tool_calls>"),
        (
            '<tool_calls>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"b": 2}}\n</tool_calls>',
            "",
            [("f", {}), ("g", {"b": 2})],
        ),
    ],
    "internlm": [
        *_json("<|plugin|>", "<|action_end|>", arguments="parameters"),
        *_json("<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters"),
    ],
    "glm4": [
        ('f\n{"a": "}"}', "", [("f", {"a": "}"})]),
        ('\nf \n{"a": 1}\n', "", [("f", {"a": 1})]),
        ("f is a name", "f is a name", []),
        ('g\n{"a": 1}', 'g\n{"a": 1}', []),
        ("f", "f", []),
    ],
    "gigachat3": [
        ('function call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
        ('So <|function_call|>{"name": "f", "arguments": {"a": 1}}', "So", [("f", {"a": 1})]),
    ],
    "granite-20b-fc": _json("<function_call> ", ""),
    "longcat": _json("<longcat_tool_call>", "</longcat_tool_call>"),
    "openai": [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            "",
            [("f", {"a": 1})],
        ),
        (
            "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant to=functions.g"
            "<|channel|>commentary json<|message|><|call|>",
            "Let me see.",
            [("g", {})],
        ),
        ("<|channel|>final<|message|>It rains.<|return|>", "It rains.", []),
        ("No header at all <|", "No header at all <|", []),
        ("<", "<", []),
    ],
}
