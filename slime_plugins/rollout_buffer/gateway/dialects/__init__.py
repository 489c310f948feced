"""The APIs that agents call, besides OpenAI's chat completions.

* ``dialect`` – the dialect of a route; ``anthropic_messages`` – Anthropic's Messages

Their requests are converted to chat completions: ``chat_requests``, ``messages`` and ``replies`` of ``gateway``.
"""
