"""The APIs that agents call, besides OpenAI's chat completions.

* ``dialect`` – the dialect of a route; ``anthropic_messages``, ``openai_responses`` – their formats

Their requests are converted to chat completions: ``chat_requests``, ``messages`` and ``replies`` of ``gateway``.
"""
