"""The ground truth: Phi-3 in PyTorch, loaded independently of the code that it checks.

    from linnet_export import reference
    model = reference.load("out/gguf/NAME-BF16.gguf")
    logits = model(torch.tensor([[1, 2, 3]]))

It needs torch, which an export does not: install linnet-export[reference].
"""

if __name__ != "linnet_export.reference":
    raise ImportError(
        f"this folder is the package linnet_export.reference, imported here as {__name__!r}; "
        "install the project (pip install -e .) and import linnet_export.reference"
    )

from linnet_export.reference.compare import Figures, compare, compare_log_probs
from linnet_export.reference.load import DTYPES, Dtype, Weights, load, open_weights
from linnet_export.reference.phi3 import Cache, Config, Phi3
from linnet_export.reference.streaming import stream

__all__ = [
    "DTYPES",
    "Cache",
    "Config",
    "Dtype",
    "Figures",
    "Phi3",
    "Weights",
    "compare",
    "compare_log_probs",
    "load",
    "open_weights",
    "stream",
]
