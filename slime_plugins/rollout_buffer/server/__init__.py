"""HTTP over the buffer. The data routes are a small ASGI application; everything else is Flask's.

On the way down of a write or a poll:

* ``request_limits`` – the middleware: deadlines and sizes; ``body_limits`` – how large a body may be, by its route
* ``asgi`` – waits, sends; ``write_batcher`` – writes share a commit
* ``poll_watcher`` – one look at the database for all polls that wait; ``wsgi_bridge`` – threads for Flask
* ``routes_data`` – items in, groups out; ``delivery_reply`` – the reply that carries them
* ``app`` – Flask's application and the routes of jobs; ``routes_inspect``, ``routes_dashboard``,
* ``routes_training_reports`` – the other routes; ``http`` – what all routes share, errors as replies
* ``supervisor_state`` – what a server knows of the supervisor; ``tokenizer_paths`` – which tokenizers a job may name
* ``gunicorn_config`` – gunicorn's log lines in the format of ours, and what its workers share
"""
