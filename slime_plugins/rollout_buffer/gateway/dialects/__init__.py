"""The APIs in which agents ask for turns.

* ``dialect`` – the dialect of a route; ``anthropic_messages`` – Anthropic's Messages
* OpenAI's chat completions are what the others become: ``chat_requests``, ``messages`` and ``replies`` of ``gateway``
"""
