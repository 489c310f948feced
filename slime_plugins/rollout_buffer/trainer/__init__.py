"""The client side of a job, for trainers of any framework: training rows in, acknowledgements out.

``RolloutFeed`` is the complete interface. Its parts: ``job_feed`` (polls, leases, retries), ``row_builder`` (items to
rows), ``vision`` and ``image_fetch`` (screenshots), ``row_token_records`` (routed experts, top-p ids),
``mask_selection`` (custom loss masks), ``reply_truncation`` (whether the last reply was cut), ``consumed`` (checkpoint
metadata), ``metrics``, ``tracking``, ``eval_job``.
slime's binding is ``slime/rollout/agent_rollout*.py``.
"""
