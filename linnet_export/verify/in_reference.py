"""The reference on the export itself: whatever a file holds, dequantized and computed in f32 by code of its own."""

import time
from pathlib import Path

from linnet_export import __version__
from linnet_export.exported import Progress
from linnet_export.verify.runtimes import INSTALL, Outcome, Task
from linnet_export.verify.truth import Truth


class Reference:
    name = "reference"

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress

    def unavailable(self) -> str | None:
        try:
            import torch  # noqa: F401
        except ImportError as error:
            return f"torch cannot be imported ({error}): {INSTALL}"
        return None

    def takes(self, export: Path) -> bool:
        return export.exists()

    def run(self, task: Task) -> Outcome:
        import torch

        started = time.monotonic()
        truth = Truth(task.export, progress=self.progress)
        prompts = [prompt.ids for prompt in task.prompts]
        positions = tuple(prompt.positions for prompt in task.prompts)
        values = truth.logits(prompts, positions)
        limits: tuple[str, ...] = ()
        if truth.fits(task.config):
            answers = truth.greedy(prompts, [task.tokens] * len(prompts), ends=task.ends)
        else:
            answers = [()] * len(prompts)
            limits = ("no answers: the whole model in f32 does not fit into the free memory",)
        return Outcome(
            version=f"linnet-export {__version__}",
            settings=f"float32, layer by layer, torch {torch.__version__}",
            kind="logits",
            positions=positions,
            values=tuple(values),
            greedy=tuple(answers),
            limits=limits,
            seconds=time.monotonic() - started,
        )
