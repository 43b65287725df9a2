"""The events of a simulated cluster, compiled: workers, their threads and links, the shards' queues, clocks, failures.

A worker has two threads: one trains, one (its client) sends requests and reads replies. A shard is one thread with a
queue. Threads have cores of their own, or share those of one machine equally (`cores`), as the benches' processes do.

A message goes this way; each arrow is an event:
    client sends -> first byte at the shard's machine -> whole message there: queued, parked, or refused -> handled
    -> first byte of the reply at the worker -> whole reply there -> read by the client

Times are seconds. `kind` is 0 for a pull, 1 for a push. Of S shards only the first `shards` may be simulated: the
slowest of the others is drawn from the replies that were seen (`wait_for_others`).
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit

PULL, PUSH = 0, 1
(
    START, SENT, AT_MACHINE, ARRIVED, HANDLED, RELEASED, AT_WORKER, RECEIVED, READ, REFUSED, RETRY, CALLED, COMPUTED,
    SHARED, DOWN, UP, LOST, EXPIRED,
) = range(18)  # fmt: skip
TRAINS_NOTHING, COMPUTES, WAITS_TO_SUBMIT = range(3)
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds between the tries of a client; doubles
MIN_RETRY, MAX_RETRY = 0.005, 1.0  # seconds that a full shard asks for
PULLED, TAKEN, FINISHED, SUBMITTED, ACKNOWLEDGED = range(5)  # in `State.done`
SMOOTHING = 1 / 512  # weight of the newest reply in a mean
NOW, TOTAL_FROM, VIRTUAL, LOOKED = range(4)  # in `State.times`
STEPS, SENT_COUNT, HANDLED_COUNT, REFUSED_COUNT, PARKED_COUNT, ACTIVE, STAMP, MEMBERS = range(8)  # in `.counts`


@njit(cache=True)
def key_of(event, worker=0, shard=0, kind=0, life=0):
    return event | (kind << 5) | (life << 6) | (shard << 7) | (worker << 20)


@njit(cache=True)
def spread(sigma):
    """A factor with mean 1, lognormal."""
    return np.exp(sigma * np.random.standard_normal() - sigma * sigma / 2) if sigma > 0 else 1.0


@njit(cache=True)
def run_job(work, st, heap, thread, seconds, key):
    """Have a thread do some work after what it has already; `key` is an event of its end."""
    st.busy[thread] += seconds
    if work.cores == 0:
        st.free[thread] = max(st.free[thread], st.times[NOW]) + seconds
        heapq.heappush(heap, (st.free[thread], key))
        return
    first, number = st.lines[0, thread], st.lines[1, thread]
    place = (first + number) % st.jobs.shape[1]
    st.jobs[thread, place], st.keys[thread, place] = seconds, key
    st.lines[1, thread] += 1
    if number == 0:
        pass_virtual_time(work, st)
        st.counts[ACTIVE] += 1
        st.ends_at[thread] = st.times[VIRTUAL] + seconds
        plan_shared(work, st, heap)


@njit(cache=True)
def rate(work, st):
    """Of a core, for each thread that has work."""
    return min(1.0, work.cores / max(1, st.counts[ACTIVE]))


@njit(cache=True)
def pass_virtual_time(work, st):
    """Virtual time is the CPU time that a thread which always had work would have had."""
    st.times[VIRTUAL] += (st.times[NOW] - st.times[LOOKED]) * rate(work, st)
    st.times[LOOKED] = st.times[NOW]


@njit(cache=True)
def plan_shared(work, st, heap):
    """Plan the end of the job that ends next; what was planned before does not count any more."""
    st.counts[STAMP] += 1
    if st.counts[ACTIVE]:
        left = max(0.0, st.ends_at.min() - st.times[VIRTUAL])
        heapq.heappush(heap, (st.times[NOW] + left / rate(work, st), key_of(SHARED, st.counts[STAMP])))


@njit(cache=True)
def end_shared(work, st, heap, stamp):
    """A job on the shared cores has ended."""
    if stamp != st.counts[STAMP]:
        return
    pass_virtual_time(work, st)
    thread = np.argmin(st.ends_at)
    first = st.lines[0, thread]
    heapq.heappush(heap, (st.times[NOW], st.keys[thread, first]))
    st.lines[0, thread] = first = (first + 1) % st.jobs.shape[1]
    st.lines[1, thread] -= 1
    if st.lines[1, thread]:
        st.ends_at[thread] += st.jobs[thread, first]
    else:
        st.ends_at[thread] = np.inf
        st.counts[ACTIVE] -= 1
    plan_shared(work, st, heap)


@njit(cache=True)
def is_idle(work, st, thread):
    return st.lines[1, thread] == 0 if work.cores else st.free[thread] <= st.times[NOW]


@njit(cache=True)
def use_link(st, side, number, seconds):
    """When a link begins with a message that comes now, after those before it."""
    start = max(st.links[side, number], st.times[NOW])
    st.links[side, number] = start + seconds
    st.link_busy[side, number] += seconds
    return start


# a worker


@njit(cache=True)
def begin_call(work, st, heap, w, kind):
    """Pull or push: a message to every shard, or to those that refused it before."""
    is_first = st.tries[kind, w] == 0
    st.called[kind, w] = st.times[NOW]
    st.calling[kind, w] = True
    st.pause[kind, w] = 0.0
    if is_first:
        st.unseen[kind, w] = work.unseen
    first = work.call
    for s in range(work.shards):
        if is_first or st.again[kind, w, s]:
            st.waiting[kind, w] += 1
            st.again[kind, w, s] = False
            st.counts[SENT_COUNT] += 1
            run_job(work, st, heap, work.workers + w, first + work.send[kind, s], key_of(SENT, w, s, kind))
            first = 0.0
    if st.waiting[kind, w] == 0:  # none of those that are simulated had refused it
        end_try(work, st, heap, w, kind)


@njit(cache=True)
def sent(work, st, heap, w, s, kind):
    seconds = work.upload[kind, s]
    start = use_link(st, 0, w, seconds * work.share[s])
    heapq.heappush(heap, (start + work.latency, key_of(AT_MACHINE, w, s, kind)))


@njit(cache=True)
def at_worker(work, st, heap, w, s, kind):
    seconds = work.download[kind, s] * work.share[s]
    start = use_link(st, 1, w, seconds)
    heapq.heappush(heap, (start + seconds, key_of(RECEIVED, w, s, kind)))


@njit(cache=True)
def note_reply(work, st, w, s, kind, is_refused):
    """Note how long a reply took, and learn from a shard that stands for others what those do."""
    took = st.times[NOW] - st.called[kind, w]
    if not is_refused:
        st.took[kind, w, s] = took
    if work.share[s] > 1.0:
        again = min(1, st.tries[kind, w])  # one that was full before is likely to be so still
        st.refusals[kind, again] += (is_refused - st.refusals[kind, again]) * SMOOTHING
        if not is_refused:
            st.mean_took[kind] += (took - st.mean_took[kind]) * SMOOTHING


@njit(cache=True)
def end_try(work, st, heap, w, kind):
    """The client has read every reply, or refusal, of a try."""
    end, unseen = st.times[NOW], st.unseen[kind, w]
    if unseen:
        end = max(end, wait_for_others(work, st, w, kind))
        st.unseen[kind, w] = np.random.binomial(unseen, st.refusals[kind, min(1, st.tries[kind, w])])
    if not st.again[kind, w].any() and st.unseen[kind, w] == 0:
        heapq.heappush(heap, (end, key_of(CALLED, w, 0, kind)))
        return
    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** st.tries[kind, w])
    wanted = st.pause[kind, w]
    if st.unseen[kind, w]:
        wanted = max(wanted, st.last_pause[kind])
    st.tries[kind, w] += 1
    heapq.heappush(heap, (end + max(pause, wanted * np.random.uniform(1.0, 1.2)), key_of(RETRY, w, 0, kind)))


@njit(cache=True)
def wait_for_others(work, st, w, kind):
    """When the slowest of the shards that are not simulated has answered.

    A reply's time is that of its call (the mean of the replies that stand for others) and a rest, drawn from those of
    all calls: the largest of n draws is the quantile u ** (1 / n). Of a repeated call the mean is that of all calls.
    """
    mean = st.mean_took[kind]
    if st.tries[kind, w] == 0:
        stands = work.share > 1.0
        mean = (st.took[kind, w] * stands).sum() / stands.sum()
        for s in range(work.shards):
            if stands[s] and not st.again[kind, w, s]:
                st.ring[kind, st.seen[kind] % st.ring.shape[1]] = st.took[kind, w, s] - mean
                st.seen[kind] += 1
                if st.seen[kind] % st.ring.shape[1] == 0:
                    st.ordered[kind] = np.sort(st.ring[kind])
    if st.seen[kind] < st.ring.shape[1]:
        return st.times[NOW]
    quantile = np.random.random() ** (1.0 / st.unseen[kind, w])
    rest = st.ordered[kind, min(st.ring.shape[1] - 1, int(quantile * st.ring.shape[1]))]
    return st.called[kind, w] + mean + rest


@njit(cache=True)
def called(work, st, heap, w, kind):
    """A pull or a push has come to its end."""
    st.calling[kind, w] = False
    st.tries[kind, w] = 0
    if kind == PULL:
        st.done[PULLED, w] += 1
    else:
        st.done[ACKNOWLEDGED, w] += 1
        if work.steps == st.done[ACKNOWLEDGED, w]:
            st.ends[w, work.steps - 1] = st.times[NOW]  # a loop ends with its last push
        if work.prefetch < 0:
            end_step(st, w)
        if st.phase[w] == WAITS_TO_SUBMIT:
            submit(work, st, heap, w)
    go_on(work, st, heap, w)


@njit(cache=True)
def go_on(work, st, heap, w):
    """Begin what may begin: computing, the next push, the next pull."""
    done = st.done[:, w]
    if st.phase[w] == TRAINS_NOTHING and done[PULLED] > done[TAKEN]:
        done[TAKEN] += 1
        st.phase[w] = COMPUTES
        run_job(work, st, heap, w, work.compute[w] * spread(work.compute_sigma), key_of(COMPUTED, w))
    if not st.calling[PUSH, w] and done[SUBMITTED] > done[ACKNOWLEDGED]:
        begin_call(work, st, heap, w, PUSH)
    if st.calling[PULL, w] or (work.steps and done[PULLED] >= work.steps):
        return
    seen = done[PULLED] - max(0, work.prefetch)  # batches whose pushes it shows
    if done[FINISHED] >= seen and done[ACKNOWLEDGED] >= seen:
        begin_call(work, st, heap, w, PULL)


@njit(cache=True)
def computed(work, st, heap, w):
    if st.done[SUBMITTED, w] - st.done[ACKNOWLEDGED, w] <= max(0, work.prefetch):
        submit(work, st, heap, w)
        go_on(work, st, heap, w)
    else:
        st.phase[w] = WAITS_TO_SUBMIT


@njit(cache=True)
def submit(work, st, heap, w):
    st.done[SUBMITTED, w] += 1
    st.done[FINISHED, w] = st.done[TAKEN, w]
    st.phase[w] = TRAINS_NOTHING
    if work.prefetch >= 0:
        end_step(st, w)


@njit(cache=True)
def end_step(st, w):
    number = st.done[TAKEN, w] - 1
    if number < st.ends.shape[1]:
        st.ends[w, number] = st.times[NOW]
    st.counts[STEPS] += 1


# a shard


@njit(cache=True)
def arrived(work, st, heap, w, s, kind):
    """A whole request is there: it is queued, parked until its clock is closed, or refused."""
    if st.is_down[s]:
        refuse(work, st, heap, w, s, kind)
        return
    parks = kind == PULL and work.staleness >= 0 and st.done[PULLED, w] - work.staleness > st.open[s]
    if st.queued[s] >= work.queue or (parks and st.num_parked[s] >= work.queue):
        st.extra[s] += work.refusal
        # about when half of the queue is done
        wanted = work.service[kind, s] * st.queued[s] / 2
        st.last_pause[kind] = min(MAX_RETRY, max(MIN_RETRY, wanted))
        st.pause[kind, w] = max(st.pause[kind, w], st.last_pause[kind])
        refuse(work, st, heap, w, s, kind)
        return
    if parks:
        st.extra[s] += work.refusal
        st.parked[s, w] = True
        st.num_parked[s] += 1
        st.counts[PARKED_COUNT] += 1
        return
    seconds, closed = work.service[kind, s], False
    if kind == PUSH and work.staleness >= 0 and st.clock[s, w] <= st.done[ACKNOWLEDGED, w]:  # else it is a repeat
        clock = st.clock[s, w] = st.done[ACKNOWLEDGED, w] + 1
        st.pushed[s, (clock - 1) % st.pushed.shape[1]] += 1
        applied, closed = close_clocks(work, st, s)
        if work.staleness == 0:
            seconds += applied - work.apply[s]
    st.queued[s] += 1
    handle(work, st, heap, s, seconds, key_of(HANDLED, w, s, kind, st.life[s]))
    if closed:
        release(work, st, heap, s)


@njit(cache=True)
def handle(work, st, heap, s, seconds, key):
    """Have a shard's thread handle a request."""
    thread = 2 * work.workers + s
    if is_idle(work, st, thread):
        seconds += work.wake
    run_job(work, st, heap, thread, seconds * spread(work.service_sigma) + st.extra[s], key)
    st.extra[s] = 0.0


@njit(cache=True)
def close_clocks(work, st, s):
    """Close the clocks that every member has pushed; the seconds of their sums, and whether there is one."""
    seconds, closed = 0.0, False
    while st.pushed[s, st.open[s] % st.pushed.shape[1]] >= st.counts[MEMBERS]:
        st.pushed[s, st.open[s] % st.pushed.shape[1]] = 0
        st.open[s] += 1
        seconds += work.apply[s] * st.counts[MEMBERS]
        closed = True
    return seconds, closed


@njit(cache=True)
def release(work, st, heap, s):
    """Handle the parked pulls that may be answered now, before what is queued later."""
    for w in range(work.workers):
        if st.parked[s, w] and st.done[PULLED, w] - work.staleness <= st.open[s]:
            st.parked[s, w] = False
            st.num_parked[s] -= 1
            handle(work, st, heap, s, work.service[PULL, s], key_of(RELEASED, w, s, PULL, st.life[s]))


@njit(cache=True)
def handled(work, st, heap, w, s, kind, life):
    if life != st.life[s]:  # its process is gone
        refuse(work, st, heap, w, s, kind)
        return
    st.counts[HANDLED_COUNT] += 1
    start = use_link(st, 3, work.machine[s], work.download[kind, s])
    heapq.heappush(heap, (start + work.latency, key_of(AT_WORKER, w, s, kind)))


@njit(cache=True)
def refuse(work, st, heap, w, s, kind):
    """The client has to send it again."""
    st.counts[REFUSED_COUNT] += 1
    when = max(st.times[NOW], work.noticed_at if st.is_down[s] else 0.0) + work.latency
    heapq.heappush(heap, (when, key_of(REFUSED, w, s, kind)))


# failures


@njit(cache=True)
def go_down(work, st, heap):
    """Some shards are away; what waits there has to be sent again."""
    for s in range(work.shards):
        if work.fails[s]:
            st.is_down[s], st.life[s], st.queued[s] = True, 1, 0
            st.free[2 * work.workers + s] = work.back_at
            for w in range(work.workers):
                if st.parked[s, w]:
                    st.parked[s, w] = False
                    refuse(work, st, heap, w, s, PULL)
            st.num_parked[s] = 0


@njit(cache=True)
def expire(work, st, heap):
    """The lease of the lost worker has ended: clocks close without it."""
    st.counts[MEMBERS] -= 1
    for s in range(work.shards):
        for clock in range(st.open[s], st.clock[s, work.lost_worker]):
            st.pushed[s, clock % st.pushed.shape[1]] -= 1
        seconds, closed = close_clocks(work, st, s)
        if closed:
            st.extra[s] += seconds if work.staleness == 0 else 0.0
            release(work, st, heap, s)


# all


@njit(cache=True)
def of_worker(work, st, heap, event, key):
    """An event that a lost worker does not see."""
    w, s, kind = key >> 20, (key >> 7) & 8191, (key >> 5) & 1
    if not st.alive[w]:
        return
    if event == SENT:
        sent(work, st, heap, w, s, kind)
    elif event == AT_WORKER:
        at_worker(work, st, heap, w, s, kind)
    elif event == RECEIVED:
        note_reply(work, st, w, s, kind, 0.0)
        run_job(work, st, heap, work.workers + w, work.receive[kind, s], key_of(READ, w, s, kind))
    elif event == REFUSED:
        st.again[kind, w, s] = True
        note_reply(work, st, w, s, kind, 1.0)
        run_job(work, st, heap, work.workers + w, work.receive[PUSH, s], key_of(READ, w, s, kind))
    elif event == READ:
        st.waiting[kind, w] -= 1
        if st.waiting[kind, w] == 0:
            end_try(work, st, heap, w, kind)
    elif event == RETRY:
        begin_call(work, st, heap, w, kind)
    elif event == CALLED:
        called(work, st, heap, w, kind)
    elif event == COMPUTED:
        computed(work, st, heap, w)
    else:
        go_on(work, st, heap, w)


@njit(cache=True)
def of_shard(work, st, heap, event, key):
    w, s, kind, life = key >> 20, (key >> 7) & 8191, (key >> 5) & 1, (key >> 6) & 1
    if event == AT_MACHINE:
        seconds = work.upload[kind, s]
        start = use_link(st, 2, work.machine[s], seconds)
        heapq.heappush(heap, (start + seconds, key_of(ARRIVED, w, s, kind)))
    elif event == ARRIVED:
        arrived(work, st, heap, w, s, kind)
    else:
        if event == HANDLED and life == st.life[s]:
            st.queued[s] -= 1
        handled(work, st, heap, w, s, kind, life)


@njit(cache=True)
def simulate_events(work, st, starts, seed):
    """Run until the goal, or until nothing is left to happen; `starts` are the workers' (W,) first moments."""
    np.random.seed(seed)
    heap = [(starts[w], key_of(START, w)) for w in range(work.workers)]
    heapq.heapify(heap)
    if work.fail_at >= 0 and work.lost_worker >= 0:
        heapq.heappush(heap, (work.fail_at, key_of(LOST)))
        heapq.heappush(heap, (work.fail_at + work.lease, key_of(EXPIRED)))
    elif work.fail_at >= 0:
        heapq.heappush(heap, (work.fail_at, key_of(DOWN)))
        heapq.heappush(heap, (work.back_at, key_of(UP)))
    is_warm = False
    while len(heap) and st.counts[STEPS] < work.goal and st.times[NOW] < work.until:
        st.times[NOW], key = heapq.heappop(heap)
        event = key & 31
        if not is_warm and st.counts[STEPS] >= work.warmup:
            is_warm, st.times[TOTAL_FROM] = True, st.times[NOW]
            # what waits now is worked off from here on
            st.busy[:] = np.maximum(0.0, st.free - st.times[NOW])
            st.link_busy[:] = np.maximum(0.0, st.links - st.times[NOW])
        if AT_MACHINE <= event <= RELEASED:
            of_shard(work, st, heap, event, key)
        elif event < SHARED:
            of_worker(work, st, heap, event, key)
        elif event == SHARED:
            end_shared(work, st, heap, key >> 20)
        elif event == DOWN:
            go_down(work, st, heap)
        elif event == UP:
            st.is_down[:] = False
        elif event == LOST:
            st.alive[work.lost_worker] = False
        else:
            expire(work, st, heap)
