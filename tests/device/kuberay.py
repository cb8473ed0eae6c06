"""The part of KubeRay's v1 resources that deploy/ uses, as a JSON schema: a field that they do not have is an error.

Names and types are those of ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go (KubeRay 1.4) and of Kubernetes'
core/v1 pod template. Fields of a pod that deploy/ does not use are left out on purpose: a new one is looked up first.
"""

from typing import Any

QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|Mi|Gi|Ti|M|G|T)?$"}
WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def closed(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """An object with these fields and no other."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def many(item: dict[str, Any]) -> dict[str, Any]:
    """A list of at least one."""
    return {"type": "array", "items": item, "minItems": 1}


RESOURCES = closed({x: {"type": "object", "additionalProperties": QUANTITY} for x in ("requests", "limits")})
CONTAINER = closed(
    {
        "name": NAME,
        "image": {"type": "string"},
        "env": many(closed({"name": {"type": "string"}, "value": {"type": "string"}}, ("name", "value"))),
        "resources": RESOURCES,
        "volumeMounts": many(
            closed(
                {"name": NAME, "mountPath": {"type": "string", "pattern": "^/"}, "readOnly": {"type": "boolean"}},
                ("name", "mountPath"),
            )
        ),
    },
    ("name", "image", "resources"),
)
VOLUME = closed(
    {
        "name": NAME,
        "persistentVolumeClaim": closed({"claimName": NAME, "readOnly": {"type": "boolean"}}, ("claimName",)),
        "emptyDir": closed({"medium": {"enum": ["", "Memory"]}, "sizeLimit": QUANTITY}),
        "hostPath": closed({"path": {"type": "string"}, "type": {"type": "string"}}, ("path",)),
    },
    ("name",),
)
TEMPLATE = closed(
    {"spec": closed({"containers": many(CONTAINER), "volumes": many(VOLUME), "nodeSelector": WORDS}, ("containers",))},
    ("spec",),
)
COUNT = {"type": "integer", "minimum": 0}
HEAD_GROUP = closed(
    {"rayStartParams": WORDS, "template": TEMPLATE, "serviceType": {"type": "string"}}, ("rayStartParams", "template")
)
WORKER_GROUP = closed(
    {
        "groupName": NAME,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "numOfHosts": COUNT,
        "rayStartParams": WORDS,
        "template": TEMPLATE,
    },
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
)
CLUSTER = closed(
    {
        "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "headGroupSpec": HEAD_GROUP,
        "workerGroupSpecs": many(WORKER_GROUP),
    },
    ("headGroupSpec",),
)
JOB = closed(
    {
        "entrypoint": {"type": "string"},
        "runtimeEnvYAML": {"type": "string"},
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        "backoffLimit": COUNT,
        "activeDeadlineSeconds": COUNT,
        "shutdownAfterJobFinishes": {"type": "boolean"},
        "ttlSecondsAfterFinished": COUNT,
        "rayClusterSpec": CLUSTER,
    },
    ("entrypoint", "rayClusterSpec"),
)


def schema(kind: str) -> dict[str, Any]:
    """Of a whole manifest, by its kind."""
    spec = {"RayCluster": CLUSTER, "RayJob": JOB}[kind]
    return closed(
        {
            "apiVersion": {"const": "ray.io/v1"},
            "kind": {"const": kind},
            "metadata": closed({"name": NAME, "labels": WORDS, "namespace": NAME}, ("name",)),
            "spec": spec,
        },
        ("apiVersion", "kind", "metadata", "spec"),
    )
