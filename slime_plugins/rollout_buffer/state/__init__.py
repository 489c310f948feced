"""The rules of state, on an open transaction: ``buffer.py`` opens it, ``storage/`` holds the rows.

In the order of a job's life:

* ``job_start`` – a payload becomes a job, or attaches; ``input_files`` – its instances
* ``group_opening`` – its groups get rows when they are needed
* ``job_lookup`` – a job by its id, and its groups' measure
* ``attempts`` – attempts at slots and their fence
* ``item_writes`` – items that come over HTTP; ``trajectory_insert`` – the one builder of a trajectory's row
* ``group_closing`` – a group is judged and closed, once; ``staleness`` – how old its weights are
* ``deliveries`` – groups go out; ``delivery_meta`` – what a poll is told beside them; ``delivery_leases`` – how long
* ``delivery_reader`` – a delivery's bytes, prefetched
* ``trainer_reports`` – what a trainer computed of its rows; ``runner_reports`` – what a runner says of its devices
* ``transcripts`` – what was said in attempts that brought no trajectory
* ``reward_versions`` – rewards given again to what is stored, beside those that it has
* ``job_end`` – how a job ends; ``recovery`` – what a crash left, at the next start
"""
