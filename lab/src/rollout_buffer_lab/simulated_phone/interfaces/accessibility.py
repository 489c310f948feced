"""Converts the screen to an accessibility forest or to XML; the forwarder sends the forest repeatedly.

The real forwarder is an app on the device that receives a port by broadcast and then connects to the host. The messages
of the forest and their gRPC service are defined by android_env. Only the functions that use it import it, so that the
rest of the phone runs without it.
"""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.widgets import Screen, Widget, WidgetKind

logger = logging.getLogger(__name__)

SET_PORT = "accessibility_forwarder.intent.action.SET_GRPC"
_SEND_EVERY_S = 0.15
_DEADLINE_S = 2.0
_SEND_BUTTON = ("com.simplemobiletools.smsmessenger", "Send")
_CLASSES = {
    WidgetKind.BUTTON: "android.widget.Button",
    WidgetKind.ICON: "android.widget.ImageButton",
    WidgetKind.SWITCH: "android.widget.Switch",
    WidgetKind.SLIDER: "android.widget.SeekBar",
    WidgetKind.FIELD: "android.widget.EditText",
}


def forest_of(screen: Screen, package: str) -> Any:
    """Returns the screen as android_env's ``AndroidAccessibilityForest``: one window, a root, all parts below it."""
    from android_env.proto.a11y import android_accessibility_forest_pb2

    forest = android_accessibility_forest_pb2.AndroidAccessibilityForest()
    window = forest.windows.add(id=1, is_active=True, is_focused=True, window_type=1)
    parts = _parts(screen)
    root = window.tree.nodes.add(unique_id=0, package_name=package, class_name="android.widget.FrameLayout")
    root.child_ids.extend(range(1, len(parts) + 1))
    _set_bounds(root, Rect(left=0, top=0, right=SCREEN_WIDTH, bottom=SCREEN_HEIGHT))
    for number, widget in enumerate(parts, start=1):
        _describe(window.tree.nodes.add(unique_id=number, depth=1, package_name=package), widget, package)
    return forest


def hierarchy_of(screen: Screen, package: str) -> bytes:
    """Returns the screen as XML, as ``uiautomator dump`` writes it, without the fields' hints."""
    root = ElementTree.Element("hierarchy", rotation="0")
    frame = ElementTree.SubElement(root, "node", {"class": "android.widget.FrameLayout", "package": package})
    for widget in _parts(screen):
        node = SimpleNamespace(bounds_in_screen=SimpleNamespace(), text="", content_description="", is_checked=False)
        _describe(node, widget, package)
        rect = node.bounds_in_screen
        values = {
            "text": node.text,
            "class": node.class_name,
            "package": package,
            "content-desc": node.content_description,
            "checked": str(node.is_checked).lower(),
            "clickable": str(node.is_clickable).lower(),
            "bounds": f"[{rect.left},{rect.top}][{rect.right},{rect.bottom}]",
        }
        ElementTree.SubElement(frame, "node", values)
    xml: bytes = ElementTree.tostring(root, encoding="UTF-8", xml_declaration=True)
    return xml


def _parts(screen: Screen) -> list[Widget]:
    """Returns the widgets that are nodes: no backgrounds, and no lines inside a field, which has them as its text."""
    fields = [widget.bounds for widget in screen.widgets if widget.kind is WidgetKind.FIELD]
    return [
        widget
        for widget in screen.widgets
        if not (widget.kind is WidgetKind.FILL or (widget.kind is WidgetKind.ROW and not widget.touchable))
        and not (widget.kind is WidgetKind.TEXT and any(_within(widget.bounds, field) for field in fields))
    ]


def _within(inner: Rect, outer: Rect) -> bool:
    return outer.left <= inner.left and inner.right <= outer.right and outer.top <= inner.top < outer.bottom


def _set_bounds(node: Any, bounds: Rect) -> None:
    rect = node.bounds_in_screen
    rect.left, rect.top, rect.right, rect.bottom = bounds.left, bounds.top, bounds.right, bounds.bottom
    node.is_visible_to_user = node.is_enabled = True


def _describe(node: Any, widget: Widget, package: str) -> None:
    _set_bounds(node, widget.bounds)
    node.class_name = _CLASSES.get(widget.kind, "android.widget.TextView" if widget.text else "android.view.View")
    node.is_clickable = widget.on_tap is not None
    node.is_long_clickable = widget.on_long_press is not None
    node.is_selected, node.is_focused = widget.selected, widget.focused
    if widget.kind is WidgetKind.FIELD:
        node.text, node.hint_text = " ".join(widget.lines), widget.text
        node.is_editable = node.is_focusable = True
    elif widget.kind is WidgetKind.ICON:
        node.content_description = widget.text or widget.icon
    elif widget.kind is WidgetKind.SWITCH:
        node.is_checkable, node.is_checked = True, widget.checked
    else:
        node.text = widget.text
    if widget.kind is WidgetKind.BUTTON:
        # Simple SMS Messenger describes its button by what it sends, not by the text on it.
        node.content_description = "SMS" if (package, widget.text) == _SEND_BUTTON else widget.text


class AccessibilityForwarder:
    """Sends the phone's forest to the port that the last ``SET_GRPC`` broadcast named, several times a second.

    A forest is sent ``slow_s`` after it was made, and the next one made after that.
    """

    def __init__(self, phone: EmulatorState) -> None:
        self._phone = phone
        self._stub: Any = None
        self._channel: Any = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self.mute = False
        self.slow_s = 0.0
        phone.listeners.append(self._on_broadcast)
        self._thread = threading.Thread(target=self._run, name="accessibility-forwarder", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Sends at once: the screen may have changed."""
        self._wake.set()

    def close(self) -> None:
        """Ends the thread and the connection."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=5.0)
        with self._lock:
            self._disconnect()

    def _on_broadcast(self, action: str, extras: dict[str, str]) -> None:
        if action != SET_PORT or not extras.get("port", "").isdecimal():
            return
        import grpc
        from android_env.proto.a11y import a11y_pb2_grpc

        with self._lock:
            self._disconnect()
            # The broadcast names the host 10.0.2.2, as an emulated device has to; this device runs on the host itself.
            self._channel = grpc.secure_channel(f"localhost:{extras['port']}", grpc.local_channel_credentials())
            self._stub = a11y_pb2_grpc.A11yServiceStub(self._channel)
        self.wake()

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._stub = None

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(_SEND_EVERY_S)
            self._wake.clear()
            if not self.mute:
                self._send()

    def _send(self) -> None:
        import grpc

        with self._phone.lock:
            screen, package = self._phone.ui.screen(), self._phone.ui.front.package
            is_airplane_mode = self._phone.state.settings.is_on("global", "airplane_mode_on")
        if is_airplane_mode:
            return
        forest = forest_of(screen, package)
        self._stop.wait(self.slow_s)
        with self._lock:
            if self._stub is None:
                return
            try:
                self._stub.SendForest(forest, timeout=_DEADLINE_S)
            except (grpc.RpcError, ValueError) as error:  # the server is gone, or the channel was just closed
                logger.debug("the forest was not taken: %s", error)
