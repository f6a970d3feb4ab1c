"""Fixtures of the tests of the real programs: each engine is loaded once."""

from pathlib import Path

import numpy as np
import pytest

import runtimes
from workshop import FIGURES, QUESTION, RANDOM, STEPS, Workshop, prompts_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("measured")
        for line in FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def llama_cpp() -> runtimes.LlamaCpp:
    return runtimes.LlamaCpp(runtimes.cache_folder() / f"llama.cpp-{runtimes.pinned('llama-cpp-python')}")


@pytest.fixture(scope="session")
def llama_cpp_source(llama_cpp: runtimes.LlamaCpp) -> Path:
    return llama_cpp.source


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def vllm(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What vLLM gives for every exported checkpoint that a test compares: four engine loads in one process."""
    question = tuple(workshop.chat(QUESTION))
    jobs = [
        runtimes.Job(name=name, model=workshop.hf(name), prompts=prompts_of(name), logprobs=True) for name in RANDOM
    ]
    jobs += [
        runtimes.Job(name=name, model=workshop.hf(name), prompts=(question,), generate=STEPS)
        for name in ("card", "checkpoint")
    ]
    return runtimes.run_vllm(jobs, tmp_path_factory.mktemp("vllm"))
