"""The conformance suite of ``AndroidHost``, as tests to inherit.

    class TestMyHost(AndroidHostContract):
        @pytest.fixture
        def host(self): ...

        def break_down(self, host): ...

``break_down`` makes the host's Android stop answering for good. A host whose endpoint has a ``state`` names the parts
of this state in ``checked_parts``, and in ``restored_parts`` those that a restore brings back; it overrides ``spoil``
and ``mend``.
Nothing here imports pytest: ``pytest.register_assert_rewrite`` with this module's name, before its import, shows the
values of a failed assertion.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidHost
from slime_plugins.rollout_buffer.generator.android_world.restored_state import part_of


class AndroidHostContract:
    """Behaviour that ``AndroidWorldDevice`` relies on."""

    packages: ClassVar[tuple[str, ...]] = ("org.example.notes",)

    checked_parts: ClassVar[tuple[str, ...]] = ()

    restored_parts: ClassVar[tuple[str, ...]] = ()

    def spoil(self, host: Any, part: str) -> None:
        """Changes a part of the state, as an episode may."""

    def mend(self, host: Any, part: str) -> None:
        """Undoes ``spoil`` by hand, as the device's owner would."""

    @abstractmethod
    def break_down(self, host: Any) -> None:
        """Makes Android stop answering."""

    def test_a_started_host_has_an_endpoint_and_is_alive(self, host: AndroidHost) -> None:
        endpoint = host.start()
        assert endpoint.serial
        assert 0 < endpoint.adb_server_port < 65536
        assert endpoint.capabilities <= set(Capability)
        assert endpoint.grpc_port is not None or Capability.GRPC not in endpoint.capabilities
        assert host.check_alive()
        assert host.lost() == ""

    def test_a_restored_host_is_alive(self, host: AndroidHost) -> None:
        host.start()
        host.restore(self.packages)
        assert host.check_alive()

    def test_what_an_episode_spoiled_is_restored_or_found(self, host: AndroidHost) -> None:
        endpoint = host.start()
        for part in self.checked_parts:
            host.restore(self.packages)
            assert endpoint.changed_state(self.packages) == {}, "the state before an episode is the recorded one"
            self.spoil(host, part)
            assert part in map(part_of, endpoint.changed_state(self.packages))
            host.restore(self.packages)
            left = endpoint.put_back(endpoint.changed_state(self.packages))
            expected = [] if part in self.restored_parts else [part]
            assert [*map(part_of, left)] == expected, (part, left)
            self.mend(host, part)

    def test_an_android_that_does_not_answer_is_an_error_with_a_reason(self, host: AndroidHost) -> None:
        host.start()
        self.break_down(host)
        for call in (host.check_alive, lambda: host.restore(self.packages)):
            assert reason_of(call)

    def test_closing_twice_does_nothing_and_a_closed_host_is_neither_alive_nor_lost(self, host: AndroidHost) -> None:
        host.close()
        host.start()
        host.close()
        host.close()
        assert reason_of(host.check_alive)
        assert host.lost() == ""

    def test_a_closed_host_can_be_started_again(self, host: AndroidHost) -> None:
        host.start()
        host.close()
        assert host.start().serial
        assert host.check_alive()


def reason_of(call: Any) -> str:
    """Returns the message of the ``DeviceError`` that a call raises, "" without one."""
    try:
        call()
    except DeviceError as error:
        return error.message
    return ""
