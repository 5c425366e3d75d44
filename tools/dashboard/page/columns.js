"use strict";
// Columns of a run's metrics by step, extended by the records of its stream.

(() => {
  const MOST_ROWS = 4000;
  const NOT_COLUMNS = ["kind", "step", "time_s"];

  /** Metrics of one kind of record of a run. A record of a step that is already there replaces it and all after it. */
  S.Columns = class {
    /** `keys`: names of the columns, with `*`. */
    constructor({ step, time_s, columns }, keys) {
      this.step = [...step];
      this.time = [...time_s];
      this.columns = columns;
      this.patterns = keys.map(S.glob);
    }

    get length() {
      return this.step.length;
    }

    /** Adds a record of metrics.jsonl. */
    append(record) {
      while (this.length && this.step[this.length - 1] >= record.step) {
        for (const column of [this.step, this.time, ...Object.values(this.columns)]) column.pop();
      }
      for (const name of Object.keys(record)) {
        if (name in this.columns || NOT_COLUMNS.includes(name) || !this.patterns.some((pattern) => pattern.test(name)))
          continue;
        this.columns[name] = new Array(this.length).fill(null);
      }
      for (const [name, column] of Object.entries(this.columns)) column.push(record[name] ?? null);
      this.step.push(record.step);
      this.time.push(record.time_s);
      if (this.length > MOST_ROWS) this.thin();
    }

    /** Drops every other row of the older half: a page that is open for days stays small. */
    thin() {
      const half = this.length / 2;
      const keep = (column) => column.filter((_, row) => row >= half || row % 2 === 0);
      for (const name of Object.keys(this.columns)) this.columns[name] = keep(this.columns[name]);
      [this.step, this.time] = [keep(this.step), keep(this.time)];
    }

    column(name) {
      return this.columns[name] || [];
    }

    /** The last value that is not null, or null. */
    last(name) {
      return this.column(name).findLast((value) => value !== null) ?? null;
    }

    first(name) {
      return this.column(name).find((value) => value !== null) ?? null;
    }

    /** Seconds of training at each step: `time_s` begins again at a restart. */
    elapsed() {
      let before = 0;
      return this.time.map((time, row) => {
        if (row && time < this.time[row - 1]) before += this.time[row - 1];
        return before + time;
      });
    }
  };

  /** Exponential mean with weight `share` of the past, corrected for the start; nulls stay. */
  S.smooth = (values, share) => {
    let mean = 0;
    let weight = 0;
    return values.map((value) => {
      if (typeof value !== "number") return null;
      mean = share * mean + (1 - share) * value;
      weight = share * weight + (1 - share);
      return mean / weight;
    });
  };

  /** Loads columns of a run. `options`: `kind`, `from`, `to`, `points`. */
  S.loadColumns = async (run, keys, options, signal) =>
    new S.Columns(await S.source.get(S.path(run, "series"), { keys: keys.join(","), ...options }, signal), keys);

  /** Evaluations of a run, scores or losses on validation rows, at the steps that made the evaluated versions. */
  S.loadEvaluations = (run, signal) =>
    S.loadColumns(run, ["score", "score_interval", "loss"], { kind: "eval" }, signal);
})();
