"""New connections while there is no room for all: each is a socket, and nothing else of a connection.

Who has sent a whole request becomes a connection at once. Who has not, waits here for the rest of it, and is closed
when too many wait: strangers that say half a sentence and come again cost a tenth of what a connection costs, and
nobody has to give way for them.
"""

from __future__ import annotations

import re
import socket
import time
from collections import deque
from collections.abc import Callable

PEEK_BYTES = 48 * 1024
"""More than the largest head, and than ``ENOUGH_OF_A_BODY`` beside it."""
TIME_TO_SPEAK_S = 0.02
"""Between connecting and sending: nobody is closed for another one before that."""
ENOUGH_OF_A_BODY = 16 * 1024
"""Who has sent so much of a larger body does send it."""
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)


Waiting = deque[tuple[socket.socket, float]]


class PendingConnections:
    """The sockets that wait. Those that have said nothing yet and those that have said a part wait apart."""

    def __init__(self, most: int, limit_s: float, admit: Callable[[socket.socket], None]) -> None:
        """``most`` wait at a time, each for ``limit_s`` at most; ``admit`` makes a connection of one."""
        self._most = most
        self._limit_s = limit_s
        self._admit = admit
        self._silent: Waiting = deque()
        self._half: Waiting = deque()

    def __len__(self) -> int:
        return len(self._silent) + len(self._half)

    @property
    def takes_more(self) -> bool:
        """Tells whether whoever would have to leave for one more has had its time to speak."""
        return len(self) < self._most or self._larger()[0][1] + TIME_TO_SPEAK_S < time.monotonic()

    def add(self, client: socket.socket) -> None:
        """Has a socket wait, or not, if its request is here."""
        self._sort(client, time.monotonic())
        if len(self) > self._most:
            self._larger().popleft()[0].close()

    def poll(self, *, admits_all: bool = False) -> None:
        """Lets those in whose requests have come meanwhile, and closes those that are gone or were too slow."""
        latest = time.monotonic() - self._limit_s
        waiting = [*self._half, *self._silent]
        self._half.clear()
        self._silent.clear()
        for client, since in waiting:
            if admits_all:
                self._admit(client)
            elif since < latest:
                client.close()
            else:
                self._sort(client, since)

    def close(self) -> None:
        """Closes all."""
        for waiting in (self._silent, self._half):
            while waiting:
                waiting.popleft()[0].close()

    def _larger(self) -> Waiting:
        return max(self._silent, self._half, key=len)

    def _sort(self, client: socket.socket, since: float) -> None:
        """Lets a socket in whose request is here, closes one that is gone, and has any other wait."""
        try:
            sent = client.recv(PEEK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            self._silent.append((client, since))
        except OSError:
            client.close()
        else:
            if not sent:
                client.close()
            elif has_sent_enough(sent):
                self._admit(client)
            else:
                self._half.append((client, since))


def has_sent_enough(sent: bytes) -> bool:
    """Tells whether a client's first request is here, or of a large one so much that the rest will come."""
    head, found, body = sent.partition(b"\r\n\r\n")
    if not found:
        return False
    length = _LENGTH.search(head + b"\r\n")
    if length is not None:
        return len(body) >= min(int(length[1]), ENOUGH_OF_A_BODY)
    return len(body) >= ENOUGH_OF_A_BODY or b"\r\n0\r\n" in b"\r\n" + body if _CHUNKED.search(head) else True
