"""The client side of a job, for trainers of any framework: training rows in, acknowledgements out.

``RolloutFeed`` is the complete interface. Its parts: ``job_feed`` (polls, leases, retries), ``row_builder`` (items to
rows), ``vision`` and ``image_fetch`` (screenshots), ``token_alignment`` (values of single tokens: weight versions,
returns, routed experts, top-p ids), ``mask_selection`` (custom loss masks), ``consumed`` (checkpoint metadata),
``metrics``, ``tracking``.
slime's binding is ``slime/rollout/agent_rollout*.py``.
"""
