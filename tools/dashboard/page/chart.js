"use strict";
// One chart over steps or time: lines of several runs, intervals, marks of events, a legend with the cursor's values.

(() => {
  const LINES = 6; // colours in style.css
  const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2], [12, 4]];
  const MARK_REACH_PX = 6;
  const MOST_NOTES = 4;
  const MARKS = {
    throttle: "--accent",
    warning: "--warn",
    restart: "--bad",
    engine_death: "--bad",
    server_lost: "--bad",
  };
  const charts = new Set();

  S.lineColour = (index) => S.css(`--line-${(index % LINES) + 1}`);

  /** A short piece of the line, for legends. */
  S.swatch = (index) =>
    S.svg(
      "svg",
      { class: "swatch", viewBox: "0 0 24 8", "aria-hidden": "true" },
      S.svg("line", {
        x1: 1,
        x2: 23,
        y1: 4,
        y2: 4,
        class: `stroke-${(index % LINES) + 1}`,
        "stroke-dasharray": DASHES[index % DASHES.length].join(" ") || null,
      }),
    );

  /** Draws all charts again: their colours come from the style sheet. */
  S.redrawCharts = () => charts.forEach((chart) => chart.plot?.redraw(false));

  const nearest = (sorted, value) => {
    let low = 0;
    let high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
  };

  const axisNumber = (value) => {
    if (value === null) return "";
    if (value && Math.abs(value) < 0.001) return value.toExponential(0).replace("e-", "e−");
    return Math.abs(value) >= 10000
      ? S.short(value).replace(".0", "")
      : String(Number(value.toPrecision(6))).replace("-", "−");
  };

  /**
   * A chart.
   *
   * Options: `title`, `unit`, `caption` (the meaning), `height` in pixels, `format(value)`, `sync` (charts of the same
   * name share their cursor), `log`, `xName` (`step` or `time`), `onZoom(from, to)` of a drag, `floor` and `ceiling`:
   * values that the y axis always includes.
   */
  S.Chart = class {
    constructor(options) {
      this.options = { height: 180, format: S.number, xName: "step", ...options };
      this.lines = [];
      this.marks = [];
      this.legend = S.h("div", { class: "legend" });
      this.canvas = S.h("div", {
        class: "plot",
        tabindex: "0",
        role: "img",
        "aria-label": options.title,
        onkeydown: (event) => this.moveCursor(event),
        onblur: () => this.plot?.setCursor({ left: -10, top: -10 }),
      });
      this.canvas.style.height = `${this.options.height}px`;
      this.note = S.h("div", { class: "mark-note", "aria-live": "polite" });
      this.root = S.h(
        "figure",
        { class: "chart" },
        S.h(
          "figcaption",
          {},
          S.h("span", { class: "chart-title" }, options.title),
          options.unit && S.h("span", { class: "unit" }, options.unit),
          this.legend,
        ),
        options.caption && S.h("p", { class: "caption", title: options.caption }, S.prose(options.caption)),
        this.canvas,
        this.note,
      );
      this.resize = new ResizeObserver(() => this.fit());
      this.resize.observe(this.canvas);
      charts.add(this);
    }

    remove() {
      charts.delete(this);
      this.resize.disconnect();
      this.plot?.destroy();
    }

    /**
     * Shows lines: `{label, index (colour and dash), x, y, interval?, points?, faint?}`, and marks of events:
     * `{x, kind, text}`. `points`: true, or "loose" without a line between them. `faint` lines stand behind, without a value in the legend.
     */
    show(lines, marks = []) {
      this.lines = lines.filter((line) => line.x.length);
      this.marks = marks;
      if (!this.canvas.isConnected || !this.canvas.clientWidth) return; // drawn once it has a size
      const shape = JSON.stringify([
        this.options.log,
        this.options.xName,
        this.lines.map((l) => [l.label, l.index, l.points, l.faint]),
      ]);
      const data = this.data();
      if (!this.plot || shape !== this.shape) this.build(data, shape);
      else this.plot.setData(data);
      this.showLegend(null);
    }

    data() {
      const positive = (y) => (this.options.log ? y.map((value) => (value > 0 ? value : null)) : y);
      if (!this.lines.length) return [[], []];
      if (this.lines.length > 1) return uPlot.join(this.lines.map(({ x, y }) => [x, positive(y)]));
      return [this.lines[0].x, positive(this.lines[0].y)];
    }

    build(data, shape) {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.settings(), data, this.canvas);
    }

    settings() {
      const { log, sync, xName, onZoom, height, floor, ceiling } = this.options;
      const axis = {
        stroke: () => S.css("--muted"),
        grid: { stroke: () => S.css("--grid"), width: 1 },
        ticks: { show: false },
        font: "11px system-ui, sans-serif",
        gap: 4,
      };
      const range = (_, low, high) => {
        if (low === null) return [0, 1];
        const ends = this.intervalEnds();
        const [bottom, top] = [Math.min(low, floor ?? low, ...ends), Math.max(high, ceiling ?? high, ...ends)];
        const margin = (top - bottom || Math.abs(top) || 1) * 0.06;
        return [bottom - (bottom === 0 && low >= 0 ? 0 : margin), top + margin];
      };
      return {
        width: this.canvas.clientWidth,
        height,
        legend: { show: false },
        padding: [6, 16, 0, 0],
        cursor: {
          sync: sync ? { key: sync, setSeries: false } : undefined,
          drag: { x: Boolean(onZoom), y: false, setScale: false },
          points: { size: 6 },
        },
        scales: {
          x: { time: false },
          y: log ? { distr: 3 } : { range },
        },
        axes: [
          {
            ...axis,
            size: 19,
            values: (_, ticks) =>
              ticks.map((tick) => (xName === "time" && tick ? S.duration(tick).replace(" 00s", "") : axisNumber(tick))),
          },
          { ...axis, size: 52, values: (_, ticks) => ticks.map(axisNumber) },
        ],
        series: [{}, ...(this.lines.length ? this.lines : [{ index: 0 }]).map((line) => this.series(line))],
        hooks: {
          draw: [(plot) => this.drawIntervals(plot), (plot) => this.drawMarks(plot)],
          setCursor: [(plot) => this.showLegend(plot.cursor.idx)],
          setSelect: [(plot) => this.zoom(plot)],
        },
      };
    }

    series({ index, points, faint }) {
      const stroke = () => S.lineColour(index);
      const dots = { stroke, width: 1, points: { show: true, size: 6, fill: stroke }, spanGaps: true };
      if (points) return points === "loose" ? { ...dots, paths: () => null } : dots;
      const few = (plot) => plot.data[0].length <= 2;
      return {
        stroke,
        width: faint ? 1 : 1.5,
        alpha: faint ? 0.28 : 1,
        dash: DASHES[index % DASHES.length],
        spanGaps: true,
        points: { show: few, size: 5, fill: stroke },
      };
    }

    intervalEnds() {
      const lines = this.lines.filter(({ interval }) => interval);
      return lines.flatMap(({ y, interval }) =>
        y.flatMap((value, i) => (interval[i] ? [value - interval[i], value + interval[i]] : [])),
      );
    }

    drawIntervals(plot) {
      for (const line of this.lines.filter(({ interval }) => interval)) {
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.beginPath();
        ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
        ctx.clip();
        ctx.strokeStyle = S.lineColour(line.index);
        ctx.lineWidth = devicePixelRatio;
        ctx.beginPath();
        line.x.forEach((x, i) => {
          if (typeof line.y[i] !== "number" || !line.interval[i]) return;
          const at = plot.valToPos(x, "x", true);
          ctx.moveTo(at, plot.valToPos(line.y[i] - line.interval[i], "y", true));
          ctx.lineTo(at, plot.valToPos(line.y[i] + line.interval[i], "y", true));
        });
        ctx.stroke();
        ctx.restore();
      }
    }

    drawMarks(plot) {
      const { ctx, bbox } = plot;
      const size = 4 * devicePixelRatio;
      ctx.save();
      ctx.lineWidth = devicePixelRatio;
      for (const { x, kind } of this.marks) {
        const at = plot.valToPos(x, "x", true);
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.strokeStyle = ctx.fillStyle = S.css(MARKS[kind] || "--muted");
        ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
        ctx.beginPath();
        ctx.moveTo(at - size, bbox.top);
        ctx.lineTo(at + size, bbox.top);
        ctx.lineTo(at, bbox.top + 1.6 * size);
        ctx.fill();
      }
      ctx.restore();
    }

    zoom(plot) {
      if (plot.select.width < 4) return;
      const from = plot.posToVal(plot.select.left, "x");
      const to = plot.posToVal(plot.select.left + plot.select.width, "x");
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      this.options.onZoom?.(from, to);
    }

    moveCursor(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.plot?.data[0].length) return;
      event.preventDefault();
      const last = this.plot.data[0].length - 1;
      const stride = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
      const index = Math.max(0, Math.min(last, (this.plot.cursor.idx ?? last + 1) + step * stride));
      this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][index], "x"), top: 10 });
    }

    /** The values at an index of the joined data; at the end of each line if `index` is null. */
    showLegend(index) {
      const { format, xName } = this.options;
      const at = index === null || index === undefined ? null : this.plot?.data[0][index];
      const named = this.lines.filter(({ faint }) => !faint);
      const values = named.map(({ x, y, interval }) => {
        const row = at === null || at === undefined ? y.findLastIndex((value) => value !== null) : nearest(x, at);
        return `${format(y[row] ?? null)}${interval?.[row] ? ` ± ${format(interval[row])}` : ""}`;
      });
      const key = JSON.stringify([named.map(({ label, index: colour }) => [label, colour])]);
      if (key !== this.legendKey) {
        this.legendKey = key;
        this.values = named.map(() => S.h("span", { class: "value" }));
        this.where = S.h("span", { class: "where" });
        this.legend.replaceChildren(
          this.where,
          ...named.map((line, i) =>
            S.h(
              "span",
              { class: "entry" },
              named.length > 1 && S.swatch(line.index),
              named.length > 1 && S.h("span", { class: "label" }, line.label),
              this.values[i],
            ),
          ),
        );
      }
      values.forEach((text, i) => (this.values[i].textContent = text));
      this.where.textContent =
        at === null || at === undefined ? "" : xName === "time" ? S.duration(at) : `step ${S.number(at)}`;
      this.canvas.setAttribute(
        "aria-label",
        `${this.options.title}: ${named.map((line, i) => `${line.label} ${values[i]}`).join(", ") || "no data"}`,
      );
      this.showMark();
    }

    showMark() {
      const left = this.plot?.cursor.left ?? -1;
      const isNear = ({ x }) => Math.abs(this.plot.valToPos(x, "x") - left) < MARK_REACH_PX;
      const near = left < 0 ? [] : this.marks.filter(isNear);
      const shown = near.slice(0, MOST_NOTES).map(({ kind, text }) => `${kind.replaceAll("_", " ")}: ${text}`);
      if (near.length > MOST_NOTES) shown.push(`${S.number(near.length - MOST_NOTES)} more`);
      this.note.textContent = shown.join("\n");
      this.note.hidden = !near.length;
    }

    fit() {
      const width = this.canvas.clientWidth;
      if (!width) return;
      if (!this.plot) this.show(this.lines, this.marks);
      else if (width !== this.plot.width) this.plot.setSize({ width, height: this.options.height });
    }
  };
})();
