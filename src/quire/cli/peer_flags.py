"""Flags of other engines, hidden from the help text: aliases of ours, flags without effect, and refusals by name."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from quire.cli.parser import Parser, UsageError
from quire.core.errors import BadRequest
from quire.engine.peers import PEER_OPTIONS, SHORT_FLAGS
from quire.engine.peers.kinds import NoEffect, Only, PeerOption, Renamed, warning

_OPTIONAL_VALUE = ("flash_attn",)  # a switch in older guides, a flag with a value in newer ones
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
_SAMPLED = Only(
    (), """requests say it; their defaults are set as --override-generation-config '{"temperature": 0.5}'"""
)
_REQUESTED = Only((), "requests say it")


def add_peer_flags(parser: Parser) -> None:
    """After the flags of the command itself, which go first where names are equal."""
    for name, peer in PEER_OPTIONS.items():
        _add(parser, _flag(name), peer, name in _OPTIONAL_VALUE)
    if "--override-generation-config" in parser.flags:
        for name in _SAMPLING:
            _add(parser, _flag(name), _SAMPLED, False)
        for flag in sampling_flags():
            _add(parser, flag, _REQUESTED, False)
    for flag, name in SHORT_FLAGS.items():
        if name.startswith("data_parallel") and "--data-parallel-size" not in parser.flags:
            continue  # else a -dp of theirs would be the beginning of several
        is_switch = isinstance(parser.flags.get(_flag(name)), argparse.BooleanOptionalAction)
        _add(parser, flag, PEER_OPTIONS.get(name) or Renamed(name, switch=is_switch), name in _OPTIONAL_VALUE)


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
        value = str(not flag.startswith(("--no-", "-n"))).lower() if self.peer.switch else values
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
        """Set the namespace as if our flag had been given with this value."""
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


def sampling_flags() -> list[str]:
    """The sampling flags of `quire run`, by every name they have."""
    from quire.cli.sampling import SamplingFlags

    return [flag for spec in fields(SamplingFlags) for flag in (_flag(spec.name), *spec.metadata.get("aliases", ()))]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
