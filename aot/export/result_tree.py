"""Check that the tree of a result still has the outputs of a contract, as its classes may have changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from jointcut.aot.export.contract import Contract
from jointcut.partition.errors import ArtefactError, message
from jointcut.wrappers.metadata.descriptors import CURE, plain_keys


def check(contract: Contract, where: str) -> None:
    """Raise `ArtefactError` if the result's tree is not the tree of the outputs; `where` is the signature."""
    spec = contract.own_result_spec
    if spec is None:
        return
    what = "has a result_tree that is not the tree of its outputs, or its classes have changed since"
    returned = contract.returned
    if not isinstance(spec, jax.tree_util.PyTreeDef) or not is_sound(spec) or spec.num_leaves != len(returned):
        raise ArtefactError(message(where, f"{what}.", CURE))
    try:
        leaves = tree_flatten_with_path(jax.tree.unflatten(spec, range(len(returned))))[0]
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise ArtefactError(message(where, f"{what} ({error}).", CURE)) from error
    if [plain_keys(keys) for keys, _ in leaves] != [output.keys for output in returned]:
        raise ArtefactError(message(where, f"{what}.", CURE))


def is_sound(tree: Any) -> bool:
    """Whether JAX can build a tree read from a file; JAX does not check that a dataclass gets all of its fields."""
    data, children = tree.node_data(), tree.children()
    if data is None:
        return True
    kind, aux = data
    if kind is type(None) and children:
        return False
    if dataclasses.is_dataclass(kind) and isinstance(aux, tuple):
        fields = sum(field.init for field in dataclasses.fields(kind))
        if len(children) + len(aux) < fields:
            return False
    return all(map(is_sound, children))
