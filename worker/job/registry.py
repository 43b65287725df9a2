"""The models by the name that a job file gives them."""

from __future__ import annotations

from embershard.worker.models.ctr.dcn import DCNV2
from embershard.worker.models.ctr.dlrm import DLRM
from embershard.worker.models.ctr.fm import FM, LR, DeepFM
from embershard.worker.models.ctr.persia import PersiaDNN
from embershard.worker.models.ctr.wide_deep import WideDeep
from embershard.worker.models.ctr.xdeepfm import XDeepFM
from embershard.worker.models.multitask.mmoe import MMoE
from embershard.worker.models.multitask.ple import PLE
from embershard.worker.models.recommender import Recommender
from embershard.worker.models.retrieval.feature_towers import FeatureTowers
from embershard.worker.models.retrieval.ncf import GMF, MLP, NeuMF
from embershard.worker.models.retrieval.simplex import SimpleX
from embershard.worker.models.retrieval.two_tower import TwoTower
from embershard.worker.models.sequence.din import DIN
from embershard.worker.models.sequence.sasrec import SASRec

MODELS: dict[str, type[Recommender]] = {
    "gmf": GMF,
    "mlp": MLP,
    "neumf": NeuMF,
    "lr": LR,
    "fm": FM,
    "wide_deep": WideDeep,
    "deepfm": DeepFM,
    "xdeepfm": XDeepFM,
    "dcn_v2": DCNV2,
    "dlrm": DLRM,
    "persia_dnn": PersiaDNN,
    "two_tower": TwoTower,
    "feature_towers": FeatureTowers,
    "simplex": SimpleX,
    "din": DIN,
    "mmoe": MMoE,
    "ple": PLE,
    "sasrec": SASRec,
}
