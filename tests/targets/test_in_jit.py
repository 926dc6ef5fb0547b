"""A program of the user's that is lowered for the devices of a target is planned and weighed for these."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.parallel import moves
from jointcut import aot
from jointcut.aot.call import under_transform
from jointcut.partition.errors import TargetError
from targeted import installed


def loss(ws, x):
    for w in 2 * ws:
        x = jnp.sin(jnp.tanh(x @ w) + x)
    return jnp.mean(x**2)


def laid(mesh, *axes):
    types = [((256, 256), P()), ((256, 256), P()), ((4096, 256), P(*(axes or ("d",))))]
    *ws, x = (jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, at)) for shape, at in types)
    return ws, x


def step_of(function):
    return jax.jit(lambda ws, x: jax.value_and_grad(function)(ws, x))


def own_step_of(function):
    return jax.jit(function.value_and_grad)


def temp_bytes(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_the_target_follows_from_the_arguments_of_the_users_jit():
    there, goals, answered = installed("h100x8"), [], under_transform.answered

    def kept(request, *rest):
        goals.append(request.options.goal)
        return answered(request, *rest)

    with mock.patch.object(under_transform, "answered", kept):
        step_of(aot.function(loss)).trace(*laid(there.mesh((8,), ("d",))))
    assert goals == [there]


def test_a_budget_there_is_weighed_by_the_compiler_of_the_target():
    args = laid(installed("h100x8").mesh((8,), ("d",)))
    assert len(jax.devices()) < 8, "the host has no such mesh"
    plain = temp_bytes(jax.jit(jax.value_and_grad(loss)).lower(*args))
    made = temp_bytes(step_of(aot.function(loss, budget=0.75, tiles=False)).lower(*args))
    assert made <= 0.75 * plain


@pytest.mark.parametrize("around", [step_of, own_step_of])
def test_a_mesh_of_another_number_of_devices_is_refused_there(around):
    there = installed("h100x8")
    args = laid(Mesh(there.mesh((8,), ("d",)).devices[:4], ("d",)))
    with pytest.raises(TargetError) as refusal:
        around(aot.function(loss, target=there)).lower(*args)
    assert str(refusal.value) == (
        "The arguments lie on 4 devices, and the target h100x8 has 8 devices.\n"
        "Lay them on as many, such as with the mesh of the target, or name a target of as many."
    )


def test_types_on_a_mesh_without_devices_lie_on_those_of_the_target():
    there, nameless = installed("h100x8"), laid(jax.sharding.AbstractMesh((8,), ("d",)))
    cut = aot.function(loss, target=there).trace(*nameless).partition()
    assert cut.plan.remarks[-1] == "all bytes are those of one of 8 devices"
    assert {d for struct in cut.traced.structs for d in struct.sharding.device_set} == {*there.devices}


def test_what_tpus_exchange_is_counted():
    there = installed("v5e-8")
    ws, x = laid(there.mesh((8,), ("d",)), None, "d")
    found = aot.collectives(aot.function(loss), ws, x)
    program = own_step_of(aot.function(loss)).lower(ws, x).compile()
    assert found.ours.totals == moves(program.as_text())
    assert found.ours.totals["all-reduce"][0] > 0
    assert any("test_in_jit.py" in row.line for row in found.ours.rows), found
