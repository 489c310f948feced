"""The OpenAI-compatible proxy: agents that nobody here wrote, with exact tokens recorded.

* ``main`` – the process; ``app`` – its routes; ``settings``; ``service`` – sessions without HTTP
* ``slot_claims`` – a session takes a slot of a job; ``backends`` – what the sessions of one job share
* ``sessions`` – a live session; ``recording`` – what was sampled in it, as a tree of turns
* ``chat_requests``, ``messages`` – what a client sends, checked; ``prompts`` – the ids the engine is sent
* ``parsed_reply``, ``replies`` – what a client gets; ``session_bodies`` – what opens and closes a session
* ``scoring`` – a reward from outside; ``remote_rollout_adapter`` – the remote rollout protocol on the same sessions
"""
