"""A served model behind OpenAI's completions interface: `vllm serve`, llama.cpp's server, or another one like them.

    outcome = Endpoint("http://127.0.0.1:8000").run(task)

Prompts go as token ids; answers are greedy (temperature 0). A server tells only the most likely entries: at every
position of a prompt where it has `prompt_logprobs` (vLLM), else after the prompt's last token. Which export it serves
is for the user to know; which rules it follows (window, longrope) is known of vLLM and llama.cpp, assumed of others.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from linnet_export.verify.records import Prompt, VerificationError
from linnet_export.verify.runtimes import OUTPUT_KEPT, Factors, Outcome, Rows, Task, longrope_limit

TOP = 20  # entries asked for: what vLLM's server allows unless it is told otherwise
TIMEOUT = 600.0  # seconds for one answer
MOST_BYTES = 1 << 28  # of one answer: 64 positions with 20 entries are below a megabyte


class Endpoint:
    name = "endpoint"

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise VerificationError(f"--endpoint {url}: a URL that begins with http:// or https:// is needed")
        self.url = url.rstrip("/").removesuffix("/completions").removesuffix("/v1")

    def unavailable(self) -> str | None:
        try:
            self._model()
        except VerificationError as error:
            return f"{error}: start a server first, such as `vllm serve DIR --max-logprobs {TOP}`"
        return None

    def takes(self, export: Path) -> bool:
        return export.exists()

    def run(self, task: Task) -> Outcome:
        started = time.monotonic()
        served = self._model()
        answers = [self._ask(str(served["id"]), prompt, task) for prompt in task.prompts]
        rows = [_rows(answer, prompt, task) for answer, prompt in zip(answers, task.prompts, strict=True)]
        factors, window, limits = self._rules(served, task)
        if not all("prompt_logprobs" in answer for answer in answers):
            limits = ("the server has no prompt_logprobs: only the last position of each prompt is compared", *limits)
        return Outcome(
            version=f"{served.get('owned_by', 'unknown')} at {self.url}",
            settings=f"model {served['id']}, {TOP} entries a position and the remainder",
            kind="top entries",
            positions=tuple(positions for positions, _ in rows),
            values=tuple(values for _, values in rows),
            greedy=tuple(_tokens(answer) for answer in answers),
            factors=factors,
            window=window,
            limits=limits,
            seconds=time.monotonic() - started,
        )

    def _rules(self, served: Mapping[str, Any], task: Task) -> tuple[Factors | None, bool, tuple[str, ...]]:
        """The longrope set and whether the window holds, by what the server says it is."""
        owner, window = served.get("owned_by"), task.config.window
        if owner == "vllm" and isinstance(served.get("max_model_len"), int):
            context = served["max_model_len"]
            return task.factors_for(context), True, longrope_limit(task, context)
        if owner == "llamacpp":
            settings = self._request("/props").get("default_generation_settings")
            context = settings.get("n_ctx") if isinstance(settings, Mapping) else None
            limits: tuple[str, ...] = ("its key/value cache may be f16, llama.cpp's default",)
            if window is not None:
                limits += (f"it ignores phi3's sliding window: positions from {window} on do not count",)
            if isinstance(context, int):
                return task.factors_for(context), False, (*limits, *longrope_limit(task, context))
            return None, False, limits
        return None, True, ("a server of an unknown kind is taken to follow the model's configuration",)

    def _model(self) -> Mapping[str, Any]:
        listed = self._request("/v1/models").get("data")
        if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict) or "id" not in listed[0]:
            raise VerificationError(f"{self.url}/v1/models lists no model; an OpenAI-compatible server is needed")
        return dict(listed[0])

    def _ask(self, model: str, prompt: Prompt, task: Task) -> Mapping[str, Any]:
        """The one choice of an answer. What a server does not know of these settings it ignores."""
        body = {
            "model": model, "prompt": list(prompt.ids), "max_tokens": task.tokens, "temperature": 0, "seed": 0,
            "logprobs": TOP, "prompt_logprobs": TOP, "return_tokens_as_token_ids": True, "return_token_ids": True,
            "ignore_eos": True, "stop_token_ids": sorted(task.ends), "skip_special_tokens": False,
            "add_special_tokens": False, "cache_prompt": False,
        }  # fmt: skip
        choices = self._request("/v1/completions", body).get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise VerificationError(f"{self.url}/v1/completions gave no choice for {prompt.name}; one is needed")
        return {key: value for key, value in choices[0].items() if value is not None}

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                answer = json.loads(response.read(MOST_BYTES))
        except urllib.error.HTTPError as error:
            said = error.read(OUTPUT_KEPT).decode("utf-8", "replace").strip()
            raise VerificationError(f"{self.url}{path} answered {error.code}: {said}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise VerificationError(f"{self.url}{path} cannot be used: {error}") from None
        if not isinstance(answer, dict):
            raise VerificationError(f"{self.url}{path} answered no JSON object; one is needed")
        return answer


def _rows(answer: Mapping[str, Any], prompt: Prompt, task: Task) -> tuple[tuple[int, ...], Rows]:
    """The positions that were answered and their log-probabilities, NaN where an entry was not given."""
    try:
        last = len(prompt.ids) - 1
        entries = {last: _first_step(answer)}
        if "prompt_logprobs" in answer:
            # The first token of a prompt has none; each later entry is the one that predicted it.
            entries |= {place: given for place, given in enumerate(answer["prompt_logprobs"][1:])}
        positions = tuple(position for position in prompt.positions if position in entries)
        values = np.full((len(positions), task.config.vocab), np.nan, np.float32)
        for row, position in enumerate(positions):
            for token, item in entries[position].items():
                value = item["logprob"] if isinstance(item, Mapping) else item
                values[row, int(str(token).removeprefix("token_id:"))] = float(value)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise VerificationError(
            f"the server's answer to {prompt.name} has no log-probabilities by token id ({problem})"
        ) from None
    return positions, values


def _first_step(answer: Mapping[str, Any]) -> Mapping[Any, Any]:
    """The entries of the first token after the prompt: OpenAI's lists (vLLM), or llama.cpp's objects with ids."""
    given = answer["logprobs"]
    if "content" in given:
        return {item["id"]: item["logprob"] for item in given["content"][0]["top_logprobs"]}
    first: Mapping[Any, Any] = given["top_logprobs"][0]
    return first


def _tokens(answer: Mapping[str, Any]) -> tuple[int, ...]:
    if "token_ids" in answer:
        return tuple(int(token) for token in answer["token_ids"])
    given = answer["logprobs"]
    if "content" in given:
        return tuple(int(item["id"]) for item in given["content"])
    return tuple(int(str(token).removeprefix("token_id:")) for token in given["tokens"])
