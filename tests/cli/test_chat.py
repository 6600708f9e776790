"""The conversation, driven through an engine that answers with what it was asked."""

import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.cli.chat import converse
from quire.cli.chat_commands import COMMANDS, run_command
from quire.cli.chat_input import read_messages
from quire.cli.conversation import SETTABLE, Conversation
from quire.cli.parser import UsageError
from quire.cli.terminal import Terminal
from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest, PromptTooLong
from quire.core.params import SamplingParams
from quire.text.event import TextEvent


class Echo:
    """Answers `you said: ...`, a word a step."""

    chat_template: str | None = "{{ messages }}"

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.interrupt_after: int | None = None  # words
        self.num_interrupts = 1
        self.refuse: Exception | None = None

    @property
    def tokenizer(self) -> "Echo":
        return self

    def stream(self, request: GenerateRequest) -> Iterator[TextEvent]:
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        assert request.messages is not None
        words = f"you said: {request.messages[-1]['content']}".split()
        ended = False
        try:
            for number, word in enumerate(words):
                if number == self.interrupt_after:
                    for _ in range(self.num_interrupts):
                        signal.raise_signal(signal.SIGINT)
                text = word if number == 0 else f" {word}"
                yield TextEvent(0, text, [number], num_prompt_tokens=7, num_cached_tokens=3)
            ended = True
            yield TextEvent(0, finish_reason="stop", num_prompt_tokens=7, final=True)
        finally:
            if not ended:
                self.cancelled.append(request.id)


def typed(*lines: str | type[BaseException]) -> Callable[[str], str]:
    waiting = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read_line


class Talk:
    def __init__(self, *lines: str | type[BaseException], engine: Echo | None = None, **settings: bool) -> None:
        self.engine = engine or Echo()
        self.chat = Conversation(SamplingParams(max_tokens=None, temperature=0.7))
        out, notes = io.StringIO(), io.StringIO()
        converse(self.engine, self.chat, Terminal(out, notes), typed(*lines), **settings)
        self.out, self.notes = out.getvalue(), notes.getvalue()


# -- what is typed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one", "two"], ["one", "two"]),
        (["one \\", "two\\", "three", "four"], ["one \ntwo\nthree", "four"]),
        (['"""first', "", 'last"""', "next"], ["first\n\nlast", "next"]),
        (['"""', "body", '"""'], ["body"]),
        (['"""all in one"""'], ["all in one"]),
        (['"""never', "closed"], ["never\nclosed"]),
        (["ends in the air\\"], ["ends in the air"]),
        ([], []),
    ],
)
def test_lines_become_messages(lines: list[str], messages: list[str]) -> None:
    assert list(read_messages(typed(*lines))) == messages


# -- turns -------------------------------------------------------------------------------------------------------------


def test_a_conversation_grows_by_a_question_and_an_answer() -> None:
    talk = Talk("hello", "", "  ", "again")
    assert talk.out == "you said: hello\nyou said: again\n"
    assert [message["content"] for message in talk.engine.requests[1].messages or []] == [
        "hello",
        "you said: hello",
        "again",
    ]
    assert talk.engine.cancelled == []


def test_speed_is_told_after_each_answer() -> None:
    talk = Talk("hello")
    assert "3 tokens · first after" in talk.notes and "tok/s · prompt 7, 3 of them cached · stop" in talk.notes


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    """The step in flight is finished first: an engine is never left in the middle of one."""
    engine = Echo()
    engine.interrupt_after = 2
    talk = Talk("what is a quire", "/clear", engine=engine)
    assert talk.engine.cancelled == ["chat-1"]
    assert talk.out == "you said: what\n" and "cancelled" in talk.notes and "forgotten" in talk.notes


def test_a_second_ctrl_c_does_not_wait_for_the_step() -> None:
    engine = Echo()
    engine.interrupt_after, engine.num_interrupts = 2, 2
    talk = Talk("what is a quire", engine=engine)
    assert talk.engine.cancelled == ["chat-1"] and talk.out == "you said:\n"


def test_after_an_answer_ctrl_c_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    Talk("hello")
    assert signal.getsignal(signal.SIGINT) is before


def test_what_came_before_ctrl_c_is_remembered() -> None:
    engine = Echo()
    engine.interrupt_after = 2
    assert Talk("hello", engine=engine).chat.turns[-1] == {"role": "assistant", "content": "you said: hello"}


def test_ctrl_c_while_typing_forgets_the_line() -> None:
    assert Talk("half \\", KeyboardInterrupt, "hello").out == "you said: hello\n"


def test_ctrl_c_ends_a_chat_from_a_pipe() -> None:
    with pytest.raises(KeyboardInterrupt):
        Talk(KeyboardInterrupt, "hello", interactive=False)


def test_a_refused_question_is_not_remembered() -> None:
    engine = Echo()
    engine.refuse = PromptTooLong("too long", "shorten the prompt")
    talk = Talk("hello", "/params", engine=engine)
    assert talk.chat.turns == []
    assert "error: too long\nhint: /clear forgets" in talk.notes
    assert "temperature" in talk.notes, "the chat went on"


def test_an_answer_that_fails_is_not_remembered() -> None:
    class Failing(Echo):
        def stream(self, request: GenerateRequest) -> Iterator[TextEvent]:
            yield TextEvent(0, "you", [1])
            yield TextEvent(0, finish_reason="error", reason="the engine ended", final=True)

    talk = Talk("hello", engine=Failing())
    assert talk.chat.turns == [] and "the engine ended" in talk.notes


# -- commands ----------------------------------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    notes = Talk("/help").notes
    assert all(name in notes for name in COMMANDS)


@pytest.mark.parametrize("line", ["/quit", "/bye", "/exit"])
def test_quit_leaves_by_the_names_of_other_chats_too(line: str) -> None:
    talk = Talk(line, "hello")
    assert (talk.out, talk.notes) == ("", "")


def test_set_reaches_the_engine() -> None:
    talk = Talk("/set temperature 0.2", "/set max_tokens 32", "/set stop END", "/set seed 7", "hello")
    params = talk.engine.requests[0].params
    assert (params.temperature, params.max_tokens, params.stop, params.seed) == (0.2, 32, ["END"], 7)
    assert "temperature = 0.2" in talk.notes


def test_none_takes_a_setting_back() -> None:
    params = Talk("/set max_tokens 5", "/set max_tokens none", "/set stop x", "/set stop none").chat.params
    assert (params.max_tokens, params.stop) == (None, [])
    params = Talk("/set samplers dry;top_k;temp", "/set mirostat 2", "/set dry_sequence_breakers none").chat.params
    assert (params.samplers, params.mirostat) == (["dry", "top_k", "temperature"], 2)
    assert params.dry_sequence_breakers == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temprature 1", "did you mean `temperature`?"),
        ("/set temperature hot", "`hot` is not a number"),
        ("/set temperature -1", "temperature must be between"),
        ("/set temperature", "takes a name and a value"),
        ("/set n 4", "there is no parameter `n`"),
        ("/set temperature none", "`none` is not a number"),
        ("/sve x", "did you mean `/save`?"),
        ("/retry", "nothing was asked yet"),
        ("/save", "/save takes a file"),
        ("/load /no/such/file", "cannot be read"),
    ],
)
def test_a_wrong_command_changes_nothing(line: str, told: str) -> None:
    talk = Talk(line)
    assert told in talk.notes
    assert talk.chat == Conversation(SamplingParams(max_tokens=None, temperature=0.7))


def test_params_shows_all_that_can_be_set() -> None:
    notes = Talk("/params").notes
    assert all(name in notes for name in SETTABLE)


def test_system_is_the_first_message() -> None:
    talk = Talk("/system Be brief.", "hello", "/system", "/system none", "again")
    first, second = talk.engine.requests
    assert (first.messages or [])[0] == {"role": "system", "content": "Be brief."}
    assert (second.messages or [])[0]["role"] == "user"
    assert "system: Be brief." in talk.notes


def test_retry_asks_the_last_question_again() -> None:
    talk = Talk("one", "two", "/retry")
    assert talk.engine.requests[1].messages == talk.engine.requests[2].messages
    assert len(talk.chat.turns) == 4


def test_clear_forgets_all_but_the_system_message() -> None:
    talk = Talk("/system Be brief.", "one", "/clear")
    assert (talk.chat.turns, talk.chat.system) == ([], "Be brief.")


def test_a_saved_conversation_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    before = Talk("/system Be brief.", "/set temperature 0.2", "one", f"/save {file}", f"/save {file}").chat
    after = Conversation(SamplingParams())
    assert "loaded 2 messages" in run_command(f"/load {file}", after).note
    assert after == before
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_saving_does_not_overwrite_something_else(tmp_path: Path) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    with pytest.raises(UsageError, match="not a saved conversation"):
        run_command(f"/save {file}", Conversation(SamplingParams()))
    assert file.read_text() == "years of work"


@pytest.mark.parametrize(
    "saved",
    [
        "nonsense",
        [],
        {"messages": []},
        {"messages": [{"role": "user"}], "params": {}},
        {"messages": [{"role": "user", "content": 7}], "params": {}},
        {"messages": [{"role": "root", "content": "x"}], "params": {}},
        {"messages": [], "params": {"temperature": -1}},
        {"messages": [], "params": {"temprature": 1}},
    ],
)
def test_a_damaged_file_is_refused_whole(tmp_path: Path, saved: object) -> None:
    (tmp_path / "talk.json").write_text(json.dumps(saved))
    chat = Conversation(SamplingParams(), "Be brief.")
    with pytest.raises(BadRequest):
        run_command(f"/load {tmp_path / 'talk.json'}", chat)
    assert chat == Conversation(SamplingParams(), "Be brief.")


# -- the terminal ------------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_cannot_steer_the_terminal() -> None:
    screen, file = Screen(), io.StringIO()
    for out in (screen, file):
        Terminal(out, io.StringIO()).write("a\x1b[2Jb\x9bc\x07\n\té")
    assert screen.getvalue() == "a␛[2Jb�c␇\n\té"
    assert file.getvalue() == "a\x1b[2Jb\x9bc\x07\n\té", "what goes to a file is what the model said"
