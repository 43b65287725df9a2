"""Which codecs suit which optimizer: one line where a choice is a poor one."""

from __future__ import annotations

from embershard.proto.codec.name import CodecName

# what divides a step by the size of the gradients that it has seen
ADAPTIVE = frozenset({"adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl", "rmsprop"})


def advice(optimizer: str, push: CodecName) -> str:
    """What speaks against a codec in front of an optimizer, by name (docs/compression.md); "": nothing."""
    if optimizer in ADAPTIVE and push.has_feedback:
        return (
            f"{push} in front of {optimizer} changes the size of its steps, for gradients that waited are divided by "
            "another history. int8 does not: it is the better choice here, and top-k in front of sgd"
        )
    if optimizer == "sgd" and push.select == "all" and not push.is_plain and not push.has_feedback:
        return (
            f"in front of sgd topk:0.01+fp16s sends far less than {push}, and what it leaves out is sent later; "
            "quantisation is the better choice in front of adagrad and adam"
        )
    return ""
