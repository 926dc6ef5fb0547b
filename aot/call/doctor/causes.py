"""Find why a step needs its memory, and try a cure of each cause by compiling."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jointcut.aot.call.doctor.equal_rows import equal_rows, hoisted
from jointcut.aot.call.doctor.gradients import GradientTaken, budget_for, gradients, peak_with
from jointcut.aot.call.doctor.late import barred, late_gradients
from jointcut.aot.call.doctor.subject import Subject, type_of
from jointcut.partition.drawing.picture import short
from jointcut.partition.figures import counted, human_bytes
from jointcut.partition.lower.memory.lifetimes import Lifetimes
from jointcut.partition.program.jax import abstract, jaxprs
from jointcut.partition.program.places import place
from jointcut.partition.program.roles import Tile

_SMALL = 0.005  # of the memory that a program takes: a smaller argument is not donated
_LARGE = 0.25  # of the memory that a program takes: one array above that is a cause of its own
_IN_PARTS = "If nothing needs all of it at once, compute some rows at a time, as by jax.lax.map."
_REMATERIALISED = re.compile(r"^\s*(?:ROOT )?%?([\w.-]*\.remat[\w.-]*) = ", re.MULTILINE)


@dataclass(frozen=True)
class Cause:
    """Why a step needs its memory.

    Attributes:
        name: "residuals", "donation", "one array", "equal rows", "late weight gradients", "gathered arrays"
            or "rematerialisation".
        evidence: a sentence with bytes and the user's line.
        cure: a line to type; empty where none is known.
        peak_bytes: the bytes that the step takes with the cure, by XLA's account; None where it was not tried.
        note: why the cure was not tried, or does not do.
        blocks: the rows that run in blocks with the cure, each with its line.
    """

    name: str
    evidence: str
    cure: str = ""
    peak_bytes: int | None = None
    note: str = ""
    blocks: tuple[str, ...] = ()

    def told(self, memory_bytes: int) -> list[str]:
        """Return the cause and its cure as lines."""
        lines = [f"{self.name}: {self.evidence}"]
        if not self.cure:
            return [*lines, f"  {self.note}"]
        result = self.note
        if self.peak_bytes is not None:
            fits = ", which fits" if self.peak_bytes <= memory_bytes else ", still too much"
            result = f"compiled with it: {human_bytes(self.peak_bytes)}{fits}"
        return [*lines, f"  {self.cure}", f"  {result}", *(f"  rows in blocks: {rows}" for rows in self.blocks)]


def causes(subject: Subject, memory_bytes: int) -> tuple[Cause, ...]:
    """Return the causes that are found, with their cures; where none suffices, two cures are tried together."""
    found, places = gradients(subject), _donatable(subject)
    told = [*_residuals(subject, found, memory_bytes), *_donation(subject, places), *_in_vain(subject)]
    tried = [cause for cause in told if cause.peak_bytes is not None]
    if len(tried) > 1 and min(cause.peak_bytes or 0 for cause in tried) > memory_bytes:
        donated = _all_donated(subject, places)
        evidence = f"neither the budget for {_losses(found)} nor the donation suffices, so both were tried together."
        both = _with_budget("both", evidence, subject.anew(donated=donated), found, memory_bytes)
        told.append(replace(both, cure=f"{both.cure}, and {_donating(subject, donated)}" * bool(both.cure)))
    told += [
        *_late(subject, found),
        *_one_array(subject, found, memory_bytes, told),
        *_equal_rows(subject),
        *_gathered(subject),
    ]
    text = "" if subject.program is None else subject.program.as_text()
    return (*told, *rematerialised(text or ""))


# -------------------------------------------------------------------------------------------------------- residuals


def _residuals(subject: Subject, found: Sequence[GradientTaken], memory_bytes: int) -> Iterator[Cause]:
    """Tell the arrays that wait at the peak for the backward, and try budgets for the losses."""
    size = _waiting_bytes(subject.lives)
    if found and subject.is_large(size):
        evidence = f"{human_bytes(size)} at the peak wait from the forward of {_losses(found)} for its backward."
        yield _with_budget("residuals", evidence, subject, found, memory_bytes)


def _losses(found: Sequence[GradientTaken]) -> str:
    return " and ".join(dict.fromkeys(taken.name for taken in found))


def _with_budget(
    name: str, evidence: str, subject: Subject, found: Sequence[GradientTaken], memory_bytes: int
) -> Cause:
    """Compile with a budget for each loss."""
    tried = budget_for(subject, found, memory_bytes)
    if tried.peak_bytes is not None and tried.peak_bytes >= subject.account.peak_bytes:
        note = "A budget does not help: no plan was found that takes less."
        return Cause(name, evidence, "", tried.peak_bytes, note)
    budget = f'"{tried.budget}"' if isinstance(tried.budget, str) else str(tried.budget)
    cures = dict.fromkeys(f"{taken.name} = aot.function({taken.name}, budget={budget})" for taken in found)
    is_ours = any(taken.is_ours for taken in found)
    cure = f"budget={budget} in the aot.function of {_losses(found)}" if is_ours else "; ".join(cures)
    blocks = tuple(dict.fromkeys(map(_blocks, tried.tiles)))
    return Cause(name, evidence, cure, tried.peak_bytes, tried.error, blocks)


def _blocks(tile: Tile) -> str:
    array, at, where = str(tile).partition(" at ")
    return array + at + short(where)


def _waiting_bytes(lives: Lifetimes | None) -> int:
    """Return the bytes that are alive at the peak, were made in the forward, and are read in the backward."""
    alive = () if lives is None else lives.alive(lives.peak)
    return sum(b.bytes for b in alive if lives is not None and b.first < lives.boundary <= b.last)


# --------------------------------------------------------------------------------------------------------- donation


def _donatable(subject: Subject) -> dict[int, int]:
    """Return the arguments that results could take the memory of, by position, with their bytes."""
    free, places = subject.result_types(), dict[int, int]()
    arguments = () if subject.is_gradient else tuple(subject.arguments())
    for _, leaves in arguments:
        free -= Counter(type_of(leaf) for _, leaf, is_donated in leaves if is_donated)
    for position, leaves in arguments:
        types = Counter(type_of(leaf) for _, leaf, is_donated in leaves if not is_donated)
        size = sum(abstract.aval_bytes(leaf) for _, leaf, is_donated in leaves if not is_donated)
        if not types - free and size >= _SMALL * subject.account.peak_bytes:
            free -= types
            places[position] = size
    return places


def _donation(subject: Subject, places: dict[int, int]) -> Iterator[Cause]:
    """Compile with more arguments donated."""
    if not subject.is_large(sum(places.values())):
        return
    donated = _all_donated(subject, places)
    names = [f"{subject.parameter(i)} ({human_bytes(size)})" for i, size in places.items()]
    evidence = f"the results are of the types of {' and '.join(names)}, and take memory of their own."
    name = subject.name if subject.name.isidentifier() else "f"
    cure = f"{name} = jax.jit({name}, donate_argnums={donated})"
    if subject.within is not None:
        cure = f"{_donating(subject, donated)}, where {subject.name} is jitted"
    yield Cause("donation", evidence, cure, subject.anew(donated=donated).account.peak_bytes)


def _donating(subject: Subject, donated: tuple[int, ...]) -> str:
    """Return the option that donates arguments; Equinox's has no positions."""
    is_of_equinox = subject.within is not None and subject.within.is_of("equinox")
    return 'donate="all"' if is_of_equinox else f"donate_argnums={donated}"


def _all_donated(subject: Subject, places: dict[int, int]) -> tuple[int, ...]:
    return tuple(sorted({*places, *subject.donated}))


def _in_vain(subject: Subject) -> Iterator[Cause]:
    """Tell the donated arrays whose memory no result takes."""
    free, lost = subject.result_types(), list[tuple[int, str]]()
    for _, leaves in subject.arguments():
        for path, leaf, is_donated in leaves:
            if is_donated and not free[type_of(leaf)]:
                lost.append((abstract.aval_bytes(leaf), f"{path}, {leaf.str_short()}"))
            free[type_of(leaf)] -= is_donated
    if subject.is_large(size := sum(size for size, _ in lost)):
        evidence = f"{human_bytes(size)} were donated in vain: no result is left with the type of {max(lost)[1]}."
        yield Cause("donation", evidence, note="Return an array of this type, or don't donate this one.")


# ------------------------------------------------------------------------------------------------- arrays and stacks


def _one_array(
    subject: Subject, found: Sequence[GradientTaken], memory_bytes: int, told: Sequence[Cause]
) -> Iterator[Cause]:
    """Tell the largest temporary at the peak, if it is much of it, and try budgets, which may run it in blocks."""
    lives = subject.lives
    alive = () if lives is None else lives.alive(lives.peak)
    total = sum(buffer.bytes for buffer in alive)
    if not alive or alive[0].bytes < _LARGE * subject.account.peak_bytes:
        return
    evidence = f"{human_bytes(alive[0].bytes)} of {human_bytes(total)} of temporaries at the peak are one array, "
    evidence += f"of {alive[0].op} at {short(alive[0].place.line) or 'no known line'}."
    if not found:
        yield Cause("one array", evidence, note=f"No cure was tried. {_IN_PARTS}")
    elif not any(cause.name == "residuals" for cause in told):
        yield _with_budget("one array", evidence, subject, found, memory_bytes)
    elif any(cause.blocks for cause in told):
        yield Cause("one array", evidence, note="With the budget above, its rows run in blocks.")
    else:
        yield Cause("one array", evidence, note=f"With the budget above, it is whole still. {_IN_PARTS}")


def _equal_rows(subject: Subject) -> Iterator[Cause]:
    """Tell the stacks of equal rows, and compile with their rows computed before the loops."""
    found = [s for s in equal_rows(jaxprs.opened(subject.traced.jaxpr)[0]) if subject.is_large(s.bytes_more)]
    peak_bytes = subject.account.peak_bytes
    if not all(stack.by_branch for stack in found):
        peak_bytes = subject.anew(hoisted(subject.traced)).account.peak_bytes
    for stack in sorted(found, key=lambda stack: -stack.bytes):
        where = short(stack.line) or "no known line"
        evidence = f"the loop at {where} stacks {stack.type}, {human_bytes(stack.bytes)}. "
        if stack.by_branch:
            evidence += f"Its {stack.rows:,} rows differ by the branch that a step takes, and by nothing else."
            note = "No cure was tried. Compute what the branches share before the loop, or use jax.numpy.where."
            yield Cause("equal rows", evidence, note=note)
        elif peak_bytes < subject.account.peak_bytes:
            evidence += f"Its {stack.rows:,} rows are equal."
            yield Cause("equal rows", evidence, "Compute the row before the loop, and don't stack it.", peak_bytes)


# ------------------------------------------------------------------------------------------- what XLA did by itself


def _late(subject: Subject, found: Sequence[GradientTaken]) -> Iterator[Cause]:
    """Tell the weight gradients that XLA computes late, and compile with barriers on the operands of their products."""
    lives, liveness = subject.lives, subject.liveness
    if lives is None or liveness is None or not found:
        return
    late = [each for each in late_gradients(liveness, liveness.times[lives.peak]) if each.line]
    if not subject.is_large(sum(each.bytes for each in late)):
        return
    peak_bytes = peak_with(subject, lambda loss: barred(loss, [each.line for each in late]))
    if not subject.is_large(subject.account.peak_bytes - peak_bytes):
        return
    size, lines = human_bytes(sum(each.bytes for each in late)), " and ".join(short(each.line) for each in late)
    count = counted(sum(each.count for each in late), "weight gradient")
    evidence = f"{size} at the peak wait for {count} of {lines}, which XLA computes late: what they read is there."
    cure = "x, w = jax.lax.optimization_barrier((x, w))  # before each product x @ w there"
    yield Cause("late weight gradients", evidence, cure, peak_bytes)


def _gathered(subject: Subject) -> Iterator[Cause]:
    """Tell the arrays that a resharding gathers whole on each device."""
    lives, liveness = subject.lives, subject.liveness
    if lives is None or liveness is None:
        return
    found, time = liveness.instructions, liveness.times[lives.peak]
    sizes: Counter[str] = Counter()
    for value in (each for each in liveness.values if each.start <= time <= each.end):
        maker = found.by_id[value.maker]
        if maker.opcode.startswith("all-gather"):
            named = found.named(maker)
            named = named if named.is_placed else found.reader(value.maker) or named
            sizes[place("", found.frames.of(named.frame)).line] += value.size
    for line, size in sizes.most_common(1):
        if subject.is_large(size):
            evidence = f"each device gathers {human_bytes(size)} of whole arrays for {short(line) or 'no known line'}."
            note = "No cure was tried. See whether operands and result of that line are sharded along the same axis."
            yield Cause("gathered arrays", evidence, note=note)


def rematerialised(text: str) -> Iterator[Cause]:
    """Tell whether XLA computes values again by itself; `text` is the compiled program's."""
    if names := _REMATERIALISED.findall(text):
        evidence = (
            f"XLA ran short and computes {counted(len(names), 'value')} again by itself, the first is {names[0]}."
        )
        yield Cause("rematerialisation", evidence, note="It chooses late. A budget for the loss chooses before.")
