"""Proves an export against its source: structure, weights, logits and text, in the real runtimes.

    from linnet_export import verify
    report = verify.verify("out/gguf/NAME-BF16.gguf", against="MODEL")
    report.passed, report.data()

It needs PyTorch (`pip install 'linnet-export[verify]'`), which importing this package does not load.
"""

from typing import TYPE_CHECKING, Any

from linnet_export.verify.records import RUNTIMES, Report, VerificationError

if TYPE_CHECKING:
    from linnet_export.verify.run import verify

__all__ = ["RUNTIMES", "Report", "VerificationError", "verify"]


def __getattr__(name: str) -> Any:
    if name == "verify":
        from linnet_export.verify.run import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
