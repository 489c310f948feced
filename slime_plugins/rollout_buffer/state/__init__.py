"""State changes; ``storage/`` holds the rows.

Most functions work on a transaction that ``buffer.py`` opens. Those of ``item_writes``, ``delivery_reader``,
``trainer_reports``, ``runner_reports``, ``reward_versions``, ``recovery``, and of ``group_closing`` with slow group
functions open their own transactions.

In the order of a job's life:

* ``job_start`` – starts a job, or attaches to one; ``input_files`` – reads its instances
* ``group_opening`` – groups get rows when they are needed
* ``job_lookup`` – a job by its id, and the policy of its groups
* ``attempts`` – attempts at slots, and fencing of replaced runners
* ``item_writes`` – items written over HTTP; ``trajectory_insert`` – the row of a trajectory
* ``group_closing`` – judges and closes a group; ``staleness`` – lag of weight versions
* ``deliveries`` – deliveries to polls; ``delivery_meta`` – their ``meta_info``; ``delivery_leases`` – their leases
* ``delivery_reader`` – reads the payloads of a delivery ahead
* ``trainer_reports`` – log-probs of the trainer against the engine's; ``runner_reports`` – state of devices
* ``transcripts`` – messages of failed attempts
* ``reward_versions`` – new versions of rewards of stored trajectories
* ``job_transitions`` – other states of a job; ``recovery`` – repairs after a crash
"""
