"""Hosts of a network of their own: Linux namespaces, with delay, loss and partitions."""

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Host:
    """A namespace whose one address this machine can reach."""

    def __init__(self, number: int) -> None:
        self.name, self._link = f"quire-test-{os.getpid()}-{number}", f"qt{os.getpid() % 100_000}h{number}"
        self.address, self._near = f"10.213.{number}.2", f"10.213.{number}.1"
        ip("netns", "add", self.name)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "far", "netns", self.name)
        ip("addr", "add", f"{self._near}/30", "dev", self._link)
        ip("-n", self.name, "addr", "add", f"{self.address}/30", "dev", "far")
        ip("-n", self.name, "link", "set", "far", "up")
        ip("link", "set", self._link, "up")

    def listen(self) -> socket.socket:
        """A socket of this host: a thread goes there to open it."""
        opened: list[socket.socket] = []

        def there() -> None:
            with Path(f"/var/run/netns/{self.name}").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            opened.append(socket.create_server((self.address, 0), backlog=128))

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        return opened[0]

    def partition(self) -> None:
        """Packets are lost, and nobody is told."""
        ip("-n", self.name, "link", "set", "far", "down")

    def heal(self) -> None:
        ip("-n", self.name, "link", "set", "far", "up")

    def worsen(self, *netem: str) -> None:
        """Delay or loss, both ways: words of `tc ... netem`."""
        for place in (["-n", self.name], []):
            link = "far" if place else self._link
            subprocess.run(["tc", *place, "qdisc", "replace", "dev", link, "root", "netem", *netem], check=True)

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._link], capture_output=True)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Skips the test where this machine does not allow it."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) on this machine")
    made: list[Host] = []
    try:
        try:
            for number in range(count):
                made.append(Host(number))
        except (subprocess.CalledProcessError, OSError) as error:
            said = getattr(error, "stderr", b"") or str(error).encode()
            pytest.skip(f"namespaces with links between them are not allowed here: {said.decode().strip()}")
        yield made
    finally:
        for host in made:
            host.close()


def needs_netem(host: Host) -> None:
    words = ["tc", "-n", host.name, "qdisc", "add", "dev", "far", "root", "netem", "delay", "1ms"]
    tried = subprocess.run(words, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this kernel has no netem: {tried.stderr.strip()}")
