"""Every export against the reference, on the full logits of every position, in the real programs.

Random models of two layers with weights of standard deviation 0.02, so that the epsilon matters; the mutated side is
the reference, so each engine is loaded once.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from linnet_export.reference.compare import Figures, compare, compare_log_probs
from linnet_export.reference.phi3 import Phi3
from workshop import FIGURES, RANDOM, Workshop, prompts_of

# f32 throughout, other summation orders: what was seen is below 3e-6 everywhere. 1e-4 of the logits' deviation leaves
# room for another processor's kernels, and every mutation below changes more than ten times as much.
BOUND = 1e-4

# The bound that every runtime must keep whatever the deviation.
ABSOLUTE = 1e-3


def logits(model: Phi3, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids]))[0]
    return found


def against_llama_cpp(workshop: Workshop, name: str, model: Phi3) -> list[Figures]:
    """The reference without window (llama.cpp has none for phi3) against the GGUF, prompt by prompt."""
    engine = workshop.engine(name)
    return [
        compare(logits(model.variant(window=None), ids), torch.from_numpy(engine.logits(ids)))
        for ids in prompts_of(name)
    ]


def against_vllm(vllm: dict[str, np.ndarray], name: str, model: Phi3) -> list[Figures]:
    """The reference against the Hugging Face export in vLLM, on log-probabilities."""
    figures = []
    for i, ids in enumerate(prompts_of(name)):
        figures.append(compare_log_probs(logits(model, ids), torch.from_numpy(vllm[f"{name}/{i}/values"])))
    return figures


def against_transformers(workshop: Workshop, name: str, model: Phi3) -> list[Figures]:
    """The reference, loaded from the source, against the Hugging Face export in transformers."""
    from transformers import Phi3ForCausalLM

    theirs = Phi3ForCausalLM.from_pretrained(workshop.hf(name), dtype=torch.float32, attn_implementation="eager")
    figures = []
    for ids in prompts_of(name):
        with torch.no_grad():
            figures.append(compare(logits(model, ids), theirs(torch.tensor([ids])).logits[0]))
    return figures


def passes(figures: list[Figures]) -> bool:
    """Whether every prompt is within the bounds, with equal argmax wherever the reference is decided."""
    return all(
        f.max_abs <= min(BOUND * f.std, ABSOLUTE) and not f.decided_disagreements and f.decided > 0 for f in figures
    )


def record(runtime: str, name: str, figures: list[Figures]) -> None:
    """Notes the largest difference of all prompts for the summary."""
    worst = max(figures, key=lambda f: f.max_abs / f.std)
    positions = sum(f.positions for f in figures)
    FIGURES.append(
        f"{name:<8} {runtime:<13} {positions} positions: largest difference {worst.max_abs:.1e}, "
        f"{worst.max_abs / worst.std:.1e} of the logits' deviation"
    )


@pytest.mark.parametrize("name", RANDOM)
def test_gguf_in_llama_cpp_equals_the_reference(workshop: Workshop, name: str) -> None:
    figures = against_llama_cpp(workshop, name, workshop.reference(name))
    record("llama.cpp", name, figures)
    assert passes(figures), figures


@pytest.mark.parametrize("name", RANDOM)
def test_checkpoint_in_vllm_equals_the_reference_past_the_window(
    workshop: Workshop, vllm: dict[str, np.ndarray], name: str
) -> None:
    figures = against_vllm(vllm, name, workshop.reference(name))
    record("vLLM", name, figures)
    assert passes(figures), figures


@pytest.mark.parametrize("name", RANDOM)
def test_checkpoint_in_transformers_equals_the_reference_past_the_window(workshop: Workshop, name: str) -> None:
    figures = against_transformers(workshop, name, workshop.reference(name))
    record("transformers", name, figures)
    assert passes(figures), figures


def swapped(first: slice, second: slice, suffix: str) -> Callable[[Phi3], Phi3]:
    """The model with two equally tall row blocks of one layer's fused tensor exchanged."""

    def mutate(model: Phi3) -> Phi3:
        other = model.variant()
        path = f"layers.1.{suffix}.weight"
        weight = dict(other.named_parameters())[path].clone()
        weight[first], weight[second] = weight[second].clone(), weight[first].clone()
        other.load_state_dict({**other.state_dict(), path: weight}, assign=True)
        return other

    return mutate


# "equal" has 96 query, 96 key and 96 value rows, and 160 gate and 160 up rows.
MUTATIONS: dict[str, Callable[[Phi3], Phi3]] = {
    "gate and up swapped": swapped(slice(0, 160), slice(160, 320), "mlp.gate_up"),
    "query and key swapped": swapped(slice(0, 96), slice(96, 192), "attention.qkv"),
    "key and value swapped": swapped(slice(96, 192), slice(192, 288), "attention.qkv"),
    "epsilon 1e-6 for 1e-5": lambda model: model.variant(eps=1e-6),
    "theta 20000 for 10000": lambda model: model.variant(theta=20000.0),
}
WINDOWS: dict[str, Callable[[Phi3], Phi3]] = {
    "window one shorter": lambda model: model.variant(window=8),
    "window one longer": lambda model: model.variant(window=10),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_llama_cpp_exposes(workshop: Workshop, mutation: str) -> None:
    figures = against_llama_cpp(workshop, "equal", MUTATIONS[mutation](workshop.reference("equal")))
    assert not passes(figures), figures


@pytest.mark.parametrize("mutation", [*MUTATIONS, *WINDOWS])
def test_vllm_exposes(workshop: Workshop, vllm: dict[str, np.ndarray], mutation: str) -> None:
    figures = against_vllm(vllm, "equal", (MUTATIONS | WINDOWS)[mutation](workshop.reference("equal")))
    assert not passes(figures), figures


@pytest.mark.parametrize("mutation", [*MUTATIONS, *WINDOWS])
def test_transformers_exposes(workshop: Workshop, mutation: str) -> None:
    figures = against_transformers(workshop, "equal", (MUTATIONS | WINDOWS)[mutation](workshop.reference("equal")))
    assert not passes(figures), figures


@pytest.mark.parametrize("name", RANDOM)
def test_llama_cpp_has_no_window(workshop: Workshop, name: str) -> None:
    """What docs/limits.md says: with the model's own window, only prompts past it differ."""
    engine, model = workshop.engine(name), workshop.reference(name)
    window = RANDOM[name]["sliding_window"]
    for ids in prompts_of(name):
        figures = compare(logits(model, ids), torch.from_numpy(engine.logits(ids)))
        assert (figures.max_abs > BOUND * figures.std) == (len(ids) > window)
