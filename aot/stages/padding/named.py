"""Give names to the sizes of arguments that vary, and choose buckets."""

from __future__ import annotations

import functools
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jointcut.aot.trace.differences import short_line
from jointcut.aot.trace.shapes import shapes
from jointcut.partition.program.cells import call_text
from jointcut.partition.program.jax import abstract, runtime
from jointcut.partition.program.places import our_folders, place
from jointcut.partition.program.sizes import names, numbers
from jointcut.wrappers.arguments.paths import tree_paths

#: Arrays are padded to a power of two, of at least so many rows and at most so many bytes more than that.
_LEAST_ROWS, _LITTLE_ROWS, _LITTLE_BYTES = 8, 64, 2**16

#: The names of so many calls are kept, by the types of their arrays.
_KEPT_CALLS = 1024

#: A bucket is used again for sizes down to this part of it.
_SMALLEST_PART = 8

#: An array of a call: its argument, its place among the argument's leaves, and the array.
Located = tuple[Any, int, Any]

#: What a function may raise if a size is not a number. It runs again with numbers, so an error of its own comes again.
_NEEDS_NUMBER = (
    *(TypeError, ValueError, AttributeError, NotImplementedError, AssertionError, LookupError, OverflowError),
    jax.errors.InconclusiveDimensionOperation,
)

#: Two sizes that differ by so much in all calls are one size, such as inputs and their targets, shifted by one.
_MOST_APART = 2


@dataclass(frozen=True)
class NamedSizes:
    """The sizes of one call that have names.

    Attributes:
        shapes: the shape of each array with such a size, by its argument and its place among the argument's leaves.
        true: the size of each name.
        bucket: the size to which each name is padded.
        places: in words, the axes of each name.
    """

    shapes: Mapping[tuple[Any, int], tuple[Any, ...]]
    true: Mapping[str, int]
    bucket: Mapping[str, int]
    places: Mapping[str, str]
    _seen: Any = field(repr=False, default=None)

    @functools.cached_property
    def scalars(self) -> dict[str, Any]:
        """The true sizes as arrays."""
        return {name: jnp.asarray(np.int32(size)) for name, size in self.true.items()}

    @property
    def key(self) -> Any:
        """The bucket, on which programs depend."""
        return tuple(self.bucket.items())

    def padded(self, x: Any, shape: Sequence[Any]) -> Any:
        """Return an array with zeros behind its end. That happens on the host, where no size needs a program."""
        size = numbers(shape, self.bucket)
        if size == x.shape:
            return jnp.asarray(x)
        if runtime.is_tracer(x):
            return jnp.pad(x, [(0, n - m) for n, m in zip(size, x.shape, strict=True)])
        made = np.zeros(size, x.dtype)
        made[tuple(slice(n) for n in x.shape)] = np.asarray(x)
        return jnp.asarray(made)

    def cut(self, x: Any, shape: Sequence[Any]) -> Any:
        """Return a padded array without what is behind its end."""
        size = numbers(shape, self.true)
        if size == x.shape:
            return x
        part = tuple(map(slice, size))
        return x[part] if runtime.is_tracer(x) else jnp.asarray(np.asarray(x)[part])

    @property
    def most(self) -> str:
        """`s0 up to 64, s1 up to 8`."""
        return ", ".join(f"{name} up to {self.bucket[name]}" for name in sorted(self.bucket))


@dataclass(frozen=True)
class _Axis:
    """An axis of an array among the arguments."""

    argument: Any
    leaf: int
    axis: int
    path: str
    array: int

    @functools.cached_property
    def group(self) -> tuple[str, int]:
        """The arrays that share their buckets: the items of a list."""
        head, *rest = re.split(r"(?<=\])", self.path, maxsplit=1)
        return head + re.sub(r"\[\d+\]", "[*]", "".join(rest)), self.axis

    def __str__(self) -> str:
        """`axis 0 of args[1]`."""
        return f"axis {self.axis} of {self.path}"


@dataclass
class _Seen:
    """The sizes of the arrays of one structure of arguments, in the calls by which the names were given.

    Attributes:
        axes: all axes.
        calls: sizes of all axes, for the first call and for each that changed the names.
        given: for each axis that has a name, the name and what is added to it.
        varied: the arrays and axes whose sizes have varied in calls of any structure.
        numbers: those of them whose size some op needs as a number.
    """

    axes: list[_Axis]
    calls: list[tuple[int, ...]]
    varied: set[tuple[str, int]]
    numbers: set[tuple[str, int]]
    given: dict[int, tuple[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Give the names that are known from calls of other structures, such as lists of another length."""
        self._name()

    def note(self, sizes: tuple[int, ...]) -> bool:
        """Take the sizes of a call into account; return whether they changed the names."""
        known = zip(self.axes, sizes, self.calls[0], strict=True)
        fits = all(n == m or i in self.given or axis.group in self.numbers for i, (axis, n, m) in enumerate(known))
        if fits and all(len(several) == 1 for several in self._sizes(sizes).values()):
            return False
        self.calls.append(sizes)
        self._name()
        return True

    def known(self, sizes: tuple[int, ...]) -> dict[str, int]:
        """Return the size of each name, without names whose axes have no rows."""
        return {name: min(several) for name, several in self._sizes(sizes).items() if min(several) > 0}

    def _sizes(self, sizes: tuple[int, ...]) -> dict[str, set[int]]:
        found = dict[str, set[int]]()
        for i, (name, more) in self.given.items():
            found.setdefault(name, set()).add(sizes[i] - more)
        return found

    def _name(self) -> None:
        columns = {i: tuple(call[i] for call in self.calls) for i in range(len(self.axes))}
        self.varied.update(self.axes[i].group for i, column in columns.items() if len(set(column)) > 1)
        varying = [i for i in columns if self.axes[i].group in self.varied - self.numbers]
        bases, given = dict[tuple[int, ...], str](), dict[int, tuple[str, int]]()
        for i in sorted(varying, key=lambda i: columns[i]):
            column = columns[i]
            for more in range(_MOST_APART + 1):
                if (base := tuple(n - more for n in column)) in bases:
                    given[i] = bases[base], more
                    break
            else:
                bases[column] = f"s{len(bases)}"
                given[i] = bases[column], 0
        self.given = given

    def give_up(self, called: Sequence[str]) -> None:
        """Leave the axes of some names to be numbers."""
        self.numbers.update(self.axes[i].group for i, (name, _) in self.given.items() if name in called)
        self._name()


@dataclass
class SizeNames:
    """The names that the sizes of a function's arguments have had."""

    _seen: dict[Any, _Seen] = field(default_factory=dict)
    _varied: set[tuple[str, int]] = field(default_factory=set)
    _numbers: set[tuple[str, int]] = field(default_factory=set)
    _buckets: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    _calls: dict[Any, NamedSizes | None] = field(default_factory=dict)

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], without: Sequence[int] = ()) -> NamedSizes | None:
        """Return the names for a call; None if no size has varied so far. Arguments in `without` get no names."""
        leaves, tree = jax.tree.flatten((tuple(args), kwargs))
        key = tree, tuple(without), tuple(map(_kind, leaves))
        if key not in self._calls:
            found = self._of(args, kwargs, without)
            if len(self._calls) >= _KEPT_CALLS:
                self._calls.clear()
            self._calls[key] = found
        return self._calls[key]

    def _of(self, args: Sequence[Any], kwargs: Mapping[str, Any], without: Sequence[int]) -> NamedSizes | None:
        arguments = [(i, x) for i, x in enumerate(args) if i not in without] + list(kwargs.items())
        trees, arrays = [], list[Located]()
        for at, argument in arguments:
            leaves, tree = jax.tree.flatten(argument)
            trees.append((at, tree))
            arrays += [(at, i, x) for i, x in enumerate(leaves) if is_plain(x)]

        def paths() -> dict[Any, Sequence[str]]:
            named = ((at, f"args[{at}]" if isinstance(at, int) else f"kwargs[{at!r}]", x) for at, x in arguments)
            return {at: tree_paths(path, jax.tree.structure(x)) for at, path, x in named}

        return self.among(tuple(trees), arrays, paths)

    def among(self, tree: Any, arrays: Sequence[Located], paths: Callable[[], Mapping[Any, Sequence[str]]]) -> Any:
        """Return the names for arrays of a call, as `of` does; `tree` is its structure, `paths` name its leaves."""
        sizes = tuple(n for _, _, x in arrays for n in x.shape)
        key = tree, tuple((at, i, x.ndim, x.dtype) for at, i, x in arrays)
        if (seen := self._seen.get(key)) is None:
            known = paths()
            placed = enumerate(arrays)
            axes = [_Axis(at, i, axis, known[at][i], n) for n, (at, i, x) in placed for axis in range(x.ndim)]
            seen = self._seen[key] = _Seen(axes, [sizes], self._varied, self._numbers)
        if seen.note(sizes):
            self._calls.clear()
        true = seen.known(sizes)
        return self._named(seen, arrays, true) if true else None

    def tried(self, named: NamedSizes, run: Callable[[], Any], note: Callable[[str], None]) -> Any:
        """Run with names; return None, and note which size must be a number and where, if one must."""
        try:
            return run()
        except _NEEDS_NUMBER as error:
            if is_fault(error):
                raise
            note(f"{self.give_up(named, str(error))} has a program for each size: {failed(error)}")
            return None

    def give_up(self, named: NamedSizes, why: str) -> str:
        """Let the sizes that an error names be numbers from now on, or all if it names none; say so in words."""
        called = [name for name in named.true if name in names(why)] or list(named.true)
        named._seen.give_up(called)
        self._calls.clear()
        return " and ".join(named.places[name] for name in called)

    def _named(self, seen: _Seen, arrays: Sequence[Located], true: dict[str, int]) -> NamedSizes:
        made, groups, places = dict[tuple[Any, int], tuple[Any, ...]](), dict[str, list[Any]](), dict[str, list[str]]()
        little = dict[str, int]()
        for i in sorted(seen.given):
            (name, more), where = seen.given[i], seen.axes[i]
            if name in true:
                x = arrays[where.array][2]
                at = where.argument, where.leaf
                shape = made.get(at, tuple(x.shape))
                made[at] = *shape[: where.axis], _size(name) + more, *shape[where.axis + 1 :]
                groups.setdefault(name, []).append(where.group)
                places.setdefault(name, []).append(str(where))
                row = math.prod(x.shape) // max(x.shape[where.axis], 1) * x.dtype.itemsize
                little[name] = max(little.get(name, 0), row)
        bucket = self._bucket(true, {name: group[0] for name, group in groups.items()}, little)
        words = {name: _listed(several) for name, several in places.items()}
        return NamedSizes(made, true, bucket, words, seen)

    def _bucket(
        self, true: Mapping[str, int], groups: Mapping[str, tuple[str, int]], rows: Mapping[str, int]
    ) -> dict[str, int]:
        needed = dict[tuple[str, int], int]()
        for name, size in true.items():
            needed[groups[name]] = max(needed.get(groups[name], 0), size)
        chosen = dict[str, int]()
        for name in sorted(true):
            used, size = self._buckets.setdefault(groups[name], []), needed[groups[name]]
            fits = [b for b in used if size <= b <= max(_SMALLEST_PART * size, _LITTLE_ROWS)]
            if not fits:
                least = min(max(_LITTLE_BYTES // max(rows[name], 1), _LEAST_ROWS), _LITTLE_ROWS)
                fits = [2 ** math.ceil(math.log2(max(size, least)))]
                used.append(fits[0])
            chosen[name] = min(fits)
        return chosen


def is_plain(x: Any) -> bool:
    """Whether an argument is an array on one device."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind in "biufc" or abstract.is_plain(jax.typeof(x))
    is_array = isinstance(x, jax.Array) and not runtime.is_tracer(x) and not isinstance(x, jax.Ref)
    return is_array and abstract.is_plain(jax.typeof(x)) and len(x.sharding.device_set) == 1


def _kind(x: Any) -> Any:
    """Return what the names depend on: the type of an array and its devices; the class of anything else."""
    if isinstance(x, np.ndarray):
        return x.shape, x.dtype
    known = type(x), getattr(x, "aval", None)
    return known if runtime.is_tracer(x) else (*known, getattr(x, "sharding", None))


@functools.cache
def _size(name: str) -> Any:
    return shapes(name, "float32").shape[0]


def _listed(places: Sequence[str]) -> str:
    more = f" and {len(places) - 2} more" if len(places) > 2 else ""
    return " and ".join(places[:2]) + more


def failed(error: BaseException) -> str:
    """Say in a line what a function did with a symbolic size that needs a number, and where."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(our_folders())]
    calls = [call_text(f.filename, f.lineno or 0, f.name) for f in reversed(frames)]
    line = place("", [*calls, *getattr(error, "__notes__", ())]).line
    return f"{text} ({short_line(line)})" if line else text


def is_fault(error: BaseException) -> bool:
    """Whether a line of ours raised an error that is not ours by its class, which is no word about a size."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return last.filename.startswith(our_folders()) and type(error).__module__ == "builtins"
