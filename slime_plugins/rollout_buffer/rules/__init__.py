"""Pure rules: no storage, no HTTP, no clock.

* ``groups`` – when a group is complete, valid, filtered, padded
* ``validity`` – which numbers are rewards, token ids and log-probs; ``reward_normalization`` – means, deviations and
  returns, from the buffer to the advantage
* ``job_states`` – transitions and final state of a job; ``causes`` – codes and messages for states of jobs and groups
* ``stored_settings`` – typed settings of a stored job; ``skip_list`` – groups that a resuming trainer skips
* ``attempt_uid`` – the id of an attempt; ``trajectory_stats`` – columns of a trajectory for charts and filters
* ``weight_versions`` – order of weight versions; ``admission`` – which group may begin under a bound on the lag
* ``concurrency`` – the number of episodes at once for ``num_process: auto``
* ``stuck_weights`` – detects a weight version that never changes
* ``selection_bias`` – trained against submitted members; ``prompt_receipts`` – counts of engines' prompt checks
* ``backoff`` – exponential backoff; ``heartbeats`` – services, their intervals and timeouts
"""
