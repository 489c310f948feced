"""The parent of all processes: starts, watches, stops and restarts them, and runs the periodic tasks of the store.

* ``supervisor`` – the loop of ``rollout-buffer serve``; ``periodic_tasks`` – calls tasks at intervals
* ``supervised_child`` – one child; ``restart_policies`` – limits of crashes and of missed heartbeats
* ``child_processes`` – start and kill processes; ``child_commands`` – command lines and environments
* ``gateway_processes`` – the processes of the gateway, also without ``serve``; ``listening_sockets`` – their sockets,
  and the server's
* ``child_startup`` – waits until a program serves HTTP, for the commands that start one
* ``local_ray`` – a Ray cluster of one machine; ``generator_discovery`` – lists the task types
"""
