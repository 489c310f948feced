"""Device pools of any kind: booting, leasing, health checks and replacement of devices.

* ``interface`` – ``Device``, and the lease that an episode holds; ``kinds`` – factories of devices
* ``settings`` – pool sizes and timeouts; ``settings_section`` – the base class of settings
* ``pool`` – the runner's side; ``local_pool`` and ``ray_cluster/pool`` – the two pools; ``pool_factory`` – chooses one
* ``device_manager`` – boots and leases devices; ``boot_schedule`` – staggers boots and retries
* ``lease_table``, ``fair_share``, ``health_policy``, ``counters`` – pure parts of the manager
* ``capabilities`` – what a task may need of a device
* ``worker`` – one device, called under its lease only; ``device_process`` – a device under another Python
* ``worker_folders`` – temporary folders; ``file_locks`` – locks that end with their process
* ``leased_device`` – a leased device in an episode: deadlines and a report

A new kind of device is a factory function (``kinds.DeviceKind``), named in ``DevicePoolSettings.kind``; nothing here
changes for it. ``testing/fake_device`` is a minimal device, ``testing/device_conformance`` the conformance suite.
"""
