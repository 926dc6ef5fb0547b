"""Turn the caller's arguments into flat arrays, and flat results back.

A compiled program takes and returns flat arrays. Callers also pass trees, objects, references, or one array twice. One
look at the function says what each input and output is (`metadata`), and each wrapper reads it. Before compiling, a
wrapper simplifies inputs and outputs; at each call it converts between the two.

Where to add what:

- a wrapper for every function: a file in `built_in`, and its name in `wrapped_for` of `aot/stages/pipeline`;
- a wrapper of your own: `aot.function(wrappers=...)`;
- an object that can be written, such as a module of Flax: `arguments/objects`;
- a class that acts as one array, such as a quantised matrix: `arguments/containers`.

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
