"""Exact ids of conversations that other programs lead: sessions of the gateway and of the remote rollout protocol.

* ``messages`` – validated messages and their digests; ``turns`` – the sampled turns of a session as a tree
* ``message_matching`` – which messages of a request count as the recorded ones; ``path_index`` – finds them
* ``prompts`` – the token ids of the next request, after the recorded ones
* ``turn_encoding`` – turns as rows of the store, and a session from them
"""
