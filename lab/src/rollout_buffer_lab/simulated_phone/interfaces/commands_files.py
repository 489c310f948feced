"""``ls``, ``find``, ``cat``, ``rm``, ``cp`` and their like, on the device's file system."""

from __future__ import annotations

import fnmatch
import itertools
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha1

from rollout_buffer_lab.simulated_phone.device_state.filesystem import FileError, FileSystem
from rollout_buffer_lab.simulated_phone.interfaces.shell_language import Command, Files, Output, failed, printed

_Handler = Callable[[FileSystem, Sequence[str], bytes], Output]


def file_commands(files: FileSystem) -> Mapping[str, Command]:
    """Returns the commands of this file by name."""
    table: Mapping[str, _Handler] = {
        "ls": _ls,
        "find": _find,
        "cat": _cat,
        "rm": _rm,
        "mkdir": _mkdir,
        "touch": _touch,
        "cp": _cp,
        "mv": _mv,
        "stat": _stat,
        "chmod": _rights,
        "chown": _rights,
        "restorecon": _rights,
        "[": _test,
        "test": _test,
        "echo": _echo,
        "grep": _grep,
        "true": lambda files, arguments, piped: printed(),
        "false": lambda files, arguments, piped: printed("", 1),
        "sync": lambda files, arguments, piped: printed(),
        "sleep": lambda files, arguments, piped: printed(),
    }
    return {name: _command(files, handler) for name, handler in table.items()}


def _command(files: FileSystem, handler: _Handler) -> Command:
    def run(arguments: Sequence[str], piped: bytes) -> Output:
        try:
            return handler(files, arguments, piped)
        except FileError as error:
            return failed(str(error))

    return run


def shell_files(files: FileSystem) -> Files:
    """Returns what the shell's language needs of this file system."""
    return Files(expand=lambda pattern: _expanded(files, pattern), read=files.read, write=files.write)


def _expanded(files: FileSystem, pattern: str) -> list[str]:
    """Returns the paths that match a glob. A wildcard after a NUL is literal; none matches a leading dot."""
    paths = ["/"]
    for part in filter(None, pattern.split("/")):
        plain = part.replace("\0", "")
        if plain == part and not set(part) & {"*", "?"}:
            paths = [path for folder in paths if files.exists(path := posixpath.join(folder, part))]
            continue
        fits = re.compile(_regex(part))
        paths = [
            posixpath.join(folder, name)
            for folder in paths
            for name in files.names(folder)
            if fits.fullmatch(name) and not name.startswith(".")
        ]
    return paths


def _regex(part: str) -> str:
    """Returns a part of a glob as a regular expression."""
    pieces = re.split(r"(\0.|\*|\?)", part)
    special = {"*": ".*", "?": "."}
    return "".join(special.get(piece, re.escape(piece.removeprefix("\0"))) for piece in pieces)


def _split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the letters of all options, and the other arguments."""
    options = "".join(argument[1:] for argument in arguments if argument.startswith("-") and len(argument) > 1)
    return options, [argument for argument in arguments if not argument.startswith("-") and argument]


def _echo(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    no_newline = arguments[:1] == ["-n"]
    return printed(" ".join(arguments[1:] if no_newline else arguments) + ("" if no_newline else "\n"))


def _missing(command: str, path: str) -> Output:
    return failed(f"{command}: {path}: No such file or directory")


def _ls(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    options, paths = _split(arguments)
    text = ""
    for path in paths or ["/"]:
        if not files.exists(path):
            return _missing("ls", path)
        in_folder = files.is_folder(path) and "d" not in options
        names = files.names(path) if in_folder else [path]
        shown = [name for name in names if "a" in options or not name.startswith(".")]
        if "l" not in options:
            text += "".join(f"{name}\n" for name in shown)
            continue
        text += "total 0\n" if in_folder else ""
        text += "".join(_long_line(files, posixpath.join(path, name) if in_folder else path, name) for name in shown)
    return printed(text)


def _long_line(files: FileSystem, path: str, name: str) -> str:
    kind = "drwxrwx---" if files.is_folder(path) else "-rw-rw----"
    size = 4096 if files.is_folder(path) else len(files.read(path))
    changed = datetime.fromtimestamp(files.modified_ms(path) / 1000, UTC)
    return f"{kind} 1 u0_a158 media_rw {size} {changed:%Y-%m-%d %H:%M:%S.%f}000 +0000 {name}\n"


def _find(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    """Supports ``-type f|d`` (more than one with ``-o``), ``-name``, ``-mindepth``, ``-maxdepth``, ``-delete`` and
    ``-exec sha1sum {} +``."""
    bases = [argument for argument in arguments if argument.startswith("/")][:1]
    base = bases[0] if bases else "/"
    if not files.exists(base):
        return _missing("find", base)
    values = _find_values(arguments)
    paths = _matching_paths(files, base, values)
    if "-delete" in arguments:
        for path in reversed(paths):
            files.remove(path)
        return printed()
    if "sha1sum" in arguments:
        return printed("".join(f"{sha1(files.read(path)).hexdigest()}  {path}\n" for path in paths))
    return printed("".join(f"{path}\n" for path in paths))


def _find_values(arguments: Sequence[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for name, value in itertools.pairwise(arguments):
        if name in ("-type", "-name", "-mindepth", "-maxdepth"):
            values.setdefault(name, []).append(value)
    return values


def _matching_paths(files: FileSystem, base: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    root = base.rstrip("/")
    kinds = values.get("-type", ["f", "d"])
    min_depth = int(values.get("-mindepth", ["0"])[0])
    max_depth = int(values.get("-maxdepth", ["99"])[0])
    names = values.get("-name")
    paths = []
    for path in [base if base == "/" else root, *_below(files, root)]:
        depth = path[len(root) :].count("/") if path not in (base, root) else 0
        kind = "d" if files.is_folder(path) else "f"
        named = names is None or any(fnmatch.fnmatch(posixpath.basename(path), name) for name in names)
        if kind in kinds and min_depth <= depth <= max_depth and named:
            paths.append(path)
    return paths


def _below(files: FileSystem, root: str) -> list[str]:
    """Returns all paths below ``root``. They begin with ``root`` as given, although it may be a link."""
    paths = []
    for name in files.names(root or "/"):
        path = f"{root}/{name}"
        paths.append(path)
        if files.is_folder(path):
            paths += _below(files, path)
    return paths


def _cat(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    _, paths = _split(arguments)
    if not paths:
        return Output(text=piped)
    for path in paths:
        if files.is_folder(path):
            return failed(f"cat: {path}: Is a directory")
        if not files.exists(path):
            return _missing("cat", path)
    return Output(text=b"".join(files.read(path) for path in paths))


def _rm(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    options, paths = _split(arguments)
    for path in paths:
        if not files.exists(path):
            if "f" not in options:
                return _missing("rm", path)
        elif files.is_folder(path) and not set(options) & {"r", "R"}:
            return failed(f"rm: {path}: is directory")
        else:
            files.remove(path)
    return printed()


def _mkdir(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    options, paths = _split(arguments)
    for path in paths:
        if files.exists(path) and "p" not in options:
            return failed(f"mkdir: '{path}': File exists")
        files.make_folders(path)
    return printed()


def _touch(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    for path in _split(arguments)[1]:
        files.write(path, files.read(path) if files.exists(path) else b"")
    return printed()


def _cp(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    options, paths = _split(arguments)
    if len(paths) < 2:
        return failed("cp: needs 2 arguments")
    *sources, target = paths
    for source in sources:
        contents_only = source.endswith("/.")
        path = source[:-2] if contents_only else source
        if not files.exists(path):
            return _missing("cp", path)
        if files.is_folder(path) and not set(options) & {"a", "r", "R"}:
            return failed(f"cp: {path}: is directory")
        if files.is_folder(path) and f"{posixpath.normpath(target)}/".startswith(f"{posixpath.normpath(path)}/"):
            return failed(f"cp: cannot copy {path} into itself")
        into_folder = files.is_folder(target) and not contents_only
        destination = posixpath.join(target, posixpath.basename(path)) if into_folder else target
        _copy(files, path, destination, keep_time="a" in options or "p" in options)
    return printed()


def _copy(files: FileSystem, source: str, target: str, *, keep_time: bool) -> None:
    if not files.is_folder(source):
        files.write(target, files.read(source), files.modified_ms(source) if keep_time else None)
        return
    files.make_folders(target)
    for name in files.names(source):
        _copy(files, posixpath.join(source, name), posixpath.join(target, name), keep_time=keep_time)


def _mv(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    _, paths = _split(arguments)
    if len(paths) != 2:
        return failed("mv: needs 2 arguments")
    source, target = paths
    if files.is_folder(target):
        target = posixpath.join(target, posixpath.basename(source.rstrip("/")))
    if files.exists(source) and files.exists(target) and not files.is_folder(target):
        files.remove(target)
    files.move(source, target)
    return printed()


def _stat(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    _, paths = _split(arguments)
    path = paths[-1] if paths else ""
    if not files.exists(path):
        return _missing("stat", path)
    kind = "directory" if files.is_folder(path) else "regular file"
    changed = datetime.fromtimestamp(files.modified_ms(path) / 1000, UTC)
    size = 4096 if files.is_folder(path) else len(files.read(path))
    return printed(f"  File: {path}\n  Size: {size}\t {kind}\nModify: {changed:%Y-%m-%d %H:%M:%S} +0000\n")


def _rights(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    """Does nothing, because there are no access rights; fails if a path is missing."""
    paths = [argument for argument in arguments if argument.startswith("/")]
    missing = [path for path in paths if not files.exists(path)]
    return _missing("chmod", missing[0]) if missing else printed()


def _test(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    flag, path = ([*arguments, "", ""])[:2]
    holds = {
        "-d": files.is_folder(path),
        "-f": files.exists(path) and not files.is_folder(path),
        "-e": files.exists(path),
        "-s": files.exists(path) and (files.is_folder(path) or bool(files.read(path))),
        "-z": path in ("", "]"),
        "-n": path not in ("", "]"),
    }
    if flag not in holds:
        return failed(f"test: {flag} is not known", 2)
    return printed("", 0 if holds[flag] else 1)


def _grep(files: FileSystem, arguments: Sequence[str], piped: bytes) -> Output:
    """Prints the lines of files, or without files of the piped text, that the pattern matches."""
    options, rest = _split(arguments)
    pattern, paths = (rest or [""])[0], rest[1:]
    text = b"".join(files.read(path) for path in paths) if paths else piped
    try:
        fits = re.compile(pattern, re.IGNORECASE if "i" in options else 0)
    except re.error:
        return failed(f"grep: bad pattern {pattern}", 2)
    lines = text.decode("utf-8", "surrogateescape").splitlines()
    matching = [line for line in lines if (fits.search(line) is None) == ("v" in options)]
    return printed("".join(f"{line}\n" for line in matching), 0 if matching else 1)
