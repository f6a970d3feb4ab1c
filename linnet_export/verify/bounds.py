"""How close a runtime must be to the reference, by the type of the export: a table, with a reason in each row.

    bound = find("bf16", "vllm")         # None: nothing is stated for such a type, and nothing is judged

Measured once, on SmolLM2-135M-Instruct in this architecture (scripts/trained_model.py; 30 layers, source in f32) with
the shipped prompts. KL may be about ten times what was seen there, for other processors' kernels and other models, and
a difference, whose square KL follows, three times. f32 has more room, for deeper models: longer sums round more often.
What tests/real/test_verify.py damages on purpose is further off.
"""

from linnet_export.verify.records import Bounds

_SUMS = "the file holds the weights exactly and only the order of f32 sums differs"
_WEIGHTS = "the weights are rounded to {}, the arithmetic is f32"
_PRODUCTS = "weights, and what they are multiplied with, are rounded to {}"
_EVERYTHING = "what passes between two operations is rounded to {}, too"
_BF16, _F16, _Q8_0 = "8 bits", "11 bits", "8 bits with a scale for each block of 32"

# Type, runtime; KL on average and at most; difference in deviations; why, and what was seen (KL mean, max, difference).
_ROWS = (
    ("f32", "reference", 1e-8, 1e-7, 3e-4, _SUMS, (1.8e-13, 8.7e-12, 6.4e-6)),
    ("f32", "transformers", 1e-8, 1e-7, 3e-4, _SUMS, (1.8e-13, 8.7e-12, 6.4e-6)),
    ("f32", "llama.cpp", 1e-8, 1e-7, 3e-4, _SUMS, (1.6e-11, 2.7e-10, 1.6e-5)),
    ("f32", "vllm", 1e-8, 1e-7, 3e-4, _SUMS, (3.8e-11, 2.3e-10, 2.2e-5)),
    ("bf16", "reference", 8e-4, 1e-2, 0.25, _WEIGHTS.format(_BF16), (7.7e-5, 1.1e-3, 0.082)),
    ("bf16", "transformers", 2e-2, 0.25, 1.0, _EVERYTHING.format(_BF16), (1.8e-3, 2.3e-2, 0.35)),
    ("bf16", "llama.cpp", 2e-3, 2.5e-2, 0.3, _PRODUCTS.format(_BF16), (1.9e-4, 2.4e-3, 0.097)),
    ("bf16", "vllm", 2e-2, 0.25, 1.0, _EVERYTHING.format(_BF16), (1.8e-3, 1.1e-2, 0.17)),
    ("f16", "reference", 3e-5, 4e-4, 0.03, _WEIGHTS.format(_F16), (3.1e-6, 3.4e-5, 0.0085)),
    ("f16", "transformers", 3e-4, 1.5e-2, 0.25, _EVERYTHING.format(_F16), (3.2e-5, 1.6e-3, 0.083)),
    ("f16", "llama.cpp", 6e-5, 1e-3, 0.06, _PRODUCTS.format(_F16), (6.1e-6, 9.7e-5, 0.021)),
    ("f16", "vllm", 3e-4, 1.5e-2, 0.25, _EVERYTHING.format(_F16), None),
    ("q8_0", "reference", 2e-2, 0.5, 1.2, _WEIGHTS.format(_Q8_0), (2.0e-3, 5.5e-2, 0.41)),
    ("q8_0", "llama.cpp", 6e-2, 0.6, 2.0, _PRODUCTS.format(_Q8_0), (6.0e-3, 6.1e-2, 0.69)),
)


# What a server says are f32 log-probabilities: the remainder, 1 less their sum, is off by their rounding (2^-24 each).
_SERVED = 1e-6


def find(kind: str, runtime: str) -> Bounds | None:
    """The bounds of a runtime on an export of a type; of a served one, the wider of vLLM's and llama.cpp's."""
    served = runtime == "endpoint"
    rows = [
        row for row in _ROWS if row[0] == kind and (row[1] in ("llama.cpp", "vllm") if served else row[1] == runtime)
    ]
    if not rows:
        return None
    _, _, mean, largest, difference, why, seen = max(rows, key=lambda row: row[3])
    said = "as in transformers" if seen is None else "seen: KL mean {:.2g}, max {:.2g}, difference {:.2g}".format(*seen)
    if served:
        mean, largest = max(mean, _SERVED), max(largest, _SERVED)
    return Bounds(kl_mean=mean, kl_max=largest, argmax_decided=True, difference=difference, reason=f"{why}; {said}")
