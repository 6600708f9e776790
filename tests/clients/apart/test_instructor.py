"""Instructor: answers that are objects."""

from collections.abc import Iterator
from typing import Any

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from clients.served import SECONDS

ADA: Any = [{"role": "user", "content": "Ada is 36 years old."}]
SHORT: Any = {"model": "smollm2", "temperature": 0, "max_tokens": 80, "messages": ADA, "max_retries": 0}


class Person(BaseModel):
    """Someone"""

    model_config = ConfigDict(extra="forbid")  # open, small models make up properties until their tokens are over
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        yield client


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_a_person(client: openai.OpenAI, mode: str) -> None:
    asked = dict(SHORT)
    if mode == "RESPONSES_TOOLS":
        asked["max_output_tokens"] = asked.pop("max_tokens")
    person = instructor.from_openai(client, mode=instructor.Mode[mode]).create(response_model=Person, **asked)
    assert isinstance(person, Person)


def test_a_person_by_and_by(client: openai.OpenAI) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    *_, last = patched.create_partial(response_model=Person, **SHORT)
    assert Person.model_validate(last.model_dump())


def test_a_person_and_what_it_took(client: openai.OpenAI) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    person, seen = patched.create_with_completion(response_model=Person, **SHORT)
    assert isinstance(person, Person) and seen.usage.completion_tokens <= 80
