"""Which tests have a second chance, and why: a first failure of any other is a failure."""

from __future__ import annotations

from collections.abc import Mapping

SERVERS = "starts a supervisor with gunicorn and runners; a crowded machine starves one of them past its deadline"
RAY = "starts a Ray of its own, whose head and workers give up on a crowded machine"
BROWSER = "starts Chromium, which drops what it is told while the machine is crowded"
EMULATORS = "starts simulated emulators and adb servers, each with timeouts of their own"
ENGINE = "asks a real engine on a CPU, which is seconds late while others work"

SECOND_CHANCE: Mapping[str, str] = {
    "test_adb_servers": EMULATORS,
    "test_agent_rollout_guide": SERVERS,
    "test_android_world_custom_generate": SERVERS,
    "test_android_world_farm": EMULATORS,
    "test_android_world_long_episodes": SERVERS,
    "test_android_world_real": EMULATORS,
    "test_android_world_verification": SERVERS,
    "test_buffer_url_flag": RAY,
    "test_child_liveness": SERVERS,
    "test_cleanup_script": SERVERS,
    "test_context_editing_real_engine": ENGINE,
    "test_context_editing_serve": SERVERS,
    "test_dashboard_browser": BROWSER,
    "test_dashboard_episodes": BROWSER,
    "test_device_pool_nodes": RAY,
    "test_device_pool_ray": RAY,
    "test_embedded_engine_real": ENGINE,
    "test_emulator_farm": EMULATORS,
    "test_engine_conformance": SERVERS,
    "test_engine_real": ENGINE,
    "test_scripted_engine_episode": SERVERS,
    "test_evaluation": SERVERS,
    "test_foreign_trainer": SERVERS,
    "test_full_disk_serve": SERVERS,
    "test_gateway_agents": SERVERS,
    "test_gateway_real_engine": ENGINE,
    "test_gateway_serve": SERVERS,
    "test_grafana_prometheus": SERVERS,
    "test_images_real_engine": ENGINE,
    "test_miniwob_faults": BROWSER,
    "test_miniwob_gymnasium": BROWSER,
    "test_miniwob_pages": BROWSER,
    "test_miniwob_policy": BROWSER,
    "test_no_orphan_emulators": EMULATORS,
    "test_npm_client": SERVERS,
    "test_odd_requests": SERVERS,
    "test_openapi": SERVERS,
    "test_plain_generators": SERVERS,
    "test_power_cut": SERVERS,
    "test_ray_versions_of_a_cluster": RAY,
    "test_readme_commands": SERVERS,
    "test_remote_rollout_generator": SERVERS,
    "test_remote_rollout_sides": SERVERS,
    "test_remote_rollout_tools": SERVERS,
    "test_rows_real_engine": ENGINE,
    "test_serve": SERVERS,
    "test_serve_crashes": SERVERS,
    "test_serve_devices": RAY,
    "test_slime_rollout_with_server": SERVERS,
    "test_slow_clients": SERVERS,
    "test_tutorial": SERVERS,
    "test_writes_side_by_side": SERVERS,
}
"""Files of ``tests/integration`` and ``lab/tests/integration``. A defect fails twice; the summary counts the reruns."""
