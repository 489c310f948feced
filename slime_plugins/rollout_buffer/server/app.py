"""The Flask application: every route that ``asgi`` does not answer itself.

Routes parse the request, call the ``Buffer`` or ``reporting`` and encode the result. The application has no state of
its own, so any number of gunicorn workers may run it. It imports no generator, device or engine.
"""

from __future__ import annotations

from flask import Flask

from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.server.http import IdConverter, ServerContext, check_before_route, error_reply
from slime_plugins.rollout_buffer.server.routes import (
    dashboard,
    deliveries,
    groups,
    images,
    jobs,
    service,
    training_reports,
    trajectories,
)

ROUTES = (
    jobs,
    deliveries,
    groups,
    trajectories,
    images,
    training_reports,
    service,
    dashboard,
)


def create_app(settings: ServeSettings) -> Flask:
    """Builds the application; each gunicorn worker calls this once."""
    app = Flask("rollout_buffer", static_folder=None)
    app.url_map.merge_slashes = False  # an id may hold slashes, also two in a row
    app.url_map.converters["id"] = IdConverter
    app.extensions["rollout_buffer"] = ServerContext(settings)
    app.before_request(check_before_route)
    for module in ROUTES:
        app.register_blueprint(module.routes)
    app.register_error_handler(Exception, error_reply)
    return app
