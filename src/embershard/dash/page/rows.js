// Tables of shards, workers and bytes, and the list of events: rows stay, and only what changed is written.
const PARTS = [
  ["compute", "compute", "--accent"],
  ["pull", "pull", "--blue"],
  ["push", "push", "--violet"],
  ["shards", "waits for shards", "--teal"],
  ["workers", "waits for workers", "--red"],
  ["data", "data", "--green"],
  ["other", "other", "--grey"],
];

const SOME = 6;
const SHOWN_WORKERS = 3; // by their numbers

function write(node, text) {
  if (node.firstChild?.nodeType === 3 && node.childNodes.length === 1) {
    if (node.firstChild.data !== text) node.firstChild.data = text;
  } else if (node.textContent !== text) node.textContent = text;
}

function mark(node, name) {
  if (node.className !== name) node.className = name;
}

// A table whose rows are kept by their keys. Columns: {label, width, number?, wide?, title?, make?(cell), fill(cell, row)}.
class Rows {
  constructor(place, columns, { key, old, detail, none }) {
    Object.assign(this, { place, columns, key, old, detail });
    this.table = el("table");
    const group = el("colgroup");
    const head = el("tr");
    for (const column of columns) {
      const col = el("col");
      col.style.width = column.width;
      group.append(col);
      head.append(el("th", column.number ? "number" : "", column.label));
    }
    this.table.append(group, el("thead"), el("tbody"));
    this.table.tHead.append(head);
    this.body = this.table.tBodies[0];
    this.empty = el("div", "none", none);
    this.place.append(this.table, this.empty);
    this.held = new Map();
  }

  // A job for a few rows each, short enough for one frame.
  jobs(rows) {
    const jobs = [() => this.arrange(rows)];
    for (let i = 0; i < rows.length; i += SOME) {
      const some = rows.slice(i, i + SOME);
      jobs.push(() => some.forEach((row) => this.fill(row)));
    }
    return jobs;
  }

  arrange(rows) {
    this.order = rows.map(this.key);
    const keys = new Set(this.order);
    for (const [key, made] of this.held) {
      if (keys.has(key)) continue;
      made.more?.remove();
      made.row.remove();
      this.held.delete(key);
    }
    this.table.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
  }

  fill(data) {
    const made = this.held.get(this.key(data)) ?? this.make(this.key(data));
    made.data = data;
    this.columns.forEach((column, k) => column.fill(made.cells[k], data, made));
    const name = (this.old?.(data) ? "old" : "") + (this.detail ? " open-able" : "");
    mark(made.row, name);
    if (made.more) this.detail(made.more.firstChild, data);
  }

  make(key) {
    const row = el("tr");
    const made = { key, row, cells: [], more: null };
    for (const column of this.columns) {
      const cell = el("td", base(column));
      cell.dataset.label = column.label;
      column.make?.(cell, made);
      made.cells.push(cell);
      row.append(cell);
    }
    if (this.detail) {
      row.tabIndex = 0;
      row.setAttribute("aria-expanded", "false");
      row.addEventListener("click", () => this.toggle(made));
      row.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          this.toggle(made);
        }
        const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
        let to = next && row[next];
        while (to && to.tabIndex < 0) to = to[next];
        if (to) {
          event.preventDefault();
          to.focus();
        }
      });
    }
    // a worker that joins late has its place by its number
    const next = this.order.slice(this.order.indexOf(key) + 1).find((other) => this.held.has(other));
    this.body.insertBefore(row, this.held.get(next)?.row ?? null);
    this.held.set(key, made);
    return made;
  }

  toggle(made) {
    made.row.setAttribute("aria-expanded", String(!made.more));
    if (made.more) {
      made.more.remove();
      made.more = null;
      return;
    }
    made.more = el("tr", "detail");
    const cell = el("td");
    cell.colSpan = this.columns.length;
    made.more.append(cell);
    made.row.after(made.more);
    this.detail(cell, made.data);
  }

  focus() {
    const to = this.body.querySelector("tr[tabindex]") ?? this.place;
    to.focus({ preventScroll: true });
    this.place.previousElementSibling.scrollIntoView(); // its title, too
  }
}

const base = (column) => [column.number && "number", column.wide && "wide", column.title && "title"].filter(Boolean).join(" ");

const text = (value) => (cell, row) => write(cell, value(row));

function gauge(cell) {
  const box = el("div", "gauge");
  const meter = el("span", "meter");
  meter.append(el("i"));
  box.append(meter, el("span"));
  cell.append(box);
}

function fillGauge(cell, share, label) {
  const [meter, shown] = cell.firstChild.children;
  const scale = `scaleX(${share == null ? 0 : Math.max(0, Math.min(1, share)).toFixed(3)})`;
  if (meter.firstChild.style.transform !== scale) meter.firstChild.style.transform = scale;
  mark(cell.firstChild, share > 0.9 ? "gauge hot" : "gauge");
  write(shown, label);
}

// The last two minutes of a number, drawn where it is seen.
class Spark {
  constructor(cell, seen, before) {
    const box = el("div", "spark");
    this.canvas = el("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.label = el("span", "number");
    box.append(this.canvas, this.label);
    cell.append(box);
    this.values = new Float64Array(240).fill(NaN);
    before.slice(-240).forEach((value, i, all) => (this.values[240 - all.length + i] = value ?? NaN));
    this.canvas.spark = this;
    this.shown = false;
    seen.observe(this.canvas);
  }

  add(value, label) {
    this.values.copyWithin(0, 1);
    this.values[239] = value ?? NaN;
    write(this.label, label);
    if (this.shown) this.draw();
  }

  // The size is what the browser said last: to ask for it would have it lay out the page.
  draw() {
    const ratio = devicePixelRatio || 1;
    const { width, height } = this;
    if (!width) return;
    if (this.canvas.width !== Math.round(width * ratio)) {
      [this.canvas.width, this.canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    let most = 0;
    for (const value of this.values) if (value > most) most = value;
    if (!most) return;
    pen.beginPath();
    let down = false;
    this.values.forEach((value, i) => {
      if (Number.isNaN(value)) {
        down = false;
        return;
      }
      const [x, y] = [(i / 239) * width, height - 1 - (value / most) * (height - 2)];
      if (down) pen.lineTo(x, y);
      else pen.moveTo(x, y);
      down = true;
    });
    pen.strokeStyle = css("--blue");
    pen.lineWidth = 1.25;
    pen.stroke();
  }
}

const HEALTH = { serving: "good", loading: "warn", recovering: "warn", ending: "warn", starting: "warn" };

// A field of a shard; null of one that never answered.
const known = (row, name) => (row.age == null ? null : row[name]);

function makeShards() {
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting, boundingClientRect } of entries) {
      Object.assign(target.spark, { shown: isIntersecting, width: boundingClientRect.width, height: boundingClientRect.height });
      if (isIntersecting) later([() => target.spark.draw()]);
    }
  });
  const columns = [
    {
      label: "shard",
      width: "10%",
      title: true,
      fill(cell, row) {
        write(cell, row.shard == null ? row.address.replace(/^.*:\/\//, "") : String(row.shard));
        if (cell.title !== row.address) cell.title = row.address;
      },
    },
    {
      label: "health",
      width: "15%",
      make: (cell) => cell.append(el("span", "dot")),
      fill(cell, row) {
        const kind = HEALTH[row.health] ?? "bad";
        const age = row.age == null ? "" : `, ${fmt.seconds(row.age)} ago`;
        mark(cell.firstChild, `dot ${kind}`);
        const silent = row.health === "down" || row.health === "no access";
        const never = row.health === "down" && row.age == null;
        write(cell.firstChild, never ? "no answer yet" : silent ? `${row.health}${age}` : row.health);
        const title = row.problem || row.address;
        if (cell.title !== title) cell.title = title;
      },
    },
    { label: "rows", width: "9%", number: true, fill: text((row) => fmt.count(known(row, "rows"))) },
    { label: "bytes", width: "8%", number: true, fill: text((row) => fmt.bytes(known(row, "table_bytes"))) },
    {
      label: "memory used",
      width: "17%",
      wide: true,
      make: gauge,
      fill: (cell, row) =>
        fillGauge(
          cell,
          row.budget_bytes ? row.used_bytes / row.budget_bytes : null,
          row.budget_bytes ? `${fmt.bytes(row.used_bytes)} of ${fmt.bytes(row.budget_bytes)}` : "–",
        ),
    },
    { label: "apply busy", width: "11%", wide: true, make: gauge, fill: (cell, row) => fillGauge(cell, row.busy, fmt.percent(row.busy)) },
    { label: "queue", width: "7%", number: true, fill: text((row) => (row.stale ? "–" : fmt.bytes(row.queued_bytes))) },
    { label: "in", width: "7%", number: true, fill: text((row) => fmt.rate(row.received)) },
    { label: "out", width: "7%", number: true, fill: text((row) => fmt.rate(row.sent)) },
    { label: "log lag", width: "7%", number: true, fill: text((row) => (known(row, "durability") === "memory" ? "no log" : fmt.bytes(known(row, "log_waiting_bytes")))) },
    {
      label: "pull p99",
      width: "11%",
      wide: true,
      make: (cell, made) => (made.spark = new Spark(cell, seen, view.sparks?.[made.key] ?? [])),
      fill: (cell, row, made) => made.spark.add(row.pull_p99, fmt.ms(row.pull_p99)),
    },
  ];
  return new Rows(document.getElementById("shards"), columns, {
    key: (row) => row.address,
    old: (row) => row.stale,
    detail: shardDetail,
    none: "No shards are watched: name them with --ps.",
  });
}

function shardDetail(cell, row) {
  cell.tables ??= new Tables(cell, row.address);
  const facts = [
    row.address,
    `up ${fmt.seconds(row.uptime)}`,
    `process ${fmt.bytes(row.resident_bytes)}`,
    `${row.connections} connection${row.connections === 1 ? "" : "s"}`,
    `${fmt.count(row.requests)} requests/s`,
    `waits in queue p99 ${fmt.ms(row.queue_p99)}`,
    `push p99 ${fmt.ms(row.push_p99)}`,
    `durability ${row.durability}${row.log_bytes ? `, log ${fmt.bytes(row.log_bytes)}` : ""}`,
  ];
  if (row.problem) facts.push(row.problem);
  write(cell.tables.facts, facts.join("   ·   "));
  cell.tables.fill(row.num_tables);
}

// The tables of an open shard. There may be thousands, so the panel is asked for a few of those that match a filter.
class Tables {
  constructor(cell, address) {
    this.address = address;
    this.facts = el("p");
    this.search = el("input");
    Object.assign(this.search, { type: "search", placeholder: "filter by name" });
    this.search.setAttribute("aria-label", `Filter the tables of ${address} by name`);
    this.search.addEventListener("input", () => this.ask());
    this.note = el("span", "note");
    this.note.setAttribute("role", "status");
    this.filter = el("div", "filter");
    this.filter.append(this.search, this.note);
    const place = el("div", "tables");
    cell.append(this.facts, this.filter, place);
    const columns = [
      {
        label: "table",
        width: "30%",
        title: true,
        fill(name, row) {
          write(name, row.name);
          if (name.title !== row.name) name.title = row.name;
        },
      },
      { label: "dim", width: "8%", number: true, fill: text((row) => fmt.count(row.dim)) },
      { label: "rows", width: "16%", number: true, fill: text((row) => fmt.count(row.rows)) },
      { label: "bytes", width: "12%", number: true, fill: text((row) => fmt.bytes(row.bytes)) },
      { label: "optimizer", width: "14%", fill: text((row) => row.optimizer) },
      { label: "push", width: "10%", fill: text((row) => row.push_codec) },
      { label: "pull", width: "10%", fill: text((row) => row.pull_codec) },
    ];
    this.rows = new Rows(place, columns, { key: (row) => row.name, none: "" });
    this.rows.table.hidden = true;
  }

  fill(count) {
    this.count = count;
    if (!this.asked || performance.now() - this.asked > 900) this.ask();
  }

  async ask() {
    const asked = (this.asked = performance.now());
    try {
      const reply = await fetch(`tables.json?${new URLSearchParams({ shard: this.address, match: this.search.value })}`);
      const found = await reply.json();
      if (asked === this.asked) later([() => this.show(found)]);
    } catch {
      // the banner tells when the panel does not answer
    }
  }

  show({ matching, tables }) {
    this.filter.hidden = this.count <= tables.length && !this.search.value;
    const some = tables.length < matching ? `the first ${tables.length} of ` : "";
    write(this.note, `${some}${fmt.count(matching)} ${this.search.value ? `that match, of ${fmt.count(this.count)} tables` : "tables"}`);
    write(this.rows.empty, this.count ? "No table has this in its name." : "No table has been declared.");
    this.rows.arrange(tables);
    tables.forEach((row) => this.rows.fill(row));
  }
}

function makeWorkers() {
  const legend = document.getElementById("legend-parts");
  for (const [, label, color] of PARTS) {
    const item = el("span", "key");
    const square = el("i");
    square.style.background = `var(${color})`;
    item.append(square, el("span", "", label));
    legend.append(item);
  }
  const columns = [
    { label: "worker", width: "7%", title: true, fill: text((row) => String(row.worker)) },
    {
      label: "state",
      width: "28%",
      wide: true,
      make: (cell) => cell.append(el("span", "dot")),
      fill(cell, row) {
        const kind = { trains: "good", silent: "bad", gone: "bad", "waited for": "bad", waits: "warn" }[row.state] ?? "plain";
        mark(cell.firstChild, `dot ${kind}`);
        write(cell.firstChild, stateOf(row));
        const title = row.waits_for.length > SHOWN_WORKERS ? `waits for workers ${row.waits_for.join(", ")}` : "";
        if (cell.title !== title) cell.title = title;
      },
    },
    { label: "clock", width: "12%", number: true, fill: text((row) => fmt.count(row.clock)) },
    { label: "lease", width: "8%", number: true, fill: text((row) => fmt.seconds(row.lease)) },
    { label: "samples/s", width: "12%", number: true, fill: text((row) => fmt.count(row.samples_per_second)) },
    { label: "step", width: "10%", number: true, fill: text((row) => fmt.ms(row.step_ms)) },
    {
      label: "where a step goes",
      width: "23%",
      wide: true,
      make(cell) {
        const stack = el("div", "stack");
        for (const [, , color] of PARTS) {
          const part = el("i");
          part.style.background = `var(${color})`;
          stack.append(part);
        }
        cell.append(stack);
      },
      fill(cell, row) {
        const whole = row.step_ms || 0;
        mark(cell.firstChild, ["waits", "waited for", "silent"].includes(row.state) ? "stack past" : "stack");
        const shown = [];
        PARTS.forEach(([name, label], k) => {
          const part = row.parts[name] ?? 0;
          const width = whole ? `${((100 * part) / whole).toFixed(1)}%` : "0%";
          const node = cell.firstChild.children[k];
          if (node.style.width !== width) node.style.width = width;
          if (part > 0.005 * whole) shown.push(`${label} ${fmt.ms(part)}`);
        });
        const title = shown.join(", ") || "this worker's record is not in the run's folder";
        if (cell.title !== title) {
          cell.title = title;
          cell.firstChild.setAttribute("aria-label", title);
          cell.firstChild.setAttribute("role", "img");
        }
      },
    },
  ];
  return new Rows(document.getElementById("workers"), columns, {
    key: (row) => row.worker,
    old: (row) => row.state === "ended" || row.state === "gone",
    none: "No worker trains on these shards.",
  });
}

function stateOf(row) {
  switch (row.state) {
    case "waits":
      if (row.waits_for_shards.length) return `waits for shard ${row.waits_for_shards.join(", ")}, ${fmt.seconds(row.seconds)}`;
      return `waits for ${whom(row.waits_for)}, ${fmt.seconds(row.seconds)}`;
    case "waited for":
      return `others wait for it, ${fmt.seconds(row.seconds)}`;
    case "silent":
      return `no push for ${fmt.seconds(row.seconds)}`;
    default:
      return row.state;
  }
}

function whom(workers) {
  if (!workers.length) return "the others";
  return workers.length > SHOWN_WORKERS ? `${workers.length} workers` : `worker ${workers.join(", ")}`;
}

function makeBytes() {
  const columns = [
    { label: "", width: "25%", title: true, fill: text((row) => (row.part === row.direction ? "other" : `${row.direction} ${row.part}`)) },
    { label: "codec", width: "22%", fill: text((row) => row.codec || "–") },
    { label: "sent", width: "18%", number: true, fill: text((row) => fmt.bytes(row.wire)) },
    { label: "as float32", width: "20%", number: true, fill: text((row) => fmt.bytes(row.raw)) },
    { label: "saved", width: "15%", number: true, fill: text((row) => (row.wire ? `${(row.raw / row.wire).toFixed(1)}×` : "–")) },
  ];
  return new Rows(document.getElementById("bytes"), columns, {
    key: (row) => `${row.direction} ${row.part}`,
    none: "A worker's bytes are in the folder of its run: name it with --run.",
  });
}

class Events {
  constructor() {
    this.list = document.getElementById("events");
    this.note = document.getElementById("note-events");
  }

  load(events) {
    this.list.replaceChildren();
    this.add(events);
    if (!events.length) write(this.note, "nothing has happened yet");
  }

  add(events) {
    for (const event of events) {
      const item = el("li");
      const time = el("time", "", fmt.clock(event.time));
      time.dateTime = new Date(event.time * 1000).toISOString();
      const kind = { info: "", warning: "warn", error: "bad" }[event.severity];
      item.append(time, el("span", `dot ${kind}`, event.text));
      this.list.prepend(item);
    }
    while (this.list.childElementCount > 200) this.list.lastChild.remove();
    if (events.length) write(this.note, `${this.list.childElementCount} shown`);
  }
}
