// Columns of numbers over time in bounded memory, as in track.py: the newest half as it came, before that means.
const CAPACITY = 14_400;

class Track {
  constructor(names, peaks = [], capacity = CAPACITY) {
    this.names = ["time", ...names];
    this.peaks = new Set(peaks);
    this.capacity = capacity;
    this.values = Object.fromEntries(this.names.map((name) => [name, new Float64Array(capacity)]));
    this.clear();
  }

  clear() {
    this.length = this.coarse = 0; // of the points, the first ones: each the mean of `per`
    this.per = 2;
  }

  load(columns) {
    this.clear();
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
    const spare = this.length - this.coarse - (this.capacity >> 1);
    let coarse = this.coarse;
    if (coarse + Math.floor(spare / this.per) > this.capacity >> 2) {
      coarse = this.merge(0, coarse, 2, 0);
      this.per *= 2;
    }
    const taken = spare - (spare % this.per) || spare;
    const end = this.merge(this.coarse, this.coarse + taken, this.per, coarse);
    for (const name of this.names) this.values[name].copyWithin(end, this.coarse + taken, this.length);
    this.length -= this.coarse + taken - end;
    this.coarse = end;
  }

  // One point for each `per` of some, written from `to` on; where they end.
  merge(from, until, per, to) {
    let at = to;
    for (let i = from; i < until; i += per, at += 1) {
      const end = Math.min(until, i + per);
      for (const name of this.names) {
        const column = this.values[name];
        column[at] = name === "time" ? column[i] : (summed(column, i, end, this.peaks.has(name)) ?? NaN);
      }
    }
    return at;
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
