"""What goes over HTTP, as models, and who may ask. Items have their own speller: ``wire/``.

* ``request_models`` – bodies of requests; ``query_params`` – queries; ``reply_models`` – replies, made into OpenAPI
* ``trainer_reports`` – what a trainer reports of its rows
* ``item_bodies``, ``inline_images`` – large bodies: items one at a time, screenshots cut out before parsing
* ``auth`` – tokens and cookies; ``hosts`` – which names a server without a token answers for
"""
