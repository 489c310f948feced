"""Contacts: the list, one contact, and the form for a new one."""

from __future__ import annotations

from functools import partial

from rollout_buffer_lab.simulated_phone.apps.page import App, ConfirmDialog, MenuDialog, Page
from rollout_buffer_lab.simulated_phone.device_state.contacts import (
    PHONE_LABELS,
    Contact,
    add_contact,
    contacts,
    delete_contact,
)
from rollout_buffer_lab.simulated_phone.fields import TextField
from rollout_buffer_lab.simulated_phone.layout import BarIcon, ScreenBuilder

_FORM_FIELDS = (("first", "First name"), ("last", "Last name"), ("phone", "Phone"))


class ContactsApp(App):
    """The address book."""

    def first_page(self) -> Page:
        """Returns the list of all contacts."""
        return _List(self)

    def new_contact(self, name: str, number: str) -> None:
        """Shows the prefilled form for a new contact, for another app's intent."""
        form = _Form(self)
        form.field_named("first").text, _, form.field_named("last").text = name.partition(" ")
        form.field_named("phone").text = number
        self.push(form)


class _List(Page):
    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("Contacts")
        all_contacts = contacts(self.state)
        for contact in all_contacts:
            open_contact = partial(self.show, _Detail, contact)
            screen.row(contact.name or "(No name)", icon="person", on_tap=open_contact)
        if not all_contacts:
            screen.section("No contacts yet")
        screen.floating_icon("add", partial(self.show, _Form))


class _Detail(Page):
    def __init__(self, app: App, contact: Contact) -> None:
        super().__init__(app)
        self._contact = contact

    def build(self, screen: ScreenBuilder) -> None:
        contact = self._contact
        dialog = ConfirmDialog(self.app, "Delete", f"Delete the contact {contact.name}?", "Delete", self._delete)
        screen.title_bar(
            contact.name, on_back=self.back, icons=[BarIcon(icon="delete", on_tap=lambda: self.app.push(dialog))]
        )
        if contact.number:
            screen.row(contact.number, secondary=contact.label, icon="phone")

    def _delete(self) -> None:
        delete_contact(self.state, self._contact.contact_id)
        self.app.pop()


class _Form(Page):
    """The form of a new contact. Its fields are stored as a draft until the form is closed."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._label = "Mobile"
        for key, _ in _FORM_FIELDS:
            self.fields[key] = TextField(on_change=lambda text: self._store_draft())
        self._store_draft()

    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("Create contact", on_back=self.back, buttons=[("Save", self._save)])
        for key, label in _FORM_FIELDS:
            screen.field(key, label)
        screen.row("Phone label", secondary=self._label, on_tap=self._choose_label)

    def leave(self) -> None:
        """Deletes the draft if the form was closed, but not if the app goes to the background."""
        super().leave()
        if self not in self.app.pages:
            for key in [key for key in self.app.preferences if key.startswith("draft_")]:
                del self.app.preferences[key]

    def _choose_label(self) -> None:
        choices = [(label, partial(self._set_label, label)) for label in PHONE_LABELS]
        self.app.push(MenuDialog(self.app, "Phone label", choices))

    def _set_label(self, label: str) -> None:
        self._label = label
        self._store_draft()

    def _store_draft(self) -> None:
        draft = {f"draft_{key}": self.fields[key].text for key, _ in _FORM_FIELDS if key in self.fields}
        self.app.preferences.update(draft, draft_label=self._label)

    def _save(self) -> None:
        first, last, phone = (self.fields[key].text for key, _ in _FORM_FIELDS)
        if any(text.strip() for text in (first, last, phone)):
            add_contact(self.state, first, last, phone.strip(), self._label)
        self.app.pop()
