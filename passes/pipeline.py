"""Pipelines as text that round-trips: ``flatten-calls,shard{memory=14GiB},mlir:cse``.

    pipeline = [pass {"," pass}]
    pass     = NAME ["{" [NAME "=" value {"," NAME "=" value}] "}"]  |  "mlir:" NAME ["{" ... "}"]
    value    = WORD | "quoted, as in JSON" | "[" [value {"," value}] "]"

What stands between the braces of an ``mlir:`` pass is MLIR's own text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from autoshard.errors import InputError, UnknownNameError
from autoshard.passes.option_values import OptionError, Quoted, Word, from_word, to_text, type_text
from autoshard.passes.registry import (
    Pass,
    PassInfo,
    build,
    check_required,
    info_of,
    lookup,
    unknown_option,
    unknown_pass,
)

_NAME = re.compile(r"[A-Za-z][\w.:-]*")
_KEY = re.compile(r"[A-Za-z][\w-]*")
_WORD = re.compile(r'[^\s,{}\[\]"=]+')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_SPACE = re.compile(r"\s*")
_AROUND = 30

Options: TypeAlias = "tuple[tuple[str, Any], ...]"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes in the order in which they run.

    Attributes:
        passes: The passes with their options.

    Examples:
        >>> str(Pipeline.parse(" flatten-calls , mlir:cse"))
        'flatten-calls,mlir:cse'
    """

    passes: tuple[Pass, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Read a pipeline.

        Raises:
            InputError: It cannot be read, or an option has a value of another type; says where.
            UnknownNameError: It names a pass or an option that is not there; says where.
        """
        if not isinstance(text, str):
            raise InputError(
                f"a pipeline is given as a {type(text).__name__}",
                fix="write the names of passes as in 'flatten-calls,shard'",
            )
        return cls(tuple(_Reader(text).pipeline()))

    @classmethod
    def of(cls, given: str | Pipeline | tuple[Pass, ...]) -> Pipeline:
        """A pipeline from its text, or from passes."""
        if isinstance(given, Pipeline):
            return given
        return cls.parse(given) if isinstance(given, str) else cls(tuple(given))

    def __str__(self) -> str:
        return ",".join(map(pass_text, self.passes))

    def index(self, name: str) -> int | None:
        """Position of the first pass of that name; None if there is none."""
        names = [each.pass_info.name for each in self.passes]
        return names.index(name) if name in names else None


def pass_text(made: Pass) -> str:
    """A pass as a pipeline names it, with the options that are not the defaults."""
    info = made.pass_info
    if info.name.startswith("mlir:"):
        options = str(getattr(made, "options", ""))
        return f"{info.name}{{{options}}}" if options else info.name
    told = []
    for option in info.options:
        value = getattr(made, option.name)
        if option.required or value != option.default:
            told.append(f"{option.name}={to_text(value)}")
    return f"{info.name}{{{','.join(told)}}}" if told else info.name


class _Reader:
    """Reads a pipeline from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def pipeline(self) -> list[Pass]:
        self._space()
        found: list[Pass] = []
        while self.position < len(self.text):
            if found:
                self._expect(",", "a comma and the next pass")
            found.append(self._pass())
        return found

    def _pass(self) -> Pass:
        start = self.position
        name = self._match(_NAME)
        if name is None:
            raise self._wrong("the name of a pass is expected", self.position)
        if name.startswith("mlir:"):
            return self._mlir(name, start)
        try:
            info = info_of(name)
        except UnknownNameError:
            raise unknown_pass(name, self._at(start)) from None
        values: dict[str, Any] = {}
        if self._take("{"):
            while not self._take("}"):
                if values:
                    self._expect(",", "a comma or }")
                self._option(info, values)
        check_required(info, values, self._at(start))
        return build(name, values)

    def _option(self, info: PassInfo, values: dict[str, Any]) -> None:
        start = self.position
        key = self._match(_KEY)
        if key is None:
            raise self._wrong(f"the name of an option of {info.name} is expected", start)
        kind = next((o.kind for o in info.options if o.name == key.replace("-", "_")), None)
        if kind is None:
            raise unknown_option(info, key, self._at(start))
        key = key.replace("-", "_")
        if key in values:
            raise self._wrong(f"option {key} is there twice", start)
        self._expect("=", f"= and a value of type {type_text(kind)}")
        start = self.position
        word = self._value()
        try:
            values[key] = from_word(word, kind)
        except OptionError as error:
            raise self._wrong(f"option {key} of {info.name}: {error}", start) from error

    def _value(self) -> Word:
        if self._take("["):
            words: list[Word] = []
            while not self._take("]"):
                if words:
                    self._expect(",", "a comma or ]")
                words.append(self._value())
            return tuple(words)
        start = self.position
        quoted = self._match(_QUOTED)
        if quoted is not None:
            try:
                return Quoted(json.loads(quoted))
            except ValueError as error:
                raise self._wrong(f"the quoted text cannot be read: {error}", start) from error
        word = self._match(_WORD)
        if word is None:
            raise self._wrong("a value is expected", start)
        return word

    def _mlir(self, name: str, start: int) -> Pass:
        options = ""
        if self._take("{"):
            depth, begin = 1, self.position
            while depth:
                if self.position == len(self.text):
                    raise self._wrong("the brace is not closed", begin - 1)
                depth += {"{": 1, "}": -1}.get(self.text[self.position], 0)
                self.position += 1
            options = " ".join(self.text[begin : self.position - 1].split())
            self._space()
        try:
            return lookup(name, options=options)
        except (InputError, UnknownNameError) as error:
            raise type(error)(error.problem, at=self._at(start), fix=error.fix) from error

    def _space(self) -> None:
        found = _SPACE.match(self.text, self.position)
        self.position = self.position if found is None else found.end()

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self.text, self.position)
        if found is None:
            return None
        self.position = found.end()
        self._space()
        return found[0]

    def _take(self, mark: str) -> bool:
        if not self.text.startswith(mark, self.position):
            return False
        self.position += len(mark)
        self._space()
        return True

    def _expect(self, mark: str, what: str) -> None:
        if not self._take(mark):
            raise self._wrong(f"{what} expected", self.position)

    def _wrong(self, problem: str, position: int) -> InputError:
        return InputError(
            f"cannot read the pipeline: {problem}",
            at=self._at(position),
            fix="write passes as in flatten-calls,shard{memory=14GiB},mlir:cse",
        )

    def _at(self, position: int) -> str:
        """The place in the text: its number, and the text around it with a mark below."""
        first = max(0, position - _AROUND)
        shown = self.text[first : position + _AROUND].replace("\n", " ")
        head = f"character {position + 1}: {'…' if first else ''}"
        mark = " " * (len("  at:  ") + len(head) + position - first) + "^"
        return f"{head}{shown}\n{mark}"


def with_options(made: Pass, **options: Any) -> Pass:
    """The same pass with some options changed."""
    changed: Any = dataclasses.replace(made, **options)  # type: ignore[type-var]
    return changed  # type: ignore[no-any-return]
