"""Say where an op that overwrites its operand gets a copy of it.

A loop overwrites the values that it carries, a scatter its first operand. XLA puts a copy before each and takes out
those that are not needed: where nothing reads the operand later. Of several loops that start from the same zeros one
takes the zeros themselves.
"""

from __future__ import annotations

from jointcut.partition.lower.xla.instructions import COPY, Kind, Program


def users_of(program: Program) -> tuple[list[list[int]], list[bool]]:
    """For each instruction those that read it, in order, and whether any result depends on it."""
    count = len(program)
    users: list[list[int]] = [[] for _ in range(count)]
    alive = [False] * count
    for n in range(count - 1, -1, -1):
        if n == program.middle:
            program.reads[n] = [v for v, part in program.crossing if users[part]]
        if n in program.parts and users[n]:  # a stack that nothing reads is not made
            unread = {copy for part, copy, is_carried in program.parts[n] if not is_carried and not alive[part]}
            program.reads[n] = [v for v in program.reads[n] if v not in unread]
        if n in program.kept or users[n]:
            alive[n] = True
            for v in dict.fromkeys(program.reads[n]):
                users[v].append(n)
    for readers in users:
        readers.reverse()
    _spare(program, users, alive)
    return users, alive


def _spare(program: Program, users: list[list[int]], alive: list[bool]) -> None:
    """Take out the copies that are not needed."""
    taken: set[int] = set()
    before: dict[int, set[int]] = {}
    for copy in program.copies:
        if not alive[copy]:
            continue
        (source,), writer = program.reads[copy], users[copy][0]
        is_fixed = program.kinds[program.buffer(source)] in (Kind.GIVEN, Kind.NUMBER)
        if is_fixed or source in program.kept or source in taken:
            continue
        others = [n for n in users[source] if n not in (copy, writer)]
        if others and writer not in before:
            before[writer] = _needed_by(program, writer)
        others = [n for n in others if not _is_over(program, users, source, n, writer, before[writer])]
        is_zeros = program.is_zeros(source) and all(program.names[n] == COPY for n in others)
        if is_zeros or not others:
            taken.add(source)
            alive[copy] = False
            program.lies_in[copy] = source
            if copy in program.shown and program.is_zeros(source):
                program.shown[source], program.rows[source] = program.shown[copy], program.rows[copy]
            program.reads[writer] = list(dict.fromkeys(source if v == copy else v for v in program.reads[writer]))
            users[source] = list(dict.fromkeys(writer if n == copy else n for n in users[source]))


def _needed_by(program: Program, n: int) -> set[int]:
    """All instructions that run before one because it depends on them."""
    seen: set[int] = set()
    work = [n]
    while work:
        fresh = set(program.reads[work.pop()]) - seen
        seen |= fresh
        work += fresh
    return seen


def _is_over(program: Program, users: list[list[int]], source: int, n: int, writer: int, before: set[int]) -> bool:
    """Whether a reader of a buffer has run before the one that overwrites it, and what passes it on is read by then."""
    if n not in before:
        return False
    names = [n] if program.lies_in.get(n) == source else [p for p in users[n] if program.lies_in.get(p) == source]
    return all(v in before or v == writer for name in names for v in users[name])
