"""A Ctrl-C inside a step: at each place where Python may raise it, the step's job goes on."""

import gc
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import embershard as es
from embershard.proto.messages import Push
from embershard.worker import session as session_folder
from embershard.worker.client.membership import Terms

SPEC = es.TableSpec(name="t", dim=2, optimizer=es.SGD(lr=1.0), initializer=es.Constant(value=0.0))
IDS = torch.arange(8)  # on both shards
WORKER_CODE = str(Path(session_folder.__path__[0]).parent)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place inside the worker's code where Python looks for signals.

    Without the garbage collector, which may run anywhere, and in whose finalizers Python drops what is raised.
    """

    def __init__(self, place: int) -> None:
        self.left = place

    def __enter__(self):
        gc.disable()
        sys.setprofile(self.look)

    def __exit__(self, *error):
        sys.setprofile(None)
        gc.enable()

    def look(self, frame, event, arg):
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(WORKER_CODE):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


def step(session):
    session.zero_grad()  # of a step that was interrupted before it took its gradients
    rows = es.Embedding(session.table(SPEC))(IDS)
    rows.sum().backward()
    session.step()
    return rows.detach()[:, 0].tolist()


def interrupted_step(session, place, *, prefetch):
    """Take a step that is interrupted at a place; whether there is such a place."""
    module, interrupt = es.Embedding(session.table(SPEC)), Interrupt(place)
    try:
        for ids in session.prefetch([IDS], inputs=lambda ids: {"t": ids}) if prefetch else [IDS]:
            module(ids).sum().backward()
            with interrupt:
                session.step()
    except KeyboardInterrupt:
        return True
    return interrupt.left <= 0


def rows_of(session, shard):
    """The rows that a shard keeps, once no push waits."""
    table = session.table(SPEC)
    route = table.route(IDS)
    return table.pull(torch.from_numpy(route.ids[route.slice_of(shard)]))[:, 0].tolist()


@pytest.mark.parametrize(
    ("staleness", "local_steps", "prefetch"),
    [(0, None, False), (0, 1, False), (0, None, True), (1, None, False), (1, 1, False)],
)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 17], ids=["each place", "a seventeenth"])
def test_workers_of_one_clock_go_on_after_a_ctrl_c_inside_a_step(make_wires, staleness, local_steps, prefetch, every):
    terms = Terms(workers=2, staleness=staleness, wait_timeout=timedelta(seconds=2))
    place, counts = 1, Counter()
    while True:
        job = make_wires(2)
        first, second = (job.session(worker, terms, local_steps=local_steps) for worker in (0, 1))
        was_there = interrupted_step(first, place, prefetch=prefetch)
        while (behind := min(first, second, key=lambda session: session.clock)).clock < 3:
            step(behind)
        for wire in job.wires:
            assert [member.clock for member in wire.shard.status().members] == [first.clock, second.clock], place
        if local_steps is None:
            for shard, wire in enumerate(job.wires):
                pushes = [request for request in wire.seen if isinstance(request, Push) and request.tables]
                applied = 3 if staleness == 0 else len({(push.token.worker, push.token.seq) for push in pushes})
                assert set(rows_of(second, shard)) == {-applied}, place
        counts[was_there] += 1
        if not was_there:
            break
        place += every
    assert counts[True] > 40 // every


def test_dense_weights_are_read_as_they_are_after_a_ctrl_c_at_any_place(make_wires):
    session, place = make_wires(2).session(), 0
    model = es.wrap(torch.nn.Linear(3, 2), session, optimizer=es.SGD(lr=1.0))
    weight, bias = (parameter.detach().clone() for parameter in model.parameters())
    interrupted = True
    while interrupted:
        place, interrupted = place + 1, False
        try:
            with Interrupt(place):
                session.refresh()
        except KeyboardInterrupt:
            interrupted = True
        assert torch.equal(model.bias, bias), place
        assert torch.equal(model.weight, weight), place
    assert place > 10
