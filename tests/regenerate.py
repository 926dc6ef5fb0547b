"""Make an output again from the array that it is a view of, by the steps that metadata lists."""

from __future__ import annotations

from typing import Any

import jax

from jointcut.wrappers.metadata.schemas import OutputAliasInfo


def can_be_regenerated(info: OutputAliasInfo) -> bool:
    """Whether all steps are known; not those of a slice whose start the program computes."""
    slices = [dict(view.arguments) for view in info.view_meta_sequence if view.op == "dynamic_slice"]
    return not any(None in arguments["start_indices"] for arguments in slices)


def regenerated(info: OutputAliasInfo, base: Any) -> Any:
    """The output made from its base."""
    for view in info.view_meta_sequence:
        arguments = [value for _, value in view.arguments]
        if view.op == "split":
            *arguments, index = arguments
            base = jax.lax.split(base, *arguments)[index]
        else:
            base = getattr(jax.lax, view.op)(base, *arguments)
    return base
