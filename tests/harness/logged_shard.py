"""A shard with a log in this process, whose bases are written when a test says so."""

import numpy as np

from embershard.proto.messages import Declare
from embershard.proto.routing import Placement
from embershard.proto.spec import Adam
from embershard.ps.recovery import recover
from embershard.ps.restore import UnloggedRows
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from harness.logs import FOLDER, open_log
from harness.shards import gradients, push, table

SEGMENT_BYTES = 2**14


class LoggedShard:
    """A shard's process with a log on a simulated disk, whose bases are written when the test says so."""

    def __init__(self, disk, mode="log", *, of=1, folder=None, segment_bytes=SEGMENT_BYTES, **options):
        self.disk, self.works, self.fatal = disk, [], []
        self.shard = Shard(0, Placement.even(of), OptimizerRegistry())
        self.folder = folder or open_log(disk, num_shards=of)
        options = {"least_cost": 2**62, "start": self.works.append, "on_fatal": self.fatal.append, **options}
        self.log = recover(self.shard, self.folder, mode, segment_bytes=segment_bytes, **options)
        self.bases = self.log.bases

    def write(self):
        while self.log.journal.write_group():
            pass

    def begin_base(self):
        """Take a base of this moment, whose work waits in `works`."""
        core = self.shard.core
        self.bases.take(0.0, core.tables.all(), core.control())

    def take_base(self):
        self.begin_base()
        self.write()
        self.works.pop()()

    def push(self, count=1, num_ids=20):
        for _ in range(count):
            seq = self.seq = getattr(self, "seq", 0) + 1
            ids = np.random.default_rng(seq).choice(200, num_ids, replace=False)
            values = np.random.default_rng(seq).standard_normal((num_ids, 3)).astype(np.float32)
            self.shard.handle(push(gradients(ids, values), seq=seq, first=seq))

    def begun(self):
        self.shard.handle(Declare(table(optimizer=Adam(lr=0.1)), lineage=5, begins_lineage=True))
        return self


def install(shard, log, contents):
    """Put what was restored in place, as a client does that asks until it is."""
    unlogged = UnloggedRows(contents.tables)
    while not shard._install(contents, unlogged):
        while log.journal.write_group():
            pass


def bases_of(disk):
    return [name for name in disk.list(FOLDER) if name.startswith("base-")]
