"""Tools for models whose chat template knows none: described in the system message, called and answered in the text."""

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
    spelled: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            block = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if spelled and spelled[-1].get("spelled"):  # the results of parallel calls are one message
                spelled[-1]["content"] += f"\n{block}"
            else:
                spelled.append({"role": "user", "content": block, "spelled": True})
        elif calls := message.get("tool_calls"):
            blocks = [_written(call["function"]) for call in calls]
            content = "\n".join(filter(None, [message.get("content"), *blocks]))
            spelled.append({"role": message["role"], "content": content})
        else:
            spelled.append(message)
    if tools:
        prompt = _PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if spelled[0]["role"] == "system":
            spelled[0] = {**spelled[0], "content": f"{spelled[0].get('content') or ''}\n\n{prompt}"}
        else:
            spelled.insert(0, {"role": "system", "content": prompt})
    return spelled


def _written(function: dict[str, Any]) -> str:
    call = json.dumps({"name": function["name"], "arguments": function.get("arguments")}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
