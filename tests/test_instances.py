"""The instances of the benchmarks are plain graphs, as their networks are, and published ones are read."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import instances
from benchmarks.convnets import NETWORKS
from benchmarks.evict import evict
from benchmarks.intervals import Instance
from jointcut.partition.program.roles import Role, Side
from jointcut.partition.program.text import parse, show

TEXTS = sorted(instances.TEXTS.glob("*.txt"))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_the_instances_of_the_benchmarks_are_plain_graphs_in_text_form(path):
    text = path.read_text()
    graph = parse(text)
    instance = Instance.of(graph)
    assert text.partition("\n")[2] == show(graph) + "\n"
    assert 40 <= len(instance.names) <= 350
    assert 0 < instance.floor_bytes < instance.nominal_bytes


def test_a_network_is_contracted_to_its_layers_and_their_backwards():
    graph = instances.traced(NETWORKS["vgg16"])
    forward = [op.name for op in graph.ops if op.origin is Side.FORWARD]
    assert [op.name for op in graph.ops if op.origin is Side.BACKWARD] == [f"{name}-back" for name in forward[::-1]]
    assert (forward[0], forward[-1], len(forward)) == ("block1_conv1", "loss", 22)
    assert parse(show(graph)) == graph
    gradients = [graph.values[v or 0].shape for v in graph.role_outputs(Role.GRADIENT)]
    parameters = graph.role_inputs(Role.PRIMAL)[: len(gradients)]
    assert gradients == [graph.values[v].shape for v in parameters]
    # the usual count of products in a forward of one image
    seconds = sum(op.seconds or 0.0 for op in graph.ops if op.origin is Side.FORWARD and op.name[:5] == "block")
    assert seconds * instances.FLOPS_PER_SECOND / (2 * 256) == pytest.approx(15.35e9, rel=0.05)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_texts_are_what_tracing_the_networks_gives(name):
    assert instances.load(name) == Instance.of(instances.traced(NETWORKS[name]))


def test_the_networks_have_as_many_parameters_as_the_published_ones():
    counts = {name: sum(math.prod(s.shape) for s in NETWORKS[name].arguments()[0].values()) for name in NETWORKS}
    assert (counts["vgg16"], counts["resnet50"]) == (138_357_544, 25_583_592)


def test_a_node_without_a_price_is_named(tmp_path):
    path = tmp_path / "published.json"
    path.write_text(json.dumps({"nodes": [{"id": 0, "cost_ram": 3}], "links": []}))
    with pytest.raises(ValueError, match=r"a node has neither cost_cpu nor duration: {'id': 0, 'cost_ram': 3}"):
        instances.read_node_link(path)


@pytest.mark.parametrize("names", [("id", "cost_cpu", "cost_ram"), ("name", "duration", "out_cost")])
def test_a_published_instance_is_read_from_its_nodes_and_links(tmp_path, names):
    name, seconds, size = names
    source, target = ("source", "target") if name == "id" else ("0", "1")
    record = {
        "graph": {"order": "[2, 0, 1]"} if name == "name" else {"name": "of three"},
        "nodes": [{name: i, seconds: 10 * i, size: 2**i} for i in range(3)],
        "links": [{source: 0, target: 1}, {source: 2, target: 1} if name == "name" else {source: 1, target: 2}],
    }
    path = tmp_path / "published.json"
    path.write_text(json.dumps(record))
    instance = instances.read_node_link(path)
    if name == "id":
        assert (instance.seconds, instance.value_bytes) == ((0.0, 10.0, 20.0), (1, 2, 4))
        assert instance.reads == ((), (0,), (1,))
    else:
        assert (instance.seconds, instance.value_bytes) == ((20.0, 0.0, 10.0), (4, 1, 2))
        assert instance.reads == ((), (), (0, 1))


@pytest.mark.parametrize("name", ["unet", "vgg16"])
def test_a_tenth_of_the_peak_of_a_network_is_evicted_within_a_percent_of_its_time(name):
    instance = instances.load(name)
    schedule = evict(instance, instance.nominal_bytes * 9 // 10)
    assert schedule is not None and schedule.seconds <= 1.01 * instance.nominal_seconds
