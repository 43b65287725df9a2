// Charts by uPlot, each with a table of the same numbers.
const BINS = 480;
const LATE_SECONDS = 3; // after which the last number is one of the past

// Colours are read once, since to ask the browser for one has it compute all styles.
let colors = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (colors = new Map()));

function css(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
}

const wholeNumbers = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

const fmt = {
  count: (value) => (value == null ? "–" : wholeNumbers.format(value)),
  short(value) {
    if (value == null) return "–";
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return `${trim(value / size)}${unit}`;
    }
    return Number.isInteger(value) ? String(value) : trim(value);
  },
  bytes(value) {
    if (value == null) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let k = 0;
    while (value >= 1000 && k < 4) [value, k] = [value / 1024, k + 1];
    return `${k === 0 ? Math.round(value) : trim(value)} ${units[k]}`;
  },
  rate: (value) => (value == null ? "–" : `${trim(value / 1e6)} MB/s`),
  ms(value) {
    if (value == null) return "–";
    return value >= 1000 ? `${trim(value / 1000)} s` : `${trim(value)} ms`;
  },
  percent: (value) => (value == null ? "–" : `${Math.round(100 * value)} %`),
  figure: (value) => (value == null ? "–" : value.toFixed(4)),
  seconds(value) {
    if (value == null) return "–";
    if (value < 10) return `${value.toFixed(1)} s`;
    if (value < 60) return `${Math.round(value)} s`;
    const [h, m] = [Math.floor(value / 3600), Math.floor(value / 60) % 60];
    return h ? `${h} h ${m} min` : `${m} min`;
  },
  clock: (time) => new Date(time * 1000).toTimeString().slice(0, 8),
};

function trim(value, digits = null) {
  const size = Math.abs(value);
  return value.toFixed(digits ?? (size >= 100 ? 0 : size >= 10 ? 1 : size === 0 ? 0 : 2));
}

// One figure with its lines. A spec: {id, title, track, lines: [{name, label, color, scale?, points?, dash?}], value}.
class Chart {
  constructor(spec, read) {
    this.spec = spec;
    this.read = read; // (spec, from, to) -> [times, ...columns]
    this.card = document.getElementById(spec.id);
    this.body = this.card.querySelector(".plot");
    this.legend = this.card.querySelector(".legend");
    this.asTable = false;
    this.data = [[]];
    this.plot = null;
    this.button = this.card.querySelector("button.numbers");
    this.button.addEventListener("click", () => this.setTable(!this.asTable));
    new ResizeObserver(() => this.resize()).observe(this.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  setTable(on) {
    this.asTable = on;
    this.button.setAttribute("aria-pressed", String(on));
    this.body.classList.toggle("as-table", on);
    this.rebuild();
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    this.body.replaceChildren();
    this.draw();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.body;
    if (this.plot && width > 0 && (this.plot.width !== width || this.plot.height !== height)) {
      this.plot.setSize({ width, height });
    }
  }

  update(from, to) {
    this.range = [from, to];
    this.data = this.read(this.spec, from, to);
    this.draw();
  }

  draw() {
    if (!this.range) return;
    const empty = this.data.slice(1).every((column) => column.every((value) => value == null));
    this.card.classList.toggle("empty", empty);
    this.drawLegend();
    if (this.asTable) return this.drawTable();
    if (empty && !this.plot) return;
    if (!this.plot) this.plot = new uPlot(this.options(), this.data, this.body);
    else this.plot.setData(this.data, false);
    this.plot.setScale("x", { min: this.range[0], max: this.range[1] });
  }

  drawLegend() {
    const items = this.spec.lines.map((line, k) => {
      const column = this.data[k + 1] ?? [];
      let i = this.at ?? column.length - 1;
      while (i >= 0 && column[i] == null) i -= 1;
      // an evaluation is the last one for long, and what is reachable does not change
      const old = this.at == null && !line.points && !line.dash && this.range[1] - this.data[0][i] > LATE_SECONDS;
      return [line.label, i < 0 ? "–" : this.spec.format(column[i], line), line.color, old ? "old" : ""];
    });
    if (this.at != null) items.unshift([fmt.clock(this.data[0][this.at] ?? 0), "", null, ""]);
    const text = items.map(([label, value, _, old]) => [label, value, old].join(" ").trim()).join(", ");
    if (text === this.shown) return;
    this.shown = text;
    this.body.setAttribute("aria-label", `${this.spec.title}: ${text}`);
    this.legend.replaceChildren(
      ...items.map(([label, value, color, old]) => {
        const item = el("span", "key");
        const mark = el("i");
        if (color) {
          mark.style.background = `var(${color})`;
          item.append(mark);
        }
        item.append(el("span", "", label), el("b", old, value));
        return item;
      }),
    );
  }

  drawTable() {
    const [times, ...columns] = this.data;
    const table = el("table");
    const head = el("tr");
    head.append(el("th", "", "time"), ...this.spec.lines.map((line) => el("th", "number", line.label)));
    table.append(el("thead"), el("tbody"));
    table.tHead.append(head);
    let rows = 0;
    for (let i = times.length - 1; i >= 0 && rows < 200; i -= 1) {
      if (columns.every((column) => column[i] == null)) continue;
      const row = el("tr");
      row.append(el("td", "", fmt.clock(times[i])));
      this.spec.lines.forEach((line, k) => {
        row.append(el("td", "number", columns[k][i] == null ? "–" : this.spec.format(columns[k][i], line)));
      });
      table.tBodies[0].append(row);
      rows += 1;
    }
    this.body.replaceChildren(table);
  }

  options() {
    const { spec } = this;
    const grid = { stroke: css("--grid"), width: 1 };
    const axis = { stroke: css("--muted"), font: `11px ${css("--font")}`, grid, ticks: { show: false }, gap: 6 };
    const scales = { x: { time: true } };
    const axes = [{ ...axis, grid: { show: false }, size: 24, space: 64, values: clockLabels }];
    for (const [k, scale] of [...new Set(spec.lines.map((line) => line.scale ?? "y"))].entries()) {
      scales[scale] = { range: (_, min, max) => ranged(min, max, spec.zero) };
      const line = spec.lines.find((one) => (one.scale ?? "y") === scale);
      const values = (_, ticks) => ticks.map((tick) => (spec.tick ?? spec.format)(tick, line));
      axes.push({ ...axis, scale, side: k ? 1 : 3, size: 52, space: 36, values, grid: k ? { show: false } : grid });
    }
    const series = spec.lines.map((line) => ({
      label: line.label,
      scale: line.scale ?? "y",
      stroke: css(line.color),
      width: line.width ?? 1.5,
      dash: line.dash,
      fill: line.fill ? css(line.fill) : undefined,
      spanGaps: Boolean(line.points || line.span),
      points: line.points ? { show: true, size: 6, fill: css(line.color) } : { show: false },
    }));
    return {
      width: this.body.clientWidth,
      height: this.body.clientHeight,
      padding: [8, spec.lines.some((line) => line.scale) ? 0 : 10, 0, 0],
      scales,
      axes,
      series: [{}, ...series],
      legend: { show: false },
      cursor: { sync: { key: "panel" }, drag: { setScale: false }, points: { size: 6 } },
      hooks: { setCursor: [(plot) => this.point(plot.cursor.left < 0 ? null : plot.cursor.idx)] },
    };
  }

  // The legend has the numbers under the pointer, else the last ones.
  point(at) {
    this.at = at ?? null;
    this.drawLegend();
  }
}

function ranged(min, max, zero) {
  if (min == null || max == null) return [0, 1];
  const low = zero ? 0 : min;
  const room = max - low || Math.abs(max) || 1;
  return [zero ? 0 : low - 0.08 * room, max + 0.12 * room];
}

function clockLabels(plot, ticks) {
  const seconds = ticks.length > 1 && ticks[1] - ticks[0] < 60;
  return ticks.map((tick) => fmt.clock(tick).slice(0, seconds ? 8 : 5));
}

function el(name, className = "", text = null) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text != null) made.textContent = text;
  return made;
}
