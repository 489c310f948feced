"""The commands ``am``, ``pm``, ``monkey`` and ``dumpsys``, for running and installed apps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout_buffer_lab.simulated_phone.apps.contacts import ContactsApp
from rollout_buffer_lab.simulated_phone.apps.messages import MessagesApp
from rollout_buffer_lab.simulated_phone.device_state.packages import InstalledApp
from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState, full_component
from rollout_buffer_lab.simulated_phone.interfaces.shell_language import Command, Output, commands_of, failed, printed

_CONTACTS = "com.google.android.contacts"
_MESSAGES = "com.simplemobiletools.smsmessenger"
_VIEWED_BY = {
    "content://contacts": _CONTACTS,
    "content://com.android.contacts": _CONTACTS,
    "content://com.android.calendar": "com.simplemobiletools.calendar.pro",
    "content://media": "com.simplemobiletools.gallery.pro",
    "http": "com.android.chrome",
    "file:": "com.android.chrome",
    "tel:": "com.google.android.dialer",
    "sms": _MESSAGES,
}
_EXTRAS = ("-e", "--es", "--ez", "--ei", "--el", "--ef", "--esa")


def activity_commands(phone: EmulatorState) -> Mapping[str, Command]:
    """Returns the commands of this file by name."""
    return commands_of(phone, {"am": _am, "pm": _pm, "monkey": _monkey, "dumpsys": _dumpsys})


@dataclass(slots=True)
class _Intent:
    """The arguments of ``am start`` and ``am broadcast``."""

    action: str = ""
    data: str = ""
    component: str = ""
    stop_first: bool = False
    extras: dict[str, str] = field(default_factory=dict)


def _intent(arguments: Sequence[str]) -> _Intent:
    intent, index = _Intent(), 0
    names = {"-a": "action", "-d": "data", "-n": "component"}
    while index < len(arguments):
        option, value = arguments[index], arguments[index + 1] if index + 1 < len(arguments) else ""
        if option in names:
            setattr(intent, names[option], value)
            index += 2
        elif option in _EXTRAS:
            intent.extras[value] = arguments[index + 2] if index + 2 < len(arguments) else ""
            index += 3
        else:
            intent.stop_first = intent.stop_first or option == "-S"
            index += 2 if option in ("-t", "-c", "-f", "--user") else 1
    return intent


def _am(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    verb, rest = (arguments[0] if arguments else ""), arguments[1:]
    if verb in ("start", "start-activity"):
        return _start(phone, _intent(rest))
    if verb == "broadcast":
        return _broadcast(phone, _intent(rest))
    if verb in ("force-stop", "kill"):
        phone.force_stop(rest[-1] if rest else "")
        return printed()
    if verb == "stack":
        return _stack(phone, rest)
    if verb == "task":
        return printed()
    return failed(f"Unknown command: {verb}", 255)


def _start(phone: EmulatorState, intent: _Intent) -> Output:
    app = _target(phone, intent)
    if app is None:
        return printed(
            f"Starting: Intent {{ act={intent.action} dat={intent.data} cmp={intent.component} }}\n"
            "Error type 3\nError: Activity class does not exist.\n",
            1,
        )
    if intent.stop_first:
        phone.force_stop(app.package)
    running = phone.launch(app)
    if intent.action == "android.intent.action.INSERT" and isinstance(running, ContactsApp):
        running.new_contact(intent.extras.get("name", ""), intent.extras.get("phone", ""))
    if intent.action == "android.intent.action.SENDTO" and isinstance(running, MessagesApp):
        running.compose(intent.data.partition(":")[2], intent.extras.get("sms_body", ""))
    return printed(
        f"Starting: Intent {{ cmp={full_component(app)} }}\n"
        f"Status: ok\nLaunchState: COLD\nActivity: {full_component(app)}\nTotalTime: 1\nWaitTime: 1\nComplete\n"
    )


def _target(phone: EmulatorState, intent: _Intent) -> InstalledApp | None:
    if intent.component:
        return phone.app_of(intent.component.partition("/")[0])
    if intent.action == "android.intent.action.INSERT":
        return phone.app_of(_CONTACTS)
    package = next((package for prefix, package in _VIEWED_BY.items() if intent.data.startswith(prefix)), "")
    return phone.app_of(package)


def _broadcast(phone: EmulatorState, intent: _Intent) -> Output:
    phone.broadcast(intent.action, intent.extras)
    head = f"Broadcasting: Intent {{ act={intent.action} }}\n"
    if intent.action == "clipper.set":
        phone.state.clipboard = intent.extras.get("text", "")
        return printed(head + 'Broadcast completed: result=-1, data="Text is copied into clipboard."\n')
    if intent.action == "clipper.get":
        return printed(head + f'Broadcast completed: result=-1, data="{phone.state.clipboard}"\n')
    return printed(head + "Broadcast completed: result=0\n")


def _stack(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    if arguments[:1] == ["list"]:
        return printed("".join(_task_lines(phone)))
    if arguments[:1] == ["remove"]:
        task_id = arguments[1] if len(arguments) > 1 else ""
        if task_id.isdecimal():
            phone.remove_task(int(task_id))
        return printed()
    return failed(f"Error: unknown command 'stack {' '.join(arguments)}'", 255)


def _task_lines(phone: EmulatorState) -> list[str]:
    bounds = f"[0,0][{SCREEN_WIDTH},{SCREEN_HEIGHT}]"
    return [
        f"RootTask id={task_id} bounds={bounds} displayId=0 userId=0\n"
        f"  taskId={task_id}: {full_component(app)} bounds={bounds} userId=0 visible={str(front).lower()} "
        f"topActivity=ComponentInfo{{{full_component(app)}}}\n\n"
        for task_id, app, front in phone.tasks()
    ]


def _pm(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    verb = arguments[0] if arguments else ""
    package = next((word for word in arguments[1:] if not word.startswith("-")), "")
    if verb == "list":
        return printed("".join(f"package:{name}\n" for name in phone.packages()))
    if verb == "path" and package == "android":
        return printed("package:/system/framework/framework-res.apk\n")
    if verb == "path":
        known = package in phone.packages()
        return printed(f"package:/data/app/{package}/base.apk\n" if known else "", 0 if known else 1)
    if verb == "clear":
        return printed("Success\n") if phone.clear(package) else failed("Failed")
    if verb in ("grant", "revoke", "enable", "disable"):
        known = package in phone.packages()
        return printed() if known else failed(f"java.lang.IllegalArgumentException: Unknown package: {package}", 255)
    if verb == "uninstall":
        phone.installed_later.discard(package)
        return printed("Success\n")
    return failed(f"Unknown command: {verb}", 255)


def _monkey(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    package = arguments[arguments.index("-p") + 1] if "-p" in arguments[:-1] else ""
    app = phone.app_of(package)
    if app is None:
        return failed("** No activities found to run, monkey aborted.", 252)
    phone.launch(app)
    return printed("Events injected: 1\n")


def _dumpsys(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    service = " ".join(arguments[:2])
    if service.startswith("input"):
        return printed(_INPUT_REPORT)
    if service.startswith("window"):
        focus = full_component(phone.ui.front)
        return printed(f"  mCurrentRotation=ROTATION_0\n  mCurrentFocus=Window{{1 u0 {focus}}}\n")
    if service == "activity recents":
        recents = [task for task in phone.tasks() if task[1] in phone.ui.running]
        lines = (f"  * Recent: {full_component(app)} id={task_id}\n" for task_id, app, _ in recents)
        return printed("ACTIVITY MANAGER RECENT TASKS (dumpsys activity recents)\n" + "".join(lines))
    if service.startswith("activity"):
        return printed(f"  ResumedActivity: {full_component(phone.ui.front)}\n")
    if service.startswith("telephony.registry"):
        return printed("  mCallState=0\n")
    return printed()


_INPUT_REPORT = f"""  Viewport INTERNAL: displayId=0, uniqueId=local:0, orientation=0, \
logicalFrame=[0, 0, {SCREEN_WIDTH}, {SCREEN_HEIGHT}], physicalFrame=[0, 0, {SCREEN_WIDTH}, {SCREEN_HEIGHT}], \
deviceSize=[{SCREEN_WIDTH}, {SCREEN_HEIGHT}], isActive=[1]
    Touch Input Mapper (mode - DIRECT):
      PhysicalWidth: {SCREEN_WIDTH}px
      SurfaceOrientation: 0
"""
