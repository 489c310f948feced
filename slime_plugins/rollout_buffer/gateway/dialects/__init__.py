"""The APIs that agents call.

* ``dialect`` – the dialect of a route; ``chat_completions``, ``anthropic_messages``, ``openai_responses``

Requests of the last two are converted to chat completions (``gateway/chat_requests``), and their replies from them.
"""
