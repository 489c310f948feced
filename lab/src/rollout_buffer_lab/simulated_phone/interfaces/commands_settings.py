"""``settings``, ``svc``, ``date``, ``getprop``, ``wm`` and their like: facts about the device as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.shell_language import Command, Output, commands_of, failed, printed

_NAMESPACES = ("system", "secure", "global")
_PROPERTIES = {
    "ro.build.version.sdk": "33",
    "ro.build.version.release": "13",
    "ro.product.model": "Simulated phone",
    "sys.boot_completed": "1",
    "init.svc.bootanim": "stopped",
    "dev.bootcomplete": "1",
}
_SERVICES = {"wifi": "wifi_on", "bluetooth": "bluetooth_on", "data": "mobile_data"}


def settings_commands(phone: EmulatorState) -> Mapping[str, Command]:
    """Returns the commands of this file by name."""
    table: Mapping[str, Callable[[EmulatorState, Sequence[str]], Output]] = {
        "settings": _settings,
        "svc": _svc,
        "date": _date,
        "getprop": _getprop,
        "wm": _wm,
        "whoami": lambda phone, arguments: printed("root\n"),
        "service": lambda phone, arguments: printed("Result: Parcel(00000000 00000001   '........')\n"),
        "cmd": _cmd,
    }
    return commands_of(phone, table)


def _settings(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    verb, namespace, key, *value = [*arguments, "", "", ""][:4]
    if namespace not in _NAMESPACES:
        return failed(f"Invalid namespace '{namespace}'", 255)
    settings = phone.state.settings
    if verb == "get":
        return printed(f"{settings.get(namespace, key) if settings.get(namespace, key) is not None else 'null'}\n")
    if verb == "put":
        settings.put(namespace, key, value[0])
        return printed()
    if verb == "delete":
        return printed(f"Deleted {int(settings.delete(namespace, key))} rows\n")
    if verb == "list":
        return printed("".join(f"{name}={text}\n" for name, text in sorted(settings.all(namespace).items())))
    return failed(f"Invalid command: {verb}", 255)


def _svc(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    service, verb = ([*arguments, "", ""])[:2]
    key = _SERVICES.get(service)
    if key is None or verb not in ("enable", "disable"):
        return failed(f"svc: {service} {verb} is not known", 1)
    phone.state.settings.put("global", key, "1" if verb == "enable" else "0")
    return printed("Success\n" if service == "bluetooth" else "")


def _cmd(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    """Switches airplane mode and "do not disturb"; other commands do nothing and succeed."""
    settings = phone.state.settings
    if list(arguments[:2]) == ["connectivity", "airplane-mode"]:
        settings.put("global", "airplane_mode_on", str(int(arguments[-1] == "enable")))
    if list(arguments[:2]) == ["notification", "set_dnd"]:
        settings.put("global", "zen_mode", str(int(arguments[-1] != "off")))
    return printed()


def _date(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    """Prints the time, or sets it from ``MMDDhhmmYY.ss``."""
    clock = phone.state.clock
    argument = arguments[-1] if arguments else ""
    if argument.startswith("+"):
        return printed(clock.now.strftime(argument[1:].replace("%s", str(int(clock.now.timestamp())))) + "\n")
    if argument:
        try:
            clock.now = datetime.strptime(argument, "%m%d%H%M%y.%S").replace(tzinfo=UTC)
        except ValueError:
            return failed(f"date: bad date '{argument}'")
    return printed(clock.now.strftime("%a %b %d %H:%M:%S UTC %Y") + "\n")


def _getprop(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    if arguments:
        return printed(_PROPERTIES.get(arguments[0], "") + "\n")
    return printed("".join(f"[{name}]: [{value}]\n" for name, value in _PROPERTIES.items()))


def _wm(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    if arguments[:1] == ["size"]:
        return printed(f"Physical size: {SCREEN_WIDTH}x{SCREEN_HEIGHT}\n")
    if arguments[:1] == ["density"]:
        return printed("Physical density: 420\n")
    return failed(f"unknown command 'wm {' '.join(arguments)}'", 255)
