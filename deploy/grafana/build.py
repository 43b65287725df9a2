"""Write the dashboard and the alerts: `python deploy/grafana/build.py`. A test fails where the files are not these."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from embershard.deploy.grafana.alerts import ALERTS, Alert
from embershard.deploy.grafana.panels import ROWS, Panel

FOLDER = Path(__file__).parent
DASHBOARD, RULES, TESTS = FOLDER / "embershard.json", FOLDER / "alerts.yml", FOLDER / "alerts_test.yml"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3  # of Grafana's 24 columns
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"x": 0, "y": top, "w": _WIDTH * _COLUMNS, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        for number, panel in enumerate(row):
            line, column = divmod(number, _COLUMNS)
            place = {"x": column * _WIDTH, "y": top + 1 + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        top += 1 + -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "title": "embershard",
        "uid": "embershard",
        "tags": ["embershard"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                _datasource(),
                _variable("run", "Run", "embershard_worker_steps_total"),
                _variable("instance", "Shards", "embershard_shard_ready"),
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
        for i, (query, legend) in enumerate(panel.queries)
    ]
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"fillOpacity": 30 if panel.stacked else 5, "lineWidth": 1, "showPoints": "never", "stacking": stacking}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, label: str, metric: str) -> dict[str, Any]:
    """Ask for values of a label, of which all are chosen at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values({metric}, {name})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def rules() -> dict[str, Any]:
    """The rules of all alerts."""
    return {"groups": [{"name": "embershard", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.query,
        "for": alert.wait,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.remedy},
    }


def tests() -> dict[str, Any]:
    """A test of each alert for promtool: it is silent at first, and fires when it should."""
    return {"rule_files": [RULES.name], "evaluation_interval": "1m", "tests": [_test(alert) for alert in ALERTS]}


def _test(alert: Alert) -> dict[str, Any]:
    summary = alert.summary
    for name, value in alert.labels:
        summary = summary.replace(f"{{{{ $labels.{name} }}}}", value)
    fired = {
        "exp_labels": {"severity": alert.severity, **dict(alert.labels)},
        "exp_annotations": {"summary": summary, "description": alert.remedy},
    }
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in alert.fires],
        "alert_rule_test": [
            {"eval_time": "1m", "alertname": alert.name, "exp_alerts": []},
            {"eval_time": f"{alert.minutes}m", "alertname": alert.name, "exp_alerts": [fired]},
        ],
    }


def files() -> dict[Path, str]:
    """Every file and its text."""
    return {
        DASHBOARD: json.dumps(dashboard(), indent=1) + "\n",
        RULES: _yaml(rules()),
        TESTS: _yaml(tests()),
    }


def _yaml(value: dict[str, Any]) -> str:
    stream, writer = io.StringIO(), YAML()
    writer.width = 200
    writer.dump(value, stream)
    return f"# Written by deploy/grafana/build.py: change the data there.\n{stream.getvalue()}"


def main() -> None:
    """Write the dashboard and the alert rules from the tables of metrics and alerts."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
