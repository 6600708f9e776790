import pytest

from quire.core.params import SamplingParams
from quire.core.request import IdLogprob, SequenceEvent
from quire.text.event import TextEvent
from quire.text.stream import CompletionText
from server.fake_service import EOS, ByteTokenizer


def completion(**params: object) -> CompletionText:
    return CompletionText(ByteTokenizer(), SamplingParams(**params))


def event(text: str | list[int], **more: object) -> SequenceEvent:
    return SequenceEvent(request_id="r", index=0, tokens=list(text.encode()) if isinstance(text, str) else text, **more)


def run(text: CompletionText, *events: SequenceEvent) -> tuple[str, TextEvent]:
    shown = ""
    for each in events:
        out = text.push(each)
        shown += out.text
        if out.finish_reason:
            break
    return shown, out


def test_characters_come_when_they_are_whole() -> None:
    text = completion()
    first, second = "é".encode()
    assert [text.push(event([first])).text, text.push(event([second])).text] == ["", "é"]
    assert text.push(event([first], finish_reason="length")).text == "\ufffd"


def test_a_stop_string_ends_the_completion_in_the_middle_of_a_step() -> None:
    logprobs = [[IdLogprob(token, -1.0, 1)] for token in b"c END d"]
    shown, last = run(completion(stop=["END"]), event("ab"), event("c END d", logprobs=logprobs))
    assert shown == "abc " and last.stop_reason == "END" and last.finish_reason == "stop"
    assert bytes(last.token_ids) == b"c END" and len(last.logprobs) == 5


def test_a_stop_string_may_be_shown() -> None:
    shown, last = run(completion(stop=["END"], include_stop_str_in_output=True), event("ab EN"), event("D more"))
    assert shown == "ab END" and bytes(last.token_ids) == b"D"


def test_held_back_text_is_shown_at_the_end() -> None:
    shown, last = run(completion(stop=["END"]), event("ab E"), event("N", finish_reason="length"))
    assert shown == "ab EN" and last.finish_reason == "length" and last.stop_reason is None


def test_no_stop_string_before_min_tokens() -> None:
    shown, last = run(completion(stop=["a"], min_tokens=4), event("aaaaaa"))
    assert shown == "aaa" and len(last.token_ids) == 4 and last.stop_reason == "a"


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "abX")])
def test_a_stop_token_is_counted_and_not_shown(include: bool, shown: str) -> None:
    text = completion(stop_token_ids=[ord("X")], include_stop_str_in_output=include)
    got, last = run(text, event("abX", finish_reason="stop", stop_token=ord("X")))
    assert got == shown and bytes(last.token_ids) == b"abX" and last.stop_reason == ord("X")


def test_eos_is_no_stop_reason() -> None:
    shown, last = run(completion(stop=["x"]), event([*b"ab", EOS], finish_reason="stop", stop_token=EOS))
    assert shown == "ab" and last.stop_reason is None and last.token_ids[-1] == EOS


def test_logprobs_have_the_bytes_of_a_token() -> None:
    first = "é".encode()[0]
    text_event = completion().push(event([first], logprobs=[[IdLogprob(first, -0.5, 1), IdLogprob(97, -2.0, 2)]]))
    [[chosen, other]] = text_event.logprobs
    assert (chosen.text, chosen.bytes, chosen.logprob) == ("\ufffd", [first], -0.5) and other.text == "a"
