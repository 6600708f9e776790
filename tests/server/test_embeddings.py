"""Vectors and scores over HTTP: with OpenAI's client, and in the shapes that others expect."""

import base64
import struct
from collections.abc import Iterator

import openai
import pytest

from server.running import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def test_openais_client_reads_vectors(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="fake", input=["ab", "abcd"])  # it asks for base64, and decodes it
        assert [entry.embedding for entry in found.data] == [[3.0, 1.0, 0.5, 0.25], [5.0, 1.0, 0.5, 0.25]]
        assert [entry.index for entry in found.data] == [0, 1] and found.usage.prompt_tokens == 8
        assert client.embeddings.create(model="fake", input="x", dimensions=2).data[0].embedding == [2.0, 1.0]


def test_both_forms_of_a_vector(server: Running) -> None:
    body = {"input": [1, 2, 3]}
    [floats] = server.http.post("/v1/embeddings", json=body).json()["data"]
    [text] = server.http.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"]
    assert floats == {"object": "embedding", "index": 0, "embedding": [3.0, 1.0, 0.5, 0.25]}
    assert list(struct.unpack("<4f", base64.b64decode(text["embedding"]))) == floats["embedding"]
    assert len(server.http.post("/v1/embeddings", json={"input": [[1], [2, 3]]}).json()["data"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "dimension": 2}, "dimension"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "texts": []}, "texts"),
        ("/rerank", {"query": "a", "texts": ["b"], "raw_scores": True}, "raw_scores"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"queries": ["a", "b"], "items": ["a"]}, "queries"),
        ("/v1/score", {"queries": "a", "text_2": "b"}, "text_1"),
        ("/v1/score", {}, "text_1"),
    ],
)
def test_a_wrong_field_is_named(server: Running, path: str, body: dict[str, object], param: str) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_back_in_order_of_their_scores(server: Running, path: str) -> None:
    body = {"query": "abc", "documents": ["a", {"text": "abc"}, "xyz"], "top_n": 2}
    answer = server.http.post(path, json=body).json()
    assert answer["results"] == [
        {"index": 1, "relevance_score": 3.0, "document": {"text": "abc"}},
        {"index": 0, "relevance_score": 1.0, "document": {"text": "a"}},
    ]
    assert answer["model"] == "fake" and answer["usage"]["total_tokens"] == 16
    bare = server.http.post(path, json={**body, "return_documents": False}).json()
    assert bare["results"][0] == {"index": 1, "relevance_score": 3.0}


def test_texts_are_ranked_as_text_embeddings_inference_does(server: Running) -> None:
    body = {"query": "abc", "texts": ["a", "abc", "xyz"], "truncate": True, "raw_scores": False}
    assert server.http.post("/rerank", json=body).json() == [
        {"index": 1, "score": 3.0},
        {"index": 0, "score": 1.0},
        {"index": 2, "score": 0.0},
    ]
    assert server.http.post("/rerank", json={**body, "return_text": True}).json()[0]["text"] == "abc"


def test_scores_of_one_against_many_and_of_pairs(server: Running) -> None:
    def scores(one: object, other: object) -> list[float]:
        answer = server.http.post("/score", json={"text_1": one, "text_2": other}).json()
        assert [entry["object"] for entry in answer["data"]] == ["score"] * len(answer["data"])
        return [entry["score"] for entry in answer["data"]]

    assert scores("ab", "abc") == [2.0]
    assert scores("ab", ["a", "ab", "c"]) == [1.0, 2.0, 0.0]
    assert scores(["ab", "c"], ["a", "cd"]) == [1.0, 1.0]


@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_what_is_scored_has_other_names_too(server: Running, names: tuple[str, str]) -> None:
    answer = server.http.post("/score", json=dict(zip(names, ("ab", ["a", "ab"]), strict=True))).json()
    assert [entry["score"] for entry in answer["data"]] == [1.0, 2.0]


def test_vllms_pooling_is_an_embedding_with_other_names(server: Running) -> None:
    told = server.http.post("/pooling", json={"input": ["Hello", "Hi"], "task": "embed"}).json()
    assert [(each["object"], each["index"], each["data"]) for each in told["data"]] == [
        ("pooling", 0, [6.0, 1.0, 0.5, 0.25]),
        ("pooling", 1, [3.0, 1.0, 0.5, 0.25]),
    ]
    assert told["usage"] == {"prompt_tokens": 9, "total_tokens": 9} and told["model"] == "fake"
    assert server.http.post("/pooling", json={"input": "Hi", "task": "classify"}).status_code == 400
