"""Let reductions take what a library of kernels computes with them.

XLA:CPU hands a reduction of single-precision numbers to a library, with the elementwise ops, spreads, products and
convolutions before it that nothing else reads, and the elementwise ops after it as long as each is read once. What else
a kernel reads is written out, also a number that is spread over an array because another op reads that array too.
Every product and every convolution by itself is such a kernel as well.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from jointcut.partition.lower.xla.instructions import CONVOLUTION, DOT, Kind, Program
from jointcut.partition.lower.xla.users import Users

#: The library is for arrays of at least so many elements.
_FEWEST = 4096

_FLOATS = frozenset({"bfloat16", "float32", "float64"})
_UNARY = {"abs", "ceil", "convert_element_type", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "neg", "round"}
_UNARY |= {"rsqrt", "sign", "sin", "sqrt", "tan", "tanh"}
_BINARY = {"add", "add_any", "div", "integer_pow", "max", "min", "mul", "pow", "square", "sub"}
_KNOWN = frozenset(_UNARY | _BINARY)
_REDUCED = frozenset({"reduce_max", "reduce_min", "reduce_sum"})


def kernels(program: Program, users: Users) -> dict[int, Kernel]:
    """The kernels that begin with a reduction, by the instruction that is their result."""
    found: dict[int, Kernel] = {}
    for n in range(len(program) - 1, -1, -1):
        if program.kinds[n] is Kind.REDUCE and users.alive[n] and _is_reduced(program, n) and n not in found:
            kernel = Kernel(program, users, n)
            kernel.grow(found)
            found[kernel.result] = kernel
    return found


@dataclass
class Kernel:
    """A kernel while it grows: the instruction that is its `result`, its `members`, and what it reads."""

    program: Program
    users: Users
    result: int
    members: set[int] = field(default_factory=set)
    reads: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with the result alone."""
        self.members.add(self.result)
        self.reads.update(dict.fromkeys(self.program.reads[self.result]))

    def grow(self, others: dict[int, Kernel]) -> None:
        """Take neighbours, breadth first, until there is none to take."""
        has_grown = True
        while has_grown:
            has_grown = False
            queue: deque[tuple[int, bool]] = deque()
            seen: set[int] = set()
            self.above(list(self.reads), self.result, queue, seen)
            self.below(queue, seen)
            while queue:
                n, is_above = queue.popleft()
                if n in others or not _is_known(self.program, n):
                    continue
                has_grown = True
                if is_above:
                    self.above(self.program.reads[n], n, queue, seen)
                    self.take(n)
                else:
                    self.become(n)
                    self.below(queue, seen)

    def above(self, reads: list[int], reader: int, queue: deque[tuple[int, bool]], seen: set[int]) -> None:
        """Consider operands that nothing else reads."""
        users = self.users
        for v in reads:
            if v in self.members or v in seen or v in self.program.kept or not users.alive[v]:
                continue
            if all(n in (self.result, reader) for n in users.of[v]):
                queue.append((v, True))
                seen.add(v)

    def below(self, queue: deque[tuple[int, bool]], seen: set[int]) -> None:
        """Consider the reader of the result, if it is the only one."""
        readers = self.users.of[self.result]
        if self.result not in self.program.kept and len(readers) == 1 and readers[0] not in seen | self.members:
            queue.append((readers[0], False))
            seen.add(readers[0])

    def take(self, n: int) -> None:
        """Take an operand into the kernel."""
        self.members.add(n)
        self.users.move_in(n, self.result, self.reads, self.members)

    def become(self, n: int) -> None:
        """Let the only reader be the result of the kernel."""
        before, users = self.result, self.users
        self.members.add(n)
        for v in self.reads:
            users.replace(v, before, n)
        users.alive[before] = False
        self.result = n
        for v in self.program.reads[n]:
            if v != before and v not in self.reads and v not in self.members:
                self.reads[v] = None
        users.remove(before, n)


def _is_known(program: Program, n: int) -> bool:
    """Whether the library can compute an instruction, and is fast enough at it."""
    kind, name = program.kinds[n], program.names[n]
    if kind is Kind.SPREAD:
        return True
    if not _is_large(program, n):
        return False
    if kind is Kind.POINT:
        types = (program.types[n], *(program.types[v] for v in program.reads[n]))
        return name in _KNOWN and all(t.dtype in _FLOATS for t in types)
    if kind is Kind.REDUCE:
        return _is_reduced(program, n)
    if name == DOT:
        return program.types[n].dtype == "float32" and not program.turned.get(n, (False, False))[0]
    return name == CONVOLUTION and _is_convolved(program, n)


def _is_large(program: Program, n: int) -> bool:
    return any(program.elements[v] >= _FEWEST for v in (n, *program.reads[n]))


def _is_reduced(program: Program, n: int) -> bool:
    return program.names[n] in _REDUCED and program.types[n].dtype == "float32" and _is_large(program, n)


def _is_convolved(program: Program, n: int) -> bool:
    """Whether the library has a kernel for a convolution: plain, of images, with many features, and not growing."""
    params = program.params(n)
    image, kernel = (program.types[v].shape for v in program.reads[n])
    result = program.types[n].shape
    if program.types[n].dtype != "float32" or params.get("batch_group_count", 1) != 1:
        return False
    if not len(result) == len(image) == len(kernel) == 4 or any(d != 1 for d in params["lhs_dilation"]):
        return False
    fits = all(result[d] <= image[d] and kernel[d - 1] <= image[d] for d in (1, 2))
    return max(image[3], result[3]) > 16 and fits
