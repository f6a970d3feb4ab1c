"""The report's drawings, as SVG that takes its colours and its font from the page it stands in.

    charts.divergence(report.runtimes), charts.differences(report.runtimes), charts.weights(report.weights)

Each gives a wide and a narrow drawing; the page shows the one that fits. matplotlib is imported here, when one is
made, and nowhere else. The same report gives the same text, byte for byte.
"""

import html
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from linnet_export import phi3, text
from linnet_export.errors import ExportError
from linnet_export.verify.records import RuntimeResult, TensorCheck
from linnet_export.verify.summary import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'linnet-export[verify]'"

# Drawn in these stand-ins, which no drawing needs for themselves, and replaced by the page's own colours.
INK, MUTED, RULE, BAND, BAD = "#000001", "#000002", "#000003", "#000004", "#000005"
SERIES = ("#000011", "#000012", "#000013", "#000014")
VARIABLES = {
    INK: "--ink", MUTED: "--muted", RULE: "--rule", BAND: "--band", BAD: "--bad",
    **{color: f"--series-{i}" for i, color in enumerate(SERIES, start=1)},
}  # fmt: skip

WIDE, NARROW = 9.4, 3.8  # inches of 72 units, which a page shows as 1.3 CSS pixels or a little less
FLOOR = 1e-16  # what is smaller, or 0, stands at the lower edge of a logarithmic axis: f64 ends there
CEILING = 1e6  # a ratio above this is drawn there
FONT = 9.0
MOST_DOTS = 250  # of a row: each takes a hundred bytes, and more would touch
MOST_LETTERS = 16  # of a prompt's name

# The kinds of tensors that are told apart: the end of a Linnet path, a word, a marker.
KINDS = (
    ("attention.qkv.weight", "query, key, value", "o"),
    ("attention.o_proj.weight", "attention output", "s"),
    ("mlp.gate_up.weight", "gate, up", "^"),
    ("mlp.down.weight", "down", "D"),
)
OTHER = ("norms, embedding, head", "v")


def divergence(runtimes: Sequence[RuntimeResult]) -> str:
    """KL(reference || runtime) at every counted position: a row a runtime, a column a prompt."""
    ran = [runtime for runtime in runtimes if runtime.prompts]
    names = list(dict.fromkeys(figures.prompt for runtime in ran for figures in runtime.prompts))
    values = [value for runtime in ran for value in runtime.kl if math.isfinite(value)]
    bounds = [runtime.bounds.kl_max for runtime in ran if runtime.bounds is not None]
    low, high = _range([*values, *bounds])

    def draw(figure: "Figure", narrow: bool) -> None:
        axes = figure.subplots(len(ran), 1, sharex=True, squeeze=False)[:, 0]
        for i, (runtime, ax) in enumerate(zip(ran, axes, strict=True)):
            for column in range(0, len(names), 2):
                ax.axvspan(column, column + 1, color=BAND, linewidth=0)
            dots = sum(len(figures.kl) for figures in runtime.prompts) <= MOST_DOTS
            for figures in runtime.prompts:
                column, count = names.index(figures.prompt), len(figures.kl)
                x = [column + (j + 0.5) / count for j in range(count)]
                y = [min(max(value, low), high) if math.isfinite(value) else high for value in figures.kl]
                ax.plot(x, y, color=SERIES[i % len(SERIES)], linewidth=0.9, markersize=1.8,
                        marker="o" if dots or count == 1 else None)  # fmt: skip
            if runtime.bounds is not None:
                ax.axhline(runtime.bounds.kl_max, color=BAD, linewidth=1, linestyle=(0, (4, 3)))
                _label(ax, 0.0, runtime.bounds.kl_max, "bound", BAD)
            _logarithmic(ax, low, high)
            _titled(ax, printable(runtime.runtime))
        positions = {figures.prompt: figures.positions for figures in reversed(ran[0].prompts)}
        last = axes[-1]
        last.set_xlim(0, len(names))
        spans = [positions.get(name, ()) for name in names]
        words = [textwrap.shorten(printable(name), MOST_LETTERS, placeholder="…") for name in names]
        labels = [f"{word}\n{span[0]}–{span[-1]}" if span else word for word, span in zip(words, spans, strict=True)]
        # As many as fit side by side; what a page has no room for stands in its tables.
        every = slice(None, None, math.ceil(len(names) / (7 if narrow else 9)))
        last.set_xticks([i + 0.5 for i in range(len(names))[every]], labels=(words if narrow else labels)[every],
                        rotation=40 if narrow else 0, ha="right" if narrow else "center")  # fmt: skip
        last.tick_params(axis="x", length=0)

    title = f"KL divergence from the reference at each position, for {', '.join(r.runtime for r in ran)}"
    return _both("kl", title, draw, height=lambda narrow: 0.9 + (1.35 if narrow else 1.45) * len(ran))


def differences(runtimes: Sequence[RuntimeResult]) -> str:
    """How often which largest difference occurs at a position, by runtime."""
    ran = [runtime for runtime in runtimes if runtime.prompts]
    found = [[v for f in runtime.prompts for v in f.differences if math.isfinite(v)] for runtime in ran]
    low, high = _range([value for values in found for value in values])
    bins = 36
    edges = [low * (high / low) ** (i / bins) for i in range(bins + 1)]

    def draw(figure: "Figure", narrow: bool) -> None:
        from matplotlib.ticker import MaxNLocator

        ax = figure.subplots()
        for i, (runtime, values) in enumerate(zip(ran, found, strict=True)):
            color = SERIES[i % len(SERIES)]
            kind = "" if runtime.kind == "logits" else f" ({runtime.kind})"
            label = printable(runtime.runtime) + kind
            clipped = [min(max(value, low), high) for value in values]
            counts = [0] * bins
            for value in clipped:
                place = int(bins * math.log(value / low) / math.log(high / low))
                counts[min(place, bins - 1)] += 1
            ax.stairs(counts, edges, color=color, linewidth=1.4, label=label, linestyle=_DASHES[i % len(_DASHES)])
            ax.stairs(counts, edges, color=color, alpha=0.12, fill=True, linewidth=0)
        _frame(ax)
        ax.set_xscale("log")
        ax.set_xlim(low, high)
        _plain_ticks(ax.xaxis, narrow)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        ax.set_xlabel("largest |difference| at a position")
        ax.set_ylabel("positions")
        if len(ran) > 1:
            figure.legend(loc="outside upper left", ncols=1 if narrow else 4, frameon=False, labelcolor=INK)

    title = "Histogram of the largest difference from the reference at each position"
    return _both("differences", title, draw, height=lambda narrow: 2.9 if narrow else 2.7)


_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))


def weights(checks: Sequence[TensorCheck]) -> str:
    """Relative error of each tensor, and its worst value over what its type allows, from embedding to head."""
    layers = [layer for check in checks if (layer := phi3.layer_of(check.name)) is not None]
    depth = max(layers, default=-1) + 1

    words = [(word, mark) for _, word, mark in KINDS] + [OTHER]
    errors = [check.relative_error for check in checks if 0 < check.relative_error <= CEILING]
    low, high = _range(errors)
    failed = [check for check in checks if not check.passed]
    worst = max((check.worst_ratio for check in checks), default=0.0)
    apart = max(1.0, depth / 10)  # the embedding from the first layer, and the last layer from the head
    first, last = -apart, depth - 1 + apart

    def kind(check: TensorCheck) -> int:
        return next((i for i, (end, _, _) in enumerate(KINDS) if check.name.endswith(end)), len(KINDS))

    def place(check: TensorCheck) -> float:
        layer = phi3.layer_of(check.name)
        if layer is None:
            return first if check.name == phi3.EMBEDDING else last
        return layer + 0.13 * (kind(check) - 2)  # the kinds of a layer side by side

    def error(check: TensorCheck) -> float:
        return min(max(check.relative_error, low), high)

    def ratio(check: TensorCheck) -> float:
        return min(check.worst_ratio, CEILING)

    def draw(figure: "Figure", narrow: bool) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for ax, figure_of in ((top, error), (bottom, ratio)):
            for i, (word, mark) in enumerate(words):
                own = [check for check in checks if kind(check) == i]
                if not own:
                    continue
                color = SERIES[i] if i < len(SERIES) else MUTED
                ax.plot([place(check) for check in own], [figure_of(check) for check in own], linestyle="none",
                        marker=mark, markersize=4.5, markerfacecolor=color, markeredgewidth=0, clip_on=False,
                        label=word if ax is top else None, zorder=3)  # fmt: skip
            if failed:  # an empty line that is not clipped has no extent, and the layout gives up
                ax.plot([place(check) for check in failed], [figure_of(check) for check in failed], linestyle="none",
                        marker="o", markersize=10, markerfacecolor="none", markeredgecolor=BAD, markeredgewidth=1.6,
                        clip_on=False, zorder=4)  # fmt: skip
        for check in failed[:1]:
            part = (place(check) - first) / (last - first)  # how far to the right
            said = top.annotate(check.name, (place(check), error(check)), textcoords="offset points", color=BAD,
                                xytext=(0, 9), ha="left" if part < 0.3 else "right" if part > 0.7 else "center",
                                )  # fmt: skip
            said.set_in_layout(False)
        _logarithmic(top, low, high, exact=any(check.relative_error == 0 for check in checks))
        _titled(top, "relative error (root mean square)")
        _ratios(bottom, worst)
        step = max(1, math.ceil(depth / (5 if narrow else 16)))
        ticks = [i for i in range(0, depth, step) if i == 0 or last - i > step / 2]
        bottom.set_xlim(first - apart / 2, last + apart / 2)
        bottom.set_xticks([first, *ticks, last], labels=["emb.", *map(str, ticks), "head"])
        bottom.set_xlabel("layer")
        figure.legend(loc="outside upper left", ncols=2 if narrow else 5, frameon=False, labelcolor=INK,
                      handletextpad=0.2, columnspacing=1.2)  # fmt: skip

    title = f"Error of each of {text.counted(len(checks), 'tensor')} against the source"
    return _both("weights", title, draw, height=lambda narrow: 4.4 if narrow else 3.9)


def _ratios(ax: "Axes", worst: float) -> None:
    """The axis of worst values: linear where all pass, logarithmic above 1 where one does not."""
    _frame(ax)
    if worst <= 2:
        ax.set_ylim(0, max(1.15, worst * 1.05))
        ax.set_yticks([0.0, 0.5, 1.0], labels=["0", "½", "1"])
    else:
        top = min(worst, CEILING)
        ax.set_yscale("symlog", linthresh=1.0)
        ax.set_ylim(0, top * 1.6)
        tens = range(1, 7, 2 if top > 1e3 else 1)
        steps = [1.0, *(10.0**n for n in tens if 10.0**n <= top * 1.6)]
        ax.set_yticks([0.0, *steps], labels=["0", *map(_short, steps)])
        ax.minorticks_off()
    ax.axhline(1, color=BAD, linewidth=1, linestyle=(0, (4, 3)))
    _titled(ax, "worst value, 1 = all that its type allows")


# Axes.


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Whole powers of ten around the positive values."""
    positive = [value for value in values if value > FLOOR and math.isfinite(value)]
    low = 10.0 ** math.floor(math.log10(min(positive, default=FLOOR)) - 0.15)
    high = 10.0 ** math.ceil(math.log10(max(positive, default=10 * low)) + 0.15)
    return low, high


def _frame(ax: "Axes") -> None:
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(RULE)
    ax.grid(axis="y", color=RULE, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(colors=MUTED, length=0)
    ax.xaxis.label.set_color(MUTED)
    ax.yaxis.label.set_color(MUTED)


def _titled(ax: "Axes", title: str) -> None:
    ax.set_title(title, loc="left", color=INK, fontsize=FONT + 0.5, pad=5)


def _label(ax: "Axes", x: float, y: float, word: str, color: str) -> None:
    where = ("axes fraction", "data")
    said = ax.annotate(word, (x, y), xycoords=where, textcoords="offset points", xytext=(4, 2), color=color)
    said.set_in_layout(False)  # or a long word would leave no room for the axes


def _logarithmic(ax: "Axes", low: float, high: float, *, exact: bool = False) -> None:
    """A logarithmic y axis with at most six labels; `exact` says that the lower edge stands for no error."""
    _frame(ax)
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    first, last = round(math.log10(low)), round(math.log10(high))
    step = max(1, math.ceil((last - first) / 5))
    within = (1.0, 2.0, 5.0) if last - first == 1 else (1.0,)
    ticks = [part * 10.0**n for n in range(first, last + 1, step) for part in within if part * 10.0**n <= high]
    labels = [_short(tick) for tick in ticks]
    if exact:
        labels[0] = "exact"
    ax.set_yticks(ticks, labels=labels)
    ax.minorticks_off()


def _plain_ticks(axis: Any, narrow: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(numticks=5 if narrow else 9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.set_minor_locator(NullLocator())


def _short(value: float) -> str:
    """A number of one digit as people type it: 0.01, 2e-7."""
    if 1e-3 <= value < 1e4:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)  # the logarithm of a power of ten may fall short of it
    return f"{value / 10.0**exponent:.0f}e{exponent}"


# From a figure to SVG.


def _both(key: str, title: str, draw: Callable[["Figure", bool], None], *, height: Callable[[bool], float]) -> str:
    return "".join(_svg(key, title, draw, narrow, height(narrow)) for narrow in (False, True))


def _svg(key: str, title: str, draw: Callable[["Figure", bool], None], narrow: bool, height: float) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ExportError(f"the report is drawn with matplotlib, which is not there ({error}): {INSTALL}") from None
    out = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A letter that the library's font lacks is measured a little wrong; the page draws it in its own font.
        warnings.filterwarnings("ignore", message="Glyph")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": key, "font.size": FONT, "text.parse_math": False}
        )
        figure = Figure(figsize=(NARROW if narrow else WIDE, height), layout="constrained")
        draw(figure, narrow)
        # The library's own name and the date would change from one installation or minute to the next.
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=metadata)
    return "".join(_inlined(out.getvalue(), f"{key}-{'narrow' if narrow else 'wide'}", title, narrow))


def _inlined(svg: str, prefix: str, title: str, narrow: bool) -> Iterator[str]:
    """An SVG document as a part of a page: no prolog, no style of its own, ids that are its own, a title."""
    box = re.search(r'viewBox="([^"]*)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", body)
    for color, variable in VARIABLES.items():
        body = body.replace(color, f"var({variable})")
    body = re.sub(r"\s*\n\s*", "\n", body)
    size = "narrow" if narrow else "wide"
    yield f'<svg class="{size}" viewBox="{box[1] if box else ""}" role="img" aria-labelledby="{prefix}-title">'
    yield f'<title id="{prefix}-title">{html.escape(printable(title))}</title>{body}</svg>\n'
