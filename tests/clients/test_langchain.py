"""LangChain's models of OpenAI, as its users have them."""

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from clients.served import SECONDS, served


@tool
def weather(city: str) -> str:
    """The weather in a city"""
    return f"It rains in {city}."


class Person(BaseModel):
    """Someone"""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def where(default_model: Path) -> dict[str, Any]:
    return {"base_url": f"{served()}/v1", "api_key": "none", "model": "smollm2", "timeout": SECONDS, "max_retries": 0}


def test_chat(where: dict[str, Any]) -> None:
    model = ChatOpenAI(**where, max_tokens=12, temperature=0, seed=3)
    answer = model.invoke("Say hello.")
    assert answer.content and answer.usage_metadata and answer.usage_metadata["output_tokens"] <= 12
    assert "".join(chunk.content for chunk in model.stream("Say hello.")) == answer.content
    assert [each.content for each in model.batch(["Say hello."] * 3)] == [answer.content] * 3
    modern = ChatOpenAI(**where, max_tokens=12, temperature=0, use_responses_api=True)
    assert modern.invoke("Say hello.").text == answer.content


def test_completions(where: dict[str, Any]) -> None:
    model = OpenAI(**where, max_tokens=6, temperature=0)
    assert model.invoke("One, two, three,") == "".join(model.stream("One, two, three,"))


def test_tools(where: dict[str, Any]) -> None:
    model = ChatOpenAI(**where, max_tokens=60, temperature=0)
    asked = HumanMessage("What is the weather in Rome?")
    called = model.bind_tools([weather], tool_choice="weather").invoke([asked])
    [call] = called.tool_calls
    assert call["name"] == "weather" and set(call["args"]) == {"city"}
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([weather], tool_choice="none").invoke([asked, called, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(where: dict[str, Any], method: Any) -> None:
    model = ChatOpenAI(**where, max_tokens=60, temperature=0).with_structured_output(Person, method=method)
    person = model.invoke("Ada is 36 years old.")
    assert isinstance(person, Person)
