"""Writes models: GGUF files, Hugging Face checkpoints, tokenizers, Ollama Modelfiles.

Uses the readers of `linnet_export`; never the reference or the command line.
"""

if __name__ != "linnet_export.converters":
    raise ImportError(
        f"this folder is the package linnet_export.converters, imported here as {__name__!r}; "
        "install the project (pip install -e .) and import linnet_export.converters"
    )
