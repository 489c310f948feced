"""Pure: which ``Host`` a server without a token answers for, and which pages a browser may ask it for.

A page of another site can have its own name resolve to loopback, and the browser then takes the server for that site.
Its requests still carry that name, which no program here uses. It can also send to loopback without reading the reply;
then the browser says in ``Origin`` whose page it was.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from slime_plugins.rollout_buffer.errors import ForbiddenError


def check_host(given: str | None, allowed: Collection[str]) -> None:
    """Lets a request pass that asks for this machine by a name of loopback's, or by one of ``allowed``.

    ``given`` is its Host header; None when it has none, which no browser's request is.

    Raises:
        ForbiddenError: it asks for another host.
    """
    if given is None:
        return
    name = _without_port(given.strip().lower())
    if name == "localhost" or name.endswith(".localhost") or _is_loopback(name):
        return
    if name not in {each.lower() for each in allowed}:
        raise ForbiddenError(
            f"this server does not answer for the host {given[:200]!r}: ask for 127.0.0.1, or start it with "
            "--allowed-host NAME or --token-file FILE"
        )


def check_origin(origin: str | None, host: str | None) -> None:
    """Lets a request pass that no page of another site made a browser send; the two are headers of it.

    Raises:
        ForbiddenError: ``origin`` is another site than ``host``.
    """
    if origin is not None and (not (site := _site_of(origin)) or site != host):
        raise ForbiddenError(f"a page of {origin[:200]} sent this: only this server's own page may")


def check_page(headers: Mapping[str, str], allowed: Collection[str]) -> None:
    """Both checks, of a request to a server without a token.

    Raises:
        ForbiddenError: as either of them.
    """
    check_host(headers.get("Host"), allowed)
    check_origin(headers.get("Origin"), headers.get("Host"))


def _site_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # brackets that hold no address
        return ""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdigit() or not port) else host


def _is_loopback(name: str) -> bool:
    """Returns True for an address of loopback, and for 0.0.0.0 and ::, which reach this machine alone as well."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
