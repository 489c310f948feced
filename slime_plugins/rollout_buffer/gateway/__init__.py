"""The proxy for third-party agents: samples their turns and records the exact tokens.

* ``main`` – the process; ``app`` – its routes; ``settings``; ``service`` – sessions, without HTTP
* ``slot_claims`` – sessions take slots of a job; ``backends`` – engine and chat template of a job
* ``sessions`` – an open session; ``recording`` – its sampled turns as a tree
* ``turn_store`` – stores turns before they are answered; ``turn_encoding`` – turns as rows, and a session from them
* ``chat_requests``, ``messages`` – validated requests; ``prompts`` – token ids for the engine
* ``dialects`` – the other APIs that agents speak, as chat requests and replies
* ``parsed_reply``, ``replies`` – replies to clients; ``session_bodies`` – bodies of ``/sessions``
* ``scoring`` – rewards from a scoring callback; ``remote_rollout_adapter`` – the remote rollout protocol
"""
