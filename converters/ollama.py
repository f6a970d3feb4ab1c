"""A Modelfile for Ollama: the model's file, its chat template in Go's language, its stops.

    made = ollama.modelfile("phi-3-mini-BF16.gguf", template=jinja, stops=["<|end|>"], name="phi-3-mini")
    made.text, made.notes

Ollama does not read Jinja. A template is recognised by what it renders: it is run on a few conversations, and where
every text is that of a family in STYLES, that family's Go template renders the same. Where none is, the TEMPLATE is
left out and a note says so; nothing is guessed from how a template is written.
"""

import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = Mapping[str, str]  # role, content


MOST_WRITTEN = 1_000_000  # letters or items that a template's operator may make: prompts are far shorter


@dataclass(frozen=True, slots=True)
class Style:
    """How turns are written: for each role the texts before and after its content, then what opens the answer.

    A role that is missing is left out of the prompt.
    """

    name: str
    turns: Mapping[str, tuple[str, str]]
    opening: str


def _style(name: str, before: str, after: str, *, at_once: bool = False) -> Style:
    """A style whose roles differ in their names alone; `at_once` opens the answer in every user turn, asked or not."""
    turns = {role: (before.format(role=role), after) for role in ("system", "user", "assistant")}
    opening = turns["assistant"][0]
    if at_once:
        turns["user"] = (turns["user"][0], after + opening)
        turns["assistant"] = ("", after)
    return Style(name, turns, "" if at_once else opening)


STYLES = (
    _style("phi-3", "<|{role}|>\n", "<|end|>\n"),
    _style("phi-3 (first release)", "<|{role}|>\n", "<|end|>\n", at_once=True),
    _style("phi-4-mini", "<|{role}|>", "<|end|>"),
    _style("phi-4", "<|im_start|>{role}<|im_sep|>", "<|im_end|>"),
    _style("phi-4 (first release)", "<|im_start|>{role}<|im_sep|>", "<|im_end|>", at_once=True),
    _style("chatml", "<|im_start|>{role}\n", "<|im_end|>\n"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """A style, and what a template does beside writing turns.

    `preface` stands before a conversation: always, or (`default`) where it does not begin with a system message.
    """

    style: Style
    preface: str = ""
    default: bool = False
    skips_empty_system: bool = False
    trims: bool = False

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that ends where the answer to `messages` begins."""
        started = messages[0]["role"] == "system"
        parts = ["" if self.default and started else self.preface]
        for message in messages:
            role, content = message["role"], message["content"]
            if role not in self.style.turns or (role == "system" and self.skips_empty_system and not content):
                continue
            before, after = self.style.turns[role]
            parts += [before, content.strip() if self.trims else content, after]
        return "".join([*parts, self.style.opening])

    def go_template(self) -> str:
        """The same in Ollama's language (text/template over .Messages).

        A last message of the assistant is left open, as Ollama continues it. Text stands in the template as it is,
        so nothing that trims stands beside it.
        """
        first = ""
        if self.default:
            first = f'{{{{- if and (eq $i 0) (ne .Role "system") }}}}{_literal(self.preface)}{{{{ end }}}}\n'
        branches = []
        for role, (before, after) in self.style.turns.items():
            end = _literal(after)
            if role == "assistant" and after:
                end = f"{{{{ if not $last }}}}{end}{{{{ end }}}}"
            test = f'eq .Role "{role}"'
            if role == "system" and self.skips_empty_system:
                test = f"and ({test}) .Content"
            branches.append(f"if {test} }}}}{_literal(before)}{{{{ .Content }}}}{end}")
        opening = ""
        if self.style.opening:
            opening = f'{{{{- if and $last (ne .Role "assistant") }}}}{_literal(self.style.opening)}{{{{ end }}}}\n'
        return (
            ("" if self.default else _literal(self.preface))
            + "{{ range $i, $_ := .Messages }}\n"
            + "{{- $last := eq (len (slice $.Messages $i)) 1 }}\n"
            + first
            + "{{- "
            + "{{ else ".join(branches)
            + "{{ end }}\n"
            + opening
            + "{{- end }}"
        )


@dataclass(frozen=True, slots=True)
class Modelfile:
    """The text of a Modelfile, and what it could not carry over."""

    text: str
    notes: tuple[str, ...]


def modelfile(
    gguf_name: str,
    *,
    template: str | None,
    stops: Sequence[str],
    name: str,
    bos_token: str = "",
    eos_token: str | None = None,
) -> Modelfile:
    """The Modelfile beside a GGUF file.

    `template` is the model's Jinja template, `stops` are the texts of its end tokens, `eos_token` the one that the
    template itself may write (the first stop, if it is not given). `bos_token` stays empty where the runtime adds
    that token to every prompt.
    """
    notes: list[str] = []
    lines = [f"# {' '.join(name.split())}", f"FROM ./{gguf_name}"]
    family = None
    if template is None:
        notes.append(f"the model has no chat template; {_WITHOUT}")
    else:
        family = recognise(template, notes, bos_token=bos_token, eos_token=(eos_token or next(iter(stops), "")))
    if family is not None:
        lines.append(f'TEMPLATE """{family.go_template()}"""')
    for stop in dict.fromkeys(stop for stop in stops if stop):
        if '"""' in stop or not all(_survives(letter) for letter in stop):
            notes.append(f"the stop {stop!r} cannot be written in a Modelfile and is left out")
            continue
        quote = '"""' if '"' in stop or "\n" in stop else '"'
        lines.append(f"PARAMETER stop {quote}{stop}{quote}")
    return Modelfile("\n".join(lines) + "\n", tuple(notes))


_WITHOUT = "the Modelfile has no TEMPLATE, and Ollama takes the nearest of its own, or none"


def recognise(template: str, notes: list[str], *, bos_token: str = "", eos_token: str = "") -> Family | None:
    """The family whose prompts a Jinja template renders; None, with a note, where there is none."""
    try:
        render = renderer(template, bos_token, eos_token)
        found = _fitting(render, notes)
    except Unrenderable as error:
        notes.append(f"the chat template cannot be rendered ({error}); {_WITHOUT}")
        return None
    if found is None:
        known = ", ".join(style.name for style in STYLES)
        notes.append(f"the chat template is of no known family ({known}); {_WITHOUT}")
        return None
    if found.trims:
        notes.append("the chat template strips whitespace around messages; Ollama's language cannot, and keeps it")
        return replace(found, trims=False)
    return found


class Unrenderable(Exception):
    """A template that is not Jinja, needs what a Go template has not, or refuses a plain conversation."""


def _messages(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple({"role": role, "content": content} for role, content in turns)


_SYSTEM, _ASK, _ANSWER, _AGAIN = (
    ("system", "Be brief.\nBe kind."),
    ("user", "One?"),
    ("assistant", "1"),
    ("user", "Two?"),
)
_PLAIN = _messages(_ASK)
# Conversations whose prompts must be equal, and those that a template may refuse (with a system message).
_PROBES = (_PLAIN, _messages(_ASK, _ANSWER, _AGAIN), _messages(_ASK, _ANSWER, _AGAIN, _ANSWER, _ASK))
_SYSTEM_PROBES = (
    _messages(_SYSTEM, _ASK),
    _messages(_SYSTEM, _ASK, _ANSWER, _AGAIN),
    _messages(("system", ""), _ASK),
)
_EDGES = _messages(("system", "  s \n"), ("user", " \n u\t"), ("assistant", "\n a "), ("user", " v "))
# Ollama can send this one too, but templates rarely care: it only decides between families that fit otherwise.
_ODD = _messages(_ASK, _SYSTEM, _AGAIN)
_THOUGHT = _messages(_ASK, ("assistant", "<think>\nhm\n</think>\n\n1"), _AGAIN)


def _fitting(render: Callable[[Sequence[Message]], str], notes: list[str]) -> Family | None:
    plain = render(_PLAIN)
    wanted = [(probe, render(probe)) for probe in _PROBES]
    refuses = False
    try:
        wanted += [(probe, render(probe)) for probe in (*_SYSTEM_PROBES, _EDGES)]
    except Unrenderable:
        refuses = True
        wanted.append((_EDGES[1:], render(_EDGES[1:])))  # without its system message
    fitting = [
        family for family in _candidates(plain) if all(family.render(probe) == prompt for probe, prompt in wanted)
    ]
    if not fitting:
        return None
    try:
        odd = render(_ODD)
        fitting.sort(key=lambda family: family.render(_ODD) != odd)
    except Unrenderable:
        pass
    found = fitting[0]
    try:
        shortens = render(_THOUGHT) != found.render(_THOUGHT)
    except Unrenderable:
        shortens = True
    if shortens:
        notes.append("the chat template shortens earlier answers (their thinking); the Modelfile keeps them whole")
    if refuses:
        notes.append("the chat template refuses system messages; the Modelfile leaves them out")
        return replace(found, style=_without_system(found.style))
    return found


def _candidates(plain: str) -> Iterator[Family]:
    """Every family whose prompt for a plain question is `plain`, the simplest first."""
    for style in STYLES:
        asked = Family(style).render(_PLAIN)
        if not plain.endswith(asked):
            continue
        preface = plain.removesuffix(asked)
        defaults = (True, False) if preface else (False,)
        for trims, default, skips, left_out in itertools.product((False, True), defaults, (False, True), (False, True)):
            yield Family(_without_system(style) if left_out else style, preface, default, skips, trims)


def _without_system(style: Style) -> Style:
    return replace(style, turns={role: turn for role, turn in style.turns.items() if role != "system"})


def renderer(template: str, bos_token: str, eos_token: str) -> Callable[[Sequence[Message]], str]:
    """A function that renders a template as transformers does (utils/chat_template_utils.py)."""
    import json

    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    def strftime_now(_format: str) -> str:
        raise jinja2.TemplateError("it writes today's date")

    class Bounded(ImmutableSandboxedEnvironment):
        """A sandbox in which no single operator makes gigabytes."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            counts = [value if isinstance(value, int) else len(value) for value in (left, right) if _countable(value)]
            if (operator == "%" and isinstance(left, str) and re.search(r"\d{4}|\*", left)) or (
                operator != "%" and len(counts) == 2 and math.prod(map(abs, counts)) > MOST_WRITTEN
            ):
                raise jinja2.TemplateError(f"it writes more than {MOST_WRITTEN} letters")
            return super().call_binop(context, operator, left, right)

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": strftime_now}
    try:
        compiled = environment.from_string(template)
    except (jinja2.TemplateError, RecursionError, MemoryError) as error:
        raise Unrenderable(_one_line(error)) from None

    def render(messages: Sequence[Message]) -> str:
        try:
            return compiled.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                bos_token=bos_token,
                eos_token=eos_token,
            )
        except Exception as error:  # noqa: BLE001 - a template is a program: it can raise anything
            raise Unrenderable(_one_line(error)) from None

    return render


def _countable(value: object) -> bool:
    return isinstance(value, int | str | list | tuple)


def _generation_tag() -> type:
    """transformers' tag around an assistant's words, {% generation %}: it marks them for training, and prints them."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as Extension declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _survives(letter: str) -> bool:
    """Whether Ollama's Modelfile parser keeps a letter: the printable ones, spaces and line ends (parser.go)."""
    return letter in " \n" or unicodedata.category(letter)[0] in "LMNPS"


def _literal(text: str) -> str:
    """Text within a Go template within a Modelfile: as it is, or as a quoted string where that would be read."""
    if "{" not in text and '"""' not in text and all(_survives(letter) for letter in text):
        return text
    quoted = "".join(_escaped(letter) for letter in text)
    return f'{{{{ "{quoted}" }}}}'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    if letter == "\n":
        return "\\n"
    if _survives(letter):
        return letter
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"
