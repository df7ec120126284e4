"""PTX that Triton wrote, made fit for launchers other than Triton's own.

Triton adds pointer parameters of its own behind a kernel's (scratch memory for the device and for profiling). Its
launcher passes them; TensorRT and a plain `cuLaunchKernel` do not. Where the code never reads them they are taken out.
"""

from __future__ import annotations

import re

from engine_build.kernels.shape import KernelError

_ENTRY = re.compile(r"(\.visible\s+\.entry\s+(\w+)\s*\()(.*?)(\))", re.DOTALL)


def without_hidden_parameters(ptx: str, num_parameters: int) -> str:
    """Drop what follows the first `num_parameters` parameters of the only entry.

    Raises:
        KernelError: the code has another number of entries, too few parameters, or uses one of those to be dropped.
    """
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise KernelError(f"the PTX has {len(entries)} entries; one kernel has one")
    _, name, declared, _ = entries[0]
    parameters = [parameter.strip() for parameter in declared.split(",") if parameter.strip()]
    if len(parameters) < num_parameters:
        raise KernelError(f"entry {name} has {len(parameters)} parameters; {num_parameters} are passed")
    for parameter in parameters[num_parameters:]:
        symbol = parameter.split()[-1]
        if len(re.findall(rf"\b{re.escape(symbol)}\b", ptx)) != 1:
            raise KernelError(f"entry {name} reads {symbol}, which only Triton's own launcher passes")
    kept = ",\n\t".join(parameters[:num_parameters])
    return _ENTRY.sub(lambda entry: f"{entry[1]}\n\t{kept}\n{entry[4]}", ptx)


def entry_name(ptx: str) -> str:
    """The name to launch it by."""
    found = _ENTRY.search(ptx)
    if found is None:
        raise KernelError("the PTX has no entry")
    return found[2]
