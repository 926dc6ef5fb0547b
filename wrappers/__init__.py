"""Turn the caller's arguments into flat arrays, and flat results back.

A compiled program takes and returns flat arrays. Callers also pass trees, objects, references, or one array twice.
`metadata` describes each input and output of a function, and each wrapper reads it. Before compiling, a wrapper
simplifies inputs and outputs; at each call it converts between the caller's form and the simple form.

Where to add what:

- a wrapper for every function: a file in `built_in`, and its name in `wrapped_for` of `aot/stages/tracing`;
- a wrapper of your own, or a pass over the joint program: `aot.function(wrappers=...)`;
- an object that can be written, such as a module of Flax: `arguments/objects`;
- a class that acts as one array, such as a quantised matrix: `arguments/containers`.

Files, in reading order:

    table: Keep one value for each key, and make it once for all threads.
    record: Write records as JSON, and read them back.
    boundary: Take our frames out of the traceback of an error that is the user's.
    mark: Mark a folder as ours, so that a process removes no files of anybody else.
    metadata: Describe each input and output of a function.
    arguments: Flatten the arguments of a call, and rebuild results.
    wrapper: Define a wrapper: one step before compiling, one step after.
    stack: Apply wrappers in order before compiling, and in reverse order after.
    rerun: Write a program anew, with some of its equations computed otherwise.
    built_in: The wrappers that every function gets.
"""

from jointcut.wrappers.metadata.convention import Convention as Convention
from jointcut.wrappers.metadata.convention import Slot as Slot
from jointcut.wrappers.metadata.convention import slots as slots
from jointcut.wrappers.metadata.descriptors import Descriptors as Descriptors
from jointcut.wrappers.rerun import rerun as rerun
from jointcut.wrappers.stack import pre_compile as pre_compile
from jointcut.wrappers.wrapper import CompilerWrapper as CompilerWrapper
from jointcut.wrappers.wrapper import JointPass as JointPass
from jointcut.wrappers.wrapper import Target as Target
