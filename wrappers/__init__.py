"""Turn a caller's arguments into flat arrays, and flat results back.

A compiled program takes and returns flat arrays. A caller also passes trees, objects, references, and one array twice.
`metadata` describes each input and output of the function; wrappers read it. Before compiling, each wrapper makes the
calling convention simpler. After compiling, it restores the convention that it was given.

Where to add what: a wrapper is a file in `built_in`, and a name in `wrapped_for` of `aot/stages/pipeline`. Users pass
their own to `aot.function(wrappers=...)`. A class that holds arrays is registered in `arguments/objects`, a class that
acts as an array in `arguments/containers`.

Files, in reading order:

    table: Keep one value for each key, and make it once for all threads.
    record: Write records as JSON, and read them back.
    metadata: Describe each input and output of a function.
    arguments: Flatten the arguments of a call, and rebuild results.
    wrapper: Define a wrapper: one step before compiling, one step after.
    stack: Apply wrappers in order before compiling, and in reverse order after.
    built_in: The wrappers that every function gets.
"""

from jointcut.wrappers.metadata.convention import Convention as Convention
from jointcut.wrappers.metadata.convention import Slot as Slot
from jointcut.wrappers.metadata.convention import slots as slots
from jointcut.wrappers.stack import pre_compile as pre_compile
from jointcut.wrappers.wrapper import CompilerWrapper as CompilerWrapper
from jointcut.wrappers.wrapper import Target as Target
