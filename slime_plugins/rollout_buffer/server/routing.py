"""Adds functions as routes: their signatures decide how a request is parsed and how OpenAPI describes the route."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_type_hints

from flask import Blueprint, Response, request
from pydantic import BaseModel

from slime_plugins.rollout_buffer.openapi.operations import Operation
from slime_plugins.rollout_buffer.server.http import json_or_unchanged, json_reply, read_body
from slime_plugins.rollout_buffer.wire.request_fields import parse

CONVERTERS = {
    "job_id": "id:",
    "uid": "id:",
    "delivery_id": "id:",
    "group_index": "int:",
    "file": "path:",
    "verb": "any(cancel, pause, resume):",
}
"""How Flask reads the parameters of paths; a parameter that is not named here is a text without slashes."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Routes:
    """The routes of one file: Flask's blueprint, and their descriptions for OpenAPI.

    The first sentence of a function's docstring is the summary, the rest the description. A parameter of a type of
    ``wire/`` is the query of a GET or the body of a POST, checked before the call. What is returned is the reply.
    """

    def __init__(self, name: str) -> None:
        self.blueprint = Blueprint(f"rollout_buffer_{name}", __name__)
        self.operations: list[Operation] = []

    def get(self, path: str, **about: Any) -> Callable[[Function], Function]:
        """Adds a function as a route; ``about`` are fields of ``Operation`` that its signature does not say.

        With ``revalidated`` a client that already has the same reply receives status 304 without a body.
        """
        return functools.partial(self._add, f"GET {path}", about)

    def post(self, path: str, **about: Any) -> Callable[[Function], Function]:
        """As ``get``."""
        return functools.partial(self._add, f"POST {path}", about)

    def put(self, path: str, **about: Any) -> Callable[[Function], Function]:
        """As ``get``."""
        return functools.partial(self._add, f"PUT {path}", about)

    def _add(self, route: str, about: dict[str, Any], function: Function) -> Function:
        method, path = route.split(" ")
        as_reply = json_or_unchanged if about.pop("revalidated", False) else json_reply
        kinds = dict(_requests_of(function))
        takes_body = bool(kinds) and method != "GET"
        described: dict[str, Any] = {"query" if method == "GET" else "body": kind for kind in kinds.values()}
        if (reply := get_type_hints(function)["return"]) is not Response:
            described["reply"] = reply
        summary, _, description = inspect.cleandoc(function.__doc__ or "").partition(".\n")
        description = " ".join(description.split())
        self.operations.append(
            Operation(route=route, summary=summary.rstrip("."), description=description, **described, **about)
        )

        @functools.wraps(function)
        def view(**parameters: Any) -> Response:
            fields = read_body() if takes_body else request.args.to_dict()
            result = function(**parameters, **{name: parse(kind, fields) for name, kind in kinds.items()})
            return result if isinstance(result, Response) else as_reply(result)

        rule = re.sub(r"{(\w+)}", lambda match: f"<{CONVERTERS.get(match[1], '')}{match[1]}>", path)
        self.blueprint.add_url_rule(rule, view_func=view, methods=[method])
        return function


def _requests_of(function: Callable[..., Any]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, kind in get_type_hints(function).items():
        if name != "return" and inspect.isclass(kind) and issubclass(kind, BaseModel):
            yield name, kind
