"""The hosts that a server may call: the trainers of a rollout server, or the scoring callbacks of a gateway.

Clients name the addresses. Without a list, they could make the server call any host in its network. Pure: no name is
resolved.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.remote_rollout.errors import CallbackRefusedError

DEFAULT_PORTS = {"http": 80, "https": 443}
_MUST_BE = "must be host, host:port, *.domain or a network like 10.0.0.0/8"
_COMPLETIONS = ("/v1/chat/completions", "/v1")


class CallbackHosts:
    """The list of hosts. A name is allowed by its name, whatever it resolves to; an address by its number.

    ``127.0.0.1`` does not allow ``localhost``, nor other spellings of the number. An entry without a port allows every
    port.

    Raises:
        ConfigError: an entry is none of ``host``, ``host:port``, ``*.domain`` or a network.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._networks = [network for entry in entries if (network := _network(entry)) is not None]
        self._names = [_split_entry(entry) for entry in entries if _network(entry) is None]

    def checked(self, server_url: str) -> str:
        """Returns the base URL to call, without a trailing ``/v1/chat/completions``.

        Raises:
            CallbackRefusedError: the URL is not one of HTTP or HTTPS, has other parts than scheme, host, port and path,
                or its host is not on the list.
        """
        parts = _split(server_url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or DEFAULT_PORTS[parts.scheme]
        if not self.allows(host, port):
            raise CallbackRefusedError(
                f"server_url {server_url!r} is refused: {host}:{port} is not among the callback hosts of this server; "
                "its operator can add it to the list",
                {"host": host, "port": port},
            )
        path = parts.path.rstrip("/")
        for ending in _COMPLETIONS:
            path = path.removesuffix(ending)
        return f"{parts.scheme}://{parts.netloc}{path}"

    def allows(self, host: str, port: int) -> bool:
        """Returns True if a host, as a URL names it without brackets, may be called on a port."""
        address = _address(host)
        if address is not None and any(address in network for network in self._networks):
            return True
        return any(_matches(name, host) and wanted in (None, port) for name, wanted in self._names)


def _split(server_url: str) -> SplitResult:
    refusal = f"server_url {server_url!r} is refused"
    try:
        parts = urlsplit(server_url)
        _ = parts.port
    except ValueError as error:
        raise CallbackRefusedError(f"{refusal}: {error}") from error
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise CallbackRefusedError(f"{refusal}: it must look like http://host:port")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise CallbackRefusedError(f"{refusal}: it must not hold a user, a password, a query or a fragment")
    if not server_url.isascii() or not server_url.isprintable() or "\\" in server_url or " " in server_url:
        raise CallbackRefusedError(f"{refusal}: it holds characters that a URL must not have")
    return parts


def _matches(name: str, host: str) -> bool:
    if name.startswith("*."):
        return host.endswith(name[1:]) and _address(host) is None
    address = _address(name)
    return name == host if address is None else address == _address(host)


def _split_entry(entry: str) -> tuple[str, int | None]:
    if _address(entry) is not None:  # also of version 6 without brackets
        return entry, None
    try:
        parts = urlsplit(f"//{entry}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"callback host {entry!r}: {error}") from error
    if not host or parts.path or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"callback host {entry!r} {_MUST_BE}")
    return host.rstrip("."), port


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if "/" not in entry:
        return None
    try:
        return ipaddress.ip_network(entry)
    except ValueError as error:
        raise ConfigError(f"callback host {entry!r} {_MUST_BE}: {error}") from error


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
