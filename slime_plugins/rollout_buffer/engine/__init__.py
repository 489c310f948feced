"""Clients of inference engines: token ids and images in, sampled ids and log-probs out.

* ``base`` – the ``Engine`` protocol, its request and reply; ``settings`` – retries; ``factory`` – makes a client
* ``http_engine`` – retries, resuming and probing of all HTTP engines
* ``sglang``, ``sglang_protocol`` – SGLang; ``openai``, ``openai_protocol`` – OpenAI-compatible servers
* ``circuit_breaker`` – pauses a job whose engine fails, and limits reports of an engine's state
* ``tokenizer_probe`` – compares the engine's tokenizer with the job's; ``prompt_probe`` – finds changed prompts
* ``prompt_check`` – compares the prompt ids sent with the ids that the engine ran
* ``token_records`` – routed experts and top-p ids of single tokens
* ``banned_tokens`` – tokens that must not be sampled; ``image_token_counts`` – the number of tokens of an image
* ``tool_call_parser`` – the parser of tool calls, for every dialect; ``streamed_calls`` – reads the arguments of a call
  while its text is sampled
"""
