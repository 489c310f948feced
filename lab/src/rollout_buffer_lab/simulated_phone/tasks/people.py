"""Tasks about contacts and text messages."""

from __future__ import annotations

import random

from rollout_buffer_lab.simulated_phone.device_state.contacts import add_contact, contacts, same_number
from rollout_buffer_lab.simulated_phone.device_state.messages import insert_sms, sent_messages
from rollout_buffer_lab.simulated_phone.device_state.packages import app_named
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.tasks.base import Params, Task, all_hold, same_text
from rollout_buffer_lab.simulated_phone.tasks.words import address, full_name, number, numbers, people, sentence

_MINUTE_MS = 60_000


def fill_phone(state: DeviceState, params: Params, rng: random.Random) -> None:
    """Puts a few contacts and conversations on the phone that have nothing to do with the task."""
    taken = [str(value) for value in params.values()]
    for name, their_number in zip(people(rng, 3, taken), numbers(rng, 3, taken), strict=True):
        first, last = name.split()
        add_contact(state, first, last, their_number)
        minutes_ago = rng.randint(600, 6000)
        _receive(state, their_number, sentence(rng), minutes_ago)


def _receive(state: DeviceState, their_number: str, body: str, minutes_ago: int) -> None:
    date_ms = state.clock.now_ms - minutes_ago * _MINUTE_MS
    insert_sms(state, their_number, body, sent=False, date_ms=date_ms)


def draw_message(rng: random.Random) -> dict[str, str]:
    """Draws a number and a message for it."""
    return {"number": number(rng), "message": sentence(rng)}


def sent(state: DeviceState, params: Params, answer: str | None) -> float:
    """Returns 1.0 if the message was sent to the number, else 0.0."""
    return all_hold(_times_sent(state, params["number"], params["message"]) >= 1)


def _times_sent(state: DeviceState, their_number: str, message: str) -> int:
    return sum(same_number(sms.address, their_number) and same_text(sms.body, message) for sms in sent_messages(state))


# Contacts


def _draw_contact(rng: random.Random) -> Params:
    return {"name": full_name(rng), "number": number(rng)}


def _contact_added(state: DeviceState, params: Params, answer: str | None) -> float:
    return all_hold(
        any(
            same_text(contact.name, params["name"]) and same_number(contact.number, params["number"])
            for contact in contacts(state)
        )
    )


def _draw_draft(rng: random.Random) -> Params:
    first, last = full_name(rng).split()
    return {"first": first, "last": last, "phone": number(rng), "phone_label": rng.choice(("Home", "Work", "Other"))}


def _drafted(state: DeviceState, params: Params, answer: str | None) -> float:
    app = app_named("Contacts")
    draft = state.preferences_of(app.package) if app else {}
    return all_hold(
        app is not None and state.focused_component == app.component,
        draft.get("draft_first", "").strip() == params["first"],
        draft.get("draft_last", "").strip() == params["last"],
        same_number(draft.get("draft_phone", ""), params["phone"]),
        draft.get("draft_label") == params["phone_label"],
    )


# Messages


def _receive_message(state: DeviceState, params: Params, rng: random.Random) -> None:
    fill_phone(state, params, rng)
    _receive(state, params["number"], sentence(rng), rng.randint(700, 5000))


def _receive_newest_message(state: DeviceState, params: Params, rng: random.Random) -> None:
    fill_phone(state, params, rng)
    _receive(state, params["number"], sentence(rng), rng.randint(1, 300))


def _draw_resend(rng: random.Random) -> Params:
    return {"name": full_name(rng), **draw_message(rng)}


def _send_once(state: DeviceState, params: Params, rng: random.Random) -> None:
    fill_phone(state, params, rng)
    first, last = params["name"].split()
    add_contact(state, first, last, params["number"])
    _receive(state, params["number"], sentence(rng), 120)
    insert_sms(
        state, params["number"], params["message"], sent=True, date_ms=state.clock.now_ms - rng.randint(1, 90) * 60_000
    )


def _resent(state: DeviceState, params: Params, answer: str | None) -> float:
    return all_hold(_times_sent(state, params["number"], params["message"]) >= 2)


def _copy_message(state: DeviceState, params: Params, rng: random.Random) -> None:
    fill_phone(state, params, rng)
    state.clipboard = params["message"]


def _draw_address(rng: random.Random) -> Params:
    name1, name2 = people(rng, 2)
    number1, number2 = numbers(rng, 2)
    return {"name1": name1, "name2": name2, "number": number1, "number2": number2, "message": address(rng)}


def _send_address(state: DeviceState, params: Params, rng: random.Random) -> None:
    fill_phone(state, params, rng)
    for name, their_number in ((params["name1"], params["number"]), (params["name2"], params["number2"])):
        first, last = name.split()
        add_contact(state, first, last, their_number)
    _receive(state, params["number"], "Where is it, by the way?", 60)
    _receive(state, params["number2"], params["message"], 5)


_IN_MESSENGER = "In Simple SMS Messenger, "

PEOPLE_TASKS = (
    Task(
        name="ContactsAddContact",
        step_budget=12,
        goal="Add a contact named {name} with the phone number {number}.",
        make_params=_draw_contact,
        set_up=fill_phone,
        success=_contact_added,
    ),
    Task(
        name="ContactsNewContactDraft",
        step_budget=12,
        goal=(
            "Open the form for a new contact and fill it in: first name {first}, last name {last}, phone {phone}, "
            "phone label {phone_label}. Do NOT save it."
        ),
        make_params=_draw_draft,
        set_up=fill_phone,
        success=_drafted,
    ),
    Task(
        name="SimpleSmsSend",
        step_budget=12,
        goal=_IN_MESSENGER + "send a text message to {number} that says: {message}",
        make_params=draw_message,
        set_up=fill_phone,
        success=sent,
    ),
    Task(
        name="SimpleSmsReply",
        step_budget=12,
        goal=_IN_MESSENGER + "reply to {number} with the message: {message}",
        make_params=draw_message,
        set_up=_receive_message,
        success=sent,
    ),
    Task(
        name="SimpleSmsReplyMostRecent",
        step_budget=12,
        goal=_IN_MESSENGER + "reply to the text message that arrived last with the message: {message}",
        make_params=draw_message,
        set_up=_receive_newest_message,
        success=sent,
    ),
    Task(
        name="SimpleSmsResend",
        step_budget=12,
        goal=_IN_MESSENGER + "send the message that I last sent to {name} once more, to the same person.",
        make_params=_draw_resend,
        set_up=_send_once,
        success=_resent,
    ),
    Task(
        name="SimpleSmsSendClipboardContent",
        step_budget=12,
        goal=_IN_MESSENGER + "send a message to {number} with what is on the clipboard.",
        make_params=draw_message,
        set_up=_copy_message,
        success=sent,
    ),
    Task(
        name="SimpleSmsSendReceivedAddress",
        step_budget=18,
        goal=_IN_MESSENGER + "text the address that {name2} just sent me to {name1}.",
        make_params=_draw_address,
        set_up=_send_address,
        success=sent,
    ),
)
