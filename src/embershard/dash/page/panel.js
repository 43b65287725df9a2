// The page: takes samples from the stream, keeps them, and shows them, a few milliseconds of work a frame.
const BUDGET_MS = 4;
const HIDDEN_MS = 10_000; // until a page that is hidden ends its stream

const tracks = {
  series: new Track(["pull_p50", "pull_p99", "push_p50", "push_p99", "pulled_rows", "pushed_rows", "received", "sent"], ["pull_p99", "push_p99"]),
  training: new Track(["loss", "samples_per_second"]),
  evaluations: new Track(["figure"], [], 2048),
};
const view = { span: 600, paused: false, numbers: false, sample: null, interval: 0.5, received: 0, broken: false, full: "" };
const work = [];
let scheduled = false;

function later(jobs) {
  work.push(...jobs);
  if (!scheduled) requestAnimationFrame(doWork);
  scheduled = true;
}

function doWork() {
  const start = performance.now();
  while (work.length && performance.now() - start < BUDGET_MS) {
    const job = work.shift();
    try {
      job();
    } catch (error) {
      reportError(error); // to the console: one part of the page must not stop the others
    }
    if (job.draws) break; // uPlot draws once this is done, in the same frame
  }
  if (!work.length && view.next) show(view.next);
  scheduled = work.length > 0;
  if (scheduled) requestAnimationFrame(doWork);
}

// Show a sample once the one before is shown whole: a page that is slow, or hidden, leaves some out.
function showSoon(sample) {
  view.next = sample;
  if (!work.length) show(sample);
}

const learning = {
  id: "chart-learning",
  title: "Loss and metric",
  empty: "Name a run with --run for its loss and its metric.",
  lines: [
    { name: "loss", label: "loss", color: "--blue", span: true },
    { name: "figure", label: "metric", color: "--accent", scale: "figure", points: true, width: 1.5 },
    { name: "best", label: "reachable", color: "--muted", scale: "figure", dash: [4, 4], span: true, width: 1 },
  ],
  format: (value) => fmt.figure(value),
  tick: (value) => value.toFixed(3).replace(/^0/, ""),
};
const speed = {
  id: "chart-speed",
  title: "Speed",
  empty: "No samples and no rows have been counted yet.",
  lines: [{ name: "samples_per_second", label: "samples/s", color: "--accent", fill: "--accent-soft", span: true }],
  zero: true,
  format: fmt.short,
  tick: (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 1000 ? `${value / 1000}k` : String(value)),
};
const latency = {
  id: "chart-latency",
  title: "Pull and push on the shards",
  empty: "No pulls and pushes in this time.",
  lines: [
    { name: "pull_p50", label: "pull p50", color: "--blue", width: 1 },
    { name: "pull_p99", label: "p99", color: "--blue", width: 1.75 },
    { name: "push_p50", label: "push p50", color: "--violet", width: 1 },
    { name: "push_p99", label: "p99", color: "--violet", width: 1.75 },
  ],
  zero: true,
  format: fmt.ms,
  tick: (value) => (value >= 1000 ? `${value / 1000} s` : `${value} ms`),
};

function readLearning(spec, from, to) {
  const loss = tracks.training.between(from, to, ["loss"], BINS, Infinity);
  const figure = tracks.evaluations.between(from, to, ["figure"], BINS, Infinity);
  const reachable = view.sample?.run?.reachable;
  const line = reachable == null ? [[from], [null]] : [[from, to], [reachable, reachable]];
  return uPlot.join([loss, figure, line]);
}

const read = (track) => (spec, from, to) =>
  track().between(from, to, spec.lines.map((line) => line.name), BINS, 4 * Math.max(view.interval, 1));

for (const spec of [learning, speed, latency, { id: "chart-staleness", title: "Staleness seen" }]) {
  const card = document.getElementById(spec.id);
  const head = el("div", "head");
  const button = el("button", "numbers", "numbers");
  button.type = "button";
  button.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-label", `${spec.title} as numbers`);
  head.append(el("h2", "", spec.title), button);
  const plot = el("div", "plot");
  plot.setAttribute("role", "img");
  plot.dataset.empty = spec.empty ?? "";
  card.append(head, el("div", "legend"), plot);
}

const charts = [
  new Chart(learning, readLearning),
  new Chart(speed, (spec, from, to) => {
    const byLog = spec.lines[0].name === "samples_per_second";
    return read(() => (byLog ? tracks.training : tracks.series))(spec, from, to);
  }),
  new Chart(latency, read(() => tracks.series)),
];
const shards = makeShards();
const workers = makeWorkers();
const bytes = makeBytes();
const events = new Events();
const staleness = document.getElementById("chart-staleness");

function timeRange() {
  const times = [tracks.series, tracks.training].filter((track) => track.length).map((track) => track.values.time);
  const run = view.sample?.run;
  const over = run?.ended && run.last;
  const to = over ? run.last : (view.sample?.time ?? Date.now() / 1000);
  const first = Math.min(to - 30, ...times.map((time) => time[0]));
  return [view.span ? Math.max(first, to - view.span) : first, to];
}

function drawCharts() {
  const [from, to] = timeRange();
  later(charts.map((chart) => Object.assign(() => chart.update(from, to), { draws: true })));
}

function showStaleness(counts) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  const bins = [];
  const ends = [1, 2, 3, 4, 8, 16, counts.length];
  let first = 0;
  for (const end of ends) {
    const pushes = counts.slice(first, end).reduce((sum, count) => sum + count, 0);
    const name = end === counts.length ? `${first}+` : end === first + 1 ? String(first) : `${first}–${end - 1}`;
    bins.push([name, pushes]);
    first = end;
  }
  const plot = staleness.querySelector(".plot");
  staleness.classList.toggle("empty", total === 0);
  plot.dataset.empty = "No push has been counted yet.";
  write(staleness.querySelector(".legend"), total ? `staleness of ${fmt.short(total)} pushes, in updates` : "");
  if (total === 0) {
    plot.replaceChildren();
    return;
  }
  plot.setAttribute("aria-label", bins.map(([name, count]) => `${name}: ${fmt.percent(count / total)}`).join(", "));
  const exact = staleness.querySelector("button").getAttribute("aria-pressed") === "true";
  let box = plot.firstChild;
  if (!box) {
    box = el("div", "bars");
    for (const [name] of bins) {
      const meter = el("span", "meter");
      meter.append(el("i"));
      box.append(el("span", "", name), meter, el("span"));
    }
    plot.append(box);
  }
  bins.forEach(([name, count], k) => {
    write(box.children[3 * k], name);
    box.children[3 * k + 1].firstChild.style.transform = `scaleX(${(count / total).toFixed(4)})`;
    const share = count / total;
    const shown = count === 0 ? "–" : share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
    write(box.children[3 * k + 2], exact ? fmt.count(count) : shown);
  });
}

staleness.querySelector("button").addEventListener("click", (event) => {
  const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
  event.currentTarget.setAttribute("aria-pressed", String(on));
  if (view.sample) showStaleness(view.sample.staleness);
});

function fact(id, value, note = "", kind = "", label = null) {
  const node = document.getElementById(`fact-${id}`);
  mark(node, `fact ${kind}`);
  write(node.querySelector("b"), value);
  write(node.querySelector(".note"), note);
  if (label) write(node.querySelector(".label"), label);
}

function showFacts(sample) {
  const { run } = sample;
  const rate = run?.samples_per_second;
  const late = run && !run.ended ? (run.age ?? 0) : 0;
  const old = late > LATE_SECONDS ? "old" : "";
  const pauses = sample.workers.some((worker) => worker.state === "paused");
  write(document.getElementById("job"), run?.name || (run ? "a run that begins" : "shards"));
  if (run) { // which is named, and may only begin
    document.querySelector("#chart-learning .plot").dataset.empty = "No step is in the log yet.";
    write(bytes.empty, "No step is in the log yet.");
  }
  write(document.getElementById("mode"), run?.mode ?? "");
  if (run) {
    const metric = run.metric ? run.metric.toUpperCase() : "metric";
    const reach = run.reachable == null ? "" : `best reachable ${fmt.figure(run.reachable)}`;
    fact("figure", fmt.figure(run.ended ? run.best : run.figure), reach || (run.best == null ? "not evaluated yet" : `best ${fmt.figure(run.best)}`), old, `${metric}${run.split ? ` on ${run.split}` : ""}`);
    learning.lines[1].label = metric;
    fact("loss", fmt.figure(run.loss ?? tracks.training.last("loss")), run.loss == null ? "" : `step ${fmt.count(run.step)}, epoch ${run.epoch}`, old);
    const waits = (run.waits.shards ?? 0) + (run.waits.workers ?? 0) + (run.waits.data ?? 0);
    fact("speed", fmt.short(rate), run.ended ? "mean of the run" : old ? (pauses ? "training pauses" : `no line in its log for ${fmt.seconds(late)}`) : `${fmt.percent(waits)} of it waiting`, old);
    const share = run.total_samples ? Math.min(1, run.samples / run.total_samples) : null;
    const left = share && rate && !run.ended && !old ? `, ${fmt.seconds((run.total_samples - run.samples) / rate)} left` : "";
    fact("progress", share == null ? fmt.short(run.samples) : fmt.percent(share), share == null ? "samples" : `${fmt.short(run.samples)} of ${fmt.short(run.total_samples)}${run.ended ? " samples" : left}`, old);
    document.querySelector("#fact-progress .meter i").style.transform = `scaleX(${share ?? 0})`;
  } else {
    const rows = (name) => fmt.short(sample.series[name]);
    fact("figure", rows("pulled_rows"), "", "", "rows pulled/s");
    fact("loss", rows("pushed_rows"), "", "", "rows pushed/s");
    fact("speed", fmt.rate(sample.series.received), "", "", "in");
    fact("progress", fmt.rate(sample.series.sent), "", "", "out");
  }
  const good = sample.shards.filter((shard) => shard.health === "serving").length;
  const bad = sample.shards.filter((shard) => !HEALTH[shard.health]);
  const total = sample.shards.reduce((sum, shard) => sum + (shard.stale ? 0 : shard.rows), 0);
  const stale = sample.shards.some((shard) => shard.stale);
  fact("shards", sample.shards.length ? `${good} of ${sample.shards.length}` : "–", sample.shards.length ? (bad.length ? whatIsBad(bad) : `${fmt.short(total)} rows${stale ? " on those that answer" : ""}`) : "not watched", bad.length ? "bad" : "");
  const training = sample.workers.filter((worker) => worker.state === "trains" || worker.state === "paused").length;
  const held = sample.workers.filter((worker) => ["waited for", "silent"].includes(worker.state) || worker.waits_for_shards.length);
  fact("workers", sample.workers.length ? (run?.ended ? String(sample.workers.length) : `${training} of ${sample.workers.length}`) : "–", held.length ? held[0].state === "waits" ? `wait for shard ${held[0].waits_for_shards.join(", ")}` : `worker ${held[0].worker} ${held[0].state === "silent" ? "is silent" : "is waited for"}`  : run?.ended ? "trained" : sample.workers.length ? "train" : "none yet", held.length ? "warn" : "");
  const [label, kind] = overall(sample, late, bad.length);
  const pill = document.getElementById("state");
  mark(pill, `pill ${kind}`);
  write(pill, label);
}

function whatIsBad(shards) {
  if (shards.length === 1 && shards[0].shard != null) return `shard ${shards[0].shard}: ${shards[0].health}`;
  const counts = new Map();
  for (const { health } of shards) counts.set(health, (counts.get(health) ?? 0) + 1);
  return [...counts].map(([health, count]) => `${health}: ${count}`).join(", ");
}

function overall({ run, shards: rows, workers: who }, late, bad) {
  if (run?.ended) return ["ended well", ""];
  if (bad) return ["needs a look", "bad"];
  if (run && late > 60) return ["no news", "warn"];
  if (who.some((worker) => ["waited for", "silent", "waits"].includes(worker.state))) return ["waiting", "warn"];
  if (who.some((worker) => worker.state === "paused")) return ["evaluating", ""];
  if (who.length) return ["training", "good"];
  return [rows.length ? "serving" : run ? "starting" : "idle", rows.length ? "good" : ""];
}

function showBytes(sample) {
  const rows = [...sample.bytes].sort((a, b) => b.wire - a.wire);
  const [wire, raw] = ["wire", "raw"].map((name) => rows.reduce((sum, part) => sum + part[name], 0));
  write(document.getElementById("note-bytes"), rows.length ? `${fmt.bytes(wire)} a step of one worker` : "");
  return bytes.jobs(rows.filter((part) => part.wire > 0.002 * wire)); // the others would not be seen
}

function show(sample) {
  view.sample = sample;
  view.next = null;
  showBanner();
  later([
    () => showFacts(sample),
    () => showStaleness(sample.staleness),
    ...shards.jobs(sample.shards),
    ...workers.jobs(sample.workers),
    ...showBytes(sample),
    () => write(document.getElementById("note-shards"), shardsNote(sample)),
    () => write(document.getElementById("sampled"), `sampled ${fmt.clock(sample.time)}, every ${view.interval} s`),
  ]);
  drawCharts();
  later([() => { document.body.dataset.shown = String(sample.number); performance.mark?.("shown"); }]);
}

function shardsNote(sample) {
  const { received, sent } = sample.series;
  return received == null && sent == null ? "" : `in ${fmt.rate(received)}, out ${fmt.rate(sent)}`;
}

function showBanner() {
  const banner = document.getElementById("banner");
  const silent = (performance.now() - view.received) / 1000;
  const lost = view.broken || view.full || (view.received && silent > LATE_SECONDS);
  document.body.classList.toggle("lost", lost);
  banner.hidden = !lost;
  if (view.full) {
    write(banner, `${view.full} pages are open, and the panel serves no more: close one. This page asks again.`);
  } else if (lost) {
    const since = view.sample ? ` What is shown is of ${fmt.clock(view.sample.time)}.` : "";
    write(banner, `The panel's process does not answer.${since} The page asks it again; training does not depend on it.`);
  }
}

function take(sample) {
  if (view.sample && sample.number <= view.newest) return;
  view.newest = sample.number;
  if (sample.restarts !== view.restarts) return reconnect(); // the run began anew: its earlier points are gone
  tracks.series.add({ time: sample.time, ...sample.series });
  for (const name of ["training", "evaluations"]) for (const point of sample.points[name] ?? []) tracks[name].add(point);
  events.add(sample.events);
  if (view.paused) view.waiting = sample;
  else showSoon(sample);
}

let source = null;

function reconnect() {
  source?.close();
  source = new EventSource("stream");
  source.addEventListener("hello", (event) => {
    const hello = JSON.parse(event.data);
    heard();
    view.interval = hello.interval;
    for (const [name, track] of Object.entries(tracks)) track.load(hello.tracks[name]);
    events.load(hello.events);
    view.sparks = hello.sparks;
    view.newest = hello.last?.number ?? -1;
    view.restarts = hello.last?.restarts ?? 0;
    if (tracks.training.length === 0 && !hello.last?.run) {
      speed.lines = [
        { name: "pulled_rows", label: "rows pulled/s", color: "--blue" },
        { name: "pushed_rows", label: "rows pushed/s", color: "--violet" },
      ];
    }
    if (view.paused) view.waiting = hello.last;
    else if (hello.last) showSoon(hello.last);
  });
  source.addEventListener("sample", (event) => {
    heard();
    take(JSON.parse(event.data));
  });
  source.addEventListener("full", (event) => {
    view.full = event.data;
    showBanner();
  });
  source.onerror = () => {
    view.broken = true;
    showBanner();
    if (source?.readyState === EventSource.CLOSED) setTimeout(() => source && reconnect(), 2000);
  };
}

// A browser opens six connections to a server, and a stream takes one: pages that nobody sees leave theirs to others.
let leaving = null;

function hideOrShow() {
  clearTimeout(leaving);
  if (document.hidden) {
    leaving = setTimeout(() => {
      source.close();
      source = null;
      view.received = 0; // it is not the panel that is silent
    }, HIDDEN_MS);
  } else if (!source) reconnect();
}

function heard() {
  view.received = performance.now();
  view.broken = false;
  view.full = "";
}

function setSpan(span) {
  view.span = span;
  for (const button of document.querySelectorAll("#spans button")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.span) === span));
  }
  drawCharts();
}

function setPaused(on) {
  view.paused = on;
  document.getElementById("pause").setAttribute("aria-pressed", String(on));
  write(document.getElementById("pause"), on ? "go on" : "pause");
  if (!on && view.waiting) showSoon(view.waiting);
}

function setNumbers(on) {
  view.numbers = on;
  document.getElementById("numbers").setAttribute("aria-pressed", String(on));
  later(charts.map((chart) => () => chart.setTable(on)));
}

document.getElementById("spans").addEventListener("click", (event) => {
  if (event.target.dataset.span) setSpan(Number(event.target.dataset.span));
});
document.getElementById("pause").addEventListener("click", () => setPaused(!view.paused));
document.getElementById("numbers").addEventListener("click", () => setNumbers(!view.numbers));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
  const spans = { 1: 60, 2: 600, 3: 3600, 4: 0 };
  const places = { s: () => shards.focus(), w: () => workers.focus(), e: () => events.list.focus() };
  if (event.key in spans) setSpan(spans[event.key]);
  else if (event.key === "p") setPaused(!view.paused);
  else if (event.key === "t") setNumbers(!view.numbers);
  else places[event.key]?.();
});
document.addEventListener("visibilitychange", hideOrShow);
setInterval(showBanner, 1000);
reconnect();
hideOrShow(); // a page may be opened where nobody sees it
