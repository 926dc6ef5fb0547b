"""Run a command: read its options, ask jointcut, and print the answer.

`facts` gathers the results of each command; they are printed as JSON, or as text by `printed`. The texts of the help
are in `usage`. A user's mistake is a `JointcutError`, whose message goes to standard error.
"""

from __future__ import annotations

import errno
import json
import re
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from jointcut.aot.cache.location import DEFAULT_FOLDER, FOLDER
from jointcut.aot.cache.store import Store
from jointcut.aot.call.doctor.doctor import doctor as doctor_for
from jointcut.aot.call.doctor.gradients import gradients_taken
from jointcut.aot.call.largest import largest_of
from jointcut.aot.command import facts, printed, usage
from jointcut.aot.command.named import as_it_is, named, users_code, with_numbers
from jointcut.aot.export import artefact
from jointcut.aot.export.contract import Contract
from jointcut.aot.export.export import known_platforms
from jointcut.aot.options.limits import Budget, limit
from jointcut.aot.options.policies import SAVE_AS, Demand
from jointcut.aot.options.scopes import budget as part_budget
from jointcut.aot.options.target import target as target_named
from jointcut.aot.report.compare import stored
from jointcut.aot.report.compare.diff import diff as difference
from jointcut.partition.errors import CacheError, JointcutError, choices, message
from jointcut.partition.packing.forms import FORMS
from jointcut.partition.prices.keys import Key
from jointcut.partition.prices.rules import CheckpointPolicy
from jointcut.partition.search.best import STRATEGIES

#: Exit codes: the user answered no, or a function does not fit; an argument cannot be used; a fault of jointcut.
NO, REFUSED, FAULT = 1, 2, 3


class _Arguments(click.types.StringParamType):
    def get_missing_message(self, *_: Any, **__: Any) -> str:
        """Say what the option is for."""
        return "Name the arguments, or a function that returns them: --example train:batch"


_EXAMPLE = click.option("--example", type=_Arguments(), required=True, metavar="MODULE:NAME", help=usage.EXAMPLE)
_AS_JSON = click.option("--json", "as_json", is_flag=True, help=usage.JSON)
_EVERYTHING = click.option("--all", "everything", is_flag=True, help=usage.ALL)
_OF_CLICK = (click.ClickException, click.exceptions.Exit, click.Abort)


class _Refused(click.ClickException):
    """A message for the user, with the exit code `REFUSED`."""

    exit_code = REFUSED


@dataclass(frozen=True)
class _Reported:
    """Give each error its exit code: a user's mistake becomes a message, any other error is a fault."""

    with_traceback: bool

    def __enter__(self) -> None:
        """Nothing is needed."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise an error that click turns into an exit code; it handles its own errors and a closed pipe already."""
        if not isinstance(error, Exception) or isinstance(error, _OF_CLICK):
            return
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            return
        is_mistake = isinstance(error, JointcutError)
        if self.with_traceback or not is_mistake:
            traceback.print_exception(error)
            raise click.exceptions.Exit(REFUSED if is_mistake else FAULT) from error
        raise _Refused(str(error)) from error


class _Commands(click.Group):
    """Commands whose errors are reported."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        with _Reported(ctx.params["with_traceback"]):
            return super().invoke(ctx)


@click.group(
    cls=_Commands,
    help=usage.MAIN,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--traceback", "with_traceback", is_flag=True, help=usage.TRACEBACK)
@click.version_option(package_name="jointcut", message="%(package)s %(version)s")
def main(with_traceback: bool) -> None:
    """Read the options that all commands share."""


def _tell(data: facts.JSON, as_json: bool, text: Callable[[], str]) -> None:
    click.echo(json.dumps(data, indent=1, allow_nan=False) if as_json else text())


# ----------------------------------------------------------------------------------------------- users' functions


def _argnums(context: click.Context, option: click.Parameter, text: str | None) -> int | tuple[int, ...] | None:
    if text is None:
        return None
    if not re.fullmatch(r"\s*-?\d+\s*(,\s*-?\d+\s*)*", text):
        raise click.BadParameter(f"{text!r} is no position, nor several joined by commas.", context, option)
    places = [int(place) for place in text.split(",")]
    return tuple(places) if len(places) > 1 else places[0]


def _budget(context: click.Context, option: click.Parameter, text: str | None) -> Budget | None:
    """Return a number with a point as a fraction; pass any other text on to `aot.function`."""
    if text is None:
        return None
    budget = float(text) if re.fullmatch(r"\d*\.\d+|\d+\.", text.strip()) else text
    limit(budget)
    return budget


def _target(context: click.Context, option: click.Parameter, text: str | None) -> AbstractContextManager[Any]:
    """Return a context in which functions are traced for the target, if one is named."""
    return nullcontext() if text is None else target_named(text)


def _platforms(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    return None if text is None else known_platforms([name.strip() for name in text.split(",") if name.strip()])


def _sizes(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> dict[str, int]:
    sizes = {}
    for text in texts:
        match = re.fullmatch(r"\s*([^\W\d]\w*)\s*=\s*(\d+)\s*", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is no name=number, such as b=8.", context, option)
        sizes[match[1]] = int(match[2])
    return sizes


def _policy(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> dict[Key, tuple[Demand, ...]]:
    policy: dict[Key, tuple[Demand, ...]] = {}
    known = {**CheckpointPolicy.__members__, **{f"SAVE_AS:{dtype}".upper(): SAVE_AS(dtype) for dtype in FORMS}}
    for text in texts:
        key, _, demand = text.rpartition("=")
        kind, _, size = demand.partition(":")
        found = part_budget(size) if kind.lower() == "budget" else known.get(demand.upper())
        if not key or found is None:
            names = choices(demand.upper(), [*known, "BUDGET:300MiB"])
            raise click.BadParameter(f"{text!r} is no key=demand. {names}", context, option)
        policy[key] = (*policy.get(key, ()), found)
    return policy


def _of_a_function(command: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments and options of commands on a user's function."""
    options = [
        click.argument("function"),
        _EXAMPLE,
        click.option("--argnums", metavar="N[,N...]", callback=_argnums, help=usage.ARGNUMS),
        click.option("--size", "sizes", metavar="NAME=N", multiple=True, callback=_sizes, help=usage.SIZE),
        click.option("--budget", metavar="BUDGET", callback=_budget, help=usage.BUDGET),
        click.option("--target", metavar="TARGET", callback=_target, help=usage.TARGET),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command(help=usage.EXPLAIN)
@_of_a_function
@click.option("--strategy", type=click.Choice(sorted(STRATEGIES)), help=usage.STRATEGY)
@click.option("--policy", metavar="KEY=DEMAND", multiple=True, callback=_policy, help=usage.POLICY)
@click.option("--spill", metavar="FOLDER", type=click.Path(path_type=Path), help=usage.SPILL)
@click.option("--compile/--no-compile", "with_compile", default=True, show_default=True, help=usage.COMPILE)
@click.option("--save", "file", metavar="FILE", type=click.Path(path_type=Path), help=usage.SAVE)
@click.option("--perfetto", "trace", metavar="FILE", type=click.Path(path_type=Path), help=usage.PERFETTO)
@click.option("--pprof", "profile", metavar="FILE", type=click.Path(path_type=Path), help=usage.PPROF)
@_EVERYTHING
@_AS_JSON
def explain(
    function: str,
    example: str,
    argnums: int | tuple[int, ...] | None,
    sizes: dict[str, int],
    budget: Budget | None,
    target: AbstractContextManager[Any],
    strategy: str | None,
    policy: dict[Key, tuple[Demand, ...]],
    spill: Path | None,
    with_compile: bool,
    file: Path | None,
    trace: Path | None,
    profile: Path | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Say what the backward of a function needs from its forward."""
    call = with_numbers(named(function, example, argnums, spill), sizes)
    with target, gradients_taken() as inside, users_code(function, "cannot be traced for these arguments"):
        traced = call.function.trace(*call.args, **call.kwargs)
    if inside and not as_json:
        click.echo(printed.takes_a_gradient(function, inside[0].name), err=True)
    cut = traced.partition(strategy, budget=budget, policy=policy or None)
    if with_compile and not as_json:
        click.echo(printed.predicted(cut, function), err=True)
    report = replace(cut.explain(measure=with_compile), name=function)
    asked = [(report.save, file), (report.perfetto, trace), (report.pprof, profile)]
    data = facts.of_report(report, cut, *(None if path is None else write(path) for write, path in asked))
    _tell(data, as_json, lambda: printed.report(report, data, everything))


@main.command(help=usage.DOCTOR)
@click.argument("function")
@_EXAMPLE
@click.option("--size", "sizes", metavar="NAME=N", multiple=True, callback=_sizes, help=usage.SIZE)
@click.option("--memory", metavar="BYTES", help=usage.MEMORY)
@click.option("--target", metavar="TARGET", help=usage.DOCTOR_TARGET)
@_AS_JSON
@click.pass_context
def doctor(
    context: click.Context,
    function: str,
    example: str,
    sizes: dict[str, int],
    memory: str | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Say whether a function fits into memory, and if not, why."""
    watching = doctor_for(memory, target=target)
    call = with_numbers(as_it_is(function, example), sizes)
    with users_code(function, "cannot be traced for these arguments"):
        found = replace(watching.check(call.function, *call.args, **call.kwargs), name=function)
    _tell(facts.of_diagnosis(found), as_json, lambda: str(found))
    context.exit(0 if found.fits else NO)


@main.command(help=usage.LARGEST)
@_of_a_function
@click.option("--axis", required=True, metavar="NAME", help=usage.AXIS)
@click.option("--constraint", "constraints", metavar="TEXT", multiple=True, help=usage.CONSTRAINT)
@_AS_JSON
def largest(
    function: str,
    example: str,
    argnums: int | tuple[int, ...] | None,
    sizes: dict[str, int],
    budget: Budget | None,
    target: AbstractContextManager[Any],
    axis: str,
    constraints: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find the largest size of an axis for which a step fits."""
    call = named(function, example, argnums)
    with target, users_code(function, "cannot be traced for these arguments"):
        found = largest_of(call.function, axis, budget, call.args, call.kwargs, sizes, constraints)
    found = replace(found, name=function)
    assert found.cut is not None, "it was found here"
    data = facts.of_largest(found, found.cut)
    _tell(data, as_json, lambda: printed.largest(found, data))


@main.command(help=usage.EXPORT)
@_of_a_function
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--platforms", callback=_platforms, help=usage.PLATFORMS)
@click.option("--order", type=click.IntRange(1, 3), default=1, show_default=True, help=usage.ORDER)
@click.option("--constraint", "constraints", metavar="TEXT", multiple=True, help=usage.CONSTRAINT)
@click.option("--overwrite", is_flag=True, help=usage.OVERWRITE)
@_AS_JSON
def export(
    function: str,
    example: str,
    argnums: int | tuple[int, ...] | None,
    sizes: dict[str, int],
    budget: Budget | None,
    target: AbstractContextManager[Any],
    folder: Path,
    platforms: tuple[str, ...] | None,
    order: int,
    constraints: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a function and its gradient to a folder."""
    artefact.free_place(folder, overwrite, "--overwrite")
    call = named(function, example, argnums)
    options: dict[str, Any] = {"platforms": platforms, "budget": budget, "order": order, "overwrite": overwrite}
    options |= {"sizes": sizes, "constraints": constraints}
    with target, users_code(function, "cannot be exported for these arguments"):
        path = call.function.export(folder, *call.args, **options, **call.kwargs)
    data = _artefact(path)
    _tell(data, as_json, lambda: printed.exported(data))


@main.command(help=usage.DIFF)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--renamed", is_flag=True, help=usage.RENAMED)
@click.option("--save", "file", metavar="FILE", type=click.Path(path_type=Path), help=usage.SAVE_DIFF)
@_EVERYTHING
@_AS_JSON
def diff(before: Path, after: Path, renamed: bool, file: Path | None, everything: bool, as_json: bool) -> None:
    """Say what a step takes more and less than another, by their reports."""
    found = difference(stored.read(before), stored.read(after), renamed, (str(before), str(after)))
    path = None if file is None else found.save(file)
    data = {**found.to_dict(), "file": None if path is None else str(path)}
    _tell(data, as_json, lambda: printed.difference(found, path, everything))


# ------------------------------------------------------------------------------------------------------ artefacts


def _artefact(folder: Path) -> facts.JSON:
    read = artefact.read(folder)
    contract = Contract.from_json(read.signature, str(read.folder / artefact.SIGNATURE))
    return facts.of_artefact(read.folder, read.signature, contract)


@main.command(help=usage.SHOW)
@click.argument("folder", type=click.Path(path_type=Path))
@_EVERYTHING
@_AS_JSON
def show(folder: Path, everything: bool, as_json: bool) -> None:
    """Say what an artefact takes, gives and holds."""
    data = _artefact(folder)
    _tell(data, as_json, lambda: printed.artefact(data, everything))


# ---------------------------------------------------------------------------------------------------------- cache


@main.group(help=usage.CACHE)
def cache() -> None:
    """List or clear the compiled programs on disk."""


_FOLDER = click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=FOLDER,
    show_envvar=True,
    default=DEFAULT_FOLDER,
    show_default=True,
    help=usage.FOLDER,
)


def _store(folder: Path) -> Store | None:
    """Return the store in a folder; return None if there is none, and create none."""
    try:
        is_there = (folder / "key").is_file()
    except OSError as error:
        what = f"cannot be looked into: {error.strerror or error}."
        raise CacheError(message(f"cache folder {folder}", what, "See to its permissions.")) from error
    return Store.at(folder) if is_there else None


@cache.command("ls", help=usage.CACHE_LS)
@_FOLDER
@_AS_JSON
def cache_ls(folder: Path, as_json: bool) -> None:
    """List the entries of a cache."""
    folder = folder.expanduser().absolute()
    store = _store(folder)
    data = facts.of_cache(folder, store.entries() if store else (), store.total_bytes if store else 0)
    _tell(data, as_json, lambda: printed.cache(data))


@cache.command("clear", help=usage.CACHE_CLEAR)
@_FOLDER
@click.option("--yes", is_flag=True, help=usage.YES)
@_AS_JSON
def cache_clear(folder: Path, yes: bool, as_json: bool) -> None:
    """Remove all entries of a cache."""
    folder = folder.expanduser().absolute()
    store = _store(folder)
    total_bytes = store.total_bytes if store else 0
    if total_bytes and not yes and not click.confirm(f"Remove {total_bytes:,} bytes from {folder}?", err=True):
        click.echo("Nothing was removed.", err=True)
        raise click.exceptions.Exit(NO)
    removed = store.clear() if store else 0
    data: facts.JSON = {"folder": str(folder), "removed": removed, "removed_bytes": total_bytes}
    _tell(data, as_json, lambda: printed.cleared(data))
