"""The conformance suite of ``AndroidHost``, as tests to inherit.

    class TestMyHost(AndroidHostContract):
        @pytest.fixture
        def host(self): ...

        def break_down(self, host): ...

``break_down`` makes the host's Android stop answering for good. A host that checks what it restores names the parts of
the state in ``checked_parts`` and overrides ``spoil``. Nothing here imports pytest.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.devices.leased_device import NOT_RESTORED
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidHost


class AndroidHostContract:
    """Behaviour that ``AndroidWorldDevice`` relies on."""

    packages: ClassVar[tuple[str, ...]] = ("org.example.notes",)

    checked_parts: ClassVar[tuple[str, ...]] = ()

    def spoil(self, host: Any, part: str, *, comes_back: bool) -> None:
        """Changes a part of the state, as an episode may; with ``comes_back`` a restore brings the old state back."""

    @abstractmethod
    def break_down(self, host: Any) -> None:
        """Makes Android stop answering."""

    def test_a_started_host_has_an_endpoint_and_is_alive(self, host: AndroidHost) -> None:
        endpoint = host.start()
        assert endpoint.serial
        assert 0 < endpoint.adb_server_port < 65536
        assert endpoint.capabilities <= set(Capability)
        assert (endpoint.grpc_port is not None) >= (Capability.GRPC in endpoint.capabilities)
        assert host.check_alive()
        assert host.lost() == ""

    def test_a_restored_host_is_alive(self, host: AndroidHost) -> None:
        host.start()
        host.restore(self.packages)
        assert host.check_alive()

    def test_what_an_episode_changed_is_restored_or_the_host_refuses_to_go_on(self, host: AndroidHost) -> None:
        host.start()
        host.restore(self.packages)
        for part in self.checked_parts:
            self.spoil(host, part, comes_back=True)
            host.restore(self.packages)
            self.spoil(host, part, comes_back=False)
            for _ in range(2):
                error = error_of(lambda: host.restore(self.packages))
                assert error is not None
                assert error.detail["fault"] == NOT_RESTORED
                assert part in error.message
            self.spoil(host, part, comes_back=True)
            host.restore(self.packages)

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
    error = error_of(call)
    return "" if error is None else error.message


def error_of(call: Any) -> DeviceError | None:
    """Returns the ``DeviceError`` that a call raises, None without one."""
    try:
        call()
    except DeviceError as error:
        return error
    return None
