"""The proxy for third-party agents: samples their turns and records the exact tokens.

* ``main`` – one of its processes; ``app`` – its routes; ``settings``; ``service`` – turns of sessions, without HTTP
* ``slot_claims`` – sessions take slots of a job; ``backends`` – engine and chat template of a job
* ``sessions`` – an open session; ``session_registry`` – a process's sessions, and what other processes did to them
* ``turn_store`` – stores turns before they are answered; ``closing`` – a session becomes a trajectory
* ``chat_requests`` – validates requests
* ``dialects`` – the APIs that agents call, with their replies; ``reply_pieces`` – sampled ids become pieces of a reply
* ``session_bodies`` – bodies of ``/sessions``
* ``scoring`` – rewards from a scoring callback
* ``remote_rollout_adapter`` – the remote rollout protocol; ``rollout_log`` – stores its sessions
"""
