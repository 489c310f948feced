"""HTTP over the buffer: an ASGI application that answers writes, polls and health, and Flask for all other routes.

* ``request_limits`` – deadlines and sizes of requests; ``body_limits`` – the size limit of each route
* ``asgi`` – the ASGI application; ``wsgi_bridge`` – Flask in threads
* ``poll_watcher`` – wakes waiting polls after commits; ``delivery_reply`` – encodes a delivery
* ``app`` – the Flask application; ``http`` – shared by all routes: context, token, bodies, replies, errors
* ``routes`` – all routes; ``write``, ``poll`` and ``health`` are the three without Flask
* ``supervisor_state`` – health of the supervisor; ``supervisor_watchdog`` – kills a frozen one
* ``tokenizer_paths`` – the tokenizers that a job may name
* ``gunicorn_config`` – gunicorn's settings and its logger with this project's format
"""
