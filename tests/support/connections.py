"""Which TCP connections processes of this machine hold, and to whom. Linux only."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ESTABLISHED, LISTEN = "01", "0A"


def with_children(pid: int) -> set[int]:
    """A process and all below it that are there now."""
    found = {pid}
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in task.read_text().split():
                found |= with_children(int(child))
    return found


def opened(pids: set[int]) -> set[tuple[str, int]]:
    """Addresses that the processes have connected to: established, and at the other end of a port
    that none of them listens on. Connections among them are left out."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    rows = [row for row in _table() if row[3] in inodes]
    listening = {local[1] for local, _, state, _ in rows if state == LISTEN}
    own = {local for local, *_ in rows}
    return {
        remote
        for local, remote, state, _ in rows
        if state == ESTABLISHED and local[1] not in listening and remote not in own
    }


def _sockets(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(fd)
                if target.startswith("socket:["):
                    yield target[8:-1]


Row = tuple[tuple[str, int], tuple[str, int], str, str]


def _table() -> Iterator[Row]:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                yield _address(words[1]), _address(words[2]), words[3], words[9]


def _address(text: str) -> tuple[str, int]:
    raw, port = text.split(":")
    words = [int(raw[n : n + 8], 16) for n in range(0, len(raw), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:"), int(port, 16)
