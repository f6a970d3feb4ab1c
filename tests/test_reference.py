"""The reference against transformers' Phi3ForCausalLM (eager attention), and its loaders against what was saved.

Every comparison is of full logits at every position. A model is two layers of random weights, see random_models.
"""

import ast
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor

from linnet_export import reference
from linnet_export.reference import phi3
from linnet_export.reference.phi3 import Config, Phi3
from random_models import Spec, bindings_of, model_of, save, tokens_of, write_card, write_gguf

# f32 carries 2^-24 = 6e-8, and the sums of a few hundred terms in two layers may leave ten or twenty times that, in
# another order of summing on another machine. The mildest of the mutations below is a thousand times over the bound.
F32_BOUND = 1e-5

SHORT = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)
LONG = (1.1, 1.4, 1.9, 2.5, 3.2, 4.0, 5.5, 7.0)

CASES = {
    "equal heads": Spec(),
    "grouped and tied": Spec(kv_heads=3, tied=True),
    "partial rotary": Spec(kv_heads=3, partial_rotary=0.75),
    "another base": Spec(theta=250000.0, eps=1e-6),
    "window": Spec(window=8),
    "longrope": Spec(kv_heads=3, original_context=16, short_factors=SHORT, long_factors=LONG),
    "longrope, partial, factor given": Spec(
        original_context=16,
        partial_rotary=0.75,
        short_factors=SHORT[:6],
        long_factors=LONG[:6],
        attention_factor=1.3,
        window=8,
    ),
}
BINDINGS = bindings_of(CASES["equal heads"])  # of every case: they have the same layers
LENGTHS = (1, 5, 8, 9, 16, 17, 29)  # around the window of 8 and the original context of 16


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Spec], Path]:
    """The checkpoint directory of a spec, saved once."""
    directories: dict[Spec, Path] = {}

    def directory_of(spec: Spec) -> Path:
        if spec not in directories:
            directories[spec] = tmp_path_factory.mktemp("model")
            save(spec, directories[spec])
        return directories[spec]

    return directory_of


def transformers_logits(spec: Spec, tokens: Tensor) -> Tensor:
    logits: Tensor = model_of(spec)(tokens).logits
    return logits


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference in deviations of the oracle's logits."""
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().std())


# The arithmetic in f32.


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CASES)
def test_f32_logits_are_those_of_transformers(name: str, length: int, saved: Callable[[Spec], Path]) -> None:
    spec = CASES[name]
    tokens = tokens_of(spec, length)
    model = reference.load(saved(spec))
    theirs = transformers_logits(spec, tokens)
    assert distance(model(tokens), theirs) <= F32_BOUND
    assert distance(model.next_token(tokens), theirs[:, -1]) <= F32_BOUND


def swap_gate_up(model: Phi3) -> Phi3:
    for name, weight in model.named_parameters():
        if name.endswith("gate_up.weight"):
            weight.copy_(torch.cat(weight.chunk(2)[::-1]))
    return model


def swap_thirds(first: int, second: int) -> Callable[[Phi3], Phi3]:
    """Swaps query (0), key (1) or value (2) rows, with equal heads."""

    def swap(model: Phi3) -> Phi3:
        for name, weight in model.named_parameters():
            if name.endswith("qkv.weight"):
                thirds = list(weight.chunk(3))
                thirds[first], thirds[second] = thirds[second], thirds[first]
                weight.copy_(torch.cat(thirds))
        return model

    return swap


MUTATIONS: dict[str, Callable[[Phi3], Phi3]] = {
    "gate and up swapped": swap_gate_up,
    "query and key swapped": swap_thirds(0, 1),
    "key and value swapped": swap_thirds(1, 2),
    "window one too short": lambda model: model.variant(window=7),
    "window one too long": lambda model: model.variant(window=9),
    "no window": lambda model: model.variant(window=None),
    "epsilon of 1e-6": lambda model: model.variant(eps=1e-6),
    "another rotary base": lambda model: model.variant(theta=11000.0),
    "a pair of dimensions that does not rotate": lambda model: model.variant(rotary_dims=14),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_fails_the_f32_bound(mutation: str, saved: Callable[[Spec], Path]) -> None:
    spec = CASES["window"]
    tokens = tokens_of(spec, 29)
    theirs = transformers_logits(spec, tokens)
    model = reference.load(saved(spec))
    assert distance(model(tokens), theirs) <= F32_BOUND
    assert distance(MUTATIONS[mutation](model)(tokens), theirs) > 1000 * F32_BOUND


@pytest.mark.parametrize("factors", ["short", "long"])
def test_pinned_longrope_factors_serve_every_length(factors: phi3.Factors, saved: Callable[[Spec], Path]) -> None:
    # transformers uses the short set for all of these lengths if the original context is the whole one, and the long
    # set for all but one token if it is 1.
    spec = replace(CASES["longrope, partial, factor given"], window=None)
    pinned = replace(spec, original_context=spec.context if factors == "short" else 1)
    model = reference.load(saved(spec), factors=factors)
    for length in (9, 29):
        tokens = tokens_of(spec, length)
        assert distance(model(tokens), transformers_logits(pinned, tokens)) <= F32_BOUND
    by_length = reference.load(saved(spec))
    other = tokens_of(spec, 29 if factors == "short" else 9)  # where the rule by length picks the other set
    assert distance(model(other), by_length(other)) > 1000 * F32_BOUND


def test_frequencies_are_those_of_transformers_and_of_the_linnet_source() -> None:
    position = torch.tensor(0)
    for rotary_dims, theta in ((16, 10000.0), (96, 10000.0), (128, 250000.0)):
        config = Config(
            vocab=2,
            hidden=rotary_dims,
            heads=1,
            kv_heads=1,
            inner=1,
            layers=1,
            eps=1e-5,
            window=None,
            theta=theta,
            rotary_dims=rotary_dims,
            tied=True,
        )
        ours = phi3.inverse_frequencies(config, position)
        # transformers' formula, to the bit: at position 4096 a last bit of the first frequencies is 2e-4 of an angle.
        assert torch.equal(ours, 1.0 / theta ** (torch.arange(0, rotary_dims, 2).float() / rotary_dims))
        # The source's formula in f32: exp(-x log theta) is off by about x log theta <= 12.5 units in the last place.
        steps = torch.arange(rotary_dims // 2).float() * 2.0 / rotary_dims
        source = torch.exp(-steps * torch.log(torch.tensor(theta)))
        assert float(((ours - source) / source).abs().max()) <= 12.5 * 2**-23


# The arithmetic in 16 bits.


def wide_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets transformers' own eager attention compute in f32, as the reference does, and cast the result."""
    from transformers.models.phi3 import modeling_phi3

    eager = modeling_phi3.eager_attention_forward

    def wide(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        mixed, weights = eager(
            module, query.float(), key.float(), value.float(), None if mask is None else mask.float(), **kwargs
        )
        return mixed.to(query.dtype), weights

    monkeypatch.setattr(modeling_phi3, "eager_attention_forward", wide)


def norm_weighted_before_the_cast(self: phi3.RmsNorm, x: Tensor) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight.float()
    return scaled.to(x.dtype)


def rows_in_f32(config: Config, positions: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del dtype
    return ROPE_ROWS(config, positions, largest, torch.float32)


def rotation_in_f32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ROTATE(x.float(), cos, sin).to(x.dtype)


ROPE_ROWS, ROTATE = phi3.rope_rows, phi3.rotate
HALF_SPEC = Spec(kv_heads=3, window=8)
HALF_MUTATIONS: dict[str, list[tuple[Any, str, Any]]] = {
    "norm weighted before the cast": [(phi3.RmsNorm, "forward", norm_weighted_before_the_cast)],
    "rotation in f32": [(phi3, "rotate", rotation_in_f32)],
    "rotation and tables in f32": [(phi3, "rotate", rotation_in_f32), (phi3, "rope_rows", rows_in_f32)],
}
# Where attention is f32 on both sides, nothing differs but, on some machine, the order of f32 sums: that moves a value
# over a rounding boundary once in some thousand times. A norm weighted before its cast flips every third value and the
# rotation's mutations many queries and keys, for a KL of 1e-6 in bf16. KL goes with the square of the unit: 2^3 of
# bf16's 2^-8 to f16's 2^-11.
SAME_NUMERICS_KL = {torch.bfloat16: 1e-8, torch.float16: 1e-8 / 2**6}


def half_logits(directory: Path, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Both logits, [batch * length, vocab]: transformers' first."""
    from transformers import Phi3ForCausalLM

    # Not by .to(dtype), which would round the rotary frequencies as well.
    oracle = Phi3ForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        theirs = oracle(tokens).logits
    ours = reference.load(directory, dtype=dtype)(tokens)
    assert ours.dtype == theirs.dtype == dtype
    return theirs.flatten(0, 1), ours.flatten(0, 1)


def mutate(monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    for patch in HALF_MUTATIONS[mutation]:
        monkeypatch.setattr(*patch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_those_of_transformers_where_its_attention_is_f32(
    dtype: torch.dtype, saved: Callable[[Spec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide_eager_attention(monkeypatch)
    figures = reference.compare(*half_logits(saved(HALF_SPEC), tokens_of(HALF_SPEC, 29, batch=16), dtype))
    assert figures.kl_mean <= SAME_NUMERICS_KL[dtype]
    assert figures.argmax_agreement >= 0.99  # a flipped value may decide between two tokens that tie in 16 bits


@pytest.mark.parametrize("mutation", HALF_MUTATIONS)
def test_a_wrong_rounding_fails_the_bf16_bound(
    mutation: str, saved: Callable[[Spec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide_eager_attention(monkeypatch)
    mutate(monkeypatch, mutation)
    figures = reference.compare(*half_logits(saved(HALF_SPEC), tokens_of(HALF_SPEC, 29, batch=16)))
    assert figures.kl_mean > 10 * SAME_NUMERICS_KL[torch.bfloat16]


def test_bf16_is_that_of_transformers_up_to_the_rounding_of_its_attention(saved: Callable[[Spec], Path]) -> None:
    # One token attends to itself alone, with weight 1 in any type: nothing is left to differ.
    every_token = torch.arange(HALF_SPEC.vocab)[:, None]
    assert reference.compare(*half_logits(saved(HALF_SPEC), every_token)).max_abs == 0

    # Longer prompts: transformers also rounds the scores, their scaled values, the weights and (as the reference
    # does, but another value) the mixture to bf16. Four relative errors of up to 2^-9 in two layers are at most
    # 8 * 2^-9 of the logits' deviation, as the deviation of their differences, and KL is half the square of that.
    logits = half_logits(saved(HALF_SPEC), tokens_of(HALF_SPEC, 29, batch=16))
    figures = reference.compare(*logits)
    deviation = 8 * 2**-9 * figures.std
    assert figures.kl_mean <= deviation**2 / 2
    decided = reference.compare(*logits, bound=4 * deviation)  # normal differences exceed that once in 16,000
    assert decided.decided > decided.positions // 2
    assert decided.decided_disagreements == ()


def test_bf16_of_one_token_fails_with_a_norm_in_the_wrong_order(
    saved: Callable[[Spec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, "norm weighted before the cast")
    every_token = torch.arange(HALF_SPEC.vocab)[:, None]
    assert reference.compare(*half_logits(saved(HALF_SPEC), every_token)).max_abs > 0


# The cache.


@pytest.mark.parametrize("name", ["equal heads", "grouped and tied", "window", "longrope, partial, factor given"])
def test_prefill_and_decode_continue_like_forward(name: str, saved: Callable[[Spec], Path]) -> None:
    spec = CASES[name]
    # Pinned: by length, keys cached before the original context would be rotated otherwise than forward rotates them.
    model = reference.load(saved(spec), factors="long" if spec.long_factors else None)
    tokens = tokens_of(spec, 29)
    whole = model(tokens)
    cache = model.cache(batch=2, max_seq=31)
    for keys in (*cache.keys, *cache.values):
        keys.normal_(generator=torch.Generator().manual_seed(2))  # what an earlier sequence left
    steps = [model.prefill(tokens[:, :5], 0, cache), model.prefill(tokens[:, 5:12], 5, cache)]
    steps += [model.decode(tokens[:, i : i + 1], i, cache) for i in range(12, 20)]
    steps += [model.decode(tokens[:, i : i + 1], torch.tensor(i), cache) for i in range(20, 29)]
    expected = whole[:, [4, 11, *range(12, 29)]]
    assert distance(torch.stack(steps, dim=1), expected) <= F32_BOUND


def test_longrope_factors_follow_the_largest_position_of_a_call(saved: Callable[[Spec], Path]) -> None:
    spec = CASES["longrope"]
    model = reference.load(saved(spec))
    for length, factors in ((16, "short"), (17, "long")):
        tokens = tokens_of(spec, length)
        pinned = model.variant(factors=factors)
        expected = pinned(tokens)[:, -1]
        assert distance(model.prefill(tokens, 0, model.cache(batch=2, max_seq=32)), expected) <= F32_BOUND
        cache = model.cache(batch=2, max_seq=32)
        pinned.prefill(tokens[:, :-1], 0, cache)
        assert distance(model.decode(tokens[:, -1:], length - 1, cache), expected) <= F32_BOUND


def test_generate_gives_the_greedy_tokens_of_forward(saved: Callable[[Spec], Path]) -> None:
    spec = CASES["window"]
    model = reference.load(saved(spec))
    tokens = tokens_of(spec, 6).int()
    cache = model.cache(batch=2, max_seq=32)
    model.prefill(tokens[:, :-1], 0, cache)
    produced = model.generate(tokens[:, -1:], 5, 20, cache)
    assert produced.dtype == torch.int32
    for _ in range(20):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True).int()), dim=1)
    assert torch.equal(produced, tokens[:, 6:])


def test_generate_takes_the_first_of_equal_maxima(saved: Callable[[Spec], Path]) -> None:
    model = reference.load(saved(CASES["equal heads"]))
    assert model.lm_head is not None
    model.lm_head.weight.zero_()
    assert model.generate(torch.tensor([[7]]), 0, 3, model.cache(batch=1, max_seq=4)).tolist() == [[0, 0, 0]]


def test_tokens_past_the_cache_are_refused(saved: Callable[[Spec], Path]) -> None:
    model = reference.load(saved(CASES["equal heads"]))
    cache = model.cache(batch=1, max_seq=8)
    with pytest.raises(ValueError, match="5 tokens at position 4 do not fit into a cache of 8 positions"):
        model.prefill(torch.zeros(1, 5, dtype=torch.int64), 4, cache)
    with pytest.raises(ValueError, match="2 sequences, but the cache has 1 rows"):
        model.decode(torch.zeros(2, 1, dtype=torch.int64), 0, cache)


def test_prefill_and_decode_compile_to_one_graph(saved: Callable[[Spec], Path]) -> None:
    spec = CASES["longrope, partial, factor given"]
    model = reference.load(saved(spec), layers=1)
    tokens = tokens_of(spec, 19)
    caches = [model.cache(batch=2, max_seq=20) for _ in range(2)]
    prefill, decode = (torch.compile(f, backend="eager", fullgraph=True) for f in (model.prefill, model.decode))
    steps = [prefill(tokens[:, :14], 0, caches[0])]
    steps += [decode(tokens[:, i : i + 1], torch.tensor(i), caches[0]) for i in range(14, 19)]
    expected = [model.prefill(tokens[:, :14], 0, caches[1])]
    expected += [model.decode(tokens[:, i : i + 1], i, caches[1]) for i in range(14, 19)]
    assert distance(torch.stack(steps), torch.stack(expected)) <= F32_BOUND


# What the model is made of.


def test_parameters_carry_their_linnet_paths(saved: Callable[[Spec], Path]) -> None:
    layer = ("attention_norm", "attention.qkv", "attention.o_proj", "mlp_norm", "mlp.gate_up", "mlp.down")
    expected = ["embedding.weight", *(f"layers.{i}.{part}.weight" for i in range(2) for part in layer), "norm.weight"]
    assert list(reference.load(saved(CASES["grouped and tied"])).state_dict()) == expected
    assert list(reference.load(saved(CASES["equal heads"])).state_dict()) == [*expected, "lm_head.weight"]


def test_a_variant_shares_the_weights(saved: Callable[[Spec], Path]) -> None:
    model = reference.load(saved(CASES["window"]))
    other = model.variant(window=None)
    assert (model.config.window, other.config.window) == (8, None)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
    assert distance(other(tokens_of(CASES["window"], 29)), reference.load(saved(Spec()))(tokens_of(Spec(), 29))) == 0


def test_the_reference_imports_nothing_that_it_checks() -> None:
    for file in Path(str(phi3.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            ours = [name for name in names if name.split(".")[0] == "linnet_export"]
            assert all(name.startswith("linnet_export.reference.") for name in ours), (file, ours)


def test_a_config_that_is_no_model_names_every_problem() -> None:
    with pytest.raises(ValueError, match=r"(?s)vocab is 0.*window is 0.*both the short and the long"):
        Config(
            vocab=0,
            hidden=96,
            heads=6,
            kv_heads=6,
            inner=160,
            layers=2,
            eps=1e-5,
            window=0,
            theta=1e4,
            rotary_dims=16,
            tied=False,
            short_factors=(1.0,) * 8,
        )


# Loading Hugging Face checkpoints.


def assert_same(loaded: Phi3, expected: Phi3) -> None:
    """The same config, and the same weights to the bit."""
    assert loaded.config == expected.config
    assert list(loaded.state_dict()) == list(expected.state_dict())
    for path, tensor in expected.state_dict().items():
        assert loaded.state_dict()[path].dtype == tensor.dtype, path
        assert torch.equal(loaded.state_dict()[path], tensor), path


def edit_config(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(source, target)
    fields = json.loads((target / "config.json").read_text())
    change(fields)
    (target / "config.json").write_text(json.dumps(fields))
    return target


@pytest.mark.parametrize("kind", ["su", "longrope"])
def test_the_old_schema_reads_like_the_new_one(kind: str, saved: Callable[[Spec], Path], tmp_path: Path) -> None:
    spec = Spec(partial_rotary=0.75, original_context=16, short_factors=SHORT[:6], long_factors=LONG[:6], theta=20000.0)

    def to_old(fields: dict[str, Any]) -> None:
        rope = fields.pop("rope_parameters")
        fields["rope_theta"], fields["partial_rotary_factor"] = rope["rope_theta"], rope["partial_rotary_factor"]
        fields["rope_scaling"] = {key: rope[key] for key in ("short_factor", "long_factor")} | {"type": kind}
        fields |= {"num_key_value_heads": None, "sliding_window": 0, "torch_dtype": fields.pop("dtype")}

    loaded = reference.load(edit_config(saved(spec), tmp_path / "old", to_old))
    assert_same(loaded, reference.load(saved(spec)))
    assert loaded.config.window is None
    assert loaded.config.rotary_dims == 12
    assert loaded.config.attention_factor == math.sqrt(1 + math.log(64 / 16) / math.log(16))


def test_an_old_config_without_scaling_is_plain_rope(saved: Callable[[Spec], Path], tmp_path: Path) -> None:
    def to_old(fields: dict[str, Any]) -> None:
        fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"]
        fields["rope_scaling"] = None

    assert_same(
        reference.load(edit_config(saved(CASES["window"]), tmp_path / "old", to_old)),
        reference.load(saved(CASES["window"])),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 500.0}, "rope_theta is stated differently"),
        ({"model_type": "phimoe"}, "the reference is Phi3ForCausalLM"),
        ({"architectures": ["Phi3SmallForCausalLM"]}, "the reference is Phi3ForCausalLM"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type longrope and yarn"),
        ({"rms_norm_eps": None}, "has no rms_norm_eps"),
        ({"intermediate_size": 168}, r"gate_up.weight is \[320, 96\], the config needs \[336, 96\]"),
        ({"num_hidden_layers": 3}, "6 tensors are missing"),
        ({"num_attention_heads": 5}, "not a multiple"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, saved: Callable[[Spec], Path], tmp_path: Path
) -> None:
    spec = CASES["longrope"]
    with pytest.raises(ValueError, match=message):
        reference.load(edit_config(saved(spec), tmp_path / "edited", lambda fields: fields.update(change)))


def test_shards_read_like_one_file(saved: Callable[[Spec], Path], tmp_path: Path) -> None:
    save(CASES["equal heads"], tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (tmp_path / "leftover.safetensors").write_bytes(b"with an index, only its files count")
    assert_same(reference.load(tmp_path), reference.load(saved(CASES["equal heads"])))


def test_a_tied_checkpoint_that_stores_another_head_is_untied(tmp_path: Path) -> None:
    import tiny

    config = {**tiny.CONFIG, "tie_word_embeddings": True}
    source = tiny.checkpoint(tmp_path, config, tokenizer=False)
    tied = reference.load(source)
    assert tied.lm_head is None
    tensors = tiny.weights(config)
    for head, untied in (
        (tensors["model.embed_tokens.weight"], False),
        (tensors["model.embed_tokens.weight"] * 2, True),
    ):
        tiny.save(source / "model.safetensors", {**tensors, "lm_head.weight": head.copy()})
        assert (reference.load(source).lm_head is not None) == untied


def test_layers_keeps_the_first_ones(saved: Callable[[Spec], Path]) -> None:
    spec = CASES["equal heads"]
    tokens = tokens_of(spec, 9)
    theirs = model_of(spec)
    theirs.model.layers = theirs.model.layers[:1]
    assert distance(reference.load(saved(spec), layers=1)(tokens), theirs(tokens).logits) <= F32_BOUND
    with pytest.raises(ValueError, match="has 2 layers; layers=3"):
        reference.load(saved(spec), layers=3)


def test_the_type_is_the_stored_one_unless_asked_for(tmp_path: Path) -> None:
    model = save(CASES["equal heads"], tmp_path, dtype="bfloat16")
    assert reference.load(tmp_path).embedding.weight.dtype == torch.bfloat16
    wide = reference.load(tmp_path, dtype="f32")
    assert torch.equal(wide.embedding.weight, model.model.embed_tokens.weight.float())
    assert reference.load(tmp_path, dtype=torch.float16).norm.weight.dtype == torch.float16
    with pytest.raises(ValueError, match="the reference computes in f32, bf16, f16"):
        reference.load(tmp_path, dtype=torch.float64)


def test_the_window_can_be_replaced(saved: Callable[[Spec], Path]) -> None:
    assert reference.load(saved(CASES["window"])).config.window == 8
    assert reference.load(saved(CASES["window"]), window=None).config.window is None
    assert reference.load(saved(CASES["window"]), window=5).config.window == 5


def test_what_is_not_there_is_named(tmp_path: Path, saved: Callable[[Spec], Path]) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        reference.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"none of: a directory with nest.toml"):
        reference.load(tmp_path)
    shutil.copy(saved(CASES["window"]) / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no .safetensors file"):
        reference.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"model.safetensors"):
        reference.load(tmp_path)


# Loading Linnet cards.


CARD_SPECS = [CASES["window"], CASES["grouped and tied"], Spec(kv_heads=3, theta=12345.0)]


@pytest.mark.parametrize("spec", CARD_SPECS, ids=["window", "tied", "another base"])
def test_a_card_reads_like_its_checkpoint(spec: Spec, saved: Callable[[Spec], Path], tmp_path: Path) -> None:
    card = write_card(tmp_path / "card", spec)
    shutil.copy(saved(spec) / "model.safetensors", card)
    assert_same(reference.load(card), reference.load(saved(spec)))


@pytest.mark.parametrize("prefix", ["", "root."])
@pytest.mark.parametrize("spec", CARD_SPECS[:2], ids=["untied", "tied"])
def test_a_card_reads_trained_weights_under_linnet_paths(
    prefix: str, spec: Spec, saved: Callable[[Spec], Path], tmp_path: Path
) -> None:
    card = write_card(tmp_path / "card", spec, 'repo = "nobody/tiny"\nrevision = "main"\nfiles = ["a.safetensors"]')
    held = load_file(saved(spec) / "model.safetensors")
    trained = tmp_path / "trained"
    trained.mkdir()
    renamed = {f"{prefix}{path}": held[name] for path, name in BINDINGS.items() if name in held}
    save_file(renamed, trained / "model.safetensors")
    expected = reference.load(saved(spec))
    assert_same(reference.load(card, weights=trained), expected)
    assert_same(reference.load(card, weights=trained / "model.safetensors"), expected)
    # Mixed names are no scheme: one tensor under another name is a missing one.
    path = f"{prefix}norm.weight"
    renamed["model.norm.weight"] = renamed.pop(path)
    save_file(renamed, trained / "model.safetensors")
    with pytest.raises(ValueError, match=f"1 tensors are missing under Linnet paths.*among them {path}"):
        reference.load(card, weights=trained)


@pytest.mark.parametrize("files", ['files = ["model.safetensors"]\n', ""])
def test_a_card_finds_its_weights_in_the_cache_of_hugging_face(
    files: str, saved: Callable[[Spec], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, commit = CASES["window"], "f39ac1d28e925b323eae81227eaba4464caced4e"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    card = write_card(tmp_path / "card", spec, f'{files}repo = "someone/tiny"\nrevision = "{commit}"')
    with pytest.raises(FileNotFoundError, match=f"nor in Hugging Face's cache .someone/tiny at {commit}"):
        reference.load(card)
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    shutil.copy(saved(spec) / "model.safetensors", snapshot)
    assert_same(reference.load(card), reference.load(saved(spec)))


def test_a_card_that_is_incomplete_is_refused(saved: Callable[[Spec], Path], tmp_path: Path) -> None:
    card = write_card(tmp_path / "card", CASES["window"])
    with pytest.raises(FileNotFoundError, match=r"has no model.safetensors, and the card names no repository"):
        reference.load(card)
    save_file({"layers.0.attention.qkv.lora_a": torch.zeros(1)}, card / "model.safetensors")
    with pytest.raises(ValueError, match="the files hold adapters"):
        reference.load(card)
    shutil.copy(saved(CASES["window"]) / "model.safetensors", card)
    (card / "src" / "other.linnet").write_text("pub const WINDOW: i32 = 9\n")
    with pytest.raises(ValueError, match=r"WINDOW is 8 in .*attention.linnet and 9 in .*other.linnet"):
        reference.load(card)
    (card / "src" / "rope.linnet").unlink()
    (card / "src" / "other.linnet").unlink()
    with pytest.raises(ValueError, match="no source has `pub const THETA`"):
        reference.load(card)


# Loading GGUF files.


GGUF_CASES = ["equal heads", "grouped and tied", "window", "longrope, partial, factor given"]


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_in_f32_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    spec = CASES[name]
    write_gguf(tmp_path / "model.gguf", spec, GGMLQuantizationType.F32)
    model = reference.load(tmp_path / "model.gguf")
    assert model.config.window == spec.window
    assert model.config.tied == spec.tied
    for length in (9, 29):
        tokens = tokens_of(spec, length)
        assert distance(model(tokens), transformers_logits(spec, tokens)) <= F32_BOUND


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)])
def test_a_gguf_file_gives_the_values_that_it_holds(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks of rows, the last one shorter. By its full name the module is hidden behind the function `load`.
    monkeypatch.setattr(sys.modules["linnet_export.reference.load"], "BLOCK_ELEMENTS", 1000)
    held = write_gguf(tmp_path / "model.gguf", CASES["grouped and tied"], GGMLQuantizationType[kind])
    model, wide = reference.load(tmp_path / "model.gguf"), reference.load(tmp_path / "model.gguf", dtype="f32")
    for path, tensor in model.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(wide.state_dict()[path], held[BINDINGS[path]])
        assert torch.equal(tensor, held[BINDINGS[path]].to(dtype))


def test_a_split_gguf_file_reads_like_one(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", CASES["equal heads"], GGMLQuantizationType.F32)
    write_gguf(tmp_path / "parts.gguf", CASES["equal heads"], GGMLQuantizationType.F32, split=6)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) == 3
    assert_same(reference.load(parts[0]), reference.load(tmp_path / "model.gguf"))
    parts[2].unlink()
    with pytest.raises(FileNotFoundError, match=r"parts-00003-of-00003.gguf does not exist"):
        reference.load(parts[0])


def test_a_gguf_file_of_something_else_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'llama'; the reference is phi3"):
        reference.load(tmp_path / "other.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGML" * 8)
    with pytest.raises(ValueError, match=r"broken.gguf: GGUF magic invalid"):
        reference.load(tmp_path / "broken.gguf")


# Figures.


def close(value: Tensor) -> Any:
    return pytest.approx(float(value), rel=1e-12)  # f64 sums in another order: some thousands of 2^-53


def test_figures_are_what_their_definitions_say() -> None:
    draw = torch.Generator().manual_seed(3)
    ours = torch.randn(150, 37, generator=draw, dtype=torch.float64) + 5
    theirs = ours + 0.1 * torch.randn(150, 37, generator=draw, dtype=torch.float64)
    figures = reference.compare(ours, theirs)
    difference = (ours - theirs).abs()
    kl = torch.nn.functional.kl_div(theirs.log_softmax(-1), ours.log_softmax(-1), log_target=True, reduction="none")
    kl = kl.sum(-1)
    assert figures.positions == 150
    assert figures.max_abs == float(difference.max())
    assert figures.worst == int(difference.max(dim=-1).values.argmax())
    assert figures.mean_abs == close(difference.mean())
    assert figures.std == close(ours.std(correction=0))
    assert figures.argmax_agreement == close((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
    assert 0 < figures.argmax_agreement < 1
    assert figures.kl_mean == close(kl.mean())
    assert figures.kl_max == close(kl.max())
    assert figures.kl_p99 == close(kl.quantile(0.99))
    assert figures.decided_disagreements == ()


def test_a_decided_position_that_flips_is_listed() -> None:
    ours = torch.zeros(70, 5)
    ours[:, 1], ours[:, 2] = 4.0, 3.0
    theirs = ours.clone()
    theirs[66, 2] = 4.5
    assert reference.compare(ours, theirs, bound=0.25).decided_disagreements == (66,)
    assert reference.compare(ours, theirs, bound=0.25).decided == 70
    assert reference.compare(ours, theirs).decided == 0  # the largest difference, 1.5, could have flipped any of them
    assert reference.compare(ours, theirs).worst == 66


def test_log_probabilities_compare_with_logits() -> None:
    draw = torch.Generator().manual_seed(4)
    ours = torch.randn(7, 37, generator=draw, dtype=torch.float64)
    shifted = reference.compare_log_probs(ours, (ours + 3.0).log_softmax(-1))
    assert shifted.max_abs <= 1e-14  # a constant shift is no difference; f64 leaves some 2^-50 of values around 5
    assert reference.compare(ours, ours + 3.0).max_abs == pytest.approx(3.0)


def test_figures_of_different_shapes_or_of_nan_do_not_pass() -> None:
    with pytest.raises(ValueError, match=r"two \[S, Vocab\] are needed"):
        reference.compare(torch.zeros(3, 5), torch.zeros(5, 3))
    broken = torch.zeros(3, 5)
    broken[1, 2] = math.nan
    figures = reference.compare(torch.zeros(3, 5), broken)
    assert math.isnan(figures.max_abs)
    assert math.isnan(figures.kl_mean)
    assert figures.worst == 1
