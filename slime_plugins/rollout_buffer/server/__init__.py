"""HTTP over the buffer. The data routes are a small ASGI application; everything else is Flask's.

On the way down of a write or a poll:

* ``worker`` – gunicorn's worker: uvicorn in each process; ``pending_connections`` – beyond what there is room for
* ``connection_limits``, ``rate_limiter`` – how long a client may take, how many and how often
* ``asgi`` – receives, waits, sends; ``body_limits`` – how large a body may be, by its route
* ``request_bodies`` – bodies in memory; ``write_batcher`` – writes share a commit
* ``poll_watcher`` – one look at the database for all polls that wait; ``wsgi_bridge`` – threads for Flask
* ``routes_data`` – items in, groups out; ``delivery_reply`` – the reply that carries them
* ``app`` – Flask's application and the routes of jobs; ``routes_inspect``, ``routes_dashboard``,
* ``routes_training_reports`` – the other routes; ``http`` – what all routes share, errors as replies
* ``supervisor_state`` – what a server knows of the supervisor; ``tokenizer_paths`` – which tokenizers a job may name
"""
