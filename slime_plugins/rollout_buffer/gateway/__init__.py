"""The proxy for third-party agents: samples their turns and records the exact tokens.

* ``main`` – the process; ``app`` – its routes; ``settings``; ``service`` – sessions, without HTTP
* ``slot_claims`` – sessions take slots of a job; ``backends`` – engine and chat template of a job
* ``sessions`` – an open session; ``turn_store`` – stores its turns before they are answered
* ``chat_requests`` – validated requests
* ``dialects`` – the other APIs that agents speak, as chat requests and replies
* ``parsed_reply``, ``replies`` – replies to clients; ``session_bodies`` – bodies of ``/sessions``
* ``scoring`` – rewards from a scoring callback; ``remote_rollout_adapter`` – the remote rollout protocol
"""
