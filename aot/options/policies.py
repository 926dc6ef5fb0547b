"""Read a policy: a user's demands on single values, by names, scopes and primitives.

Scopes are `jax.named_scope`s, jitted functions and modules. Where several keys name a value, a MUST goes before a
PREFER. Then a `checkpoint_name` goes before a function, and a function before scopes and primitives. Then the first key
of the dict wins. A policy of JAX's saves each value that it finds saveable wherever the backward reads it. All other
values are computed again, except ops that must run once and the carries of loops.

>>> from jointcut import aot
>>> read_policy({"attention_out": aot.MUST_SAVE, "encoder/*": aot.PREFER_RECOMPUTE})
(('attention_out', <CheckpointPolicy.MUST_SAVE: 'must save'>),
 ('encoder/*', <CheckpointPolicy.PREFER_RECOMPUTE: 'prefer to recompute'>))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jointcut.aot.options.scopes import budget
from jointcut.partition.errors import PolicyError, choices, message
from jointcut.partition.packing.forms import FORMS, SaveAs
from jointcut.partition.prices.constraints import Policy, forms_of
from jointcut.partition.prices.keys import Key, shown
from jointcut.partition.prices.rules import CheckpointPolicy
from jointcut.partition.program.graph import Graph
from jointcut.wrappers.record import Record, choice

#: In a policy: never computed again, and saved wherever the backward has a use for it. Refused for values in a step of
#: `aot.while_loop`, which computes again all values that its checkpoints do not hold.
MUST_SAVE = CheckpointPolicy.MUST_SAVE
#: In a policy: computing it again counts as its own time and ten times the time to write and read it. For the strategy
#: `"min_cut"`, which counts bytes alone, it may be saved whatever it costs to compute. In a step of `aot.while_loop`,
#: which is cut on its own, no preference has an effect.
PREFER_SAVE = CheckpointPolicy.PREFER_SAVE
#: In a policy: never saved. Refused where something must run once, and in a step of `aot.while_loop`.
MUST_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
#: In a policy: computing it again counts as no time; for `"min_cut"` its bytes count ten times.
PREFER_RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE
#: In a policy: never computed again. It waits in host memory (`pinned_host`) until the backward reads it, wherever the
#: backward has a use for it. It is copied there where it is made, and back ahead of its reader; in loops step by step.
#: On a CPU the halves then run as two programs, since XLA keeps all arrays of one program (a `jit` of yours) in one
#: memory there. Refused for outputs of the function and for values in a conditional or in a step of `aot.while_loop`.
MUST_OFFLOAD = CheckpointPolicy.MUST_OFFLOAD
#: In a policy: in host memory if it is saved, and computing it again counts as with `PREFER_SAVE`. It has no effect on
#: outputs of the function, and on values in a conditional or in a step of `aot.while_loop`.
PREFER_OFFLOAD = CheckpointPolicy.PREFER_OFFLOAD


@dataclass(frozen=True)
class SAVE_AS(SaveAs, Record):
    """In a policy: saved values wait for the backward in another dtype, which takes fewer bytes.

    `aot.SAVE_AS("bfloat16")`; also `"float16"`, `"float8_e4m3fn"` (or `"float8_e4m3"`), `"float8_e5m2"` and `"int8"`,
    or such a dtype itself. The forward computes with the exact values. The backward reads them brought back to
    their own dtype, so only gradients are inexact (`Cut.check_forms` measures by how much). Choices that the program
    makes by looking at floats are kept exactly, since the stored floats might lead to other choices: masks as bits,
    indices, and the elements that a maximum pooling took. In eight bits the numbers are divided by a scale, one for
    each place on the last axis, or one for the whole array where there are fewer than 64 numbers for each. There a NaN
    or an infinity makes all numbers of its scale NaN, and the gradient cannot be differentiated again. XLA:CPU holds
    the stacks of loops in bfloat16 as float32 too. So there, outside of transformations, they wait as `uint16` of the
    same bits. Inside of them float16 waits as bfloat16 of the same bits, since a cotangent of it may be beyond 65504.

    A loop without a known number of trips (`aot.while_loop`, also `lax.while_loop` within an `aot.function`) keeps its
    checkpoints and the arrays that it fills: name them by `"while_loop_with_checkpoints"` or a scope around the loop.
    The backward runs the steps again from stored checkpoints, as many as the forward ran. So a loop whose steps
    magnify small differences magnifies these. Residuals within one step are not stored in the form.

    Whether a value is saved is left to the plan, or to a second demand: `{"hidden": (aot.MUST_OFFLOAD,
    aot.SAVE_AS("int8"))}`. In a loop each step is stored by itself. It has no effect on integers and booleans, on
    values that it would not make smaller, on arguments and outputs of the function, on values in a step of such a loop
    (plans say so), on residuals of a conditional that cannot be cut, and on the carries that a loop in segments keeps.
    Branches of a conditional share space by dtype: give all of them the form.

    Raises `PolicyError` for an unknown dtype.

    Attributes:
        dtype: the full name of the dtype.

    >>> import jax.numpy as jnp
    >>> from jointcut import aot
    >>> loss = aot.function(lambda w: jnp.sum(jnp.tanh(w @ w) ** 2), policy={"tanh": aot.SAVE_AS("bfloat16")})
    >>> print(loss.trace(jnp.ones((64, 64))).partition().plan.remarks[0])
    kept as bfloat16: 1 value, 8.19 kB instead of 16.4 kB
    """

    dtype: str

    def __post_init__(self) -> None:
        """Replace the dtype by its full name; refuse one that is no form."""
        name = {"float8_e4m3": "float8_e4m3fn"}.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else None
        if name is None:
            try:
                name = jnp.dtype(self.dtype).name
            except TypeError:
                name = repr(self.dtype)
        if name not in FORMS:
            raise PolicyError(message("aot.SAVE_AS", f"{name!r} is no form.", choices(name, FORMS)))
        object.__setattr__(self, "dtype", name)

    def __repr__(self) -> str:
        """`aot.SAVE_AS('bfloat16')`."""
        return f"aot.{self.name}"


Demand = CheckpointPolicy | SAVE_AS | budget

#: A policy as users give it: a dict from keys to demands, or a policy of `jax.checkpoint_policies`.
GivenPolicy = Mapping[Key, Demand | tuple[Demand, ...]] | Callable[..., Any]

_EXAMPLE = '{"attention_out": aot.MUST_SAVE, "dot_general": aot.PREFER_SAVE}'

choice(CheckpointPolicy)  # records may hold it


def read_policy(policy: GivenPolicy | Policy | None) -> Policy | None:
    """Return the policy as rules in order, a policy of JAX's unchanged, or None where nothing is demanded.

    Raises `PolicyError` for anything else.
    """
    if policy is None or callable(policy):
        return policy
    if not isinstance(policy, Mapping | tuple):
        cure = f"Give a dict such as {_EXAMPLE}, or a policy of jax.checkpoint_policies."
        raise PolicyError(message("policy", f"is a {type(policy).__name__}, not a dict.", cure))
    pairs = policy.items() if isinstance(policy, Mapping) else policy
    rules = tuple((key, each) for key, demand in pairs for each in (demand if isinstance(demand, tuple) else [demand]))
    for key, demand in rules:
        _refuse(key, demand)
    return rules or None


def stored_forms(policy: GivenPolicy | Policy | None, graph: Graph) -> tuple[tuple[int, str], ...]:
    """Return the values of a program that a policy gives a form, each with the name of the form.

    Raises as `forms_of` does, and `PolicyError` for a dtype that the backend cannot store.
    """
    forms = forms_of(read_policy(policy), graph)
    backend = jax.default_backend()
    for v, form in {form: (v, form) for v, form in forms}.values():
        if cause := _not_stored(form, backend):
            where, what = f"policy: {graph.where(v)}", f"is SAVE_AS({form!r}), which {backend} cannot store: {cause}"
            raise PolicyError(message(where, f"{what.rstrip('.')}.", 'Take another form, such as "bfloat16".'))
    return forms


def has_forms(policy: GivenPolicy | Policy | None) -> bool:
    """Whether a policy gives any value a smaller form."""
    rules = read_policy(policy)
    return rules is not None and not callable(rules) and any(isinstance(demand, SaveAs) for _, demand in rules)


@functools.cache
def _not_stored(form: str, backend: str) -> str:
    """Return why a backend cannot store numbers in a form; empty where it can."""
    del backend  # JAX compiles for this backend
    stored = FORMS[form]

    def there_and_back(x: Any) -> Any:
        return stored.unpack(x.dtype, stored.pack(x))

    try:
        jax.jit(there_and_back).lower(jax.ShapeDtypeStruct((64, 2), "float32")).compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return ""


def _refuse(key: Any, demand: Any) -> None:
    if not key or not (isinstance(key, str) or callable(key)):
        cure = "Give a checkpoint_name, a scope, a primitive, or a function of (op, value)."
        raise PolicyError(message("policy", f"has the key {key!r}.", cure))
    where = f"policy[{shown(key)}]"
    if not isinstance(demand, CheckpointPolicy | SaveAs | budget):
        names = ", ".join(f"aot.{member.name}" for member in CheckpointPolicy)
        raise PolicyError(
            message(where, f"is {demand!r}.", f"Give one of {names}, aot.SAVE_AS(dtype) or aot.budget(bytes).")
        )
