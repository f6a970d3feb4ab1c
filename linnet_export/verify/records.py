"""What verification is made of: the questions, the findings and the report, as plain data.

Nothing here imports PyTorch or a runtime, so a report can be read and drawn anywhere.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from linnet_export.errors import ExportError

# The runtimes by the names that --runtime takes; the reference reads the export back by its own code.
RUNTIMES = ("reference", "transformers", "llama.cpp", "vllm")

# Positions a prompt at which a runtime that must copy a distribution out (vLLM) gives the whole vocabulary.
MOST_POSITIONS = 64


class VerificationError(ExportError):
    """The verification itself could not be run: a runtime broke, a prompt file is missing."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text, tokenized by the source's own tokenizer. `positions` are those whose distribution is compared."""

    name: str
    text: str
    chat: bool
    ids: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of structure or weights: `subject` is a key, a tensor or a file; `message` says found and needed."""

    subject: str
    passed: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCheck:
    """One tensor read back: `exact` where every bit is the source's, else how far it is off.

    `relative_error` is the root mean square of the difference over that of the source; `worst_ratio` is the largest
    difference over what its type allows there (at most 1 passes); `index` is where that is.
    """

    name: str
    type: str
    exact: bool
    passed: bool
    relative_error: float
    worst_ratio: float
    index: tuple[int, ...]
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFigures:
    """A runtime against the reference on one prompt. Lists have one value a counted position, KL in nats.

    `differences` is the largest |difference| at each position, of logits or, where a runtime gives those, of
    log-probabilities. `excluded` says which positions do not count, and why.
    """

    prompt: str
    positions: tuple[int, ...]
    kl: tuple[float, ...]
    differences: tuple[float, ...]
    mean_abs: float
    std: float
    argmax_agreement: float
    decided_disagreements: tuple[int, ...]
    perplexity: float
    reference_perplexity: float
    excluded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A greedy answer, in the schema of Linnet's samples.json (`sample()`), and where it first differs."""

    prompt: str
    chat: bool
    output: str
    reference: str
    reference_stack: str
    tokens: int
    agreeing_prefix: int
    stack: str
    output_pieces: tuple[str, ...] = ()
    reference_pieces: tuple[str, ...] = ()

    def sample(self) -> dict[str, Any]:
        """The seed's keys, in its order."""
        return {
            "kind": "text",
            "prompt": self.prompt,
            "chat": self.chat,
            "output": self.output,
            "reference": self.reference,
            "reference_stack": self.reference_stack,
            "tokens": self.tokens,
            "agreeing_prefix": self.agreeing_prefix,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a runtime must keep on a file type, and why; None is not asked for.

    `difference` is the largest |difference| allowed, as a share of the deviation of the reference's logits; a position
    is decided where the reference's two best differ by more than twice that.
    """

    kl_mean: float
    kl_max: float
    argmax_decided: bool
    reason: str
    difference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeResult:
    """One runtime on the export. `skipped` has the reason where it did not run; then the rest is empty."""

    runtime: str
    version: str = ""
    settings: str = ""
    skipped: str = ""
    passed: bool = True
    failures: tuple[str, ...] = ()
    kind: Literal["logits", "log-probabilities", "top entries"] = "logits"
    bounds: Bounds | None = None
    prompts: tuple[PromptFigures, ...] = ()
    samples: tuple[Sample, ...] = ()
    limits: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def kl(self) -> tuple[float, ...]:
        return tuple(value for figures in self.prompts for value in figures.kl)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole verification; `passed` is the exit code."""

    export: str
    source: str
    type: str
    date: str
    environment: Mapping[str, str]
    structure: tuple[Finding, ...] = ()
    weights: tuple[TensorCheck, ...] = ()
    runtimes: tuple[RuntimeResult, ...] = ()
    seconds: float = 0.0
    peak_mb: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return (
            all(finding.passed for finding in self.structure)
            and all(tensor.passed for tensor in self.weights)
            and all(runtime.passed for runtime in self.runtimes)
        )

    def data(self) -> dict[str, Any]:
        """Everything as JSON values, `passed` first."""
        return {"passed": self.passed, **asdict(self)}
