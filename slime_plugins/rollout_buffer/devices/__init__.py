"""Devices for episodes, of any kind: started, lent, looked after, and lent again.

* ``interface`` – what a device is, and what an episode holds of it; ``kinds`` – the functions that make one
* ``settings`` – how many there are, and every timeout; ``settings_section`` – what all such sections share
* ``pool`` – a runner's side; ``local_pool`` and ``ray_cluster/pool`` – where the devices live; ``pool_factory`` – which
* ``device_manager`` – brings up, lends, takes back; ``boot_schedule`` – when devices boot, and boot again
* ``lease_table``, ``fair_share``, ``health_policy``, ``counters`` – who has and gets one, what it needs
* ``worker`` – one device behind its fence; ``device_process`` – one under another Python
* ``worker_folders`` – where each writes; ``file_locks`` – what says that somebody lives
* ``leased_device`` – a device in an episode, with deadlines and a report

A new kind of device is a function that makes one (``kinds.DeviceKind``), named in ``DevicePoolSettings.kind``; nothing
here changes for it. ``testing/fake_device`` is the smallest, ``testing/device_conformance`` what all of them keep.
"""
