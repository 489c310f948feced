"""The ``adb`` program of simulated phones: carries its arguments to a phone's socket and the phone's answer back.

Run as ``python fake_adb.py FOLDER ARGS``, where FOLDER holds one socket for each phone, named after its serial. It uses
nothing but the standard library, and as little of it as it can, because it is started for every single command.
"""

from __future__ import annotations

import json
import os
import socket
import sys

_LOG = "adb_servers.log"


def _answer(folder: str, serial: str, arguments: list[str]) -> int:
    """Sends one command to the phone and prints its answer; returns the exit code."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.path.join(folder, serial + ".sock"))
    except OSError:
        return _complain(f"adb: device '{serial}' not found")
    with connection, connection.makefile("rb") as stream:
        connection.sendall(json.dumps({"arguments": arguments}).encode() + b"\n")
        head = json.loads(stream.readline() or b'{"code": 1, "size": 0}')
        sys.stdout.buffer.write(stream.read(head["size"]))
        sys.stdout.buffer.flush()
        if head.get("stream"):
            stream.read()  # logcat ends only when the phone is gone
        return int(head["code"])


def _complain(text: str) -> int:
    sys.stderr.write(text + "\n")
    return 1


def _devices(folder: str) -> int:
    names = sorted(name[:-5] for name in os.listdir(folder) if name.endswith(".sock"))
    sys.stdout.write("List of devices attached\n" + "".join(f"{name}\tdevice\n" for name in names) + "\n")
    return 0


def _server_command(folder: str, port: str, verb: str) -> int:
    """Logs a command for the adb server, which does not exist here: tests read what a shared server would get."""
    with open(os.path.join(folder, _LOG), "a", encoding="utf-8") as log:
        log.write(f"{port} {verb}\n")
    return 0


def main(words: list[str]) -> int:
    """Returns adb's exit code."""
    folder, words = words[0], words[1:]
    port = os.environ.get("ANDROID_ADB_SERVER_PORT", "5037")
    serial = os.environ.get("ANDROID_SERIAL", "")
    while words and words[0] in ("-P", "-s", "-H", "-L"):
        option, value, words = words[0], words[1], words[2:]
        if option == "-P":
            port = value
        if option == "-s":
            serial = value
    verb = words[0] if words else ""
    if verb in ("start-server", "kill-server"):
        return _server_command(folder, port, verb)
    if verb == "devices":
        return _devices(folder)
    if verb in ("version", "--version"):
        sys.stdout.write("Android Debug Bridge version 1.0.41 (simulated)\n")
        return 0
    return _answer(folder, serial, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
