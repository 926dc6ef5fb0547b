"""Read a policy: what a user demands of single values, by names, scopes and primitives.

Scopes are those of `jax.named_scope`, of jitted functions and of modules. Where several keys name a value, a MUST goes
before a PREFER, then a `checkpoint_name` before a function, that before scopes and primitives, then the first of the
dict. A policy of JAX's saves what it finds saveable wherever the backward reads it; all else is computed again, except
what must run once and what a loop hands on.

>>> from jointcut import aot
>>> read_policy({"attention_out": aot.MUST_SAVE, "encoder/*": aot.PREFER_RECOMPUTE})
(('attention_out', <CheckpointPolicy.MUST_SAVE: 'must save'>),
 ('encoder/*', <CheckpointPolicy.PREFER_RECOMPUTE: 'prefer to recompute'>))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jointcut.partition.errors import PolicyError, message
from jointcut.partition.prices.policies import Key, Policy, shown
from jointcut.partition.prices.rules import CheckpointPolicy
from jointcut.wrappers.record import choice

#: In a policy: never computed again, and saved wherever the backward has a use for it. Refused for values in a step of
#: `aot.while_loop`, which computes again what its checkpoints do not hold.
MUST_SAVE = CheckpointPolicy.MUST_SAVE
#: In a policy: computing it again counts as its own time and ten times that of writing and reading it. For the strategy
#: `"min_cut"`, which counts bytes alone, it may be saved whatever it costs to compute. In a step of `aot.while_loop`,
#: which is cut on its own, no preference has an effect.
PREFER_SAVE = CheckpointPolicy.PREFER_SAVE
#: In a policy: never saved. Refused where something must run once, and in a step of `aot.while_loop`.
MUST_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
#: In a policy: computing it again counts as no time; for `"min_cut"` its bytes count ten times.
PREFER_RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE
#: In a policy: never computed again, and in host memory (`pinned_host`) until the backward reads it, wherever it has a
#: use for it. It is copied there where it is made, and back ahead of its reader; in loops step by step. On a CPU the
#: halves then run as two programs, since XLA keeps all arrays of one program (a `jit` of yours) in one memory there.
#: Refused for outputs of the function and for values in a conditional or in a step of `aot.while_loop`.
MUST_OFFLOAD = CheckpointPolicy.MUST_OFFLOAD
#: In a policy: in host memory if it is saved, and computing it again counts as with `PREFER_SAVE`. It has no effect on
#: outputs of the function, and on values in a conditional or in a step of `aot.while_loop`.
PREFER_OFFLOAD = CheckpointPolicy.PREFER_OFFLOAD

#: A policy as users give it: a dict from keys to demands, or a policy of `jax.checkpoint_policies`.
GivenPolicy = Mapping[Key, CheckpointPolicy] | Callable[..., Any]

_EXAMPLE = '{"attention_out": aot.MUST_SAVE, "dot_general": aot.PREFER_SAVE}'

choice(CheckpointPolicy)  # records may hold it


def read_policy(policy: GivenPolicy | Policy | None) -> Policy | None:
    """The policy as rules in order, or one of JAX's as it is; None where nothing is demanded.

    Raises `PolicyError` for anything else.
    """
    if policy is None or callable(policy):
        return policy
    if not isinstance(policy, Mapping | tuple):
        cure = f"Give a dict such as {_EXAMPLE}, or a policy of jax.checkpoint_policies."
        raise PolicyError(message("policy", f"is a {type(policy).__name__}, not a dict.", cure))
    rules = tuple(policy.items()) if isinstance(policy, Mapping) else policy
    for key, demand in rules:
        _refuse(key, demand)
    return rules or None


def _refuse(key: Any, demand: Any) -> None:
    if not key or not (isinstance(key, str) or callable(key)):
        cure = "Give a checkpoint_name, a scope, a primitive, or a function of (op, value)."
        raise PolicyError(message("policy", f"has the key {key!r}.", cure))
    where = f"policy[{shown(key)}]"
    if not isinstance(demand, CheckpointPolicy):
        names = ", ".join(f"aot.{member.name}" for member in CheckpointPolicy)
        raise PolicyError(message(where, f"is {demand!r}.", f"Give one of {names}."))
