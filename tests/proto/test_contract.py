"""What embershard.proto tells a client in another language about settings."""

import dataclasses
import re
from pathlib import Path

from embershard.proto import spec


def test_the_contract_names_the_settings_of_every_optimizer_and_initializer_with_their_defaults():
    proto = (Path(__file__).resolve().parents[2] / "proto" / "embershard.proto").read_text()
    told = " ".join(line.removeprefix("// ") for line in proto.partition("message TableSpec")[0].splitlines())
    for kind, cls in spec.OPTIMIZERS.items():
        settings = re.search(rf'"{kind}"(?:, "\w+")?: (.*?)\. ("|They)', told)[1]
        for field in dataclasses.fields(cls):
            if field.name not in ("lr", "clip_value", "clip_norm"):
                numbers = re.search(rf"\b{field.name} ([^,]+)", settings)[1]
                assert field.default in [float(one) for one in re.findall(r"\d[\d.]*(?:e-\d+)?", numbers)]
    for cls in (spec.Constant, spec.Uniform, spec.Normal):
        settings = re.search(rf'"{cls.kind}" \((.*?)\)', told)[1]
        for field in dataclasses.fields(cls):
            assert f"{field.name}, {field.default:g}" in settings
