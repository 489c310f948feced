"""The parent of all processes: starts, watches, ends and restarts them, and writes what time alone changes.

* ``supervisor`` – the loop of ``rollout-buffer serve``; ``periodic_tasks`` – what it does again and again
* ``supervised_child`` – one child; ``restart_policies`` – limits of crashes and of time without a heartbeat
* ``child_processes`` – processes and their ends; ``child_commands`` – command lines and environments
* ``child_health`` – waiting for a child that serves HTTP
* ``local_ray`` – a Ray cluster of one machine; ``generator_discovery`` – which task types there are
"""
