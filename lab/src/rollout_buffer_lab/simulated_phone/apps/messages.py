"""Simple SMS Messenger: the list of conversations, one conversation, and the form of a new one."""

from __future__ import annotations

from functools import partial

from rollout_buffer_lab.simulated_phone.apps.dates import date_and_time
from rollout_buffer_lab.simulated_phone.apps.page import App, MenuDialog, Page
from rollout_buffer_lab.simulated_phone.device_state.contacts import contacts, name_of_number
from rollout_buffer_lab.simulated_phone.device_state.messages import (
    Sms,
    conversations,
    delete_sms,
    insert_sms,
    messages_with,
)
from rollout_buffer_lab.simulated_phone.layout import ScreenBuilder


class MessagesApp(App):
    """Text messages."""

    def first_page(self) -> Page:
        """Returns the list of conversations."""
        return _Conversations(self)

    def compose(self, number: str, body: str) -> None:
        """Shows the conversation with a number, with a draft in it, for another app's intent."""
        self.push(_Thread(self, number, draft=body))


class _Conversations(Page):
    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("Messages")
        latest = conversations(self.state)
        for sms in latest:
            screen.row(
                name_of_number(self.state, sms.address),
                secondary=sms.body,
                on_tap=partial(self.show, _Thread, sms.address),
            )
        if not latest:
            screen.section("No conversations yet")
        screen.floating_icon("add", partial(self.show, _NewConversation))


class _Thread(Page):
    """One conversation, scrolled to its end when opened."""

    def __init__(self, app: App, address: str, draft: str = "") -> None:
        super().__init__(app)
        self._address = address
        self.field_named("message").text = draft
        self.scroll = 1_000_000  # the builder reduces it to the end of the list

    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar(name_of_number(self.state, self._address), on_back=self.back)
        screen.footer_field("message", "Message", "Send", self._send)
        for sms in messages_with(self.state, self._address):
            screen.section(date_and_time(sms.date_ms))
            screen.bubble(sms.body, sent=sms.sent, on_long_press=partial(self._open_menu, sms))

    def _send(self) -> None:
        field = self.field_named("message")
        if field.text.strip():
            insert_sms(self.state, self._address, field.text, sent=True)
            field.clear()
            self.scroll = 1_000_000

    def _open_menu(self, sms: Sms) -> None:
        choices = [
            ("Copy", partial(self._copy_body, sms)),
            ("Forward", partial(self.show, _NewConversation, sms.body)),
            ("Delete", partial(delete_sms, self.state, sms.sms_id)),
        ]
        self.app.push(MenuDialog(self.app, "Message", choices))

    def _copy_body(self, sms: Sms) -> None:
        self.state.clipboard = sms.body


class _NewConversation(Page):
    def __init__(self, app: App, draft: str = "") -> None:
        super().__init__(app)
        self.field_named("message").text = draft

    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("New conversation", on_back=self.back)
        screen.footer_field("message", "Message", "Send", self._send)
        screen.field("number", "Phone number")
        screen.section("Contacts")
        for contact in contacts(self.state):
            if contact.number:
                screen.row(contact.name, secondary=contact.number, on_tap=partial(self._pick, contact.number))

    def enter(self) -> None:
        """Moves the focus from the number to the message; from the message it takes the focus away."""
        self.focused = "message" if self.focused == "number" else None

    def _pick(self, number: str) -> None:
        field = self.field_named("number")
        field.clear()
        field.insert(number)
        self.focus("message")

    def _send(self) -> None:
        number, message = self.field_named("number").text.strip(), self.field_named("message").text
        if number and message.strip():
            insert_sms(self.state, number, message, sent=True)
            self.app.replace(_Thread(self.app, number))
