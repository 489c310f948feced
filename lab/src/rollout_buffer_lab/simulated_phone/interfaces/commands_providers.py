"""``content`` and ``sqlite3``: rows of the providers and of any database file on the device."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_buffer_lab.simulated_phone.device_state.contacts import add_contact, contacts
from rollout_buffer_lab.simulated_phone.device_state.databases import Database
from rollout_buffer_lab.simulated_phone.device_state.messages import insert_sms
from rollout_buffer_lab.simulated_phone.device_state.state import STORAGE
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.shell_language import Command, Output, failed, printed

_SMS_FOLDERS = {"content://sms": (1, 2), "content://sms/inbox": (1,), "content://sms/sent": (2,)}
_PHONES = ("content://contacts/phones", "content://com.android.contacts/data/phones")
_CONTACTS = ("content://com.android.contacts/contacts", "content://contacts/people")
_Row = Mapping[str, Any]


def provider_commands(phone: EmulatorState) -> Mapping[str, Command]:
    """Returns the commands of this file by name."""
    return {
        "content": lambda arguments, piped: _content(phone, arguments),
        "sqlite3": lambda arguments, piped: _sqlite3(phone, arguments, piped),
    }


def _content(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    verb = arguments[0] if arguments else ""
    options = _options(arguments)
    uri = options.get("--uri", [""])[0].rstrip("/")
    if verb == "query":
        return _query(phone, uri, options.get("--projection", [""])[0])
    if verb == "delete":
        return _delete(phone, uri)
    if verb == "insert":
        return _insert(phone, uri, dict(_binding(text) for text in options.get("--bind", [])))
    return failed(f"[ERROR] Unsupported operation: {verb}")


def _options(arguments: Sequence[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for name, value in itertools.pairwise(arguments):
        if name.startswith("--"):
            options.setdefault(name, []).append(value)
    return options


def _binding(text: str) -> tuple[str, str]:
    """Returns name and value of ``NAME:TYPE:VALUE``."""
    name, _, rest = text.partition(":")
    return name, rest.partition(":")[2]


def _query(phone: EmulatorState, uri: str, projection: str) -> Output:
    rows = _rows(phone, uri)
    if rows is None:
        return failed(f"Error while accessing provider: {uri}")
    if not rows:
        return printed("No result found.\n")
    names = projection.split(":") if projection else None
    lines = []
    for number, row in enumerate(rows):
        columns = names or list(row)
        shown = ", ".join(f"{name}={'NULL' if row.get(name) is None else row[name]}" for name in columns)
        lines.append(f"Row: {number} {shown}\n")
    return printed("".join(lines))


def _rows(phone: EmulatorState, uri: str) -> Sequence[_Row] | None:
    state = phone.state
    if uri in _SMS_FOLDERS:
        kinds = _SMS_FOLDERS[uri]
        rows = state.sms_db.query("SELECT * FROM sms ORDER BY date DESC, _id DESC")
        return [row for row in rows if row["type"] in kinds]
    if uri in (*_PHONES, *_CONTACTS):
        listed = [each for each in contacts(state) if each.number or uri in _CONTACTS]
        return [{"_id": each.contact_id, "display_name": each.name, "number": each.number} for each in listed]
    if uri.startswith(("content://call_log/", "content://media/")):
        return []
    return None


def _delete(phone: EmulatorState, uri: str) -> Output:
    state = phone.state
    if uri in _SMS_FOLDERS:
        kinds = ", ".join(str(kind) for kind in _SMS_FOLDERS[uri])
        state.sms_db.execute(f"DELETE FROM sms WHERE type IN ({kinds})")
    elif uri == "content://media/external/downloads":
        for path in state.files.files_under(f"{STORAGE}/Download"):
            state.files.remove(path)
    elif not uri.startswith(("content://call_log/", "content://media/")):
        return failed(f"Error while accessing provider: {uri}")
    return printed()


def _insert(phone: EmulatorState, uri: str, values: Mapping[str, str]) -> Output:
    state = phone.state
    if uri in _SMS_FOLDERS:
        sent = uri.endswith("/sent") or values.get("type") == "2"
        date = values.get("date", "")
        date_ms = int(date) if date.isdecimal() else None
        insert_sms(state, values.get("address", ""), values.get("body", ""), sent=sent, date_ms=date_ms)
    elif uri in _CONTACTS:
        first, _, last = values.get("display_name", "").partition(" ")
        add_contact(state, first, last, values.get("number", ""))
    else:
        return failed(f"Error while accessing provider: {uri}")
    return printed()


def _sqlite3(phone: EmulatorState, arguments: Sequence[str], piped: bytes) -> Output:
    """Runs the statements on a database file; rows are printed with ``|`` between the columns."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    if not words:
        return failed("sqlite3: no database named")
    path, sql = words[0], " ".join(words[1:]) or piped.decode("utf-8", "replace")
    files = phone.state.files
    scratch = Database(path, "")
    try:
        if files.exists(path):
            scratch.write(files.read(path))
        rows = scratch.run_script(sql)
        files.write(path, scratch.read())
    except sqlite3.Error as error:
        return failed(f"Error: in prepare, {error}")
    finally:
        scratch.close()
    return printed("".join("|".join("" if value is None else str(value) for value in row) + "\n" for row in rows))
