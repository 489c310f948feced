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


def provider_commands(handset: EmulatorState) -> Mapping[str, Command]:
    """Returns the commands of this file by name."""
    return {
        "content": lambda arguments, piped: _content(handset, arguments),
        "sqlite3": lambda arguments, piped: _sqlite3(handset, arguments, piped),
    }


def _content(handset: EmulatorState, arguments: Sequence[str]) -> Output:
    verb = arguments[0] if arguments else ""
    options = _options(arguments)
    address = options.get("--uri", [""])[0].rstrip("/")
    if verb == "query":
        return _query(handset, address, options.get("--projection", [""])[0])
    if verb == "delete":
        return _delete(handset, address)
    if verb == "insert":
        return _insert(handset, address, dict(_binding(text) for text in options.get("--bind", [])))
    return failed(f"[ERROR] Unsupported operation: {verb}")


def _options(arguments: Sequence[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for name, value in itertools.pairwise(arguments):
        if name.startswith("--"):
            options.setdefault(name, []).append(value)
    return options


def _binding(text: str) -> tuple[str, str]:
    name, _, rest = text.partition(":")
    return name, rest.partition(":")[2]


def _query(handset: EmulatorState, address: str, projection: str) -> Output:
    rows = _rows(handset, address)
    if rows is None:
        return failed(f"Error while accessing provider: {address}")
    if not rows:
        return printed("No result found.\n")
    wanted = projection.split(":") if projection else None
    lines = []
    for number, row in enumerate(rows):
        columns = wanted or list(row)
        shown = ", ".join(f"{name}={'NULL' if row.get(name) is None else row[name]}" for name in columns)
        lines.append(f"Row: {number} {shown}\n")
    return printed("".join(lines))


def _rows(handset: EmulatorState, address: str) -> Sequence[_Row] | None:
    state = handset.state
    if address in _SMS_FOLDERS:
        kinds = _SMS_FOLDERS[address]
        rows = state.sms_db.query("SELECT * FROM sms ORDER BY date DESC, _id DESC")
        return [row for row in rows if row["type"] in kinds]
    if address in (*_PHONES, *_CONTACTS):
        everyone = contacts(state)
        known = [one for one in everyone if one.number] if address in _PHONES else everyone
        return [{"_id": one.contact_id, "display_name": one.name, "number": one.number} for one in known]
    if address.startswith(("content://call_log/", "content://media/")):
        return []
    return None


def _delete(handset: EmulatorState, address: str) -> Output:
    state = handset.state
    if address in _SMS_FOLDERS:
        kinds = ", ".join(str(kind) for kind in _SMS_FOLDERS[address])
        state.sms_db.execute(f"DELETE FROM sms WHERE type IN ({kinds})")
    elif address == "content://media/external/downloads":
        for path in state.files.files_under(f"{STORAGE}/Download"):
            state.files.remove(path)
    elif not address.startswith(("content://call_log/", "content://media/")):
        return failed(f"Error while accessing provider: {address}")
    return printed()


def _insert(handset: EmulatorState, address: str, values: Mapping[str, str]) -> Output:
    state = handset.state
    if address in _SMS_FOLDERS:
        sent = address.endswith("/sent") or values.get("type") == "2"
        date = values.get("date", "")
        date_ms = int(date) if date.isdecimal() else None
        insert_sms(state, values.get("address", ""), values.get("body", ""), sent=sent, date_ms=date_ms)
    elif address in _CONTACTS:
        first, _, last = values.get("display_name", "").partition(" ")
        add_contact(state, first, last, values.get("number", ""))
    else:
        return failed(f"Error while accessing provider: {address}")
    return printed()


def _sqlite3(handset: EmulatorState, arguments: Sequence[str], piped: bytes) -> Output:
    """Runs the statements on a database file; rows are printed with ``|`` between the columns."""
    words = [one for one in arguments if not one.startswith("-")]
    if not words:
        return failed("sqlite3: no database named")
    path, sql = words[0], " ".join(words[1:]) or piped.decode("utf-8", "replace")
    files = handset.state.files
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
    return printed("".join("|".join("" if one is None else str(one) for one in row) + "\n" for row in rows))
