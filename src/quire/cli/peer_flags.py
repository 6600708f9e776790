"""Flags of other engines, hidden from the help text: aliases of ours, flags without effect, and refusals by name."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from quire.cli.parser import Parser, UsageError
from quire.core.errors import BadRequest
from quire.engine.peer_options import (
    NEGATED_FLAGS,
    PEER_OPTIONS,
    SHORT_FLAGS,
    NoEffect,
    Only,
    PeerOption,
    Renamed,
    warning,
)

_OPTIONAL_VALUE = ("flash_attn",)  # a switch in older guides, a flag with a value in newer ones
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
_SAMPLED = Only(
    (), """requests say it; their defaults are set as --override-generation-config '{"temperature": 0.5}'"""
)


def add_peer_flags(parser: Parser) -> None:
    """After the flags of the command itself, which go first where names are equal."""
    for name, peer in PEER_OPTIONS.items():
        _add(parser, _flag(name), peer, name in _OPTIONAL_VALUE)
    if "--override-generation-config" in parser.flags:
        for name in _SAMPLING:
            _add(parser, _flag(name), _SAMPLED, False)
    for flag, name in SHORT_FLAGS.items():
        _add(parser, flag, PEER_OPTIONS.get(name) or Renamed(name), name in _OPTIONAL_VALUE)


def _add(parser: Parser, flag: str, peer: PeerOption, optional: bool) -> None:
    names = [flag, f"--no-{flag[2:]}"] if peer.switch and flag.startswith("--") else [flag]
    names = [name for name in names if name not in parser.flags]
    if not names:
        return
    ours = parser.flags.get(_flag(peer.option)) if isinstance(peer, Renamed) else None
    if isinstance(peer, Renamed) and (ours is None or isinstance(ours, _PeerFlag)):
        if peer.option not in _SAMPLING or "--override-generation-config" not in parser.flags:
            return
        peer = _SAMPLED
    nargs: Any = 0 if peer.switch else "?" if optional else None
    parser.add_argument(*names, action=_PeerFlag, peer=peer, ours=ours, nargs=nargs, help=argparse.SUPPRESS)


class _PeerFlag(argparse.Action):
    def __init__(self, *, peer: PeerOption, ours: argparse.Action | None, **settings: Any) -> None:
        super().__init__(**{**settings, "default": argparse.SUPPRESS})
        self.peer, self.ours = peer, ours

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        is_on = not flag.startswith("--no-") and flag not in NEGATED_FLAGS
        value = str(is_on).lower() if self.peer.switch else values
        if isinstance(self.peer, NoEffect | Only):
            try:
                text = warning(flag, self.peer, value)
            except BadRequest as error:
                raise UsageError(error.message, error.hint) from None
            if text:
                print(f"warning: {text}", file=sys.stderr)
            return
        assert self.ours is not None
        here = self.peer.values.get(str(value).lower(), value)
        if here is not None:
            self._give(parser, namespace, here)

    def _give(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any) -> None:
        """As if our flag had been given with this value."""
        ours = self.ours
        assert ours is not None
        if isinstance(ours, argparse.BooleanOptionalAction):
            ours(parser, namespace, None, ours.option_strings[0 if value else 1])
            return
        try:
            read: Any = ours.type(value) if callable(ours.type) else value
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if ours.choices is not None and read not in ours.choices:
            raise argparse.ArgumentError(self, f"`{read}` is not one of {', '.join(ours.choices)}")
        ours(parser, namespace, [read] if ours.nargs == "+" else read, ours.option_strings[0])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
