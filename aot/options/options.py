"""List every choice a user can make, with its default."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jointcut.aot.hooks.saved_arrays import SavedArrays
from jointcut.aot.hooks.spilling import Spill, read_spill
from jointcut.aot.options.conventions import NAMED, Conventions
from jointcut.aot.options.limits import Budget, limit, plain_number
from jointcut.aot.options.policies import GivenPolicy, has_forms, read_policy
from jointcut.aot.options.sizes import OF_ONE_SIZE, read_sizes
from jointcut.aot.options.target import Target, backend_for, current, target
from jointcut.aot.options.tiles import GivenShapes, GivenTiles, read_shapes, read_tiles
from jointcut.aot.options.xla import GivenCompilerOptions, read_compiler_options
from jointcut.partition.errors import (
    BudgetError,
    CacheError,
    PlanError,
    PolicyError,
    StrategyError,
    TraceError,
    choices,
    message,
)
from jointcut.partition.passes import HalfPass
from jointcut.partition.plans import planfile
from jointcut.partition.plans.plan import Plan
from jointcut.partition.prices.constraints import Policy, constraints_of
from jointcut.partition.prices.cost import CostModel
from jointcut.partition.prices.rules import Constraint
from jointcut.partition.program.graph import Graph
from jointcut.partition.program.jax import abstract, runtime
from jointcut.partition.program.roles import Tile
from jointcut.partition.search.best import STRATEGIES, best
from jointcut.partition.split import Strategy
from jointcut.wrappers.arguments.tree import Statics
from jointcut.wrappers.record import Record
from jointcut.wrappers.stack import refuse_no_wrappers
from jointcut.wrappers.wrapper import CompilerWrapper, JointPass

#: The strategy used when none is requested.
DEFAULT = "best"

#: The checks that a call may ask for.
NONFINITE = "nonfinite"


@dataclass(frozen=True)
class Options(Record):
    """The choices of `aot.function`, under the names that JAX gives them (PyTorch's `AOTConfig`).

    In JSON the strategy, and any other function among them, is written by name.

    Attributes:
        argnums: positional arguments that `value_and_grad` and `grad` differentiate, as in `jax.grad`; with `()`, no
            derivative is traced.
        has_aux: whether the function returns `(output, aux)`, where `aux` is not differentiated.
        static_argnums, static_argnames: Python values that a program is specialised for, as in `jax.jit`.
        strategy: `"best"`, `"min_cut"`, `"save_all"`, or a function from the `Graph` to a `Plan`; see `aot.function`.
        keep_unused: whether compiled programs keep arguments that nothing reads, as in `jax.jit`.
        donate_argnums, donate_argnames: arguments whose buffers a call gives up, as in `jax.jit`. They are not donated
            to `vjp` or to halves compiled as two programs, since the backward may read them.
        sparse_gradients: paths of tables (`args[0]['embedding']`) that the function reads by rows; `value_and_grad`
            and `grad` return their gradients as a `jax.experimental.sparse.BCOO` of the rows that were read.
        budget: the memory that a step may take: a fraction of plain JAX's activations (a float from 0.0 to 1.0; where
            plain JAX has no gradient, through a `lax.while_loop`, a fraction of the activations with all saved), peak
            bytes of the whole step (an int, or a text such as `"1.5GiB"`), or `"device"`.
        devices: how many devices share the batch where a step is part of a program of the user's, and it is not known
            how its arrays lie; by default those of the target.
        cost: the model of the seconds that each op takes. The default for budgets is a roofline of the device's
            measured rates. They are stored for the machine, so that a budget always leads to the same plan
            (`aot.rates` says where, and how to set them). The strategy `"best"` uses fixed rates.
        plan: a plan made before, or its text.
        filter: which arrays of the differentiated arguments are differentiated: a predicate on arrays
            (`equinox.is_inexact_array`), a class that holds them (`nnx.Param`), or a tree of booleans that is a prefix
            of the argument; a tuple of trees if `argnums` is a tuple. The gradient of any other array is None.
        wrappers: the user's wrappers. Those with `pre_compile` go `around` the function, those with `before_cut` are
            `rewrites` of the joint program, and those with `pre_lower` are `passes` over the halves; one wrapper may be
            all of them.
        derivatives: the choice at singular points: `"jax"`, `"finite"`, `"pytorch"`, or a record of `aot.conventions`.
        check: `"nonfinite"`, or None: whether every call looks at its results, and raises if one is not finite.
        policy: the demands on single values: a dict from keys to `aot.MUST_SAVE` and the like, or a
            policy of `jax.checkpoint_policies`. Canonical options hold the pairs of the dict, in order.
        offload: whether a budget's search may also offload values that the policy does not name.
        error: the relative error of the gradient up to which a budget's search may let values wait in bfloat16.
        check_offload: whether a small step is checked before anything is first offloaded on a kind of device.
        saved_arrays: the functions that saved arrays pass through, and which arrays these are for.
        spill: the folder in which saved arrays wait for the backward in files, or None.
        cache: the folder that keeps compiled programs for other processes; True for `~/.cache/jointcut/programs`, False
            for none. The default is the environment variable `JOINTCUT_CACHE_DIR`, if set.
        target: the device that everything is planned and compiled for, or its name; see `aot.target`. The default is
            the target of the `with` statement around the trace, or the one on whose devices the arguments lie, or
            else JAX's default device.
        tiles: whether rows may run in blocks, where a budget asks for it or the model of a GPU or TPU gains by it; or a
            dict from paths of arguments, whose first axis has the rows, or names of sizes to numbers of blocks.
        shapes: names for sizes, as `aot.shapes` writes them, by path. Canonical options hold pairs.
        compiler_options: XLA's options for the programs, as in `jax.jit`. Canonical options hold pairs.
        sizes: `"dynamic"`, or None: whether calls of all sizes of an axis share one program.
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
    wrappers: Sequence[CompilerWrapper | JointPass | HalfPass] = ()
    derivatives: str | Conventions = "jax"
    check: str | None = None
    policy: GivenPolicy | Policy | None = None
    offload: bool = False
    check_offload: bool = True
    saved_arrays: SavedArrays | None = None
    spill: str | os.PathLike[str] | Spill | None = None
    error: float | None = None
    devices: int | None = None
    target: str | Target | None = None
    tiles: GivenTiles = True
    shapes: GivenShapes = ()
    compiler_options: GivenCompilerOptions = None
    sizes: str | None = None

    @property
    def goal(self) -> Target | None:
        """The target of the options, or else of the current `with` statement; None for JAX's default device."""
        return current() if self.target is None else target(self.target)

    @property
    def sharing(self) -> int | None:
        """How many devices share the batch in a program of the user's: as given, or those of the target."""
        return self.devices or (self.goal.count if self.goal is not None and self.goal.count > 1 else None)

    @property
    def measures_error(self) -> bool:
        """Whether a budget's search measures the error of the gradient."""
        return self.error is not None and self.budget is not None

    @property
    def chosen(self) -> tuple[int, ...]:
        """The differentiated positions as a tuple."""
        return (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)

    @property
    def conventions(self) -> Conventions:
        """The derivatives that are chosen at singular points."""
        return NAMED[self.derivatives] if isinstance(self.derivatives, str) else self.derivatives

    @property
    def cost_of_forms(self) -> CostModel | None:
        """The cost model that leaves out slower lossless forms; None under a budget, where bytes count."""
        return self.cost if self.budget is None else None

    @property
    def spilled(self) -> Spill | None:
        """The folder in which residuals wait in files; None without one."""
        return read_spill(self.spill)

    @property
    def around(self) -> tuple[Any, ...]:
        """The user's wrappers of the function, outermost first."""
        return tuple(w for w in self.wrappers if hasattr(w, "pre_compile"))

    @property
    def rewrites(self) -> tuple[Any, ...]:
        """The user's passes over the joint program, in order."""
        return tuple(w for w in self.wrappers if hasattr(w, "before_cut"))

    @property
    def passes(self) -> tuple[Any, ...]:
        """The user's passes over the halves, in order."""
        return tuple(w for w in self.wrappers if hasattr(w, "pre_lower"))

    @property
    def donated(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The donated positions and names as tuples."""
        nums, names = self.donate_argnums, self.donate_argnames
        return _tuple(nums), _tuple(names)


def with_budget(options: Options, budget: Budget) -> Options:
    """Return the options with a budget instead of strategy, budget and plan."""
    return replace(options, strategy=DEFAULT, budget=budget, plan=None)


def validated(function: Any, options: Options) -> Options:
    """Return the options in canonical form.

    Raises `TraceError` if `function` is not callable or a position is not an integer, and `StrategyError` for an
    unknown strategy, `PolicyError` for a policy that is none.
    """
    if not callable(function):
        cure = "Pass a function: aot.function(f), or @aot.function above its definition."
        raise TraceError(message("aot.function", f"was given a {type(function).__name__}, not a function.", cure))
    argnums = _argnums(options.argnums)
    nums = None if options.static_argnums is None else _integers("static_argnums", options.static_argnums)
    if not callable(options.strategy) and options.strategy not in list(STRATEGIES):
        known = choices(options.strategy, STRATEGIES) + " A function Graph -> Plan is welcome as well."
        raise StrategyError(message("strategy", f"{options.strategy!r} is unknown.", known))
    names = options.static_argnames
    names = names if names is None or isinstance(names, str) else tuple(names)
    if not isinstance(options.derivatives, Conventions) and options.derivatives not in list(NAMED):
        known = choices(options.derivatives, NAMED) + " A choice of your own is made by aot.conventions(...)."
        raise TraceError(message("derivatives", f"{options.derivatives!r} is unknown.", known))
    _integers("donate_argnums", options.donate_argnums)
    positions, donated_names = options.donated
    donated = Statics.of(function, positions or None, donated_names or None, "donate")
    _check(options)
    check_error(options)
    wanted_plan(options)
    refuse_no_wrappers(_tuple(options.wrappers))
    return replace(
        options,
        argnums=argnums,
        static_argnums=nums,
        static_argnames=names,
        donate_argnums=tuple(sorted(donated.argnums)),
        donate_argnames=tuple(sorted(donated.argnames)),
        sparse_gradients=_tuple(options.sparse_gradients),
        budget=plain_number(options.budget),
        cache=_folder(options.cache) if options.sizes is None else False,
        wrappers=_tuple(options.wrappers),
        policy=read_policy(options.policy),
        spill=read_spill(options.spill),
        target=None if options.target is None else target(options.target),
        tiles=read_tiles(options.tiles),
        shapes=read_shapes(options.shapes),
        compiler_options=read_compiler_options(options.compiler_options),
    )


def _argnums(given: Any) -> Any:
    """Return the positions that are differentiated, each once; raises `TraceError` for an invalid position."""
    cure = "Give the position of an argument, or a tuple of positions."
    if given is None:
        raise TraceError(message("argnums", "is None.", cure))
    argnums = _integers("argnums", given)
    if not isinstance(argnums, int) and len(set(argnums)) < len(argnums):
        raise TraceError(message("argnums", f"is {given!r}, which names an argument twice.", cure))
    return argnums


def _check(options: Options) -> None:
    """Raise `TraceError` for an unfit check or saved arrays, and `BudgetError` for an unfit number of devices."""
    if options.saved_arrays is not None and not isinstance(options.saved_arrays, SavedArrays):
        what = f"is a {type(options.saved_arrays).__name__}."
        raise TraceError(message("saved_arrays", what, "Give aot.saved_arrays(pack, unpack)."))
    if options.saved_arrays is not None and options.spill is not None:
        cure = "Give one of them: pack may itself write to a file."
        raise TraceError(message("saved_arrays and spill", "are given together.", cure))
    if options.check not in (None, NONFINITE):
        raise TraceError(message("check", f"{options.check!r} is unknown.", choices(options.check, [NONFINITE])))
    if options.check is not None and any(options.donated):
        what = "are given together, and a donated argument is gone when a failed call is replayed."
        cure = "Donate in the function that updates, or leave check out and look at one call with aot.first_nonfinite."
        raise TraceError(message("check and donate_argnums", what, cure))
    read_sizes(options.sizes, [x for x in OF_ONE_SIZE if getattr(options, x) not in (getattr(Options, x), False)])
    devices = options.devices
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
        raise BudgetError(message("devices", f"is {devices!r}.", "Give how many devices share a batch, such as 8."))


def check_error(options: Options) -> None:
    """Raise `TraceError` for an invalid bound on the error, or for one beside forms whose error has no bound."""
    if (error := options.error) is None:
        return
    if isinstance(error, bool) or not isinstance(error, int | float) or not 0 < error < 1:
        raise TraceError(message("error", f"is {error!r}.", "Give a relative error, such as 1e-2."))
    beside = ["policy"] * has_forms(options.policy) + ["saved_arrays"] * (options.saved_arrays is not None)
    if beside:
        what = "are given together, and both change what is saved."
        raise TraceError(message(f"error and {beside[0]}", what, "Give one; Cut.check_forms measures aot.SAVE_AS."))


def way_of(options: Options) -> str:
    """Return in a word or two how a plan is chosen."""
    if options.budget is not None:
        return f"budget {limit(options.budget)}"
    if options.plan is not None:
        return "plan"
    strategy = options.strategy
    return strategy if isinstance(strategy, str) else getattr(strategy, "__name__", repr(strategy))


def name_of(function: Any) -> str:
    """Return a function's name in messages and artefacts; a `functools.partial` has the name of its function."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


@dataclass(frozen=True)
class WantedPlan:
    """How a plan is chosen: by a strategy, within a budget, or as a plan made before, which `keeps_forms`.

    If values wait in smaller forms, the program also keeps the values that must stay exact beside them.
    """

    strategy: Strategy
    budget: Budget | None = None
    keeps_forms: bool = False
    tiles: tuple[Tile, ...] = ()


def demands(options: Options, graph: Graph) -> tuple[Constraint, ...]:
    """Return the constraints that the options' policy puts on values of a program.

    Raises as `constraints_of` does, and `PolicyError` where the policy offloads and the device has no host memory.
    """
    policy = read_policy(options.policy)
    in_nested = backend_for(options.goal).moves_in_nested
    found = () if policy is None else constraints_of(policy, graph, in_nested=in_nested)
    if options.goal is not None:  # GPUs and TPUs have host memory
        return found
    if options.offload:
        _refuse_without_host("offload", "is True")
    if asking := next((c for c in found if c.demand.is_for_host), None):
        _refuse_without_host(f"policy: {graph.where(asking.value)}", f"is {asking.reason}")
    return found


def _refuse_without_host(where: str, asked: str) -> None:
    """Raise `PolicyError` if the device has no host memory that it copies to by itself."""
    kinds = runtime.memory_kinds()
    if abstract.HOST not in kinds:
        what = f"{asked}, and the device has no {abstract.HOST} memory; it has {', '.join(kinds)}."
        raise PolicyError(message(where, what, "Keep values on the device, or ask for MUST_RECOMPUTE."))


def wanted_plan(
    options: Options, strategy: Strategy | None = None, budget: Budget | None = None, plan: Plan | str | None = None
) -> WantedPlan:
    """Choose between strategy, budget and plan; the arguments take precedence over the options.

    Raises `BudgetError` for an invalid budget, and `PlanError` if two of the three are given.
    """
    if strategy is None and budget is None and plan is None:
        strategy = None if options.strategy == DEFAULT else options.strategy
        budget, plan = options.budget, options.plan
    choosers = {"strategy": strategy, "budget": budget, "plan": plan}
    if len(names := [name for name, value in choosers.items() if value is not None]) > 1:
        raise PlanError(message(" and ".join(names), "are given together.", "Give one: each of them decides the plan."))
    if budget is not None:
        limit(budget)
    if isinstance(plan, str):
        return WantedPlan(functools.partial(planfile.loads, plan), None, '"form": ' in plan, planfile.tiles_of(plan))
    if plan is not None:
        return WantedPlan(lambda graph: plan, keeps_forms=bool(plan.stored), tiles=plan.tiles)
    strategy = strategy or DEFAULT
    if strategy == DEFAULT and options.cost is not None:
        strategy = functools.partial(best, cost=options.cost)
    return WantedPlan(strategy, budget)


def disjoint(options: Options, fixed: Collection[int], count: int | None) -> None:
    """Raise `TraceError` if an argument is both static and differentiated.

    `fixed` are the static positions. `count` is the number of positional parameters, or None if it is not known.
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


def _integers(name: str, positions: Any) -> int | tuple[int, ...]:
    items: Sequence[Any] = _tuple(positions)
    for item in items:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            cure = "Give the position of an argument, or a tuple of positions."
            raise TraceError(message(name, f"holds {item!r}, not an integer.", cure))
    return int(positions) if hasattr(positions, "__index__") else tuple(int(i) for i in items)


def _tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
