"""The APIs that agents call.

* ``dialect`` – the dialect of a route; ``chat_completions``, ``anthropic_messages``, ``openai_responses``

Requests of the last two are converted to bodies of chat completions, which ``gateway/chat_requests`` validates; replies
are converted back.
"""
