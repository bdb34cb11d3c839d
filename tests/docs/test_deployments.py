"""The examples for CI and Kubernetes: they follow their schemas, and what they name is there."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import ROOT, environment, run_aotc
from registry_server import docker_config, htpasswd, needs, running_registry
from scripts_here import run_script
from services import RunningService, started
from store.signing import key_by_openssl, needs_openssl

from aotc.integrations.vllm.plugin import PluginSettings
from aotc.runtime.stats import Stats
from aotc.store.reference import is_remote, parse_reference

PODS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
ACTION = ROOT / "examples" / "ci" / "action.yml"
IMAGES = {"container": ROOT, "bert": ROOT / "examples" / "bert", "small_image": ROOT, "llm_without_torch": ROOT}
"""Folders of `examples` with a Dockerfile, and the context of each."""
DOCKERFILES = [ROOT / "examples" / folder / "Dockerfile" for folder in IMAGES]
DOCKERFILE_USER = re.search(r"^USER (\d+):\d+$", DOCKERFILES[0].read_text(), re.MULTILINE) or ["", "0"]
WORKFLOW = ROOT / "examples" / "ci" / "aotc-build.yml"
OURS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


MANIFESTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}")
    for path in PODS
    for document in yaml.safe_load_all(path.read_text())
]
DOCUMENTS = [one for one in MANIFESTS if one.values[0]["kind"] == "Deployment"]
OPERATORS = "monitoring.coreos.com/"
"""The group of the kinds of the Prometheus operator, which are not Kubernetes' own."""


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (one.values[0] for one in MANIFESTS if one.values[0]["kind"] == kind)
    return found


@pytest.mark.parametrize(
    "document", [one for one in MANIFESTS if not one.values[0]["apiVersion"].startswith(OPERATORS)]
)
def test_a_manifest_follows_the_schema_of_kubernetes(document: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(document, validator.latest_version(), strict=True)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_pod_mounts_probes_and_runs_is_there(document: dict[str, Any]) -> None:
    pod = document["spec"]["template"]["spec"]
    assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert not [argument for argument in container["command"] if argument.endswith(".py") and not is_file(argument)]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        named = [one["value"] for one in container.get("env", ()) if one["value"].startswith("/")]
        named += [after for option, after in itertools.pairwise(container["command"]) if option == "--store"]
        assert named and [path for path in named if not any(path.startswith(mount) for mount in mounts)] == []
    for container in pod["containers"]:
        ports = {port["containerPort"] for port in container["ports"]}
        assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} <= ports


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if not str(one.id).startswith("engine")])
def test_the_service_the_budget_and_the_monitor_are_of_these_pods(document: dict[str, Any]) -> None:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    labels, ports = document["spec"]["selector"]["matchLabels"], {port["name"] for port in container["ports"]}
    service, budget, monitor = (of_kind(kind)["spec"] for kind in ("Service", "PodDisruptionBudget", "PodMonitor"))
    assert service["selector"] == labels and {port["targetPort"] for port in service["ports"]} <= ports
    assert budget["selector"]["matchLabels"] == labels and budget["maxUnavailable"] < document["spec"]["replicas"]
    assert monitor["selector"]["matchLabels"] == labels
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
    scaled = of_kind("HorizontalPodAutoscaler")["spec"]
    assert scaled["scaleTargetRef"]["name"] == document["metadata"]["name"]
    assert scaled["minReplicas"] <= document["spec"]["replicas"] <= scaled["maxReplicas"]


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if not str(one.id).startswith("engine")])
def test_what_a_pod_writes_is_bounded(document: dict[str, Any]) -> None:
    pod = document["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["volumes"] if one.get("emptyDir") == {}] == []
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert all("ephemeral-storage" in container["resources"][kind] for kind in ("requests", "limits"))


def test_an_alert_is_on_metrics_that_are_exported_and_says_what_to_do() -> None:
    nothing = Stats(calls=0, buckets={}, misses=0, miss_kinds={}, contiguous_copies=0, errors={})
    exported = {*nothing.counters(), *(f"aotc_call_seconds_{part}" for part in ("bucket", "sum", "count"))}
    for group in of_kind("PrometheusRule")["spec"]["groups"]:
        for rule in group["rules"]:
            used = set(re.findall(r"\b(?:aotc|kube)_\w+", rule["expr"]))
            assert " / " not in rule["expr"], "an idle service has no calls to divide by"
            assert used and {name for name in used if not name.startswith("kube_")} <= exported
            assert rule["expr"].count("(") == rule["expr"].count(")")
            assert {"summary", "action"} <= rule["annotations"].keys() and "severity" in rule["labels"]


def test_the_autoscaler_s_own_metric_is_made_of_one_that_is_exported() -> None:
    (named,) = (
        one["pods"]["metric"]["name"] for one in of_kind("HorizontalPodAutoscaler")["spec"]["metrics"] if "pods" in one
    )
    (rule,) = yaml.safe_load(of_kind("ConfigMap")["data"]["config.yaml"])["rules"]
    assert rule["name"] == {"as": named}
    for query in (rule["seriesQuery"], rule["metricsQuery"]):
        assert re.findall(r"aotc_\w+", query) == ["aotc_call_seconds_sum"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_pod_asks_for_what_it_needs_and_may_do_no_more(document: dict[str, Any]) -> None:
    """Its user is a number, its threads are its cores, and it becomes ready before another one of its kind ends."""
    pod = document["spec"]["template"]["spec"]
    user = int(DOCKERFILE_USER[1])
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == user
    assert [secret["name"] for secret in pod["imagePullSecrets"]] == ["registry-login"]
    assert {*document["spec"]["strategy"]["rollingUpdate"].values()} == {0, 1}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        resources, privileges = container["resources"], container["securityContext"]
        assert {"cpu", "memory"} <= resources["requests"].keys() and "memory" in resources["limits"]
        assert not privileges["allowPrivilegeEscalation"] and privileges["capabilities"] == {"drop": ["ALL"]}
        if privileges.get("readOnlyRootFilesystem"):
            assert {"/tmp"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    for container in pod["containers"]:
        variables = {one["name"]: one["value"] for one in container["env"]}
        assert variables["OMP_NUM_THREADS"] == container["resources"]["limits"]["cpu"]
        assert container["startupProbe"]["httpGet"] == container["livenessProbe"]["httpGet"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_pod_that_ends_is_out_of_the_balancers_first_and_has_time_to_finish(document: dict[str, Any]) -> None:
    """20 seconds at least for requests, after the pause before SIGTERM and the service's own after it."""
    pod = document["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause >= 5 and pod["terminationGracePeriodSeconds"] >= pause + 5 + 20
    if "examples/service.py" in container["command"]:
        readiness = container["readinessProbe"]
        assert readiness["httpGet"]["path"] == "/readyz"
        assert readiness["periodSeconds"] * readiness["failureThreshold"] < 5  # seconds that the service goes on


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_pins_torch_once_and_runs_as_a_number(path: Path) -> None:
    """The torch that CI tests, and of every file that is copied, that it is there and not kept out of the context."""
    text = path.read_text()
    constraints = ROOT / ".ci" / "constraints.txt"
    pinned = re.findall(r"^ARG TORCH=(\S+)$", text, re.MULTILINE)
    assert len(pinned) == 1 and text.count('pip install --no-cache-dir "torch==${TORCH}"') == 1
    assert not constraints.exists() or f"torch=={pinned[0]}" in constraints.read_text().splitlines()
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "10001:10001"
    assert f"useradd --uid {DOCKERFILE_USER[1]} " in text or text.split("\nFROM ")[-1].startswith("scratch\n")
    context = IMAGES[path.parent.name]
    kept = {line.removeprefix("!") for line in (context / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for *sources, _ in (line.split() for line in re.findall(r"^COPY (?!--)(.+)$", text, re.MULTILINE)):
        assert {source.partition("/")[0] for source in sources} <= kept
        assert context != ROOT or all((ROOT / source).exists() for source in sources)


def test_each_target_that_a_page_builds_is_a_stage() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILES[0].read_text(), re.MULTILINE))
    texts = [path.read_text() for path in (*PODS, *(ROOT / "examples").rglob("README.md"), DOCKERFILES[0])]
    asked = {target for text in texts for target in re.findall(r"--target (\w+) -t", text)}
    assert asked == {"artifacts", "service", "tools"} and asked <= stages


def test_the_plug_in_of_an_engine_is_told_what_it_reads() -> None:
    document = yaml.safe_load((ROOT / "examples/kubernetes/engine-cache.yaml").read_text())
    (engine,) = document["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in engine["env"]}
    settings = PluginSettings.of(variables)
    assert settings is not None and settings.mode == "restore"
    assert is_remote(parse_reference(settings.cache).store)
    written = [variables[name] for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "AOTC_CACHE_DIR", "HOME")]
    assert [each for each in written if not each.startswith("/compiled/")] == []


def is_file(name: str) -> bool:
    return (ROOT / name).is_file()


@pytest.mark.parametrize(
    ("path", "schema"),
    [(ACTION, "github-actions"), *((path, "github-workflows") for path in (WORKFLOW, *OURS))],
)
def test_a_file_for_github_follows_its_schema(path: Path, schema: str) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", path]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_the_action_uses_inputs_that_it_has_and_never_as_code() -> None:
    action = yaml.safe_load(ACTION.read_text())
    assert set(re.findall(r"inputs\.(\w+)", ACTION.read_text())) == action["inputs"].keys()
    for step in action["runs"]["steps"]:
        assert "uses" in step or (step["shell"] == "bash" and "${{" not in step["run"])


def test_the_steps_of_the_action_build_and_push(quickstart_store: Path, tmp_path: Path) -> None:
    """In bash, as a runner runs them; the store has the units, as a cache would."""
    shutil.copytree(quickstart_store, tmp_path / "store")
    action = yaml.safe_load(ACTION.read_text())
    inputs = {name: str(entry.get("default", "")) for name, entry in action["inputs"].items()}
    inputs |= {"manifest": "manifests/quickstart.yaml", "store": str(tmp_path / "store"), "tag": "v1"}
    inputs |= {"model": "quickstart", "push": f"file://{tmp_path}/registry#quickstart:v1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for step in action["runs"]["steps"]:
        if "run" in step and step["name"] != "Verify":  # README's test runs that command
            values = {name: fill_in(text, inputs) for name, text in step["env"].items()}
            variables = environment(PATH=path, GITHUB_STEP_SUMMARY=str(tmp_path / "summary"), **values)
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            ran = run_script(command, ROOT, variables)
            assert ran.returncode == 0, ran.stdout
    assert "quickstart:v1" in (tmp_path / "summary").read_text()
    assert (tmp_path / "registry" / "index.json").exists()


def fill_in(text: str, inputs: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: inputs[found[1]], text)


# -- GitLab, and any shell --------------------------------------------------------------------------------------------

BUILD, GITLAB = ROOT / "examples" / "ci" / "build.sh", ROOT / "examples" / "ci" / "gitlab-ci.yml"


def test_the_file_for_gitlab_follows_its_schema() -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.gitlab-ci", GITLAB]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_gitlab_gives_the_script_what_it_needs_and_keeps_its_store() -> None:
    job = yaml.safe_load(GITLAB.read_text())["aotc"]
    asked = set(re.findall(r"\$\{?:? ?([A-Z]+)[:}]", BUILD.read_text())) | {"KEY", "PUSH", "TARGET", "STORE"}
    assert {"MANIFEST", "MODEL", "TAG"} <= asked and asked - {"SEEDS", "EXPIRES"} <= job["variables"].keys()
    assert is_file(job["variables"]["MANIFEST"]) and job["cache"]["paths"] == [job["variables"]["STORE"]]
    assert [line for line in job["script"] if BUILD.name in line]


@needs_openssl
def test_the_script_builds_verifies_signs_attests_and_pushes(quickstart_store: Path, tmp_path: Path) -> None:
    """The store has the units, as a cache would, so nothing is compiled; the push meets a policy that asks for all."""
    shutil.copytree(quickstart_store, tmp_path / "store")
    private, public = key_by_openssl(tmp_path, "ci")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {
        "MANIFEST": str(ROOT / "manifests/quickstart.yaml"),
        "MODEL": "quickstart",
        "TAG": "v1",
        "KEY": str(private),
    }
    given |= {"STORE": str(tmp_path / "store"), "PUSH": f"file://{tmp_path}/registry#quickstart:v1", "PATH": path}
    ran = run_script(["bash", BUILD], tmp_path, environment(**given))
    assert ran.returncode == 0, ran.stdout
    release = json.loads((tmp_path / "aotc-release.json").read_text())
    assert {one["kind"] for one in release["statements"]} == {"provenance", "sbom"} and len(release["signatures"]) == 1
    policy = {
        "AOTC_TRUSTED_KEYS": str(public),
        "AOTC_REQUIRE": "provenance,sbom",
        "AOTC_CACHE_DIR": str(tmp_path / "c"),
    }
    fetch = ("fetch", f"file://{tmp_path}/registry#quickstart:v1", "--store", tmp_path / "copy")
    fetched = run_aotc(*fetch, **policy)
    assert fetched.returncode == 0, fetched.stderr


# -- a pod, rehearsed -------------------------------------------------------------------------------------------------


class Pod:
    """Its containers as processes: the commands as they are written, with folders in the place of its mounts, a
    registry of the test in that of the manifest's, and a free port."""

    def __init__(self, folder: Path, document: dict[str, Any], registry: str, keys: Path, login: Path) -> None:
        self.spec, self.folder, self._registry = document["spec"]["template"]["spec"], folder, registry
        given = {"keys": keys, "registry-login": login}
        self._volumes = {one["name"]: given.get(one["name"], folder / one["name"]) for one in self.spec["volumes"]}
        for volume in self._volumes.values():
            volume.mkdir(parents=True, exist_ok=True)

    def command(self, container: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        mounts = {one["mountPath"]: str(self._volumes[one["name"]]) for one in container["volumeMounts"]}

        def here(text: str) -> str:
            at = next((at for at in mounts if text == at or text.startswith(f"{at}/")), None)
            return mounts[at] + text.removeprefix(at) if at else text.replace("registry.example.com", self._registry)

        variables = {one["name"]: here(one["value"]) for one in container["env"]}
        return [here(argument) for argument in container["command"]], {**variables, "TMPDIR": mounts["/tmp"]}

    def fetch(self) -> subprocess.CompletedProcess[str]:
        (container,) = self.spec["initContainers"]
        (program, *arguments), variables = self.command(container)
        assert program == "aotc"
        return run_aotc(*arguments, **variables)

    @contextmanager
    def serving(self) -> Iterator[RunningService]:
        (container,) = self.spec["containers"]
        (_, *arguments), variables = self.command(container)
        arguments = ["127.0.0.1" if one == "0.0.0.0" else one for one in arguments]
        with started([*arguments, "--port", 0], self.folder, **variables) as service:
            yield service


@needs_openssl
@needs("docker-registry")
def test_the_deployment_s_pod_runs_from_a_registry_to_its_end(quickstart_store: Path, tmp_path: Path) -> None:
    """kubelet's part of it: the init container, probes, a request, metrics, preStop, SIGTERM and the grace period. A
    bundle that no trusted key has signed does not get into the volume, and the pod does not start."""
    document = yaml.safe_load((ROOT / "examples/kubernetes/deployment.yaml").read_text())
    store = Path(shutil.copytree(quickstart_store, tmp_path / "store"))
    private, public = key_by_openssl(tmp_path, "ci")
    (keys := tmp_path / "trusted").mkdir()
    shutil.copy(public, keys / "cosign.pub")
    with running_registry(tmp_path / "registry", **htpasswd(tmp_path)) as server:
        login = docker_config(tmp_path / "login", server.host)

        def aotc(*arguments: object) -> None:
            ran = run_aotc(*arguments, DOCKER_CONFIG=str(login))
            assert ran.returncode == 0, ran.stderr

        aotc("tag", "quickstart", "quickstart:v1", "--store", store)
        aotc("push", f"{store}#quickstart:v1", f"oci://{server.host}/team/quickstart:v1")
        refused = Pod(tmp_path / "refused", document, server.host, keys, login)
        ran = refused.fetch()
        assert ran.returncode == 2 and "is not signed" in ran.stderr, ran.stderr
        assert {path.name for path in (tmp_path / "refused" / "artifacts").iterdir()} <= {".aotc"}, "only a lock"
        aotc("sign", f"{store}#quickstart:v1", "--key", private, "--as", "quickstart:v1")
        aotc("push", f"{store}#quickstart:v1", f"oci://{server.host}/team/quickstart:v1")
        pod = Pod(tmp_path / "pod", document, server.host, keys, login)
        assert (ran := pod.fetch()).returncode == 0, ran.stderr
    (container,) = pod.spec["containers"]  # no registry is there any more
    with pod.serving() as service:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert service.request("GET", container[probe]["httpGet"]["path"])[0] == 200
        assert service.predict({"batch": 1})[0] == 200
        _, text = service.request("GET", "/metrics")
        assert re.search(r'^aotc_call_seconds_bucket\{.*le="\+Inf"\} 2$', text, re.MULTILINE), text
        used = of_kind("ConfigMap")["data"]["config.yaml"] + yaml.dump(of_kind("PrometheusRule"))
        assert {name for name in re.findall(r"aotc_\w+", used) if name != "aotc_busy"} <= {
            *re.findall(r"aotc_\w+", text)
        }
        began = time.monotonic()
        time.sleep(container["lifecycle"]["preStop"]["sleep"]["seconds"])
        assert service.end_by_the_rule("/predict", {"batch": 1}) == 0
        assert time.monotonic() - began < pod.spec["terminationGracePeriodSeconds"]
