"""Everything of an export but its weights' values: is the file whole, and does it say what the source says?

    findings = check_structure(Path("out/gguf/NAME-BF16.gguf"), open_model("MODEL"))
    [finding for finding in findings if not finding.passed]

What a GGUF file must hold is what `converters.gguf.plan` decides for the source; what a checkpoint directory must
hold is what `converters.hf.plan` decides. Damage of any kind is a failed finding. Weights are not read here.
"""

from dataclasses import replace
from pathlib import Path

from linnet_export.errors import InputError
from linnet_export.model import CONFIG, Model
from linnet_export.verify import structure_gguf, structure_hf
from linnet_export.verify.records import Finding


def check_structure(
    export: Path, source: Model, *, layers: int | None = None, pre_tokenizer: str | None = None
) -> tuple[Finding, ...]:
    """A finding for each group of what a GGUF file or an exported checkpoint directory says.

    `layers` is how many of the source's layers the export has, all where None; `pre_tokenizer` is the option that a
    GGUF file was exported with. Raises InputError where `export` is neither kind or is not there.
    """
    if layers is not None:
        if not 1 <= layers <= source.config.layers:
            raise InputError(f"layers is {layers}; 1 to {source.config.layers}, the source's, is needed")
        source = replace(source, config=replace(source.config, layers=layers))
    if export.is_file():
        return tuple(structure_gguf.findings(export, source, pre_tokenizer))
    if export.is_dir() and not (export / CONFIG).is_file():
        raise InputError(f"{export} has no {CONFIG}; an exported checkpoint directory, or a .gguf file, is needed")
    if export.is_dir():
        return tuple(structure_hf.findings(export, source))
    raise InputError(f"{export} does not exist; a .gguf file or an exported checkpoint directory is needed")
