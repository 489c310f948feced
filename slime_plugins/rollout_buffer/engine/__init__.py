"""Clients of inference engines: token ids and images in, sampled ids and log-probs out.

* ``base`` – the ``Engine`` protocol, its request, reply and settings; ``factory`` – makes the one that is asked for
* ``http`` – what all have in common: retries, resuming, probing
* ``sglang``, ``sglang_protocol`` – SGLang; ``openai``, ``openai_protocol`` – OpenAI-compatible servers
* ``circuit_breaker`` – when a job waits for its engine; ``report_throttle`` – when an engine's state is reported
* ``tokenizer_probe`` – whether an engine's tokenizer is the job's; ``prompt_probe`` – what it does to prompts
* ``prompt_check`` – the ids that it was sent, compared with those that it ran
* ``token_records`` – experts and kept ids of single tokens: asked for, read, and how far they were told
* ``banned_tokens``, ``image_tokens`` – what a prompt must not sample, and how many tokens an image is
* ``tool_call_parser`` – the one parser of tool calls, for every dialect
"""
