"""The dashboard and the alerts ask for what is exported, and the files in the tree are those that are built."""

import json
import re

import pytest

from embershard.deploy.grafana.alerts import ALERTS
from embershard.deploy.grafana.build import dashboard, files
from embershard.deploy.grafana.panels import ROWS
from embershard.proto.monitoring.metrics import SHARD_METRICS, WORKER_METRICS

# what the exporters of a live shard and a live worker show is compared with these tables by tests/ps/monitoring and
# tests/worker/reporting: what stands here is exported
CONSTANT = {"embershard_shard": {"shard"}, "embershard_worker": {"worker", "run"}}
PROMETHEUS_LABELS = {"instance", "job"}

QUERIES = [query for _, row in ROWS for panel in row for query, _ in panel.queries] + [one.query for one in ALERTS]


def exported():
    """Name of a series -> its labels."""
    found = {}
    for metric in (*SHARD_METRICS, *WORKER_METRICS):
        own = {*metric.labels, *CONSTANT[metric.name.rpartition("_shard_")[0] + "_shard" if "_shard_" in metric.name
                                          else "embershard_worker"]}  # fmt: skip
        if metric.type == "histogram":
            found |= {f"{metric.name}_bucket": {*own, "le"}, f"{metric.name}_sum": own, f"{metric.name}_count": own}
        else:
            found[metric.name] = own
    return found


def problems(query):
    """What a query asks for that nobody exports."""
    known = exported()
    names = re.findall(r"\bembershard_(?:shard|worker)_\w+", query)
    found = {name for name in names if name not in known}
    for name, matchers in re.findall(r"(embershard_\w+)\{([^}]*)\}", query):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        found |= {f"{name}.{label}" for label in labels - known.get(name, set()) - PROMETHEUS_LABELS}
    anywhere = PROMETHEUS_LABELS.union(*(known.get(name, set()) for name in names))
    for grouping in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", query):
        found |= {label for label in re.split(r"[\s,]+", grouping.strip()) if label not in anywhere}
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_metrics_and_labels_that_are_exported(query):
    assert problems(query) == set()
    assert "embershard_" in query or query.startswith("up{")


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("embershard_shard_no_such", "embershard_shard_no_such"),
        ('embershard_shard_clock{table="a"}', "embershard_shard_clock.table"),
        ("sum by (tabel) (embershard_shard_table_rows)", "tabel"),
        ("embershard_shard_queue_duration_seconds", "embershard_shard_queue_duration_seconds"),
    ],
)
def test_a_query_for_anything_else_is_found(query, problem):
    assert problems(query) == {problem}


def test_a_panel_shows_the_chosen_runs_and_shards_only():
    for query in (query for _, row in ROWS for panel in row for query, _ in panel.queries):
        assert re.findall(r"embershard_shard_\w+(?!\w)(?!{instance=~\"\$instance\")", query) == []
        assert re.findall(r"embershard_worker_\w+(?!\w)(?!{run=~\"\$run\")", query) == []
    assert [one["name"] for one in dashboard()["templating"]["list"]] == ["datasource", "run", "instance"]


def test_every_metric_is_drawn_or_tells_what_a_process_is():
    asked = " ".join(QUERIES)
    undrawn = {m.name for m in (*SHARD_METRICS, *WORKER_METRICS) if m.name not in asked}
    assert undrawn == {
        "embershard_shard_build_info",
        "embershard_shard_uptime_seconds",
        "embershard_worker_lost_leases_total",  # the shards' evictions are
        "embershard_worker_samples_per_second",  # for who asks one worker; the panel adds up samples
        "embershard_worker_skipped_rows_total",  # the shards' are
        "embershard_worker_steps_total",
        "embershard_worker_table_codec_info",
    }


def test_the_files_are_those_that_are_built():
    for path, text in files().items():
        assert path.read_text(encoding="utf-8") == text, f"run python deploy/grafana/build.py: {path.name} is old"


def test_panels_do_not_overlap_and_fill_their_rows():
    cells = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells
        assert place["x"] + place["w"] <= 24
        cells |= own
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    json.dumps(dashboard())


def test_every_alert_says_what_to_do_and_is_tested():
    for alert in ALERTS:
        assert alert.remedy.endswith("."), alert.name
        assert alert.fires, alert.name
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
