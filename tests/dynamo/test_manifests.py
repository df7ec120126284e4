"""Kubernetes manifests: Dynamo's schema, Kubernetes' own, and the flags of our commands."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml

from executor.cli import app

DEPLOY = Path(__file__).parents[2] / "deploy"
SCHEMA = json.loads((DEPLOY / "schema" / "dynamo_graph_deployment.json").read_text())
GRAPHS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted(DEPLOY.glob("*.yaml"))
    if "DynamoGraphDeployment" in path.read_text()
}


def check(graph: dict[str, Any]) -> None:
    """Raises what the first validator that objects raises."""
    jsonschema.validate(graph, SCHEMA)
    names = [component["name"].lower() for component in graph["spec"]["components"]]
    assert len(set(names)) == len(names)
    for component in graph["spec"]["components"]:
        pod = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "pod"},
            "template": component["podTemplate"],
        }
        kubernetes_validate.validate(pod, "1.34", strict=True)


def workers(graph: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Main containers by component, those of frontends left out."""
    return {
        component["name"]: container
        for component in graph["spec"]["components"]
        for container in component["podTemplate"]["spec"]["containers"]
        if component["type"] != "frontend" and container["name"] == "main"
    }


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_what_the_operator_takes(name: str) -> None:
    check(GRAPHS[name])


def test_both_ways_to_serve_are_there() -> None:
    assert set(GRAPHS) == {"aggregated", "disaggregated"}


def test_the_volume_claim_is_what_kubernetes_takes() -> None:
    kubernetes_validate.validate(yaml.safe_load((DEPLOY / "engines.yaml").read_text()), "1.34", strict=True)


def rename_field(graph: dict[str, Any]) -> None:
    graph["spec"]["components"][0]["replica"] = graph["spec"]["components"][0].pop("replicas")


def unknown_type(graph: dict[str, Any]) -> None:
    graph["spec"]["components"][1]["type"] = "context"


def misspelled_container_field(graph: dict[str, Any]) -> None:
    graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["volumeMount"] = []


def no_main_container(graph: dict[str, Any]) -> None:
    graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["name"] = "worker"


def replicas_as_text(graph: dict[str, Any]) -> None:
    graph["spec"]["components"][1]["replicas"] = "3"


@pytest.mark.parametrize(
    "spoil", [rename_field, unknown_type, misspelled_container_field, no_main_container, replicas_as_text]
)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_check_finds_what_is_wrong(name: str, spoil: Callable[[dict[str, Any]], None]) -> None:
    graph = copy.deepcopy(GRAPHS[name])
    spoil(graph)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(graph)


def parameters(container: dict[str, Any]) -> dict[str, Any]:
    """What `executor dynamo-worker` reads from a container's arguments; fails as the command would."""
    program, subcommand, engine_dir = container["command"]
    assert (program, subcommand) == ("executor", "dynamo-worker")
    command = typer.main.get_command(app).get_command(None, subcommand)  # type: ignore[attr-defined]
    read: dict[str, Any] = command.make_context(subcommand, [engine_dir, *container["args"]]).params
    return read


@pytest.mark.parametrize("name", GRAPHS)
def test_workers_are_started_with_arguments_that_the_command_takes(name: str) -> None:
    for container in workers(GRAPHS[name]).values():
        read = parameters(container)
        assert read["discovery_backend"] == "kubernetes"
        assert any(str(read["engine_dir"]).startswith(f"{mount['mountPath']}/") for mount in container["volumeMounts"])


def test_components_have_the_roles_of_their_types() -> None:
    roles = {
        component["type"]: parameters(workers(graph)[component["name"]])["role"].value
        for graph in GRAPHS.values()
        for component in graph["spec"]["components"]
        if component["type"] != "frontend"
    }
    assert roles == {"worker": "both", "prefill": "context", "decode": "generation"}
