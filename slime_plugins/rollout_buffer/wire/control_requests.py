"""The bodies of ``drain`` and ``sign_in``."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from slime_plugins.rollout_buffer.wire.request_fields import Body


class DrainPayload(Body):
    """The body of ``drain``."""

    stop: bool = False
    """True gives running attempts up, to play them again after `resume`; false lets them end by themselves."""


class SignInPayload(Body):
    """The body of ``sign_in``, sent by the dashboard."""

    token: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """The server's token: the first line of its `--token-file`."""
