"""List every choice a user can make, with its default."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jointcut.aot.limits import Budget, limit, plain_number
from jointcut.partition.errors import CacheError, PlanError, StrategyError, TraceError, choices, message
from jointcut.partition.lower.passes import HalfPass
from jointcut.partition.plans import planfile
from jointcut.partition.plans.plan import Plan
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.search.best import STRATEGIES, best
from jointcut.partition.split import Strategy
from jointcut.wrappers.arguments.tree import Statics
from jointcut.wrappers.record import Record
from jointcut.wrappers.wrapper import CompilerWrapper

#: The strategy that decides where nothing is asked for.
DEFAULT = "best"


@dataclass(frozen=True)
class Options(Record):
    """The choices of `aot.function`, under the names that JAX gives them (PyTorch's `AOTConfig`).

    They have a JSON form where the strategy, or any other function among them, is told by name.

    Attributes:
        argnums: which positional arguments `value_and_grad` and `grad` differentiate, as in `jax.grad`; with `()` none
            is, and no derivative is traced.
        has_aux: whether the function returns `(output, aux)`, where `aux` is not differentiated.
        static_argnums, static_argnames: Python values that a program is specialised for, as in `jax.jit`.
        strategy: `"best"`, `"min_cut"`, `"save_all"`, or a function from the `Graph` to a `Plan`; see `aot.function`.
        keep_unused: whether compiled programs keep arguments that nothing reads, as in `jax.jit`.
        donate_argnums, donate_argnames: arguments whose buffers a call gives up, as in `jax.jit`; `vjp` and halves
            that are compiled as two programs keep them, since the backward may read them.
        sparse_gradients: paths of tables (`args[0]['embedding']`) that the function reads by rows; `value_and_grad`
            and `grad` give theirs as a `jax.experimental.sparse.BCOO` of the rows that were read.
        budget: the memory that a step may take: a fraction of plain JAX's activations (a float from 0.0 to 1.0), peak
            bytes of the whole step (an int, or a text such as `"1.5GiB"`), or `"device"`.
        cost: what ops take in seconds. By default budgets go by a roofline of what the device was measured to do, which
            is noted with the machine (`aot.rates` says where, and how to fix it), so that a budget leads to one plan.
            The strategy `"best"` goes by fixed rates.
        plan: a plan made before, or its text.
        filter: which arrays of the differentiated arguments are differentiated: a predicate on arrays
            (`equinox.is_inexact_array`), a class that holds them (`nnx.Param`), or a tree of booleans that the argument
            begins with, a tuple of such where `argnums` is one. The gradient of any other is None.
        wrappers: the user's own: those with `pre_compile` stand `around` the function, those with `pre_lower` are
            `passes` over the halves; one may be both.
        cache: the folder in which compiled programs are kept for other processes; True for
            `~/.cache/jointcut/programs`, False for none. By default that of the environment variable
            `JOINTCUT_CACHE_DIR`, where it is set.
    """

    argnums: int | Sequence[int] = 0
    has_aux: bool = False
    static_argnums: int | Sequence[int] | None = None
    static_argnames: str | Sequence[str] | None = None
    strategy: Strategy = DEFAULT
    keep_unused: bool = False
    donate_argnums: int | Sequence[int] = ()
    donate_argnames: str | Sequence[str] = ()
    sparse_gradients: str | Sequence[str] = ()
    budget: Budget | None = None
    cost: CostModel | None = None
    plan: Plan | str | None = None
    cache: str | os.PathLike[str] | bool | None = None
    filter: Any = None
    wrappers: Sequence[CompilerWrapper | HalfPass] = ()

    @property
    def chosen(self) -> tuple[int, ...]:
        """The differentiated positions as a tuple."""
        return (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)

    @property
    def around(self) -> tuple[Any, ...]:
        """The user's wrappers of the function, outermost first."""
        return tuple(w for w in self.wrappers if hasattr(w, "pre_compile"))

    @property
    def passes(self) -> tuple[Any, ...]:
        """The user's passes over the halves, the first one first."""
        return tuple(w for w in self.wrappers if hasattr(w, "pre_lower"))

    @property
    def donated(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The donated positions and names as tuples."""
        nums, names = self.donate_argnums, self.donate_argnames
        return _tuple(nums), _tuple(names)


def checked(function: Any, options: Options) -> Options:
    """The options in their canonical form.

    Raises `TraceError` for something that is no function or for a position that is no integer, `StrategyError` for
    an unknown strategy.
    """
    if not callable(function):
        cure = "Pass a function: aot.function(f), or @aot.function above its definition."
        raise TraceError(message("aot.function", f"was given a {type(function).__name__}, not a function.", cure))
    given_argnums: Any = options.argnums
    if given_argnums is None:
        raise TraceError(message("argnums", "is None.", "Give the position of an argument, or a tuple of positions."))
    argnums = _integers("argnums", options.argnums)
    if not isinstance(argnums, int) and len(set(argnums)) < len(argnums):
        what = f"is {options.argnums!r}, which names an argument twice."
        raise TraceError(message("argnums", what, "Give the position of an argument, or a tuple of positions."))
    nums = None if options.static_argnums is None else _integers("static_argnums", options.static_argnums)
    if not callable(options.strategy) and options.strategy not in list(STRATEGIES):
        known = choices(options.strategy, STRATEGIES) + " A function Graph -> Plan is welcome as well."
        raise StrategyError(message("strategy", f"{options.strategy!r} is unknown.", known))
    names = options.static_argnames
    names = names if names is None or isinstance(names, str) else tuple(names)
    _integers("donate_argnums", options.donate_argnums)
    positions, named = options.donated
    donated = Statics.of(function, positions or None, named or None, "donate")
    wanted_plan(options)
    _refuse_no_wrappers(options.wrappers)
    return replace(
        options,
        argnums=argnums,
        static_argnums=nums,
        static_argnames=names,
        donate_argnums=tuple(sorted(donated.argnums)),
        donate_argnames=tuple(sorted(donated.argnames)),
        sparse_gradients=_tuple(options.sparse_gradients),
        budget=plain_number(options.budget),
        cache=_folder(options.cache),
        wrappers=_tuple(options.wrappers),
    )


def _refuse_no_wrappers(wrappers: Any) -> None:
    """Raise `TraceError` for something among the user's wrappers that is none."""
    for i, wrapper in enumerate(_tuple(wrappers)):
        if not hasattr(wrapper, "pre_lower") and not (
            hasattr(wrapper, "pre_compile") and hasattr(wrapper, "post_compile")
        ):
            what = f"is a {type(wrapper).__name__}, which has neither pre_compile and post_compile nor pre_lower."
            cure = "Give objects with the methods of wrappers.wrapper.CompilerWrapper or partition.passes.HalfPass."
            raise TraceError(message(f"wrappers[{i}]", what, cure))
        if isinstance(wrapper, type):
            what, cure = f"is the class {wrapper.__name__}.", f"Give an object of it, {wrapper.__name__}()."
            raise TraceError(message(f"wrappers[{i}]", what, cure))


def way_of(options: Options) -> str:
    """How a plan is chosen, in a word or two."""
    if options.budget is not None:
        return f"budget {limit(options.budget)}"
    if options.plan is not None:
        return "plan"
    strategy = options.strategy
    return strategy if isinstance(strategy, str) else getattr(strategy, "__name__", repr(strategy))


def name_of(function: Any) -> str:
    """What messages and artefacts call a function; a `functools.partial` bears the name of what it calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


@dataclass(frozen=True)
class WantedPlan:
    """How a plan comes about: by a strategy, or by a budget."""

    strategy: Strategy
    budget: Budget | None = None


def wanted_plan(
    options: Options, strategy: Strategy | None = None, budget: Budget | None = None, plan: Plan | str | None = None
) -> WantedPlan:
    """The one of strategy, budget and plan that decides: what is asked for goes before the options.

    Raises `BudgetError` for a budget that says nothing, `PlanError` where two of the three are given.
    """
    if strategy is None and budget is None and plan is None:
        strategy = None if options.strategy == DEFAULT else options.strategy
        budget, plan = options.budget, options.plan
    given = {"strategy": strategy, "budget": budget, "plan": plan}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise PlanError(message(" and ".join(named), "are given together.", "Give one: each of them decides the plan."))
    if budget is not None:
        limit(budget)
    if isinstance(plan, str):
        return WantedPlan(functools.partial(planfile.loads, plan))
    if plan is not None:
        return WantedPlan(lambda graph: plan)
    strategy = strategy or DEFAULT
    if strategy == DEFAULT and options.cost is not None:
        strategy = functools.partial(best, cost=options.cost)
    return WantedPlan(strategy, budget)


def disjoint(options: Options, fixed: Collection[int], count: int | None) -> None:
    """Raise `TraceError` where an argument is both static and differentiated.

    `fixed` are the static positions, `count` how many positional parameters the function has, if that is known.
    """
    chosen = {n + count if n < 0 and count is not None else n for n in options.chosen}
    if overlap := sorted(chosen & set(fixed)):
        cure = "Take it out of one of the two: a static argument is a Python value and has no gradient."
        raise TraceError(message("argnums and static_argnums", f"both name position {overlap[0]}.", cure))


def _folder(cache: Any) -> str | bool | None:
    if cache is None or isinstance(cache, bool):
        return cache
    if not isinstance(cache, str | os.PathLike):
        what = f"is a {type(cache).__name__}, not a folder."
        raise CacheError(message("cache", what, "Give a path, True for ~/.cache/jointcut/programs, or False for none."))
    return os.fspath(cache)


def _integers(name: str, given: Any) -> int | tuple[int, ...]:
    items: Sequence[Any] = _tuple(given)
    for item in items:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            cure = "Give the position of an argument, or a tuple of positions."
            raise TraceError(message(name, f"holds {item!r}, not an integer.", cure))
    return int(given) if hasattr(given, "__index__") else tuple(int(i) for i in items)


def _tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
