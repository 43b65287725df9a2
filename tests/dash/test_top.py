"""`embershard top`, in a terminal that is not there."""

import asyncio
import os
import signal
import time

import pytest
from textual.widgets import DataTable

from embershard.cli.top import NoTerminal, top
from embershard.dash.sampler import Sampler
from embershard.dash.terminal import TopApp, facts, worker_cells
from embershard.dash.workers import WorkerRow
from harness.served import ServedShard
from harness.shards import make_shard, table


@pytest.fixture
def addresses():
    shards = [ServedShard(shard=make_shard(table(name=name))) for name in ("a", "b")]
    yield [shard.address for shard in shards]
    for shard in shards:
        shard.stop()


async def shown(app, pilot):
    while app.sample is None or any(row.stale for row in app.sample.shards):
        await pilot.pause(0.02)


def test_shards_are_shown_sorted_and_opened_by_keys(addresses):
    app = TopApp(Sampler(addresses, interval=0.05))

    async def use() -> None:
        async with app.run_test(size=(140, 40)) as pilot:
            await shown(app, pilot)
            rows = app.query_one("#shards", DataTable)
            assert rows.row_count == 2
            assert "2 of 2 shards" in facts(app.sample).plain
            await pilot.press("down", "enter")
            await pilot.pause()
            opened = app.shards[1]
            (of_shard,) = app._sampler.tables(opened.address)
            assert f"{of_shard.name}: 0 rows" in str(app.query_one("#detail").render())
            before = app.sort_column
            await pilot.press("s")
            assert app.sort_column != before
            await pilot.press("q")

    asyncio.run(use())


def test_an_open_shard_with_many_tables_leaves_room_for_the_rest():
    shard = ServedShard(shard=make_shard(*(table(f"t{k}") for k in range(30))))
    app = TopApp(Sampler([shard.address], interval=0.05))

    async def use() -> None:
        async with app.run_test(size=(140, 40)) as pilot:
            await shown(app, pilot)
            await pilot.press("enter")
            await pilot.pause()
            lines = str(app.query_one("#detail").render()).splitlines()
            assert (len(lines), lines[-1]) == (22, "  and 10 more, which `embershard status` prints")

    asyncio.run(use())
    shard.stop()


def test_it_stands_still_while_it_is_paused(addresses):
    app = TopApp(Sampler(addresses, interval=0.05))

    async def use() -> None:
        async with app.run_test() as pilot:
            await shown(app, pilot)
            await pilot.press("p")
            number = app.sample.number
            await pilot.pause(0.2)
            assert app.sample.number == number
            await pilot.press("p")
            await pilot.pause(0.2)
            assert app.sample.number > number

    asyncio.run(use())


def test_its_sampler_ends_before_it_does(addresses):
    class Slow(Sampler):
        def sample(self):
            found = super().sample()
            self._stop.wait() if self.last.number else None  # a round that the end of the app meets
            time.sleep(2)
            return found

    sampler = Slow(addresses)
    app = TopApp(sampler)

    async def use() -> None:
        async with app.run_test() as pilot:
            await shown(app, pilot)
            await pilot.press("q")
        assert not sampler._thread.is_alive()

    asyncio.run(use())


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
def test_a_key_ends_it(key):
    app = TopApp(Sampler([]))

    async def use() -> None:
        async with app.run_test() as pilot:
            await pilot.press(key)
            while app.is_running:
                await asyncio.sleep(0.02)

    asyncio.run(use())


def test_a_signal_ends_it_and_gives_the_terminal_back(addresses):
    app = TopApp(Sampler(addresses, interval=0.05))

    async def use() -> None:
        async with app.run_test() as pilot:
            await shown(app, pilot)
            os.kill(os.getpid(), signal.SIGTERM)
            while app.is_running:
                await asyncio.sleep(0.02)

    asyncio.run(use())
    assert app.return_code == 128 + signal.SIGTERM


def test_it_says_that_it_needs_a_terminal():
    with pytest.raises(NoTerminal):
        top(ps="127.0.0.1:1")


def test_a_run_without_shards_is_not_said_to_have_none_of_them():
    sampler = Sampler([])
    assert facts(sampler.sample()).plain == "0 workers"
    sampler.close()


def test_a_worker_that_waits_names_whom_it_waits_for():
    row = WorkerRow(worker=0, state="waits", waits_for=[1, 3], seconds=4.0, step_ms=10.0, parts={"compute": 10.0})
    cells = [cell.plain for cell in worker_cells(row)]
    assert "1, 3" in cells[1]
    assert "4 s" in cells[1]
