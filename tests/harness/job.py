"""A job that is valid with nothing said, for tests that change one section of it."""

from embershard.worker.job.job import Job

_SECTIONS: dict[str, dict[str, object]] = {
    "model": {"name": "lr"},
    "data": {"reader": "ctr_csv", "train": "t.csv"},
    "embedding": {"optimizer": {"name": "sgd", "lr": 0.1}},
    "train": {"batch_size": 50},
}


def make_job(strategy: str = "ps", **sections: object) -> Job:
    """The job with these fields in place of its own; another reader, or a user's model, has fields of its own only."""
    values: dict[str, object] = {"strategy": strategy, **_SECTIONS}
    for name, fields in sections.items():
        own = _SECTIONS.get(name) if isinstance(fields, dict) and not fields.keys() & {"reader", "class"} else None
        values[name] = fields if own is None else {**own, **fields}
    return Job.model_validate(values)
