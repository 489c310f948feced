"""The part of the shell's language that ``adb shell`` gets: quoting, pipes, lists, redirection, ``if``, ``*``.

``run_script`` parses a script and runs its commands through a table. Variables, substitution, loops and jobs are not
supported. Other syntax gives the shell's exit code for a syntax error (2) and a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

COMMAND_NOT_FOUND = 127
SYNTAX_ERROR = 2
_OPERATORS = ("&&", "||", ">>", "|", ";", "\n", ">", "<")
_STDERR_OPERATORS = ("2>&1", "2>>", "2>")
_GLOB = "*?"
_Device = TypeVar("_Device")


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What a command did: its exit code, and what it wrote (``adb shell`` mixes both streams)."""

    code: int = 0
    text: bytes = b""


Command = Callable[[Sequence[str], bytes], Output]
"""Gets the arguments after the command's name, and what comes through the pipe."""


def commands_of(device: _Device, table: Mapping[str, Callable[[_Device, Sequence[str]], Output]]) -> dict[str, Command]:
    """Returns the functions of the table as commands: each gets the device and its arguments, and nothing piped."""

    def bound(answer: Callable[[_Device, Sequence[str]], Output]) -> Command:
        return lambda arguments, piped: answer(device, arguments)

    return {name: bound(answer) for name, answer in table.items()}


def printed(text: str = "", code: int = 0) -> Output:
    """Returns the output of a command that wrote this text."""
    return Output(code=code, text=text.encode("utf-8", "surrogateescape"))


def failed(text: str, code: int = 1) -> Output:
    """Returns the output of a command that failed with this message."""
    return printed(text + "\n", code)


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """What the language itself needs of the file system."""

    expand: Callable[[str], list[str]]
    read: Callable[[str], bytes]
    write: Callable[[str, bytes], None]


def run_script(script: str, commands: Mapping[str, Command], files: Files) -> Output:
    """Returns what the script's commands wrote, and the exit code of the last one; never raises on bad scripts."""
    try:
        tree = _Parser(_tokens(script)).script()
    except _SyntaxError as problem:
        return failed(f"sh: syntax error: {problem}", SYNTAX_ERROR)
    return _Runner(commands, files).run(tree)


class _SyntaxError(ValueError):
    pass


# ---- words -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Word:
    """One word. ``text`` without its quotes; ``pattern`` the same with quoted wildcards escaped by a NUL."""

    text: str
    pattern: str
    quoted: bool

    @property
    def has_wildcards(self) -> bool:
        plain = self.pattern.replace("\0*", "").replace("\0?", "")
        return any(character in plain for character in _GLOB)


_Token = _Word | str  # a word, or an operator


class _WordMaker:
    """Collects the characters of the word that is being read."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._pattern: list[str] = []
        self._quoted = False
        self._begun = False

    def add(self, character: str, *, quoted: bool) -> None:
        self._begun = True
        self._quoted = self._quoted or quoted
        self._text.append(character)
        self._pattern.append("\0" + character if quoted and character in _GLOB else character)

    def open_quote(self) -> None:
        self._begun = self._quoted = True

    @property
    def begun(self) -> bool:
        return self._begun

    def finish(self) -> list[_Token]:
        if not self._begun:
            return []
        word = _Word("".join(self._text), "".join(self._pattern), self._quoted)
        self._text, self._pattern, self._quoted, self._begun = [], [], False, False
        return [word]


def _tokens(script: str) -> list[_Token]:
    tokens: list[_Token] = []
    word = _WordMaker()
    position = 0
    while position < len(script):
        operators = _OPERATORS if word.begun else (*_STDERR_OPERATORS, *_OPERATORS)
        operator = next((operator for operator in operators if script.startswith(operator, position)), None)
        character = script[position]
        if character in "'\"":
            position = _read_quoted(script, position, word)
        elif character == "\\" and position + 1 < len(script):
            word.add(script[position + 1], quoted=True)
            position += 2
        elif operator is not None:
            tokens += [*word.finish(), operator]
            position += len(operator)
        elif character in " \t\r":
            tokens += word.finish()
            position += 1
        else:
            word.add(character, quoted=False)
            position += 1
    return [*tokens, *word.finish()]


def _read_quoted(script: str, start: int, word: _WordMaker) -> int:
    """Reads a quoted part into the word; returns the position behind its closing quote."""
    quote, position = script[start], start + 1
    word.open_quote()
    while position < len(script) and script[position] != quote:
        if quote == '"' and script[position] == "\\" and script[position + 1 : position + 2] in ('"', "\\", "$", "`"):
            position += 1
        word.add(script[position], quoted=True)
        position += 1
    if position >= len(script):
        raise _SyntaxError("no closing quote")
    return position + 1


# ---- grammar ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Simple:
    words: list[_Word] = field(default_factory=list)
    target: _Word | None = None
    source: _Word | None = None
    append: bool = False


@dataclass(slots=True)
class _If:
    condition: _List
    then: _List
    otherwise: _List


_Stage = _Simple | _If


@dataclass(slots=True)
class _List:
    """Pipelines, each with the operator before it: ``;``, ``&&`` or ``||``."""

    parts: list[tuple[str, list[_Stage]]] = field(default_factory=list)


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._position = 0

    def script(self) -> _List:
        parsed = self._list(())
        if self._position < len(self._tokens):
            raise _SyntaxError(f"unexpected {self._shown()}")
        return parsed

    def _list(self, ends: tuple[str, ...]) -> _List:
        """Reads pipelines up to one of the reserved words, which is left to be read."""
        parsed, operator = _List(), ";"
        while self._position < len(self._tokens) and not self._at_word(*ends):
            token = self._tokens[self._position]
            if token in (";", "\n"):
                operator = ";"
                self._position += 1
            elif token in ("&&", "||") and parsed.parts:
                operator = str(token)
                self._position += 1
            else:
                parsed.parts.append((operator, self._pipeline()))
                operator = ";"
        return parsed

    def _pipeline(self) -> list[_Stage]:
        stages = [self._stage()]
        while self._position < len(self._tokens) and self._tokens[self._position] == "|":
            self._position += 1
            stages.append(self._stage())
        return stages

    def _stage(self) -> _Stage:
        if self._at_word("if"):
            return self._conditional()
        return self._simple()

    def _conditional(self) -> _If:
        self._expect("if")
        condition = self._list(("then",))
        self._expect("then")
        then = self._list(("else", "fi"))
        otherwise = _List()
        if self._at_word("else"):
            self._expect("else")
            otherwise = self._list(("fi",))
        self._expect("fi")
        return _If(condition, then, otherwise)

    def _simple(self) -> _Simple:
        command = _Simple()
        while self._position < len(self._tokens):
            token = self._tokens[self._position]
            if isinstance(token, _Word):
                command.words.append(token)
                self._position += 1
            elif token == "2>&1":
                self._position += 1  # both streams are one here anyway
            elif token in (">", ">>", "<", "2>", "2>>"):
                self._redirection(command, token)
            else:
                break
        if not command.words and command.target is None:
            raise _SyntaxError(f"unexpected {self._shown()}")
        return command

    def _redirection(self, command: _Simple, operator: str) -> None:
        self._position += 1
        name = self._tokens[self._position] if self._position < len(self._tokens) else None
        if not isinstance(name, _Word):
            raise _SyntaxError(f"no file after {operator}")
        self._position += 1
        if operator.startswith("2"):
            return  # stderr is not kept apart here
        if operator == "<":
            command.source = name
        else:
            command.target, command.append = name, operator == ">>"

    def _at_word(self, *words: str) -> bool:
        token = self._tokens[self._position] if self._position < len(self._tokens) else None
        return isinstance(token, _Word) and not token.quoted and token.text in words

    def _expect(self, word: str) -> None:
        if not self._at_word(word):
            raise _SyntaxError(f"{word} expected, not {self._shown()}")
        self._position += 1

    def _shown(self) -> str:
        token = self._tokens[self._position] if self._position < len(self._tokens) else "the end"
        return repr(token.text if isinstance(token, _Word) else token)


# ---- running ---------------------------------------------------------------------------------------------------------


class _Runner:
    def __init__(self, commands: Mapping[str, Command], files: Files) -> None:
        self._commands = commands
        self._files = files

    def run(self, parsed: _List) -> Output:
        code, written = 0, b""
        for operator, stages in parsed.parts:
            if (operator == "&&" and code != 0) or (operator == "||" and code == 0):
                continue
            output = self._pipe(stages)
            code, written = output.code, written + output.text
        return Output(code=code, text=written)

    def _pipe(self, stages: Sequence[_Stage]) -> Output:
        output = Output()
        for stage in stages:
            output = self._if(stage) if isinstance(stage, _If) else self._run_simple(stage, output.text)
        return output

    def _if(self, stage: _If) -> Output:
        condition = self.run(stage.condition)
        chosen = self.run(stage.then if condition.code == 0 else stage.otherwise)
        return Output(code=chosen.code, text=condition.text + chosen.text)

    def _run_simple(self, command: _Simple, piped: bytes) -> Output:
        words = [text for word in command.words for text in self._expanded(word)]
        try:
            if command.source is not None:
                piped = self._files.read(command.source.text)
            output = self._called(words, piped)
            return self._redirected(command, output)
        except OSError as error:
            return failed(f"sh: {error}")

    def _called(self, words: Sequence[str], piped: bytes) -> Output:
        if not words:
            return Output()
        name = words[0].rpartition("/")[2] if words[0].startswith("/system/bin/") else words[0]
        known = self._commands.get(name)
        if known is None:
            return failed(f"/system/bin/sh: {words[0]}: inaccessible or not found", COMMAND_NOT_FOUND)
        return known(words[1:], piped)

    def _redirected(self, command: _Simple, output: Output) -> Output:
        if command.target is None or output.code != 0:
            return output
        path = command.target.text
        if path != "/dev/null":
            before = self._files.read(path) if command.append and self._files.expand(path) else b""
            self._files.write(path, before + output.text)
        return Output(code=output.code)

    def _expanded(self, word: _Word) -> list[str]:
        """Returns the paths that a word with wildcards matches; the word itself if it has none, or nothing matches."""
        return (self._files.expand(word.pattern) or [word.text]) if word.has_wildcards else [word.text]
