"""Run programs of symbolic sizes on padded arrays.

A program that was traced for symbolic sizes says `float32[s0,64]`. XLA compiles no such program. Here it becomes one
for arrays that are padded to a larger size, a bucket, with the true sizes as further inputs. Numbers behind the true
size may be anything; each op that joins numbers along a padded axis first puts its neutral number there. So what the
program computes within the true sizes is what the function computes without padding.

Files, in reading order:

    extents: Tell the true and the padded sizes of a program's values, and mask what is padded.
    moved: Move elements of padded arrays: slices, reshapes, gathers, scatters, concatenations.
    joined: Join numbers along padded axes: sums, products of matrices, sorts.
    padded: Write a program of symbolic sizes as one for padded arrays.
    named: Give names to the sizes of arguments that vary, and choose buckets.
    sized: Run a function whose sizes vary: one pair of halves for padded arrays serves all sizes of an axis.
"""
