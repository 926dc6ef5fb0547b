"""A plan as steps: in which order both halves run, as text."""

from __future__ import annotations

from textwrap import dedent

import jax
import jax.numpy as jnp
from jax import lax

from jointcut.partition import Roles, split
from jointcut.partition.lower.schedule import schedule
from jointcut.partition.plans.backend import CPU, PORTABLE
from jointcut.partition.plans.plan import Plan
from jointcut.partition.plans.problem import Problem
from jointcut.partition.program.text import parse as read


def text_of(graph_text, saved, backend=CPU, lengths=None, kept_steps=None):
    graph = read(graph_text)
    return str(schedule(Problem.of(graph, backend=backend), Plan.of(graph, saved), lengths, kept_steps))


def steps(text):
    return dedent(text).lstrip("\n")


# ---------------------------------------------------------------------------------------------- golden texts


CHAIN = """
    primal %0:float32[8]
    cotangent %1:float32[8]
    %2:float32[8] = sin %0
    %3:float32[8] = exp %2
    %4:float32[8] = tan %3
    backward:
    %5:float32[8] = mul %1 %4
    %6:float32[8] = mul %5 %3
    %7:float32[8] = mul %6 %2
    output %4
    gradient %7
"""


def test_where_all_is_saved_each_op_runs_once_and_nothing_waits():
    assert text_of(CHAIN, [2, 3, 4]) == steps("""
        forward:
            run #0 sin
            run #1 exp
            run #2 tan
        handed: %2 %3 %4
        backward:
            run #3 mul
            run #4 mul
            run #5 mul
        """)


def test_what_is_not_saved_runs_again_once_a_cotangent_is_there():
    assert text_of(CHAIN, [3, 4]) == steps("""
        forward:
            run #0 sin
            run #1 exp
            run #2 tan
        handed: %3 %4
        backward:
            run #3 mul
            run #4 mul
            wait %0 for %6
            again #0 sin
            run #5 mul
        """)


PRODUCTS = """
    primal %0:float32[8,8]
    cotangent %1:float32[8,8]
    %2:float32[8,8] = dot_general %0 %0
    %3:float32[8,8] = tanh %2
    %4:float32[8,8] = dot_general %3 %0
    backward:
    %5:float32[8,8] = mul %1 %3
    %6:float32[8,8] = dot_general %3 %5
    output %4
    gradient %6
"""


def test_a_backend_may_want_chains_written_out_before_products():
    assert text_of(PRODUCTS, [2]) == steps("""
        forward:
            run #0 dot_general
            run #1 tanh
            write %3
            run #2 dot_general
        handed: %2
        backward:
            wait %2 for %1
            again #1 tanh
            run #3 mul
            write %3
            write %5
            run #4 dot_general
        """)
    assert "write" not in text_of(PRODUCTS, [2], PORTABLE)


POOLED = """
    primal %0:float32[8]
    cotangent %1:float32[4]
    %2:float32[8] = neg %0
    %3:float32[8] = dot_general %2
    %4:float32[4] = reduce_window_max %3
    backward:
    %5:float32[8] = select_and_scatter_add %1 %3
    %6:float32[8] = mul %5 %2
    output %4
    gradient %6
"""


def test_an_op_that_the_compiler_takes_apart_waits_in_a_computation_of_its_own():
    assert text_of(POOLED, [3]) == steps("""
        forward:
            run #0 neg
            write %2
            run #1 dot_general
            run #2 reduce_window_max
        handed: %3
        backward:
            wait %3 for %1
            run apart #3 select_and_scatter_add
            wait %0 for %5
            again #0 neg
            run #4 mul
        """)


LOOP = """
    loop 1 x5
    primal %0:float32[3]
    cotangent %1:float32[3]
    %2:float32[3] = exp %0
    %3:float32[3] %4:float32[3]@1 = loop %0 %6 body 1 of loop 1 {
        #4 %5:float32[3] = mul %4 %2
        %6:float32[3] = sin %5
        next %6
        stacks %5
    }
    backward:
    #2 %7:float32[3] %8:float32[3]@1 = loop %1 %10 body 2 of loop 1 {
        #6 %9:float32[3] = cos %5
        %10:float32[3] = mul %8 %9
        %11:float32[3] = mul %10 %2
        next %10
        stacks %11
    }
    #3 %12:float32[3] = reduce_sum %11
    output %3
    gradient %7
    gradient %12
"""


def test_a_loop_stacks_what_is_saved_and_its_backward_recomputes_the_rest():
    assert text_of(LOOP, [4]) == steps("""
        forward:
            run #0 exp
            loop #1 stacks %4 {
                run #4 mul
                run #5 sin
            }
        handed: %4
        backward:
            wait %0 for %1
            again #0 exp
            stacks after %2:float32[3] (exp)
            loop #2 stacks %11 {
                again #4 mul
                run #6 cos
                run #7 mul
                run #8 mul
            }
            run #3 reduce_sum
        """)


def test_in_segments_a_loop_keeps_its_carry_and_its_forward_runs_again_before_each_part_of_the_backward():
    assert text_of(LOOP, [2, 4], lengths={1: 2}) == steps("""
        forward:
            run #0 exp
            keep %4 every 2 steps {
                loop #1 stacks {
                    run #4 mul
                    run #5 sin
                }
            }
        handed: %2
        backward:
            segments of 2 steps from %4 {
                again loop #1 stacks %4 {
                    run #4 mul
                    run #5 sin
                }
                loop #2 stacks %11 {
                    again #4 mul
                    run #6 cos
                    run #7 mul
                    run #8 mul
                }
            }
            run #3 reduce_sum
        """)


def test_segments_of_segments_run_a_loop_for_its_carry_alone_first():
    assert text_of(LOOP, [2, 4], lengths={1: (3, 2)}) == steps("""
        forward:
            run #0 exp
            keep %4 every 3 steps {
                loop #1 stacks {
                    run #4 mul
                    run #5 sin
                }
            }
        handed: %2
        backward:
            segments of 3 steps from %4 {
                keep %4 every 2 steps {
                    again loop #1 stacks {
                        run #4 mul
                        run #5 sin
                    }
                }
                segments of 2 steps from %4 {
                    again loop #1 stacks %4 {
                        run #4 mul
                        run #5 sin
                    }
                    loop #2 stacks %11 {
                        again #4 mul
                        run #6 cos
                        run #7 mul
                        run #8 mul
                    }
                }
            }
            run #3 reduce_sum
        """)


KEPT = """
    forward:
        run #0 exp
        keep %4 every 2 steps but the last 1 {
            loop #1 stacks {
                run #4 mul
                run #5 sin
            }
            loop #1 stacks %4 {
                run #4 mul
                run #5 sin
            }
        }
    handed: %2
    backward:
        segments of 2 steps from %4 after the last 1 {
            again loop #1 stacks %4 {
                run #4 mul
                run #5 sin
            }
            loop #2 stacks %11 {
                again #4 mul
                run #6 cos
                run #7 mul
                run #8 mul
            }
        }
        run #3 reduce_sum
"""


def test_a_loop_that_keeps_its_last_steps_stands_twice_in_the_forward_and_its_backward_once():
    assert text_of(LOOP, [2, 4], lengths={1: 2}, kept_steps={1: 1}) == steps(KEPT)


def test_segments_are_no_longer_than_the_steps_that_are_left_for_them():
    text = text_of(LOOP, [2, 4], lengths={1: (4, 3)}, kept_steps={1: 2})
    (length,) = {line.split(" of ")[1].split()[0] for line in text.splitlines() if "segments of" in line}
    assert length == str(read(LOOP).loops[1].length - 2)


def test_segments_are_handed_what_they_read_unless_the_backward_has_computed_it_again():
    assert "handed:\n" in text_of(LOOP, [5], lengths={1: 2})
    reads_less = LOOP.replace("mul %10 %2", "neg %10")
    assert "handed: %5\n" in text_of(reads_less, [5])
    assert "handed: %2\n" in text_of(reads_less, [5], lengths={1: 2})


def traced_cell(reverse):
    def loss(h, xs):
        return jnp.sum(lax.scan(lambda h, x: (jnp.sin(h * x), None), h, xs, reverse=reverse)[0])

    def joint(h, xs, ct):
        y, pullback = jax.vjp(loss, h, xs)
        return y, *pullback(ct)

    struct = jax.ShapeDtypeStruct
    given = struct((3,), "float32"), struct((4, 3), "float32"), struct((), "float32")
    return split(jax.make_jaxpr(joint)(*given), Roles.simple(2, 1, 1, 2), "min_cut", backend=PORTABLE)


def test_the_direction_of_a_scan_is_its_own_and_steps_do_not_tell_it():
    ahead, back = traced_cell(False), traced_cell(True)
    assert str(ahead.schedule) == str(back.schedule)
    assert str(back.schedule) == steps("""
        forward:
            loop #0 stacks %4 {
                run #5 mul
                run #6 sin
            }
            run #1 reduce_sum
        handed: %4
        backward:
            run #2 broadcast_in_dim
            loop #3 stacks %9 {
                wait %4 for %11
                wait %10 for %11
                again #5 mul
                again #7 cos
                run #8 mul
                run #9 mul
                run #10 mul
            }
        """)


NESTED = """
    loop 1 x4
    loop 2 x3 in 1
    primal %0:float32[3]
    cotangent %1:float32[3]
    %2:float32[3] %9:4xfloat32[3]@1 = loop %0 %5 body 1 of loop 1 {
        #2 %11:4xfloat32[3] %14:12xfloat32[3]@2 = loop %9 %4 body 3 of loop 2 {
            #6 %3:12xfloat32[3] = cos %14
            %4:12xfloat32[3] = sin %14
            next %4
            stacks %3 %4
        }
        %5:4xfloat32[3] = tanh %11
        %6:4xfloat32[3] = sub %5
        next %5
        stacks %3 %4 %5 %6
    }
    backward:
    #1 %8:float32[3] %10:4xfloat32[3]@1 = loop %1 %13 body 2 of loop 1 {
        #5 %7:4xfloat32[3] = mul %10 %6
        #8 %13:4xfloat32[3] %15:12xfloat32[3]@2 = loop %7 %12 body 4 of loop 2 {
            #9 %12:12xfloat32[3] = mul %15 %3
            next %12
        }
        next %13
    }
    output %2
    gradient %8
"""


def test_a_loop_within_a_loop_runs_again_and_stacks_what_one_step_of_the_outer_needs():
    assert text_of(NESTED, [5, 9]) == steps("""
        forward:
            loop #0 stacks %5 %9 {
                loop #2 stacks {
                    run #7 sin
                }
                run #3 tanh
            }
        handed: %5 %9
        backward:
            loop #1 stacks {
                wait %5 for %10
                again #4 sub
                run #5 mul
                wait %9 for %7
                again loop #2 stacks %3 {
                    run #6 cos
                    run #7 sin
                }
                loop #8 stacks {
                    run #9 mul
                }
            }
        """)


TWO_OUTPUTS = """
    primal %0:float32[4]
    primal %1:float32[4]
    cotangent %2:float32[4]
    cotangent %3:float32[4]
    %4:float32[4] = exp %0
    %5:float32[4] = mul %4 %1
    %6:float32[4] = sin %4
    backward:
    %7:float32[4] = mul %2 %4
    %8:float32[4] = mul %2 %1
    #5 %9:float32[4] = cos %4
    %10:float32[4] = mul %3 %9
    %11:float32[4] = add_any %8 %10
    %12:float32[4] = mul %11 %4
    output %5
    output %6
    gradient %12
    gradient %7
"""


def test_what_only_the_backward_computes_runs_where_it_is_needed():
    assert text_of(TWO_OUTPUTS, []) == steps("""
        forward:
            run #0 exp
            run #1 mul
            run #2 sin
        handed:
        backward:
            wait %0 for %2
            again #0 exp
            run #3 mul
            run #4 mul
            again #5 cos
            run #6 mul
            run #7 add_any
            run #8 mul
        """)


BRANCHES = """
    primal %0:float32[4]
    primal %1:bool[]
    cotangent %2:float32[4]
    %3:float32[4] = sin %0
    %4:float32[4] = cond %1 %3 holds exp sin
    %5:float32[4] = exp %4
    backward:
    %6:float32[4] = mul %2 %5
    %7:float32[4] = cond %1 %6 %3 holds mul cos
    %8:float32[4] = mul %7 %0
    output %5
    gradient %8
"""


def test_an_op_with_branches_is_one_step():
    assert text_of(BRANCHES, [4]) == steps("""
        forward:
            run #0 sin
            run #1 cond
            run #2 exp
        handed: %4
        backward:
            wait %4 for %2
            again #2 exp
            run #3 mul
            wait %0 for %6
            again #0 sin
            run #4 cond
            run #5 mul
        """)


INPUT_RETURNED = """
    primal %0:float32[4]
    cotangent %1:float32[4]
    %2:float32[4] = mul %0 %0
    %3:float32[] = reduce_sum %2
    backward:
    %4:float32[4] = mul %1 %0
    output %3
    output %0
    gradient %4
"""


def test_inputs_are_not_listed_among_what_is_handed_over():
    assert text_of(INPUT_RETURNED, []) == steps("""
        forward:
            run #0 mul
            run #1 reduce_sum
        handed:
        backward:
            run #2 mul
        """)
