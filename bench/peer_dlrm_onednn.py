"""The peers' dlrm_torch.py with linear layers by oneDNN.

peers.py copies it into that file's place, beside worker/nn/onednn.py.
"""

from dlrm_torch_plain import Dense as PlainDense
from dlrm_torch_plain import loss_fn as loss_fn
from onednn import use_onednn


class Dense(PlainDense):  # type: ignore[misc]
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        if not use_onednn(self):
            raise RuntimeError("this torch was built without oneDNN")
