"""`quire chat`: a conversation in the terminal."""

import sys
from collections.abc import Sequence
from itertools import count

from quire.cli.answer import PrintedAnswer, TextEngine
from quire.cli.chat_commands import run_command
from quire.cli.chat_input import ReadLine, keep_history, line_reader, read_messages
from quire.cli.conversation import Conversation
from quire.cli.flags import add_model_argument, read_flags, with_model_argument
from quire.cli.interrupts import first_interrupt_noted
from quire.cli.load import add_model_flags, load
from quire.cli.parser import Parser
from quire.cli.sampling import SamplingFlags
from quire.cli.terminal import Terminal
from quire.client.generate_request import GenerateRequest
from quire.core.errors import PromptTooLong, QuireError, Unsupported
from quire.hub import cache_dir
from quire.text.chat.chat_format import chat_format

EXAMPLES = """\
  quire chat
  quire chat Qwen/Qwen2.5-0.5B-Instruct --system "You answer in one sentence."
  quire chat --load talk.json --temperature 0.2
  printf 'Hello!\\nAnd in French?\\n' | quire chat
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("chat [MODEL]", "Talk to a model. Inside, /help lists the commands.", EXAMPLES)
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="how the model should behave")
    parser.add_argument("--load", metavar="FILE", help="go on from a conversation that /save wrote")
    add_model_flags(parser)
    arguments = with_model_argument(parser.parse(argv))
    flags = read_flags(SamplingFlags, arguments)
    chat = Conversation(flags.params(), arguments.system, arguments.lora)
    terminal = Terminal()
    if arguments.load is not None:
        terminal.note(run_command(f"/load {arguments.load}", chat).note)
    engine, model, seconds = load(arguments)
    if arguments.load is None:  # a saved conversation has its own
        chat.params = flags.params(engine.generation.sampling)
    if not engine.tokenizer.chat_template:
        raise Unsupported(f"`{model}` has no chat template", "it completes text: `quire run --raw -m MODEL TEXT`")
    if sys.stdin.isatty():
        keep_history(cache_dir() / "chat_history")
        terminal.note(f"{model}, loaded in {seconds:.2f} s. /help lists commands, Ctrl-D leaves.")
    converse(engine, chat, terminal, line_reader(), interactive=sys.stdin.isatty())
    return 0


def converse(
    engine: TextEngine, chat: Conversation, terminal: Terminal, read_line: ReadLine, *, interactive: bool = True
) -> None:
    """Read and answer until the input ends or the user leaves."""
    numbers = count(1)
    while True:
        try:
            for message in read_messages(read_line):
                if not _turn(engine, chat, terminal, message, f"chat-{next(numbers)}"):
                    return
        except KeyboardInterrupt:  # while typing: forget the line, as a shell does
            if not interactive:
                raise
            terminal.note("")
            continue
        return


def _turn(engine: TextEngine, chat: Conversation, terminal: Terminal, message: str, request_id: str) -> bool:
    """Run a command or answer a message. An error ends the turn, not the conversation. -> whether to go on"""
    try:
        question: str | None = message
        if message.startswith("/"):
            done = run_command(message.strip(), chat)
            if done.leave:
                return False
            if done.note:
                terminal.note(done.note)
            question = done.ask
        if question is not None and question.strip():
            answer(engine, chat, terminal, question, request_id)
    except QuireError as error:
        terminal.note(f"error: {error}")
    return True


def answer(engine: TextEngine, chat: Conversation, terminal: Terminal, question: str, request_id: str) -> None:
    """Ask, and show the answer as it comes. Ctrl-C stops it; what came until then stays in the conversation."""
    chat.ask(question)
    reply = PrintedAnswer()
    form = chat_format(engine.tokenizer.chat_template or "")
    messages = form.messages([dict(message) for message in chat.messages()])
    request = GenerateRequest(id=request_id, params=chat.params, messages=messages, adapter=chat.adapter)
    try:
        with first_interrupt_noted() as interrupted:
            reply.follow(engine.stream(request), terminal.write, interrupted.is_set)
    except KeyboardInterrupt:
        pass
    except PromptTooLong as error:
        chat.take_back()
        raise PromptTooLong(error.message, "/clear forgets what was said, /system none the system message") from error
    except QuireError:
        chat.take_back()
        raise
    chat.answer(reply.text)
    terminal.write("\n")
    terminal.note(reply.stats())
