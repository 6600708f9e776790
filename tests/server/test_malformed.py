"""Valid bodies, damaged in two hundred ways: each is refused or served, none is a failure of the server."""

import json
import random
from typing import Any

from server.running import running

VALID: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": "fake",
            "messages": [
                {"role": "system", "content": "Be"},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
            "max_tokens": 4,
            "temperature": 0.5,
            "logit_bias": {"5": 1.0},
            "stop": ["x"],
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"a": 1},
        },
    ),
    (
        "/v1/completions",
        {"model": "fake", "prompt": ["a", "b"], "n": 2, "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 3,
         "stream": True, "stream_options": {"include_usage": True}, "bad_words": ["q"], "stop_token_ids": [3]},
    ),
    ("/tokenize", {"model": "fake", "prompt": "text", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]  # fmt: skip

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1e300,
    "",
    "x",
    [],
    [[]],
    [None],
    {},
    {"": None},
    {"a": [1]},
    "\u0000",
    [{}],
    -0.5,
]


def damaged(value: Any, chance: random.Random) -> Any:
    """The same with one place of it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        changed, key = dict(value), chance.choice(list(value))
        action = chance.randrange(5)
        if action == 0:
            del changed[key]
        elif action == 1:
            changed[chance.choice(["", "N", key.upper(), "\u2603"])] = changed.pop(key)
        else:
            changed[key] = damaged(value[key], chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], damaged(value[at], chance), *value[at + 1 :]]
    return chance.choice(ODD)


def test_damaged_bodies_never_look_like_our_failure() -> None:
    chance = random.Random(5)
    refused = 0
    with running() as server:
        for round_number in range(200):
            path, valid = VALID[round_number % len(VALID)]
            body = json.dumps(damaged(valid, chance)).encode()
            if round_number % 5 == 4:  # and on the wire
                at = chance.randrange(len(body))
                body = body[:at] + bytes([chance.randrange(256)]) * chance.randrange(3) + body[at + 1 :]
            response = server.http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code < 500, (path, body, response.text)
            if response.status_code != 200:
                refused += 1
                assert response.json()["error"]["message"]
            else:
                assert '"error"' not in response.text, (path, body, response.text)
        assert refused > 120
        assert not server.service.open
        for path, valid in VALID:
            assert server.http.post(path, json=valid).status_code == 200
