"""Contacts in the database of the contacts provider."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState

PHONE_LABELS = {"Mobile": 2, "Home": 1, "Work": 3, "Other": 7}
"""Android's number for each label (``ContactsContract.CommonDataKinds.Phone.TYPE_*``)."""

_PHONE, _NAME = 5, 7  # ids in the table mimetypes


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """One contact; ``number`` is empty if it has none."""

    contact_id: int
    name: str
    number: str
    label: str


def contacts(state: DeviceState) -> list[Contact]:
    """Returns all contacts by name; one with two numbers comes twice, as the provider's list of phones has it."""
    rows = state.contacts_db.query(
        """
        SELECT raw_contacts._id AS contact_id, display_name, data1, data2
        FROM raw_contacts
        LEFT JOIN data ON data.raw_contact_id = raw_contacts._id AND data.mimetype_id = ?
        WHERE deleted = 0
        ORDER BY display_name COLLATE NOCASE, raw_contacts._id
        """,
        _PHONE,
    )
    names = {str(number): label for label, number in PHONE_LABELS.items()}
    return [
        Contact(
            contact_id=row["contact_id"],
            name=row["display_name"] or "",
            number=row["data1"] or "",
            label=names.get(str(row["data2"]), "Other"),
        )
        for row in rows
    ]


def add_contact(state: DeviceState, first: str, last: str, number: str, label: str = "Mobile") -> int:
    """Saves a contact and returns its id."""
    name = f"{first.strip()} {last.strip()}".strip()
    database = state.contacts_db
    contact_id = database.execute("INSERT INTO contacts (name_raw_contact_id) VALUES (NULL)")
    raw_id = database.execute("INSERT INTO raw_contacts (contact_id, display_name) VALUES (?, ?)", contact_id, name)
    database.execute("UPDATE contacts SET name_raw_contact_id = ? WHERE _id = ?", raw_id, contact_id)
    insert = "INSERT INTO data (mimetype_id, raw_contact_id, data1, data2, data3, data4) VALUES (?, ?, ?, ?, ?, ?)"
    database.execute(insert, _NAME, raw_id, name, first.strip(), last.strip(), None)
    if number:
        database.execute(insert, _PHONE, raw_id, number, str(PHONE_LABELS.get(label, 7)), None, _digits(number))
    return raw_id


def delete_contact(state: DeviceState, contact_id: int) -> None:
    """Deletes a contact with all its rows."""
    state.contacts_db.execute("DELETE FROM data WHERE raw_contact_id = ?", contact_id)
    state.contacts_db.execute("DELETE FROM contacts WHERE name_raw_contact_id = ?", contact_id)
    state.contacts_db.execute("DELETE FROM raw_contacts WHERE _id = ?", contact_id)


def name_of_number(state: DeviceState, number: str) -> str:
    """Returns the contact's name, or the number if unknown."""
    for contact in contacts(state):
        if contact.number and same_number(contact.number, number):
            return contact.name
    return number


def same_number(first: str, second: str) -> bool:
    """Returns True if both are the same number, whatever blanks and dashes they contain."""
    return _digits(first) == _digits(second)


def _digits(number: str) -> str:
    digits = "".join(character for character in number if character in "+0123456789")
    return digits or number.strip()
