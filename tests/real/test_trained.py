"""The real trained model, as a Linnet card and as a grouped, tied checkpoint, through every runtime.

Its answer must be the same, token for token, wherever nothing is rounded.
"""

import numpy as np
import pytest
import torch

from linnet_export import gguf, hf
from linnet_export.reference.compare import compare
from linnet_export.reference.load import load
from linnet_export.reference.phi3 import Phi3
from runtimes import LlamaCpp
from workshop import QUESTION, STEPS, Workshop

FORMS = ("card", "checkpoint")


def greedy(model: Phi3, ids: list[int], steps: int) -> list[int]:
    """The reference's answer, through its cache."""
    cache = model.cache(batch=1, max_seq=len(ids) + steps)
    with torch.no_grad():
        first = model.prefill(torch.tensor([ids]), 0, cache).argmax(-1, keepdim=True)
        rest = model.generate(first, len(ids), steps - 1, cache)
    return torch.cat([first, rest], dim=1)[0].tolist()


def english(workshop: Workshop, tokens: list[int]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(workshop.source("checkpoint")).decode(tokens))


@pytest.fixture(scope="module")
def answer(workshop: Workshop) -> list[int]:
    """The reference's 64 tokens for the card."""
    return greedy(workshop.reference("card"), workshop.chat(QUESTION), STEPS)


def test_the_reference_answers_in_english(workshop: Workshop, answer: list[int]) -> None:
    assert "Rayleigh scattering" in english(workshop, answer)


@pytest.mark.parametrize("form", FORMS)
def test_transformers_gives_the_same_answer(workshop: Workshop, answer: list[int], form: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(workshop.hf(form), dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([workshop.chat(QUESTION)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=None,
    )
    assert out[0, ids.shape[1] :].tolist() == answer


@pytest.mark.parametrize("form", FORMS)
def test_llama_cpp_gives_the_same_answer(workshop: Workshop, answer: list[int], form: str) -> None:
    assert workshop.engine(form).greedy(workshop.chat(QUESTION), STEPS) == answer


@pytest.mark.parametrize("form", FORMS)
def test_vllm_gives_the_same_answer(vllm: dict[str, np.ndarray], answer: list[int], form: str) -> None:
    assert vllm[f"{form}/0/tokens"].tolist() == answer


@pytest.mark.parametrize("form", FORMS)
def test_the_export_read_back_gives_the_same_answer(workshop: Workshop, answer: list[int], form: str) -> None:
    ids = workshop.chat(QUESTION)
    assert greedy(load(workshop.gguf(form, "f32")), ids, STEPS) == answer
    assert greedy(load(workshop.hf(form)), ids, STEPS) == answer


@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
@pytest.mark.parametrize("form", FORMS)
def test_rounded_types_answer_in_english(workshop: Workshop, form: str, outtype: str) -> None:
    text = english(workshop, workshop.engine(form, outtype).greedy(workshop.chat(QUESTION), 40))
    # Its subject, in words of the prompt's language, whatever the rounding chose.
    assert "sky" in text, text
    assert "blue" in text, text
    assert text.isascii(), text


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("form", FORMS)
def test_llama_bench_runs_every_type(workshop: Workshop, llama_cpp: LlamaCpp, form: str, outtype: str) -> None:
    rows = llama_cpp.bench(workshop.gguf(form, outtype))
    assert {(row["n_prompt"], row["n_gen"]) for row in rows} == {(16, 0), (0, 8)}
    assert all(row["avg_ts"] > 0 and row["model_type"].startswith("phi3") for row in rows)


def test_the_cards_protocol_two_layers_and_ten_tokens(workshop: Workshop) -> None:
    """Two truncated layers in f32 on a ten-token chat prompt, within the card's own tolerance of 2e-3."""
    from transformers import AutoConfig, AutoModelForCausalLM

    prompt = workshop.chat("Hi", system="")[:10]
    assert len(prompt) == 10
    folder = workshop.folder / "truncated"
    card = workshop.source("card")
    hf.export(card, folder / "hf", bind={"Layers": 2})
    gguf.export(card, folder / "two.gguf", outtype="f32", bind={"Layers": 2})
    config = AutoConfig.from_pretrained(workshop.hf("card"), num_hidden_layers=2)
    theirs = AutoModelForCausalLM.from_pretrained(
        workshop.hf("card"), config=config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
        for ours in (load(card, layers=2), load(folder / "hf"), load(folder / "two.gguf")):
            figures = compare(expected, ours(torch.tensor([prompt]))[0], bound=2e-3)
            assert figures.max_abs <= 2e-3, figures
            assert figures.argmax_agreement == 1.0


MIXED = (
    "Hello  world,\n\n\ttabs and   spaces\r\n1234567890 3.14159 -42 ½ 🦙🦙 😶‍🌫️ naïve Ünïcödé 我想在apple工作1314151天"
    "～ I'VE can't <|im_start|>user\nHi<|im_end|>\n<|endoftext|> \u00a0 end "
)


@pytest.mark.parametrize("form", FORMS)
def test_llama_tokenize_agrees_with_the_checkpoints(workshop: Workshop, llama_cpp: LlamaCpp, form: str) -> None:
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(workshop.source(form) / "tokenizer.json"))
    ids = theirs.encode(MIXED, add_special_tokens=False).ids
    assert {1, 2, 0} <= set(ids)  # the control tokens are recognised, not spelled
    assert llama_cpp.tokenize(workshop.gguf(form, "f32"), MIXED, special=True) == ids
