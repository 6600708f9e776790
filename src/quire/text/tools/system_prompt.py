"""Tools for models whose chat template has none: described in the system message, called and answered in the text."""

import json
from typing import Any

_PROMPT = """\
You may call functions. Their names and the JSON schemas of their arguments are:
<tools>
{tools}
</tools>
To call one, write
<tool_call>
{{"name": "the function's name", "arguments": {{...}}}}
</tool_call>
and nothing else; for several calls, several such blocks. The results are given to you as <tool_response> blocks."""


def add_tools_to_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in system, user and assistant messages alone."""
    result: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            block = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if not (result and result[-1].get("tool_response")):  # the results of parallel calls are one message
                result.append({"role": "user", "content": [], "tool_response": True})
            result[-1]["content"].append(block)
        elif calls := message.get("tool_calls"):
            blocks = [_call_block(call["function"]) for call in calls]
            content = "\n".join(filter(None, [message.get("content"), *blocks]))
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            result.append({**kept, "content": content})
        else:
            result.append(message)
    for message in result:
        if message.get("tool_response"):
            message["content"] = "\n".join(message["content"])
    if tools:
        prompt = _PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if result[0]["role"] == "system":
            result[0] = {**result[0], "content": f"{result[0].get('content') or ''}\n\n{prompt}"}
        else:
            result.insert(0, {"role": "system", "content": prompt})
    return result


def _call_block(function: dict[str, Any]) -> str:
    call = json.dumps({"name": function["name"], "arguments": function.get("arguments")}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
