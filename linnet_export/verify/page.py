"""A report to read: one page that needs nothing else.

    Path("report.html").write_text(page.html(report), encoding="utf-8")
    print(page.terminal(report))

The page has its style and its drawings within it, makes no request, runs no script, and is the same, byte for byte,
for the same report.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import Any

from linnet_export import __version__, text
from linnet_export.verify import charts
from linnet_export.verify.records import Finding, PromptFigures, Report, RuntimeResult, Sample, TensorCheck
from linnet_export.verify.summary import REASONS, agrees, duration, number, overall, printable, reasons, share, terminal
from linnet_export.verify.weights import ROUNDINGS

__all__ = ["html", "terminal"]

WORST = 10  # tensors, and positions, that are listed unfolded


def html(report: Report) -> str:
    """The report as one HTML document."""
    title = f"{'Passed' if report.passed else 'Failed'}: {report.export}"
    body = "".join(
        part
        for section in (_summary, _structure, _weights, _logits, _texts, _footer)
        for part in section(report)
    )  # fmt: skip
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{_text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}</main>\n"
        "</body>\n</html>\n"
    )


def _text(value: object) -> str:
    """Any text within HTML: markup escaped, control characters spelled out."""
    shown = printable(str(value), keep="\n\t")
    return escape(shown, quote=True)


def _chip(passed: bool, *, skipped: bool = False) -> str:
    if skipped:
        return '<span class="chip skipped">not run</span>'
    return '<span class="chip passed">✓ passed</span>' if passed else '<span class="chip failed">✗ failed</span>'


def _summary(report: Report) -> Iterator[str]:
    failures = reasons(report)
    yield f'<section class="card verdict{"" if report.passed else " failed"}">\n'
    yield f"<h1>{'✓ Verified' if report.passed else '✗ Verification failed'}</h1>\n"
    yield f'<span class="path">{_text(report.export)}</span>\n'
    facts = {"against": report.source, "type": report.type, "date": report.date}
    if report.seconds:
        facts["took"] = duration(report.seconds)
    if report.peak_mb:
        facts["peak memory"] = text.size(round(report.peak_mb * 1e6))
    yield _facts({**facts, **report.environment})
    if failures:
        yield '<ul class="reasons">\n'
        for reason in failures[:REASONS]:
            yield f"<li><b>{_text(reason.subject)}</b>: {_text(reason.message)}</li>\n"
        if len(failures) > REASONS:
            yield f"<li>and {len(failures) - REASONS} more, in the sections below</li>\n"
        yield "</ul>\n"
    yield "</section>\n"
    yield from _tiles(report)
    yield from _figures_table(report)


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<div><dt>{_text(key)}</dt><dd>{_text(value)}</dd></div>\n" for key, value in facts.items())
    return f"<dl>\n{rows}</dl>\n"


def _tiles(report: Report) -> Iterator[str]:
    yield '<nav class="tiles" aria-label="Sections">\n'
    findings, checks = report.structure, report.weights
    if findings:
        good = sum(finding.passed for finding in findings)
        yield _tile(
            "structure", "Structure", _chip(good == len(findings)), f"{good} of {len(findings)} findings passed"
        )
    if checks:
        good, exact = sum(check.passed for check in checks), sum(check.exact for check in checks)
        yield _tile("weights", "Weights", _chip(good == len(checks)),
                    f"{good} of {text.counted(len(checks), 'tensor')} passed, {exact} bit for bit")  # fmt: skip
    for runtime in report.runtimes:
        whole = overall(runtime)
        line = f"{text.counted(whole.positions, 'position')}, largest KL {number(whole.kl_max)}" if whole else ""
        yield _tile("logits", runtime.runtime, _chip(runtime.passed, skipped=bool(runtime.skipped)),
                    _text(runtime.skipped or line or "; ".join(runtime.failures)))  # fmt: skip
    yield "</nav>\n"


def _tile(anchor: str, title: str, chip: str, line: str) -> str:
    return f'<a class="tile" href="#{anchor}"><b>{_text(title)}</b>{chip}<small>{line}</small></a>\n'


@dataclass(frozen=True, slots=True)
class _Cell:
    """A value, a remark below it, and whether it is out of bounds."""

    value: str
    note: str = ""
    wrong: bool = False


def _table(columns: Sequence[str], rows: Iterable[tuple[bool, Sequence[_Cell]]]) -> str:
    """A table of a name and figures; where the page is narrow, each row becomes a list with the columns' names."""
    heads = [f'<th class="n">{column}</th>' for column in columns[1:]]
    made = [f"<table><thead><tr><th>{columns[0]}</th>{''.join(heads)}</tr></thead>\n<tbody>\n"]
    for passed, (first, *rest) in rows:
        made.append(f'<tr class="{"passed" if passed else "failed"}"><td>{_cell(first)}</td>')
        for column, cell in zip(columns[1:], rest, strict=True):
            label = f' data-label="{column}"' if cell.value else ""
            made.append(f'<td class="n{" wrong" if cell.wrong else ""}"{label}><span>{_cell(cell)}</span></td>')
        made.append("</tr>\n")
    return f"{''.join(made)}</tbody></table>\n"


def _cell(cell: _Cell) -> str:
    return _text(cell.value) + (f"<small>{_text(cell.note)}</small>" if cell.note else "")


def _figures_table(report: Report) -> Iterator[str]:
    """The figures of the runtimes side by side, as a part of the summary."""
    rows: list[tuple[bool, list[_Cell]]] = []
    for runtime in report.runtimes:
        whole, bounds = overall(runtime), runtime.bounds
        if whole is None:
            continue
        mean, most = _Cell(number(whole.kl_mean)), _Cell(number(whole.kl_max))
        if bounds is not None:
            mean = _Cell(mean.value, f"at most {number(bounds.kl_mean)}", not whole.kl_mean <= bounds.kl_mean)
            most = _Cell(most.value, f"at most {number(bounds.kl_max)}", not whole.kl_max <= bounds.kl_max)
        cells = [
            _Cell(runtime.runtime, runtime.version),
            mean,
            _Cell(number(whole.kl_p99)),
            most,
            _Cell(share(whole.agreement), f"of {text.counted(whole.positions, 'position')}"),
            _Cell(number(whole.difference), "" if runtime.kind == "logits" else "of log-probabilities"),
            _Cell(number(whole.perplexity, 5), f"reference {number(whole.reference_perplexity, 5)}"),
        ]
        rows.append((runtime.passed, cells))
    if rows:
        columns = ("runtime", "KL mean", "KL 99 %", "KL max", "same best token", "largest difference", "perplexity")
        yield f'<div class="card after-tiles">\n{_table(columns, rows)}</div>\n'


def _structure(report: Report) -> Iterator[str]:
    if not report.structure:
        return
    yield '<h2 id="structure">Structure</h2>\n'
    failed = [finding for finding in report.structure if not finding.passed]
    passed = [finding for finding in report.structure if finding.passed]
    if failed:
        yield f'<div class="card">\n{_findings(failed)}</div>\n'
    if passed:
        names = ", ".join(dict.fromkeys(finding.subject for finding in passed))
        yield f"<details><summary>{text.counted(len(passed), 'finding')} passed</summary>\n"
        yield f'{_findings(passed)}</details>\n<p class="muted below">{_text(names)}</p>\n'


def _findings(findings: Sequence[Finding]) -> str:
    rows = "".join(
        f'<tr class="{"passed" if finding.passed else "failed"}"><td>{_text(finding.subject)}</td>'
        f"<td>{_text(finding.message)}</td></tr>\n"
        for finding in findings
    )
    return f'<table class="findings"><tbody>\n{rows}</tbody></table>\n'


def _weights(report: Report) -> Iterator[str]:
    checks = report.weights
    if not checks:
        return
    failed = [check for check in checks if not check.passed]
    off = [check for check in checks if not check.exact]
    yield '<h2 id="weights">Weights</h2>\n<div class="card">\n'
    if not off:
        yield f"<p>All {text.counted(len(checks), 'tensor')} hold the source's bits.</p>\n</div>\n"
    else:
        kinds = [kind for kind in dict.fromkeys(check.type for check in off) if kind in ROUNDINGS]
        allowed = "; ".join(f"{kind}: {ROUNDINGS[kind].formula}" for kind in kinds)
        exact = len(checks) - len(off)
        caption = f"{exact} of {text.counted(len(checks), 'tensor')} hold the source's bits"
        yield f"<figure><figcaption>{_text(caption)}<small>What a type allows: {_text(allowed)}</small></figcaption>\n"
        yield f"{charts.weights(checks)}</figure>\n</div>\n"
    if failed:
        yield f'<div class="card">\n{_tensors(failed)}</div>\n'
    worst = sorted((check for check in off if check.passed), key=lambda check: -check.relative_error)[:WORST]
    if worst:
        yield f"<details><summary>The {len(worst)} passed tensors with the largest error</summary>\n"
        yield f"{_tensors(worst)}</details>\n"
    yield f"<details><summary>All {text.counted(len(checks), 'tensor')}</summary>\n{_tensors(checks)}</details>\n"


def _tensors(checks: Iterable[TensorCheck]) -> str:
    def row(check: TensorCheck) -> tuple[bool, list[_Cell]]:
        first, kind = _Cell(check.name, check.message), _Cell(check.type)
        if check.exact:
            return check.passed, [first, kind, _Cell("exact"), _Cell(""), _Cell("")]
        place = _Cell(", ".join(map(str, check.index)))
        return check.passed, [first, kind, _Cell(number(check.relative_error)), _Cell(number(check.worst_ratio)), place]

    return _table(("tensor", "type", "relative error", "worst value", "at"), map(row, checks))


def _logits(report: Report) -> Iterator[str]:
    if not report.runtimes:
        return
    yield '<h2 id="logits">Logits</h2>\n'
    ran = [runtime for runtime in report.runtimes if overall(runtime) is not None]
    if ran:
        yield '<div class="card">\n<figure><figcaption>KL divergence at each position<small>KL(reference || runtime) '
        yield "in nats, prompts side by side; dashed: the bound</small></figcaption>\n"
        yield f"{charts.divergence(ran)}</figure>\n"
        yield "<figure><figcaption>Differences<small>the largest |difference| over the vocabulary, counted over the "
        yield f"positions</small></figcaption>\n{charts.differences(ran)}</figure>\n</div>\n"
    yield '<div class="card">\n'
    for runtime in report.runtimes:
        yield from _runtime_notes(runtime)
    yield "</div>\n"
    for runtime in ran:
        yield f"<details><summary>{_text(runtime.runtime)} by prompt</summary>\n{_prompts(runtime.prompts)}</details>\n"


def _runtime_notes(runtime: RuntimeResult) -> Iterator[str]:
    yield f'<div class="runtime-notes"><h3>{_text(runtime.runtime)} '
    yield f"{_chip(runtime.passed, skipped=bool(runtime.skipped))}</h3>\n"
    facts = [part for part in (runtime.version, runtime.settings) if part]
    if runtime.prompts:
        facts.append(f"compared by {runtime.kind}")
    if runtime.seconds:
        facts.append(duration(runtime.seconds))
    if facts:
        yield f'<p class="muted">{_text("; ".join(facts))}</p>\n'
    if runtime.failures:
        items = "".join(f"<li>{_text(failure)}</li>" for failure in runtime.failures)
        yield f'<ul class="reasons">{items}</ul>\n'
    notes = [runtime.skipped] if runtime.skipped else []
    if runtime.bounds is not None:
        decided = "; the same best token wherever the reference's is decided" if runtime.bounds.argmax_decided else ""
        notes.append(
            f"Bounds: KL mean at most {number(runtime.bounds.kl_mean)}, KL at any position at most "
            f"{number(runtime.bounds.kl_max)}{decided}; the reason: {runtime.bounds.reason}"
        )
    notes += [f"Limit: {limit}" for limit in runtime.limits]
    notes += [f"Not counted in {figures.prompt}: {figures.excluded}" for figures in runtime.prompts if figures.excluded]
    if notes:
        yield f'<ul class="notes">{"".join(f"<li>{_text(note)}</li>" for note in notes)}</ul>\n'
    yield "</div>\n"


def _prompts(prompts: Iterable[PromptFigures]) -> str:
    def row(figures: PromptFigures) -> tuple[bool, list[_Cell]]:
        wrong, kl = figures.decided_disagreements, figures.kl or (math.nan,)
        return not wrong, [
            _Cell(figures.prompt, f"another best token where it is decided: {_places(wrong)}" if wrong else ""),
            _Cell(str(len(figures.positions))),
            _Cell(number(math.fsum(kl) / len(kl))),
            _Cell(number(max(kl))),
            _Cell(share(figures.argmax_agreement)),
            _Cell(number(max(figures.differences, default=math.nan)), f"mean {number(figures.mean_abs)}"),
            _Cell(number(figures.std)),
            _Cell(number(figures.perplexity, 5), f"reference {number(figures.reference_perplexity, 5)}"),
        ]

    columns = ("prompt", "positions", "KL mean", "KL max", "same best token", "largest difference",
               "deviation of logits", "perplexity")  # fmt: skip
    return _table(columns, map(row, prompts))


def _places(positions: Sequence[int]) -> str:
    shown = ", ".join(map(str, positions[:WORST]))
    more = f" and {len(positions) - WORST} more" if len(positions) > WORST else ""
    return f"position{'' if len(positions) == 1 else 's'} {shown}{more}"


def _texts(report: Report) -> Iterator[str]:
    having = [runtime for runtime in report.runtimes if runtime.samples]
    if not having:
        return
    yield '<h2 id="text">Text</h2>\n'
    for runtime in having:
        equal = sum(agrees(sample) for sample in runtime.samples)
        line = (
            f"{runtime.runtime}: {equal} of {text.counted(len(runtime.samples), 'greedy text')} equal the reference's"
        )
        opened = " open" if equal < len(runtime.samples) or runtime is having[0] else ""
        yield f"<details{opened}><summary>{_text(line)}</summary>\n"
        yield from map(_sample, runtime.samples)
        yield "</details>\n"


def _sample(sample: Sample) -> str:
    chat = ' <span class="chip skipped">chat</span>' if sample.chat else ""
    state = "passed" if agrees(sample) else "skipped"
    count = (
        f'<span class="chip {state}">{sample.agreeing_prefix} of {text.counted(sample.tokens, "token")} agree</span>'
    )
    columns = "".join(
        f"<div><h4>{_text(title)}</h4><pre>{_pieces(pieces, whole, other, sample)}</pre></div>"
        for title, pieces, whole, other in (
            (sample.reference_stack, sample.reference_pieces, sample.reference, sample.output),
            (sample.stack, sample.output_pieces, sample.output, sample.reference),
        )
    )
    return (
        f'<div class="sample">{count}{chat}<code class="prompt">{_text(sample.prompt)}</code>'
        f'<div class="pair">{columns}</div></div>\n'
    )


def _pieces(pieces: Sequence[str], whole: str, other: str, sample: Sample) -> str:
    """A text with the first piece marked that the other does not have; without pieces, the first character."""
    if agrees(sample):
        return _text(whole)
    if pieces:
        place = sample.agreeing_prefix
        before, first, after = "".join(pieces[:place]), "".join(pieces[place : place + 1]), "".join(pieces[place + 1 :])
    else:
        place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, other, strict=False)))
        before, first, after = whole[:place], whole[place : place + 1], whole[place + 1 :]
    # A text that ends where the other goes on differs by its end.
    marked = _text(first) if first else "∎"
    return f'{_text(before)}<mark title="first disagreement">{marked}</mark><span class="after">{_text(after)}</span>'


def _footer(report: Report) -> Iterator[str]:
    if report.options:
        yield f'<h2>Options</h2>\n<div class="card">{_facts(report.options)}</div>\n'
    yield f"<footer>linnet-export {__version__}; every figure of this page is in report.json.</footer>\n"
