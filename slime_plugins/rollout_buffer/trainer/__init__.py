"""The client side of a job, for trainers of any framework: training rows in, acknowledgements out.

``RolloutFeed`` is the complete interface. Its parts: ``job_feed`` (polls, leases, retries), ``delivery_conversion`` and
``row_builder`` (items to rows), ``batch_types`` (the records of a batch), ``vision`` and ``image_fetch`` (screenshots),
``token_alignment`` (values of single tokens: weight versions, returns, routed experts, top-p ids), ``mask_selection``
(custom loss masks), ``consumed`` (checkpoint metadata), ``training_reports`` (the trainer's log-probs to the buffer),
``metrics`` and ``tracking``. slime's binding is ``slime/rollout/agent_rollout*.py``.
"""
