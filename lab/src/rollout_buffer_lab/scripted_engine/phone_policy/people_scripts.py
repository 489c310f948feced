"""Scripts for contacts and text messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from rollout_buffer_lab.scripted_engine.phone_policy.actions import (
    app_opened,
    button_tapped,
    field_filled,
    field_pasted,
    find_row,
    icon_tapped,
    last_message,
    stepped_back,
    tapped_row,
    titled,
)
from rollout_buffer_lab.scripted_engine.phone_policy.moves import Move, give_up, press, tap
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import PolicyObservation
from rollout_buffer_lab.scripted_engine.phone_policy.task_script import AppScript, TaskScript

MESSENGER: Final = "Simple SMS Messenger"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddContact(AppScript):
    """Fills in the form and saves it."""

    words: ClassVar[tuple[str, ...]] = ("first", "last", "phone")
    app = "Contacts"
    done = "Saved the contact {0.first} {0.last}."
    first: str
    last: str
    phone: str

    def in_app(self, observation: PolicyObservation) -> Move:
        if observation.screen.title == "Create contact":
            return _form_filled(observation, self.first, self.last, self.phone) or button_tapped(
                observation, "Save", self.conclusion, decisive=True
            )
        return _to_contact_form(observation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftContact(TaskScript):
    """Fills in the form and leaves it open. The label comes first, because the keyboard would cover it later."""

    words: ClassVar[tuple[str, ...]] = ("first", "last", "phone")
    first: str
    last: str
    phone: str
    label: str

    def next_move(self, observation: PolicyObservation) -> Move | None:
        return app_opened(observation, "Contacts") or self._in_contacts(observation)

    def _in_contacts(self, observation: PolicyObservation) -> Move | None:
        if observation.screen.title == "Phone label":
            return tapped_row(observation, self.label, f"Chose the label {self.label}.", decisive=True)
        if observation.screen.title != "Create contact":
            return _to_contact_form(observation)
        label = find_row(observation, "Phone label")
        if label is not None and label.detail != self.label:
            return tapped_row(observation, "Phone label")
        return _form_filled(observation, self.first, self.last, self.phone)


def _form_filled(observation: PolicyObservation, first: str, last: str, phone: str) -> Move | None:
    values = {"First name": first, "Last name": last, "Phone": phone}
    moves = (field_filled(observation, label, value) for label, value in values.items() if value)
    return next((move for move in moves if move is not None), None)


def _to_contact_form(observation: PolicyObservation) -> Move:
    if observation.screen.title == "Contacts":
        return icon_tapped(observation, "add", "add a contact")
    return stepped_back(observation)


@dataclass(frozen=True, kw_only=True, slots=True)
class SendMessage(AppScript):
    """Starts a conversation and sends a text; without a text it pastes the clipboard."""

    words: ClassVar[tuple[str, ...]] = ("number", "text")
    app = MESSENGER
    done = "Sent a message to {0.number}."
    number: str
    text: str = ""

    def in_app(self, observation: PolicyObservation) -> Move:
        if observation.screen.title == "Messages":
            return icon_tapped(observation, "add", "start a conversation")
        if observation.screen.title not in ("New conversation", "Edit text"):
            return stepped_back(observation)
        if observation.screen.title == "New conversation":
            numbered = field_filled(observation, "Phone number", self.number)
            if numbered is not None:
                return numbered
        return _message_entered(observation, self.text) or button_tapped(
            observation, "Send", self.conclusion, decisive=True
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply(AppScript):
    """Sends a text in an existing conversation: with the contact ``name``, or without it in the topmost one."""

    words: ClassVar[tuple[str, ...]] = ("text",)
    app = MESSENGER
    done = "Sent the reply."
    name: str = ""
    text: str

    def in_app(self, observation: PolicyObservation) -> Move:
        chosen = self.name or observation.recalled(r"Opened the conversation with (.+?)\.$")
        if observation.screen.title == "Messages":
            return _conversation_opened(observation, self.name)
        if not titled(observation, chosen or "", "Edit text"):
            return stepped_back(observation)
        return _message_entered(observation, self.text) or button_tapped(
            observation, "Send", self.conclusion, decisive=True
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SendAgain(TaskScript):
    """Reads the last message sent to a contact, and sends it again."""

    name: str

    def next_move(self, observation: PolicyObservation) -> Move | None:
        text = observation.recalled(r'Tapped the field Message, to send this again: "(.+)"\.$')
        if text is None:
            return app_opened(observation, MESSENGER) or self._read(observation)
        return Reply(name=self.name, text=text).next_move(observation)

    def _read(self, observation: PolicyObservation) -> Move:
        field = observation.screen.find_field("Message")
        if observation.screen.title == "Messages":
            return _conversation_opened(observation, self.name)
        if not titled(observation, self.name) or field is None:
            return stepped_back(observation)
        text = last_message(observation, sent=True)
        if not text:
            return give_up(f"I see no message of mine to {self.name}.")
        conclusion = f'Tapped the field Message, to send this again: "{text}".'
        return tap(field.center, f'The last message I sent reads "{text}". I send it once more.', conclusion)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardReceived(TaskScript):
    """Reads the latest message from a contact, and forwards its text to another."""

    from_name: str
    to_name: str

    def next_move(self, observation: PolicyObservation) -> Move | None:
        text = observation.recalled(rf'Read what {re.escape(self.from_name)} sent: "(.+)"\.$')
        if text is None:
            return app_opened(observation, MESSENGER) or self._read(observation)
        return Reply(name=self.to_name, text=text).next_move(observation)

    def _read(self, observation: PolicyObservation) -> Move:
        if observation.screen.title == "Messages":
            return _conversation_opened(observation, self.from_name)
        if not titled(observation, self.from_name):
            return stepped_back(observation)
        text = last_message(observation, sent=False)
        if not text:
            return give_up(f"I see no message from {self.from_name}.")
        thought = f'{self.from_name} wrote "{text}". I remember that and go back to the conversations.'
        return press("Back", thought, f'Read what {self.from_name} sent: "{text}".')


def _conversation_opened(observation: PolicyObservation, name: str) -> Move:
    if not name and not observation.rows:
        return give_up("There are no conversations.")
    chosen = name or observation.rows[0].text
    return tapped_row(observation, chosen, f"Opened the conversation with {chosen}.")


def _message_entered(observation: PolicyObservation, text: str) -> Move | None:
    return field_filled(observation, "Message", text) if text else field_pasted(observation, "Message")
