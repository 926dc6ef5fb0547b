"""Bend the caller's convention into plain arrays, and back.

A compiled program takes and returns flat arrays. What a caller passes is more: trees, objects, references, the same
array twice. One look at the function says what each input and output is (`metadata`), and each wrapper reads it.
Before compiling it makes the convention simpler; after, it gives the caller back the one he knows.

Where to add what: a wrapper is a file in `built_in`, and a name in `wrapped_for` of `aot/stages/pipeline`; one of a
user's own is given to `aot.function(wrappers=...)`. A class that holds arrays is made known in `arguments/objects`, one
that acts as an array in `arguments/containers`.

Files, in reading order:

    table: Keep what was made for a key, made once whichever thread asks for it.
    record: Write a record as JSON, and read it back equal.
    metadata: Say what each input and output of a function is.
    arguments: Take the arguments of a call apart, and put results together.
    wrapper: Define a wrapper: one half before compiling, one half after.
    stack: Apply every wrapper in order before, and in reverse after.
    built_in: The wrappers that every function gets.
"""

from jointcut.wrappers.metadata.convention import Convention as Convention
from jointcut.wrappers.metadata.convention import Slot as Slot
from jointcut.wrappers.metadata.convention import slots as slots
from jointcut.wrappers.stack import pre_compile as pre_compile
from jointcut.wrappers.wrapper import CompilerWrapper as CompilerWrapper
from jointcut.wrappers.wrapper import Target as Target
