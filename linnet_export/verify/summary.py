"""A report in few words: why it failed, a runtime's figures over all prompts, lines for a terminal.

print(terminal(report))
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from linnet_export import text
from linnet_export.verify.records import Report, RuntimeResult, Sample
from linnet_export.verify.weights import INCOMPARABLE

WIDTH = 80  # columns of a terminal
REASONS = 12  # failures that a summary lists


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a verification failed: the tensor, key, file or runtime, and what was found and is needed."""

    subject: str
    message: str


def reasons(report: Report) -> tuple[Reason, ...]:
    """Every failure of a report: structure, then weights, then runtimes."""
    found = [Reason(finding.subject, finding.message) for finding in report.structure if not finding.passed]
    found += [Reason(check.name, check.message) for check in report.weights if not check.passed]
    for runtime in report.runtimes:
        if not runtime.passed:
            found += [Reason(runtime.runtime, failure) for failure in runtime.failures or ("it failed",)]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    """A runtime's figures over all its prompts; perplexities are means over the counted positions."""

    positions: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    kl_max_at: str
    agreement: float
    difference: float
    difference_at: str
    perplexity: float
    reference_perplexity: float


def overall(runtime: RuntimeResult) -> Overall | None:
    """The figures of one runtime, None where it compared nothing."""
    prompts = [figures for figures in runtime.prompts if figures.positions]
    if not prompts:
        return None
    counts = [len(figures.positions) for figures in prompts]
    total = sum(counts)
    kl = [(value, f"{f.prompt}, position {p}") for f in prompts for p, value in zip(f.positions, f.kl, strict=False)]
    off = [
        (value, f"{f.prompt}, position {p}")
        for f in prompts
        for p, value in zip(f.positions, f.differences, strict=False)
    ]
    worst, largest = max(kl, key=_nan_last, default=(math.nan, "")), max(off, key=_nan_last, default=(math.nan, ""))
    return Overall(
        positions=total,
        kl_mean=math.fsum(value for value, _ in kl) / len(kl) if kl else math.nan,
        kl_p99=quantile([value for value, _ in kl], 0.99),
        kl_max=worst[0],
        kl_max_at=worst[1],
        agreement=math.fsum(f.argmax_agreement * n for f, n in zip(prompts, counts, strict=True)) / total,
        difference=largest[0],
        difference_at=largest[1],
        perplexity=_mean_perplexity([f.perplexity for f in prompts], counts),
        reference_perplexity=_mean_perplexity([f.reference_perplexity for f in prompts], counts),
    )


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which a part of the values lies, linear between neighbours, as torch.quantile has it."""
    if not values or any(math.isnan(value) for value in values):
        return math.nan
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _nan_last(pair: tuple[float, str]) -> float:
    return math.inf if math.isnan(pair[0]) else pair[0]


def _mean_perplexity(values: Sequence[float], counts: Sequence[int]) -> float:
    """Of all positions together: perplexities multiply as their logarithms add."""
    if any(not value > 0 or math.isinf(value) for value in values):
        return math.nan
    return math.exp(math.fsum(n * math.log(v) for v, n in zip(values, counts, strict=True)) / sum(counts))


def number(value: float, digits: int = 3) -> str:
    """A few digits that people read: 0.0123, 4.2e-7, 0."""
    if not math.isfinite(value) or value >= INCOMPARABLE:
        return "not a number" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def share(value: float) -> str:
    """A share in percent that says 100 only where it is all."""
    if math.isnan(value):
        return "not a number"
    shown = f"{100 * value:.2f}"
    if value < 1 and shown == "100.00":
        shown = "99.99"
    return f"{shown.removesuffix('.00')} %"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def agrees(sample: Sample) -> bool:
    return sample.agreeing_prefix >= sample.tokens and sample.output == sample.reference


# The terminal.


def terminal(report: Report) -> str:
    """The report in lines of at most 80 columns: failures first, the verdict last."""
    lines: list[str] = []
    failures = reasons(report)
    for reason in failures[:REASONS]:
        lines += _wrapped(f"✗ {reason.subject}: {reason.message}", "  ")
    if len(failures) > REASONS:
        lines.append(f"  and {len(failures) - REASONS} more")
    if failures:
        lines.append("")
    rows = [("export", [f"{report.export} ({report.type})"]), ("against", [report.source])]
    if report.structure:
        good = sum(finding.passed for finding in report.structure)
        rows.append(("structure", [f"{good} of {text.counted(len(report.structure), 'finding')} passed"]))
    if report.weights:
        good, exact = sum(check.passed for check in report.weights), sum(check.exact for check in report.weights)
        line = f"{good} of {text.counted(len(report.weights), 'tensor')} passed, {exact} bit for bit"
        off = max((c.relative_error for c in report.weights if c.passed and not c.exact), default=None)
        rows.append(("weights", [line] if off is None else [line, f"relative error at most {number(off)}"]))
    rows += [(runtime.runtime, _runtime_lines(runtime)) for runtime in report.runtimes]
    column = max(len(label) for label, _ in rows) + 2
    for label, said in rows:
        for i, line in enumerate(said):
            lines += _wrapped((label if i == 0 else "").ljust(column) + line, " " * column)
    lines.append("")
    took = f" in {duration(report.seconds)}" if report.seconds else ""
    lines.append(f"passed{took}" if report.passed else f"FAILED{took}: {text.counted(len(failures), 'problem')}")
    return "\n".join(lines)


def _runtime_lines(runtime: RuntimeResult) -> list[str]:
    if runtime.skipped:
        return [f"not run: {runtime.skipped}"]
    parts = ["passed" if runtime.passed else "FAILED"]
    whole = overall(runtime)
    if whole is not None:
        parts += [
            f"KL mean {number(whole.kl_mean)}, 99 % {number(whole.kl_p99)}, max {number(whole.kl_max)} "
            f"({whole.kl_max_at})",
            f"same best token at {share(whole.agreement)} of {text.counted(whole.positions, 'position')}",
            f"largest difference {number(whole.difference)} ({whole.difference_at})",
            f"perplexity {number(whole.perplexity, 5)}, reference {number(whole.reference_perplexity, 5)}",
        ]
    if runtime.samples:
        equal = sum(agrees(sample) for sample in runtime.samples)
        parts.append(f"{equal} of {text.counted(len(runtime.samples), 'text')} equal")
    return parts


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(printable(line), WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def printable(line: str, *, keep: str = "") -> str:
    """A text without what would break a screen or a file: control characters and halves of pairs spelled out."""
    return "".join(c if c in keep or c == " " or c.isprintable() else _spelled(c) for c in line)


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
