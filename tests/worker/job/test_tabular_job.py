"""Jobs of tables whose fields contradict each other are refused before anything is read, with file and line."""

import pytest

from embershard.worker.job.load import JobFileError, load_job

JOB = """\
model: {model}
data:
  reader: tabular
  train: a.csv
  {data}
features:
  user: {{}}
  {feature}
embedding: {{optimizer: {{name: sgd, lr: 0.1}}}}
train: {{epochs: 1, batch_size: 32}}
{rest}
"""
REFUSED = {  # name: (the parts of a job, what is said)
    "ratings with binary cross-entropy": ({"data": "label_range: [1, 5]"}, ":5: data.label_range: labels outside 0..1"),
    "any label with binary cross-entropy": ({"data": "label_range: any", "rest": "loss: bce"}, ":5: data.label_range"),
    "a feature that reads the label": ({"feature": "seen: {column: label}"}, ":8: features.seen: reads column 'label'"),
    "a cross that reads the label": (
        {"feature": "x: {type: cross, of: [user, label]}"},
        ":8: features.x: reads column 'label'",
    ),
    "a label twice": ({"data": "label: [a, a]", "model": "{name: mmoe}"}, ":5: data.label: names 'a' twice"),
    "two labels for one logit": ({"data": "label: [a, b]"}, ":1: model.name: fm has one logit"),
    "sequences of other lengths beside each other": (
        {
            "model": "{name: din, target: [user, shop], history: [items, shops]}",
            "feature": "\n  ".join(
                [
                    "shop: {}",
                    "items: {type: sequence, table: user, max_length: 5}",
                    "shops: {type: sequence, table: shop, max_length: 7}",
                ]
            ),
        },
        ":10: features.shops.max_length: must be that of 'items'",
    ),
    "hashes without shards": (
        {"rest": "strategy: local"},
        "give each table buckets, vocabulary, min_count or ids: exact",
    ),
    "groups of no feature": (
        {"rest": "evaluate: {groups: nope}"},
        "evaluate.groups: 'nope' is no feature of one value",
    ),
    "boundaries that are no numbers": (
        {"feature": "hour: {type: number, bucketise: [1, a]}"},
        ":8: features.hour.bucketise.1: input should be a valid number",
    ),
    "buckets that are neither a number nor a list": (
        {"feature": "hour: {type: number, bucketise: x}"},
        ":8: features.hour.bucketise: must be a valid integer or a list, got 'x'",
    ),
    "no layers": ({"model": "{name: xdeepfm, cin: []}"}, ":1: model.cin: list should have at least 1 item"),
    "a loss whose class is no text": ({"rest": "loss: {class: [1]}"}, ":11: loss.class: input should be a valid"),
    "a range of labels that is none": (
        {"data": "label_range: x"},
        ":5: data.label_range: must be a list or 'any', got 'x'",
    ),
    "gauc without groups": ({"rest": "metrics: [auc, gauc]"}, ":11: metrics.1: 'gauc' needs evaluate.groups"),
    "weights of other labels": (
        {"data": "label: [a, b]", "model": "{name: mmoe}", "rest": "loss: {name: bce, label_weights: [1]}"},
        "label_weights: has 1 weights for labels a, b",
    ),
}


def job_of(folder, model="{name: fm}", data="label: label", feature="item: {}", rest=""):
    (folder / "a.csv").write_text("user,item,label\nu,i,1\n")
    (folder / "job.yaml").write_text(JOB.format(model=model, data=data, feature=feature, rest=rest))
    return load_job(folder / "job.yaml")


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_contradict_each_other_are_named_with_their_line(tmp_path, case):
    parts, want = REFUSED[case]
    with pytest.raises(JobFileError) as found:
        job_of(tmp_path, **parts)
    assert f"{tmp_path}/job.yaml" in str(found.value)
    assert want in str(found.value)


def test_labels_of_any_range_are_for_a_loss_of_ones_own(tmp_path):
    assert job_of(tmp_path, data="label_range: [1, 5]", rest='loss: "math:dist"').data.label_range == (1, 5)
    assert job_of(tmp_path, data="label_range: [0.2, 0.8]").data.label_range == (0.2, 0.8)


def test_a_feature_without_fields_is_a_category(tmp_path):
    assert job_of(tmp_path, feature="item:").features == job_of(tmp_path, feature="item: {}").features
