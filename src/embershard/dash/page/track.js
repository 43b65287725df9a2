// Columns of numbers over time in bounded memory, as in track.py: once full, the older half is averaged in pairs.
const CAPACITY = 14_400;

class Track {
  constructor(names, peaks = [], capacity = CAPACITY) {
    this.names = ["time", ...names];
    this.peaks = new Set(peaks);
    this.capacity = capacity;
    this.values = Object.fromEntries(this.names.map((name) => [name, new Float64Array(capacity)]));
    this.length = 0;
  }

  load(columns) {
    this.length = 0;
    const given = columns?.time ?? [];
    for (let i = Math.max(0, given.length - this.capacity); i < given.length; i += 1) {
      for (const name of this.names) this.values[name][this.length] = columns[name]?.[i] ?? NaN;
      this.length += 1;
    }
  }

  add(point) {
    if (this.length === this.capacity) this.thin();
    for (const name of this.names) this.values[name][this.length] = point[name] ?? NaN;
    this.length += 1;
  }

  thin() {
    const quarter = this.capacity >> 2;
    for (const name of this.names) {
      const column = this.values[name];
      for (let i = 0; i < quarter; i += 1) column[i] = merged(column[2 * i], column[2 * i + 1], this.peaks.has(name));
      column.copyWithin(quarter, 2 * quarter, this.length);
    }
    this.length -= quarter;
  }

  last(name) {
    for (let i = this.length - 1; i >= 0; i -= 1) {
      if (!Number.isNaN(this.values[name][i])) return this.values[name][i];
    }
    return null;
  }

  // Some columns between two times, in at most `bins` steps: [times, column, ...] with null for what is not known.
  // A line is closed over what is missing for less than `gap` seconds.
  between(from, to, names, bins, gap) {
    const time = this.values.time;
    let first = 0;
    let end = this.length;
    while (first < end) {
      const middle = (first + end) >> 1;
      if (time[middle] < from) first = middle + 1;
      else end = middle;
    }
    first = Math.max(0, first - 1);
    const step = (to - from) / bins;
    const out = [[], ...names.map(() => [])];
    let before = -Infinity;
    for (let i = first; i < this.length && time[i] <= to; ) {
      const limit = Math.max(from + (Math.floor((time[i] - from) / step) + 1) * step, time[i]);
      let last = i + 1;
      while (last < this.length && time[last] < limit && time[last] <= to) last += 1;
      if (time[i] - before > gap && before > 0) {
        out[0].push((before + time[i]) / 2);
        names.forEach((_, k) => out[k + 1].push(null));
      }
      before = time[last - 1];
      out[0].push(time[last - 1]);
      names.forEach((name, k) => out[k + 1].push(summed(this.values[name], i, last, this.peaks.has(name))));
      i = last;
    }
    return out;
  }
}

function merged(a, b, larger) {
  if (Number.isNaN(a)) return b;
  if (Number.isNaN(b)) return a;
  return larger ? Math.max(a, b) : (a + b) / 2;
}

function summed(column, first, end, larger) {
  let known = 0;
  let sum = 0;
  let most = -Infinity;
  for (let i = first; i < end; i += 1) {
    if (Number.isNaN(column[i])) continue;
    known += 1;
    sum += column[i];
    if (column[i] > most) most = column[i];
  }
  return known === 0 ? null : larger ? most : sum / known;
}
