"""Pure rules: no storage, no HTTP, no clock of their own. The rest of the project asks them.

* ``groups`` – when a group is done, valid, filtered, padded; ``rewards`` – which numbers are rewards;
  ``reward_normalization`` – means, deviations and returns, from the buffer to the advantage
* ``jobs`` – states of a job and how it ends; ``causes`` – why a job or a group is where it is, as codes
* ``stored_settings`` – the settings of a stored job, typed; ``skip_list`` – what a trainer that resumes skips
* ``attempt_uid`` – the name of an attempt; ``trajectory_stats`` – the few numbers of a trajectory that charts need
* ``weight_versions`` – how old weights are; ``admission`` – which group may begin, so that none gets too old
* ``concurrency`` – how many episodes play at once where nobody has set a number
* ``stuck_weights`` – whose weight version stands still, so that a lag says nothing
* ``bias`` – is what is trained what was submitted; ``prompt_receipts`` – what engines said of the prompts that they ran
* ``vocabulary`` – which token ids and log-probs there can be; ``typos`` – which unknown key is a slip
* ``backoff`` – how long to wait before trying again, for everybody; ``heartbeats`` – who sends some, how often, and
  when silence is death
"""
