"""Check objects of KEDA against the fields that its definitions have: kubernetes-validate does not know them.

.venv-deploy/bin/python tools/check_keda.py deploy/keda/*.yaml"""

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
COUNT = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}  # values of triggers are texts
SWITCH = {"enum": ["true", "false"]}


def struct(required: str = "", **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


METADATA = struct(
    "name",
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    namespace=TEXT,
    labels={"type": "object", "additionalProperties": TEXT},
    annotations={"type": "object", "additionalProperties": TEXT},
)
POLICY = struct("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=NUMBER, periodSeconds=NUMBER)
RULES = struct(
    stabilizationWindowSeconds=NUMBER, policies=many(POLICY), selectPolicy={"enum": ["Max", "Min", "Disabled"]}
)
AUTHENTICATION = struct("name", name=TEXT, kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]})
TRIGGERS = {
    "metrics-api": struct(
        "url valueLocation targetValue",
        url={"type": "string", "pattern": r"^https?://[\w-]+\.[\w-]+[^?]*$"},  # service.namespace; a query is dropped
        valueLocation=TEXT,
        targetValue=COUNT,
        activationTargetValue=COUNT,
        format={"enum": ["json", "xml", "yaml", "prometheus"]},
        aggregateFromKubeServiceEndpoints=SWITCH,
        aggregationType={"enum": ["average", "sum", "max", "min"]},
        unsafeSsl=SWITCH,
        authMode={"enum": ["apiKey", "basic", "tls", "bearer"]},
    ),
    "prometheus": struct(
        "serverAddress query threshold",
        serverAddress={"type": "string", "pattern": r"^https?://[\w-]+\.[\w-]+"},
        query=TEXT,
        threshold=COUNT,
        activationThreshold=COUNT,
        namespace=TEXT,
        customHeaders=TEXT,
        ignoreNullValues=SWITCH,
        queryParameters=TEXT,
        unsafeSsl=SWITCH,
        authModes=TEXT,
    ),
}
TRIGGER = {
    "oneOf": [
        struct("type metadata", type={"const": kind}, metadata=fields, name=TEXT, authenticationRef=AUTHENTICATION)
        for kind, fields in TRIGGERS.items()
    ]
}
SCALED = struct(
    "scaleTargetRef triggers",
    scaleTargetRef=struct("name", name=TEXT, apiVersion=TEXT, kind=TEXT, envSourceContainerName=TEXT),
    minReplicaCount=NUMBER,
    maxReplicaCount=NUMBER,
    idleReplicaCount=NUMBER,
    pollingInterval=NUMBER,
    cooldownPeriod=NUMBER,
    initialCooldownPeriod=NUMBER,
    fallback=struct("failureThreshold replicas", failureThreshold=NUMBER, replicas=NUMBER),
    advanced=struct(
        restoreToOriginalReplicaCount=FLAG,
        horizontalPodAutoscalerConfig=struct(name=TEXT, behavior=struct(scaleDown=RULES, scaleUp=RULES)),
    ),
    triggers=many(TRIGGER),
)
SECRET = struct("parameter name key", parameter=TEXT, name=TEXT, key=TEXT)
SPECS = {"ScaledObject": SCALED, "TriggerAuthentication": struct(secretTargetRef=many(SECRET))}


def check(item: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    kinds = {"enum": sorted(SPECS)}
    head = struct(
        "apiVersion kind metadata spec",
        apiVersion={"const": "keda.sh/v1alpha1"},
        kind=kinds,
        metadata=METADATA,
        spec=SPECS.get(item.get("kind", ""), {}),
    )
    jsonschema.validate(item, head)


def main() -> None:
    for name in sys.argv[1:]:
        for item in yaml.safe_load_all(Path(name).read_text()):
            try:
                check(item)
            except jsonschema.ValidationError as error:
                raise SystemExit(f"{name}: {error.json_path}: {error.message}") from None


if __name__ == "__main__":
    main()
