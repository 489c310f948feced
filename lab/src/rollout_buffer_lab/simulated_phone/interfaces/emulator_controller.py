"""The emulator's gRPC service ``EmulatorController`` for a simulated phone: status, screenshots, touches and keys.

The service and its messages are those of the Android emulator as android_env ships them; that package must be
installed where this runs.
"""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent import futures
from typing import Any

from rollout_buffer_lab.simulated_phone.interfaces.commands_input import press_key
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import ACTION_S, EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.exchanges import ExchangeRecorder
from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults
from rollout_buffer_lab.simulated_phone.interfaces.screen_capture import rgba_of

_LONG_TOUCH_S = 0.4
_BROWSER_KEYS = {"Enter": "ENTER", "GoBack": "BACK", "GoHome": "HOME", "Backspace": "DEL", "AppSwitch": "APP_SWITCH"}


def serve_emulator_controller(
    phone: EmulatorState, port: int, faults: Faults, recorder: ExchangeRecorder | None = None
) -> Any:
    """Starts the service on the port and returns the grpc server. A ``recorder`` gets every call with its answer.

    Raises:
        OSError: the port is taken.
    """
    import grpc
    from android_env.proto import emulator_controller_pb2_grpc

    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=4),
        interceptors=[] if recorder is None else [_recording(recorder)],
        options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)],
    )
    emulator_controller_pb2_grpc.add_EmulatorControllerServicer_to_server(servicer_of(phone, faults), server)
    try:
        bound_port = server.add_secure_port(f"localhost:{port}", grpc.local_server_credentials())
    except RuntimeError as error:
        raise OSError(f"gRPC port {port} is taken: {error}") from error
    if bound_port != port:
        raise OSError(f"gRPC port {port} is taken")
    server.start()
    return server


def servicer_of(phone: EmulatorState, faults: Faults) -> Any:
    """Makes the servicer; its base class exists only where android_env is installed."""
    from android_env.proto import emulator_controller_pb2 as messages
    from android_env.proto import emulator_controller_pb2_grpc
    from google.protobuf import empty_pb2

    touch = Touch(phone)
    started = time.monotonic()

    class Servicer(emulator_controller_pb2_grpc.EmulatorControllerServicer):  # type: ignore[misc]  # untyped base
        def getStatus(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's own name
            up_s = time.monotonic() - started
            booted = not faults.never_boots and up_s >= faults.boot_s
            return messages.EmulatorStatus(version="simulated", uptime=int(up_s * 1000), booted=booted)

        def getScreenshot(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's own name
            width, height, pixels = rgba_of(phone)
            image_format = messages.ImageFormat(format=request.format, width=width, height=height)
            return messages.Image(format=image_format, image=pixels)

        def sendTouch(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's own name
            for event in request.touches:
                touch.moved(event.x, event.y, event.pressure > 0)
            return empty_pb2.Empty()

        def sendKey(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's own name
            with phone.lock:
                if request.text:
                    phone.ui.type_text(request.text)
                elif request.eventType != messages.KeyboardEvent.keyup:
                    press_key(phone.ui, _BROWSER_KEYS.get(request.key, request.key))
            return empty_pb2.Empty()

    return Servicer()


def _recording(recorder: ExchangeRecorder) -> Any:
    """Makes the interceptor that records calls."""
    import grpc

    class Recording(grpc.ServerInterceptor):  # type: ignore[misc]  # untyped base
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            handler = continuation(details)

            def answer(request: Any, context: Any) -> Any:
                reply = handler.unary_unary(request, context)
                name = details.method.rpartition("/")[2]
                recorder.record_call(name, request.SerializeToString(), comparable(name, reply))
                return reply

            return grpc.unary_unary_rpc_method_handler(
                answer, handler.request_deserializer, handler.response_serializer
            )

    return Recording()


def comparable(name: str, reply: Any) -> bytes:
    """Returns the answer to a call, without its time, and with a digest in place of pixels."""
    copy = type(reply)()
    copy.CopyFrom(reply)
    if name == "getStatus":
        copy.uptime = 0
    if name == "getScreenshot":
        copy.image = hashlib.sha256(reply.image).digest()
    serialized: bytes = copy.SerializeToString(deterministic=True)
    return serialized


class Touch:
    """Turns the moves of one finger into taps, long presses and swipes."""

    def __init__(self, phone: EmulatorState) -> None:
        self._phone = phone
        self._lock = threading.Lock()
        self._down: tuple[int, int, float] | None = None
        self._last = (0, 0)

    def moved(self, x: int, y: int, down: bool) -> None:
        """Takes the finger's new position; ``down`` says whether it touches the screen."""
        with self._lock:
            if down:
                self._last = (x, y)
                self._down = self._down or (x, y, time.monotonic())
                return
            start, self._down = self._down, None
            if start is not None:
                self._lifted(*start)

    def _lifted(self, x: int, y: int, since: float) -> None:
        held_s = time.monotonic() - since
        with self._phone.lock:
            ui = self._phone.ui
            if (x, y) == self._last and held_s >= _LONG_TOUCH_S:
                ui.long_press(x, y, held_s)
            else:
                ui.swipe(x, y, *self._last)
            self._phone.state.clock.advance(ACTION_S)
