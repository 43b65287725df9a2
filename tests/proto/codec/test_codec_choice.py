import re
from contextlib import nullcontext

import numpy as np
import pytest

from embershard.proto.codec.name import CodecName

TEXTS = {
    "none": {},
    "fp16s": {"values": "fp16s"},
    "bf16": {"values": "bf16"},
    "int8": {"values": "int8"},
    "onebit": {"values": "onebit"},
    "topk:0.01": {"select": "topk", "number": 0.01},
    "topk:1": {"select": "topk", "number": 1.0},
    "topk:0.01+mine.codecs:half": {"select": "topk", "number": 0.01, "values": "mine.codecs:half"},
    "rows:0.1+int8": {"select": "rows", "number": 0.1, "values": "int8"},
    "randomk:1e-05": {"select": "randomk", "number": 1e-5},
    "dgc:0.001+fp16s": {"select": "dgc", "number": 0.001, "values": "fp16s"},
    "powersgd:4": {"select": "powersgd", "number": 4},
    "delta": {"select": "delta"},
    "mine.codecs:half": {"values": "mine.codecs:half"},
}


@pytest.mark.parametrize(("text", "fields"), TEXTS.items())
def test_a_text_and_its_codec_say_the_same(text, fields):
    assert CodecName.parse(text) == CodecName(**fields)
    assert str(CodecName(**fields)) == text


def test_numbers_of_any_kind_and_plain_values_give_the_same_text():
    codec = CodecName(select="topk", number=np.float64(0.01))
    assert str(codec) == str(CodecName.parse("topk:0.01+none")) == "topk:0.01"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no ''"),
        ("gzip", "there is no 'gzip' (known: none, fp16s"),
        ("Int8", "there is no 'Int8'"),
        ("int8:4:4", "there is no 'int8:4:4'"),
        ("mine:", "there is no 'mine:'"),
        ("topk", "its ratio must be a number, as in topk:0.01"),
        ("topk:", "its ratio must be a number"),
        ("topk:few", "its ratio must be a number"),
        ("topk:nan", "its ratio must be a number"),
        ("topk:inf", "its ratio must be a number"),
        ("topk:0", "above 0 and at most 1, got 0"),
        ("topk:-0.1", "above 0 and at most 1, got -0.1"),
        ("topk:1.5", "above 0 and at most 1, got 1.5"),
        ("randomk:2", "above 0 and at most 1, got 2"),
        ("dgc:1", "to send everything, write none"),
        ("powersgd", "its rank must be a number, as in powersgd:4"),
        ("powersgd:0", "whole number from 1 to 256, got 0"),
        ("powersgd:2.5", "whole number from 1 to 256, got 2.5"),
        ("powersgd:257", "whole number from 1 to 256, got 257"),
        ("delta:3", "it takes no number"),
        ("delta+int8", "no values codec can follow it"),
        ("topk:0.1+onebit", "cannot follow a selection"),
        ("topk:0.1+topk:0.1", "RATIO"),
        ("topk:0.1+", "there is no ''"),
        ("int8+fp16s", "nothing follows it"),
        ("none+fp16s", "nothing follows it"),
    ],
)
def test_a_wrong_text_says_what_is_wrong_and_what_is_known(text, message):
    with pytest.raises(ValueError, match="known: none, fp16s, bf16") as error:
        CodecName.parse(text)
    assert message in str(error.value)


def test_a_codec_says_what_it_is():
    def those(fact):
        return {text for text in TEXTS if getattr(CodecName.parse(text), fact)}

    selections = {text for text in TEXTS if text.startswith(("topk", "rows", "randomk", "dgc", "powersgd"))}
    assert those("is_plain") == {"none"}
    assert those("is_custom") == {"topk:0.01+mine.codecs:half", "mine.codecs:half"}
    assert those("has_feedback") == selections | {"onebit"}
    assert those("for_pull") == {"none", "fp16s", "bf16", "int8", "delta", "mine.codecs:half"}
    assert those("dense_only") == {"onebit", "powersgd:4", "delta"}


@pytest.mark.parametrize(
    ("texts", "served"),
    [
        (["none", "int8", "mine:half"], [("rows", "push"), ("rows", "pull"), ("dense", "push"), ("dense", "pull")]),
        (["topk:0.01+int8", "dgc:0.001"], [("rows", "push"), ("dense", "push")]),
        (["onebit", "powersgd:4"], [("dense", "push")]),
        (["delta"], [("dense", "pull")]),
    ],
)
def test_a_codec_refuses_what_it_cannot_serve(texts, served):
    for text in texts:
        for kind in ("rows", "dense"):
            for direction in ("push", "pull"):
                is_served = (kind, direction) in served
                with nullcontext() if is_served else pytest.raises(ValueError, match=re.escape(repr(text))):
                    CodecName.parse(text).check(direction, kind == "dense")
