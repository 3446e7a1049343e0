"""The manifests of docs/deploy/kubernetes follow the API's schemas, fit each other, and say what lmkit understands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.cluster.config import read
from lmkit.proxy.config import load_config
from lmkit.turbo.transport.async_engine import STOP_SECONDS
from lmkit.web.key_file import parse_keys
from tests.test_deploy import OURS, ROOT

FOLDER = ROOT / "docs" / "deploy" / "kubernetes"
VERSIONS = ("1.30", "1.37")  # of Kubernetes: an old and a new one
OF_KUBERAY = "ray.io/v1"


def manifests() -> Iterator[tuple[str, Any]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if "kind" in document:
                yield path.name, document


ALL = [document for _, document in manifests()]


def of(kind: str) -> list[Any]:
    return [document for document in ALL if document["kind"] == kind]


def named(kind: str, name: str) -> Any:
    (found,) = (document for document in of(kind) if document["metadata"]["name"] == name)
    return found


def templates() -> Iterator[tuple[str, Any]]:
    """(name, pod template) of the Deployments and of KubeRay's groups."""
    for document in of("Deployment"):
        yield document["metadata"]["name"], document["spec"]["template"]
    for document in of("RayJob"):
        cluster = document["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group.get("groupName", "head"), group["template"]


def container(template: Any) -> Any:
    (only,) = template["spec"]["containers"]
    return only


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("file", "document"), manifests(), ids=lambda value: value if isinstance(value, str) else value["kind"]
)
def test_they_follow_the_schemas(file: str, document: Any, version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    if document["apiVersion"] != OF_KUBERAY:
        schemas.validate(document, version, strict=True)
    wrong = {**document, "spec": {**document.get("spec", {}), "replcas": 1}}
    if document["kind"] in ("Deployment", "Service"):
        with pytest.raises(schemas.ValidationError):
            schemas.validate(wrong, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "template"), templates(), ids=lambda value: value if isinstance(value, str) else "")
def test_pods_follow_the_schemas(name: str, template: Any, version: str) -> None:
    """KubeRay's templates, too: their own resource has no schema here."""
    schemas = pytest.importorskip("kubernetes_validate")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
    schemas.validate(pod, version, strict=True)


def test_names_and_labels_meet() -> None:
    pods = [
        (template["metadata"]["labels"], container(template)) for _, template in templates() if "metadata" in template
    ]
    selectors = [document["spec"]["selector"] for document in of("Service")]
    selectors += [
        document["spec"]["selector"]["matchLabels"] for document in (*of("Deployment"), *of("PodDisruptionBudget"))
    ]
    for selector in selectors:
        assert sum(selector.items() <= labels.items() for labels, _ in pods) == 1, selector
    for service in of("Service"):
        (here,) = (c for labels, c in pods if service["spec"]["selector"].items() <= labels.items())
        ports = {port["name"]: port["containerPort"] for port in here["ports"]}
        assert [ports[port["targetPort"]] for port in service["spec"]["ports"]] == [8080]
    for scaler in of("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in named(target["kind"], target["name"])["spec"]
    for _, template in templates():
        for volume in template["spec"].get("volumes", []):
            if secret := volume.get("secret"):
                named("Secret", secret["secretName"])
            if config := volume.get("configMap"):
                named("ConfigMap", config["name"])
        for variable in container(template).get("env", []):
            if key := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert key["key"] in named("Secret", key["name"])["stringData"]
        mounted = {mount["name"] for mount in container(template).get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in template["spec"].get("volumes", [])}


def test_the_proxy_s_file_is_one(tmp_path: Path) -> None:
    secret = named("Secret", "lmkit")["stringData"]
    (tmp_path / "proxy.yaml").write_text(secret["proxy.yaml"])
    config = load_config(tmp_path / "proxy.yaml")
    roles = {key.role: key.key for key in parse_keys(config.api_keys)}
    assert roles["node"] == secret["node-key"]
    assert config.mixed_weights  # a new version rolls out beside the old one
    assert (
        named("Deployment", "lmkit-proxy")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        > config.drain_seconds
    )
    (port,) = container(named("Deployment", "lmkit-proxy")["spec"]["template"])["ports"]
    assert port["containerPort"] == config.port
    assert {key.role for key in parse_keys(named("Secret", "lmkit-metrics")["stringData"]["keys"].splitlines())} == {
        "metrics"
    }


def test_the_servers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pods' arguments and variables; `lmkit serve` prints what it understands."""
    template = named("Deployment", "lmkit-qwen3-8b")["spec"]["template"]
    variables = {entry["name"]: entry.get("value", "x" * 32) for entry in container(template)["env"]}
    assert variables.keys() <= OURS
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "keys").write_text(named("Secret", "lmkit-metrics")["stringData"]["keys"])
    arguments = [word.replace("/etc/lmkit", str(tmp_path)) for word in container(template)["args"]]
    result = CliRunner().invoke(app, [*arguments, "--print-config"])
    assert result.exit_code == 0, result.exception
    (port,) = container(template)["ports"]
    assert re.search(rf"^port: {port['containerPort']}\b", result.stdout, re.MULTILINE)
    assert "LMKIT_PROXY" in result.stdout
    assert template["spec"]["terminationGracePeriodSeconds"] > float(variables["LMKIT_DRAIN_SECONDS"]) + STOP_SECONDS
    service = named("Service", "lmkit-proxy")
    assert variables["LMKIT_PROXY"] == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


def test_the_cluster_of_kuberay_is_one(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(named("ConfigMap", "lmkit-cluster")["data"]["cluster.yaml"])
    config = read(tmp_path / "cluster.yaml")
    service = named("Service", "lmkit-up")
    assert config.address == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    cluster = named("RayJob", "lmkit-up")["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    (group,) = config.models
    assert container(workers["template"])["resources"]["requests"]["cpu"] == str(group.cores)
    assert workers["maxReplicas"] >= group.bounds.max


def test_the_metrics_of_the_autoscaler_exist() -> None:
    rules = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    wanted = {
        metric["pods"]["metric"]["name"]
        for scaler in of("HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
    }
    assert {rule["name"]["as"] for rule in rules} == wanted
    used = set(re.findall(r"lmkit:(\w+)", (FOLDER / "prometheus-adapter.yaml").read_text()))
    code = (ROOT / "lmkit/serve/engine_figures.py").read_text()
    assert all(f'{{prefix}}:{name}"' in code for name in used), used
