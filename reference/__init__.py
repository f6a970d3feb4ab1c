"""The ground truth: Phi-3 in PyTorch, loaded independently of the code that it checks.

    from linnet_export import reference
    model = reference.load("out/gguf/NAME-BF16.gguf")
    logits = model(torch.tensor([[1, 2, 3]]))
"""

if __name__ != "linnet_export.reference":
    raise ImportError(
        f"this folder is the package linnet_export.reference, imported here as {__name__!r}; "
        "install the project (pip install -e .) and import linnet_export.reference"
    )
