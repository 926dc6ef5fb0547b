"""Teach the command line by example.

The texts of `jointcut --help` and of the help of each command. After a line with only a backspace, click keeps the line
breaks of the paragraph; such lines have at most 76 columns.
"""

from __future__ import annotations

MAIN = """Cut a JAX function and its gradient into two programs, see what is saved between them, and ship them.

A function is named as module:function, as it would be imported from the current folder. Its arguments are an object of
a module too, named by --example: a tuple of arguments, a dict of arguments by their names, or a function without
parameters that returns one of these. Where programs are only explained or exported, types do as well as arrays:
jax.ShapeDtypeStruct.

\b
  jointcut explain train:loss --example train:batch
  jointcut explain train:loss --example train:batch --budget 1.5GiB
  jointcut diff before.json after.json
  jointcut doctor train:step --example train:batch --memory 24GiB
  jointcut largest train:loss --example train:any_batch --axis b --target h100
  jointcut export train:loss artefact/ --example train:batch
  jointcut show artefact/
  jointcut cache ls

With --json a command prints one JSON object and nothing else to its standard output. What your own modules print goes
to standard error, as errors do.

\b
Exit codes:
  0  all went well
  1  a question was answered with no, or a function does not fit
  2  wrong usage, or something given cannot be used; the message says
     where, what is wrong and what to do
  3  a fault of jointcut, with its traceback
"""

TRACEBACK = "Show where in the code an error was raised, your own code included."

EXPLAIN = """Say what the backward of FUNCTION keeps of its forward.

FUNCTION is module:function: a plain function, or one that aot.function made, with its options. It is traced for the
arguments of --example, cut, and compiled; it is not run. An example without a module is of FUNCTION's.

\b
  jointcut explain train:loss --example train:batch
  jointcut explain train:loss --example batch --argnums 0,1
  jointcut explain train:loss --example batch --strategy save_all
  jointcut explain train:loss --example batch --policy tanh=MUST_SAVE
  jointcut explain train:loss --example batch --policy tanh=BUDGET:8kB
  jointcut explain train:loss --example batch --spill /scratch
  jointcut explain train:loss --example batch --budget 0.5
  jointcut explain train:loss --example batch --target h100
  jointcut explain train:loss --example batch --save report.html
  jointcut explain train:loss --example batch --json | jq .totals

\b
where train.py might say:
  import jax, jax.numpy as jnp
  def loss(params, x): ...
  batch = ({"w": jnp.ones((64, 64))},
           jax.ShapeDtypeStruct((32, 64), jnp.float32))

The report lists the bytes and the time of a step, beside plain JAX; the saved arrays, largest first, with the
operation and the line that make each, the operations that need it, and why it is saved; the operations that the
backward computes again; and the cost of less memory. Unless --no-compile is given, the memory is XLA's own account of
the compiled step and of jax.jit(jax.value_and_grad(FUNCTION)); else it is predicted.

\b
--save writes the report to a file, as the name ends:
  .html  a page with pictures, which needs no network
  .json, .txt

\b
--json prints an object of
  function, strategy, backend (or the target), and device_bytes, which a
    device of the target has
  totals, plain     of this plan, and of plain JAX: saved_bytes,
                    num_saved, forward_bytes and backward_bytes (the
                    most that is alive in each), peak_bytes (as
                    predicted), fixed_bytes (arguments and results),
                    again_ops, again_flops, again_seconds (what runs
                    twice), step_flops, offloaded_bytes (in host
                    memory between forward and backward)
  saved             arrays: value, bytes, type, op, path, line,
                    needed_by, reason, memory ("device" or
                    "pinned_host"), part (that a device has on a mesh)
  recomputed        by line: path, line, count, ops, flops, seconds
  less              smaller budgets: share of this plan's peak,
                    peak_bytes, budget (what to type: it was tried
                    and holds; empty with --no-compile),
                    extra_seconds, extra_share, freed_bytes,
                    kept_bytes, freed and kept (as in saved), again,
                    lines (as in recomputed), segments
  segments          loops that run in segments: loop, steps (of one),
                    kept_steps (its last, which are in no segment)
  forms             cheaper forms of values: kind, value, source,
                    bytes_less
  overruled         preferences of the policy that the plan does not
                    follow: value, demand, reason, what, bytes,
                    seconds, is_computed_again
  packed            the saved values as a pack of saved_arrays
                    stores them: values, bytes, plain_bytes
  gradient_error    of smaller forms, where a bound was given: most,
                    relative, are_drawn, unused (why there are none)
  bound_bytes       which no plan goes below, if that is known
  derivatives       where they may differ from JAX's: rule, value,
                    line, count, gives
  account           XLA's: temp_bytes, peak_bytes, plain_temp_bytes,
                    plain_peak_bytes; null with --no-compile
  collectives       what several devices exchange: totals and plain (by
                    kind, number and bytes), more (kind, op, line,
                    count, plain_count, bytes, plain_bytes, why), whole
                    (type, bytes, op, line)
  spilled_bytes     that wait in files, with --spill, but for the
                    starts of segments
  plans_compiled    on the way to the budget, if there was one
  snapshot          what jointcut diff reads: format, function, backend,
                    jax, account, figures (peak_bytes, temp_bytes,
                    residual_bytes, flops), at_peak and saved (arrays:
                    bytes, type, op, scope, line), memory (as the page
                    draws it: kind, id, title, lead, note, per (whose
                    bytes these are, on several devices), steps of op,
                    side, source, scope and loop, boundary, groupings
                    of groups by name, total, peak of step and arrays,
                    ghost, lines)
  file, perfetto,   that --save, --perfetto and --pprof wrote
    pprof
"""

EXAMPLE = "Arguments: module:name of a tuple, a dict by names, or a function without parameters that returns either."

ARGNUMS = "Positions of the arguments to differentiate, such as 0 or 0,2; for a plain function. By default 0."

SIZE = """The number for a size of the example that is a name, as aot.shapes("b, 128", "float32") has: the plan is made
for it, and an exported program runs with any. May be given several times."""

CONSTRAINT = "A condition on sizes that are names, such as 'b >= 2'. May be given several times."

BUDGET = """The memory that a step may take: its peak in bytes with a unit (1.5GiB, '800 MB'), a fraction of plain JAX's
activations (0.5; 0.0 is the least that is found), or device for the memory that is free on it. It is held by XLA's
own account."""

TARGET = """The device that the step is planned and compiled for, such as h100, h100x8 or v5e-4, which need not be here.
XLA's compilers for GPUs and TPUs are in the extras cuda and tpu."""

STRATEGY = """How to choose the saved values: min_cut takes the fewest bytes with no product computed twice, save_all
the values that JAX keeps, best fewer bytes than min_cut where that saves time too. By default best."""

POLICY = """The demands on single values, such as tanh=MUST_SAVE: a checkpoint_name, scope or primitive,
and MUST_SAVE, MUST_RECOMPUTE, MUST_OFFLOAD or the PREFER of each, a form such as SAVE_AS:bfloat16, or the most bytes
that these values keep together, such as 'blocks/*=BUDGET:300MiB'. May be given several times; replaces the function's
own."""

SPILL = """The folder in which saved arrays would wait in files, as aot.function(spill=...); for a plain function.
Nothing is written: the answer tells the bytes."""

COMPILE = (
    "Whether to compile, which tells what a step takes and tries smaller budgets; without, the answer comes sooner."
)

SAVE = "Write the report to a file too: report.html, .json or .txt."

PERFETTO = "Write the memory over the step as a trace, step.json, which https://ui.perfetto.dev shows."

PPROF = "Write the arrays at the peak and the saved ones as a profile, step.pb.gz, which pprof reads."

ALL = "List every array, not only the first of them."

JSON = "Print one JSON object."

DIFF = """Say what a step takes more and less than another one.

BEFORE and AFTER are reports in JSON, as jointcut explain --save writes them: of two commits, plans, budgets, targets or
versions of JAX. Arrays are matched by scope, operation and type, since lines move from one commit to the next.

\b
  git checkout main && jointcut explain train:loss --example batch \\
      --save before.json
  git checkout mine && jointcut explain train:loss --example batch \\
      --save after.json
  jointcut diff before.json after.json
  jointcut diff before.json after.json --save diff.html
  jointcut diff before.json after.json --json | jq .figures

\b
--save writes it to a file, as the name ends:
  .html  a page with the memory over both steps, over one axis
  .json, .txt

\b
--json prints an object of
  before, after     function, backend (or the target), jax, account
                    ("XLA", or "the model" with --no-compile)
  is_empty          whether nothing changes
  figures           by name, before, after and more: peak_bytes,
                    temp_bytes, residual_bytes, flops
  at_peak, saved    arrays alive at the peak, and saved for the
                    backward: how ("new", "gone", "larger", "smaller"
                    or "same"), bytes_before, bytes_after, bytes_more,
                    before and after (bytes, type, op, scope, line)
  file              that --save wrote
"""

RENAMED = "Compare the reports of two functions of different names."

SAVE_DIFF = "Write the differences to a file too: diff.html, .json or .txt."

DOCTOR = """Say whether FUNCTION fits into memory, and if it doesn't, why.

FUNCTION is module:function: a training step or any other function, jitted or not, or an aot.function, whose value and
gradient are meant. It is compiled for the arguments of --example, and not run. Each cause is told with what cures it
and the bytes that the function takes with that, by compiling.

\b
  jointcut doctor train:step --example train:batch --memory 24GiB
  jointcut doctor train:step --example train:batch --target h100
  jointcut doctor train:step --example batch --json | jq .causes

The exit code is 0 if it fits, else 1. --json prints an object of function, memory_bytes, fits, account (XLA's:
argument_bytes, output_bytes, temp_bytes, alias_bytes, host_bytes, peak_bytes) and causes (name, evidence, cure,
peak_bytes with the cure, note).
"""

MEMORY = "The memory of the device, such as 24GiB; by default what it says. A CPU does not say."

DOCTOR_TARGET = "The device that the function is compiled for, such as h100, which need not be here."

LARGEST = """Find the largest size for which a step of FUNCTION fits.

A step is value and gradient. FUNCTION and --example are as in jointcut explain. Sizes of the example are names:
any_batch = ({...}, aot.shapes("b, 64", "float32")). The budget is a number of bytes; without one it is the memory of
the target, or what the device has free. The peak is predicted at a few sizes, then XLA is asked, in at most four
compilations. The result was compiled. If a larger size holds by that, rows run in blocks: the table tells how many.

\b
  jointcut largest train:loss --example any_batch --axis b --budget 24GiB
  jointcut largest train:loss --example any_batch --axis b --target h100
  jointcut largest train:loss --example any --axis b --size t=1024 \\
      --constraint 'mod(b, 8) == 0'
  jointcut largest train:loss --example any_batch --axis b --json | jq .size

\b
--json prints an object of
  function, axis, size, target, budget_bytes
  peak_bytes, step_seconds
                    of the step of this size: by XLA's account of the
                    compiled step, and as predicted
  in_blocks         the rows that run in blocks, in words
  plan              strategy, saved_bytes, again_ops
  tried             sizes: size, peak_bytes, step_seconds,
                    seconds_per_example, fits, how ("compiled",
                    "weighed" or "predicted"), strategy (of its
                    plan), blocks (1 where rows run whole)
"""

AXIS = "The name of the size that is looked for, such as b."

EXPORT = """Write FUNCTION and its gradient as programs to FOLDER.

FUNCTION and --example are as in jointcut explain. FOLDER gets the function alone, its forward and its backward as
portable artefacts of jax.export and as readable StableHLO, a signature.json that says what each array is, and a
README.md for whoever finds it. They run without their source.

\b
  jointcut export train:loss artefact/ --example train:batch
  jointcut export train:loss artefact/ --example batch --platforms cpu,tpu
  jointcut export train:loss artefact/ --example batch --budget 1.5GiB
  jointcut export train:loss artefact/ --example batch --order 2 --overwrite
  jointcut export train:loss artefact/ --example any_batch --size b=8

The platforms need not be here, and by default are all of them. A budget is measured on this machine. Sizes of the
example may be names, any_batch = ({...}, aot.shapes("b, 64", "float32")): the programs then run with any. --json prints
what jointcut show FOLDER --json does.
"""

PLATFORMS = (
    "What to lower the programs for: one or more of cpu, cuda, rocm, tpu, joined by commas. By default that of the "
    "target, or all."
)

ORDER = "How often the artefact can be differentiated."

OVERWRITE = "Replace an artefact that is there."

SHOW = """Say what the artefact in FOLDER takes, gives and holds.

Every file is compared with its checksum, and none is run: this works where the artefact cannot run. Inputs, outputs and
gradients are told by the paths by which you reach them, such as args[0]['w'].

\b
  jointcut show artefact/
  jointcut show artefact/ --json | jq '.inputs[].path'

--json prints all that signature.json says (inputs, outputs, residuals, gradients, platforms, plan, files, versions and
more), with folder, total_bytes (of all files) and saved_bytes (from the forward to the backward).
"""

CACHE = """List or clear the compiled programs kept on disk.

The folder is that of --dir, else of the environment variable JOINTCUT_CACHE_DIR, else ~/.cache/jointcut/programs.

\b
  jointcut cache ls
  jointcut cache ls --json | jq .total_bytes
  jointcut cache clear --dir /scratch/programs --yes
"""

FOLDER = "The folder of the cache."

CACHE_LS = """List what the cache holds, the last used first.

A folder that is not there holds nothing, and is not made. --json prints an object of folder, total_bytes, and entries:
key, label, bytes, last_used (in seconds since 1970).
"""

CACHE_CLEAR = """Remove everything that the cache holds.

Programs that run go on running; a removed program is compiled again when it is next needed. --json prints an object of
folder, removed (how many entries) and removed_bytes.
"""

YES = "Do not ask."
