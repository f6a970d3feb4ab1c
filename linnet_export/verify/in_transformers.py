"""transformers, in this process: the export as `AutoModelForCausalLM` loads it, in its own type, eager attention."""

import inspect
import time
from pathlib import Path
from typing import Any

from linnet_export.verify.records import Prompt, VerificationError
from linnet_export.verify.runtimes import INSTALL, Outcome, Rows, Task, is_checkpoint, torch_dtype


class Transformers:
    name = "transformers"

    def unavailable(self) -> str | None:
        try:
            import torch  # noqa: F401
            import transformers  # noqa: F401
        except ImportError as error:
            return f"transformers or torch cannot be imported ({error}): {INSTALL}"
        return None

    def takes(self, export: Path) -> bool:
        return is_checkpoint(export)

    def run(self, task: Task) -> Outcome:
        import torch
        import transformers

        started = time.monotonic()
        dtype = torch_dtype(task.type)
        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()
        values: list[Rows] = []
        answers: list[tuple[int, ...]] = []
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                task.export, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
            )
            with torch.inference_mode():
                for prompt in task.prompts:
                    rows, answer = _answer(model, prompt, task)
                    values.append(rows)
                    answers.append(answer)
        except Exception as error:
            raise VerificationError(f"transformers on {task.export}: {type(error).__name__}: {error}") from error
        limits: tuple[str, ...] = ()
        if task.config.rope.is_long:
            limits = ("longrope: its factors follow the length of the sequence, as the reference's do",)
        return Outcome(
            version=f"transformers {transformers.__version__}",
            settings=f"{dtype}, eager attention, torch {torch.__version__}",
            kind="logits",
            positions=tuple(prompt.positions for prompt in task.prompts),
            values=tuple(values),
            greedy=tuple(answers),
            limits=limits,
            seconds=time.monotonic() - started,
        )


def _answer(model: Any, prompt: Prompt, task: Task) -> tuple[Rows, tuple[int, ...]]:
    """Logits at a prompt's positions and the greedy tokens after it, through the library's own cache.

    Not `generate`: it would mix in whatever generation_config.json says (penalties, forbidden tokens).
    """
    import torch
    from transformers import DynamicCache

    taken = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # until 5.24
    held: dict[str, Any] = {taken: DynamicCache(config=model.config), "use_cache": True}
    out = model(torch.tensor([prompt.ids]), logits_to_keep=torch.tensor(prompt.positions), **held)
    rows: Rows = out.logits[0].float().numpy().copy()
    produced = [int(out.logits[0, -1].argmax())]  # the positions end with the last one
    while len(produced) < task.tokens and produced[-1] not in task.ends:
        out = model(torch.tensor([produced[-1:]]), **held)
        produced.append(int(out.logits[0, -1].argmax()))
    return rows, tuple(produced)
