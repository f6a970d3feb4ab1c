"""Exports Phi-3 models to GGUF and to Hugging Face checkpoints, true to the byte.

    from linnet_export import gguf, hf, reference
    gguf.export("phi-3-mini-4k-instruct", "out/gguf", outtype="bf16")

What goes where is in docs/design.md: readers and records here, writers in `converters`, the ground truth in
`reference` (needs PyTorch: `pip install 'linnet-export[reference]'`).
"""

__version__ = "0.1.0"
