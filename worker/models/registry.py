"""The models by the name that a job file gives them."""

from __future__ import annotations

from embershard.worker.models.dcn import DCNV2
from embershard.worker.models.dlrm import DLRM
from embershard.worker.models.fm import FM, LR, DeepFM
from embershard.worker.models.ncf import GMF, MLP, NeuMF
from embershard.worker.models.persia import PersiaDNN
from embershard.worker.models.recommender import Recommender
from embershard.worker.models.two_tower import TwoTower
from embershard.worker.models.wide_deep import WideDeep

MODELS: dict[str, type[Recommender]] = {
    "gmf": GMF,
    "mlp": MLP,
    "neumf": NeuMF,
    "lr": LR,
    "fm": FM,
    "wide_deep": WideDeep,
    "deepfm": DeepFM,
    "dcn_v2": DCNV2,
    "dlrm": DLRM,
    "persia_dnn": PersiaDNN,
    "two_tower": TwoTower,
}
