"""GGUF files against llama.cpp's own convert_hf_to_gguf.py: the same keys, the same values, the same tensor bytes.

The deliberate differences are the list in docs/gguf.md; `general.*` describes the file's origin and is each tool's own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, TokenType

import real_vocabularies
import tiny
from linnet_export import gguf
from runtimes import LlamaCpp
from workshop import Workshop

OUTTYPES = ("f32", "f16", "bf16", "q8_0")


def contents(path: Path) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Keys outside general.* (and the file type), and tensors by name."""
    reader = GGUFReader(path)
    keys = {
        name: (tuple(field.types), field.contents())
        for name, field in reader.fields.items()
        if name == "general.file_type" or not name.startswith(("GGUF.", "general."))
    }
    tensors = {
        t.name: (t.tensor_type.name, tuple(int(n) for n in t.shape), np.ascontiguousarray(t.data).tobytes())
        for t in reader.tensors
    }
    return keys, tensors


def equal(ours: Path, theirs: Path) -> None:
    our_keys, our_tensors = contents(ours)
    their_keys, their_tensors = contents(theirs)
    assert our_keys.keys() == their_keys.keys()
    for key, value in their_keys.items():
        assert our_keys[key] == value, key
    assert our_tensors.keys() == their_tensors.keys()
    for name, tensor in their_tensors.items():
        assert our_tensors[name][:2] == tensor[:2], name
        assert our_tensors[name][2] == tensor[2], f"{name}: other bytes"


def as_gpt2(source: Path, folder: Path) -> Path:
    """The same checkpoint under the class name by which the converter tells byte-level BPE for phi3."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "GPT2Tokenizer"}))
    return folder


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_the_trained_model_equals_the_converters(
    workshop: Workshop, llama_cpp: LlamaCpp, tmp_path: Path, outtype: str
) -> None:
    source = as_gpt2(workshop.source("checkpoint"), tmp_path / "source")
    theirs = llama_cpp.convert(source, tmp_path / "theirs.gguf", outtype)
    equal(workshop.gguf("checkpoint", outtype), theirs)


def phi3_source(folder: Path, llama_cpp: LlamaCpp, form: Any, dtype: str, **changes: Any) -> Path:
    """A tiny model with the real Phi-3 vocabulary."""
    config = {**tiny.CONFIG, "vocab_size": 32064, "eos_token_id": 32000, "pad_token_id": 32000, **changes}
    source = tiny.checkpoint(folder, config, dtype=dtype, tokenizer=False)
    real_vocabularies.phi3_tokenizer(llama_cpp.source / "models/ggml-vocab-phi-3.gguf", source, form=form)
    return source


LONGROPE = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": 256,
    "sliding_window": None,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0],
        "long_factor": [1.1, 1.4, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
    },
}


@pytest.mark.parametrize(
    ("outtype", "dtype", "changes"),
    [("f16", "BF16", {}), ("q8_0", "F16", {"num_key_value_heads": 2}), ("bf16", "F32", LONGROPE)],
    ids=["plain f16 from bf16", "grouped q8_0 from f16", "longrope bf16 from f32"],
)
def test_the_real_vocabulary_equals_the_converters(
    llama_cpp: LlamaCpp, tmp_path: Path, outtype: str, dtype: str, changes: dict[str, Any]
) -> None:
    source = phi3_source(tmp_path / "source", llama_cpp, "model", dtype, **changes)
    gguf.export(source, tmp_path / "ours.gguf", outtype=outtype)
    equal(tmp_path / "ours.gguf", llama_cpp.convert(source, tmp_path / "theirs.gguf", outtype))


@pytest.mark.parametrize("form", ["model", "json"])
def test_the_real_vocabulary_passes_its_pairs_in_llama_cpp(llama_cpp: LlamaCpp, tmp_path: Path, form: str) -> None:
    import llama_cpp as library

    source = phi3_source(tmp_path / "source", llama_cpp, form, "BF16")
    gguf.export(source, tmp_path / "ours.gguf", outtype="bf16")
    vocabulary = llama_cpp.source / "models/ggml-vocab-phi-3.gguf"
    model = library.Llama(str(tmp_path / "ours.gguf"), vocab_only=True, verbose=False)
    pairs = real_vocabularies.pairs(vocabulary)
    assert len(pairs) == 46
    for text, ids in pairs:
        assert model.tokenize(text.encode(), add_bos=False, special=False) == ids, text

    ours, _ = contents(tmp_path / "ours.gguf")
    theirs, _ = contents(vocabulary)
    for key in ("tokens", "scores"):
        assert ours[f"tokenizer.ggml.{key}"] == theirs[f"tokenizer.ggml.{key}"], key
    # The file is older than the converter: it calls the padding rows UNKNOWN, where today's says UNUSED.
    tokens = 32011
    our_types, their_types = (keys["tokenizer.ggml.token_type"][1] for keys in (ours, theirs))
    assert our_types[:tokens] == their_types[:tokens]
    assert set(our_types[tokens:]) == {TokenType.UNUSED}
    assert set(their_types[tokens:]) == {TokenType.UNKNOWN}
