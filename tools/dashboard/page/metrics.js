"use strict";
// All metrics as charts, grouped; filter, zoom, log scale, smoothing, marks of events. Catalogue look-ups.

(() => {
  const CHART_POINTS = 800;
  const NEAR_PX = 300;
  const MOST_RECENT = 500;
  const MOST_EVENTS = 300; // the latest ones are listed

  /** Groups in the order of the page; a metric belongs to the first whose expression matches. */
  const GROUPS = [
    ["Reward", /^(reward|score\/|groups_without_spread|eval|pass_at|maj_at)/],
    ["Answers", /^(answer|ended\/|trajectories_per|truncated_answers)/],
    ["Staleness", /^staleness|^throttle\//],
    ["Off-policy", /^(ess|weight_mean|kl_k|chi2|clip_fraction|truncated_fraction|masked|mismatch)/],
    [
      "Optimisation",
      /^(loss|entropy|lr|grad_norm|skipped_updates|reference_kl|kl_coefficient|value_|critic_|experts\/)/,
    ],
    ["Throughput", /^(tokens|actions|answers$|step_s|train_s|publish_s|wait_s|mfu|flops|power_w|cost_per|gpus$)/],
    ["Idle", /idle/],
    [
      "Servers and KV cache",
      /^(kv_|prefix_hits|weights?[/_]|generation_stall|engine_deaths|requests_restarted|groups_in_flight|policy_version|servers?[/_])/,
    ],
    ["Buffer", /^buffer\//],
    ["Other", /./],
  ];

  const isPattern = (name) => name.includes("<");
  const matches = (name, key) => (isPattern(name) ? S.glob(name.replace(/<\w+>/g, "*")).test(key) : name === key);

  /** Unit and meaning of a metric by the catalogue; empty texts if it has none. */
  S.describe = (catalog, key, kind = "step") =>
    catalog.find((metric) => metric.kind === kind && metric.name.split(" ").some((name) => matches(name, key))) || {
      unit: "",
      meaning: "",
    };

  const groupOf = (key) => GROUPS.find(([, expression]) => expression.test(key))[0];

  const expressionOf = (text) => {
    try {
      return new RegExp(text, "i");
    } catch {
      return null;
    }
  };

  class Charts {
    constructor(context, choices) {
      this.context = context;
      this.choices = choices; // x, log, smooth, from, to
      this.charts = new Map(); // key -> Chart
      this.visible = new Set();
      this.columns = new Map(); // run -> key -> Columns
      this.recent = new Map(); // run -> its latest records
      this.wanted = new Set();
      this.events = [];
      this.load = S.perFrame(() => this.loadWanted());
      this.observer = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: `${NEAR_PX}px` });
    }

    element(key) {
      const { unit, meaning } = S.describe(this.context.catalog, key);
      const chart = new S.Chart({
        title: key,
        unit,
        caption: meaning,
        sync: "metrics",
        height: 150,
        format: (value) => S.value(key, unit, value),
        log: this.choices.log,
        xName: this.choices.x,
        onZoom: (from, to) => this.zoom(from, to),
      });
      chart.root.dataset.key = key;
      chart.canvas.addEventListener("dblclick", () => this.zoom(null, null));
      this.charts.set(key, chart);
      this.observer.observe(chart.root);
      return chart.root;
    }

    seen(entries) {
      for (const { target, isIntersecting } of entries) {
        const { key } = target.dataset;
        if (!isIntersecting) this.visible.delete(key);
        else {
          this.visible.add(key);
          this.wanted.add(key);
        }
      }
      if (this.wanted.size) this.load();
    }

    /** Loads the columns that became visible, in one request for each run. */
    async loadWanted() {
      const { runs, signal } = this.context;
      const { columns, choices } = this;
      const keys = [...this.wanted].filter((key) => !columns.get(runs[0])?.[key]);
      this.wanted.clear();
      const range = { from: choices.from ?? undefined, to: choices.to ?? undefined };
      const options = { points: CHART_POINTS, ...range };
      try {
        if (keys.length)
          await Promise.all(
            runs.map(async (run) => this.keep(columns, run, await S.loadColumns(run, keys, options, signal))),
          );
        if (columns === this.columns) this.draw();
      } catch (error) {
        if (error.name !== "AbortError") S.announce(S.failure(error).textContent);
      }
    }

    /** Keeps what was loaded, with the records that came meanwhile. Each request thins on its own rows. */
    keep(columns, run, added) {
      if (this.choices.to === null) {
        const last = added.step.at(-1) ?? -Infinity;
        for (const record of this.recent.get(run) || []) if (record.step > last) added.append(record);
      }
      if (!columns.has(run)) columns.set(run, {});
      for (const name of Object.keys(added.columns)) columns.get(run)[name] = added;
    }

    zoom(from, to) {
      if (from !== null && this.choices.x === "time") [from, to] = this.stepsAt(from, to);
      this.choices.from = from === null ? null : Math.floor(from);
      this.choices.to = to === null ? null : Math.ceil(to);
      this.columns = new Map(); // what is still being loaded is for the range before
      this.visible.forEach((key) => this.wanted.add(key));
      this.load();
      this.onZoom?.();
    }

    stepsAt(from, to) {
      const [any] = Object.values(this.columns.get(this.context.runs[0]));
      const elapsed = any.elapsed();
      const inside = any.step.filter((_, row) => elapsed[row] >= from && elapsed[row] <= to);
      return inside.length ? [inside[0], inside.at(-1)] : [any.step[0], any.step.at(-1)];
    }

    /** Draws the visible charts. */
    draw() {
      const { runs } = this.context;
      const { x, smooth } = this.choices;
      const xOf = (columns) => (x === "time" ? columns.elapsed() : columns.step);
      for (const key of this.visible) {
        const lines = runs.flatMap((run, index) => {
          const columns = this.columns.get(run)?.[key];
          if (!columns) return [];
          const line = { label: run, index, x: xOf(columns), y: columns.column(key) };
          return smooth
            ? [
                { ...line, faint: true },
                { ...line, y: S.smooth(line.y, smooth) },
              ]
            : [line];
        });
        this.charts.get(key).show(lines, this.marks(key));
      }
    }

    marks(key) {
      const marks = S.marksOf(this.events);
      if (this.choices.x === "step") return marks;
      const columns = this.columns.get(this.context.runs[0])?.[key];
      if (!columns?.length) return [];
      const elapsed = columns.elapsed();
      const at = (step) =>
        elapsed[
          Math.max(
            0,
            columns.step.findLastIndex((known) => known <= step),
          )
        ];
      return marks.map((mark) => ({ ...mark, x: at(mark.x) }));
    }

    append(run, records) {
      const recent = this.recent.get(run) || [];
      for (const record of records) {
        while (recent.length && recent.at(-1).step >= record.step) recent.pop();
        recent.push(record);
      }
      this.recent.set(run, recent.slice(-MOST_RECENT));
      if (this.choices.to !== null) return; // a range was chosen
      const kept = new Set(Object.values(this.columns.get(run) || {}));
      for (const columns of kept) records.forEach((record) => columns.append(record));
      this.draw();
    }

    remove() {
      this.observer.disconnect();
      this.charts.forEach((chart) => chart.remove());
    }

    setLog(isLog) {
      this.choices.log = isLog;
      this.charts.forEach((chart) => (chart.options.log = isLog));
      this.draw();
    }

    setX(name) {
      this.choices.x = name;
      this.charts.forEach((chart) => (chart.options.xName = name));
      this.draw();
    }
  }

  S.views.push({
    name: "metrics",
    title: "Metrics",

    async show(root, context) {
      const { parameters, runs, signal } = context;
      const number = (name) => (parameters.has(name) ? Number(parameters.get(name)) : null);
      const choices = {
        x: parameters.get("x") || "step",
        log: parameters.has("log"),
        smooth: number("smooth") || 0,
        from: number("from"),
        to: number("to"),
      };
      const [names, events] = await Promise.all([
        Promise.all(runs.map((run) => context.get(S.path(run, "series"), { keys: "*", points: 2 }))),
        context.get(S.path(runs[0], "events")),
      ]);
      const hidden = ["steps", "step", "time_s"];
      const place = (key) => context.catalog.indexOf(S.describe(context.catalog, key));
      const keys = [...new Set(names.flatMap(({ columns }) => Object.keys(columns)))]
        .filter((key) => !hidden.includes(key))
        .sort((a, b) => place(a) - place(b));
      if (!keys.length) {
        root.append(S.empty("No step is trained yet, so there is no metric."));
        return null;
      }
      const charts = new Charts(context, choices);
      charts.events = events;
      const range = S.h("button", { type: "button", class: "quiet", onclick: () => charts.zoom(null, null) });
      charts.onZoom = () => {
        range.hidden = choices.from === null;
        range.textContent = `Steps ${S.number(choices.from)} to ${S.number(choices.to)} · show all`;
        context.keep({ from: choices.from, to: choices.to });
      };
      const problem = S.h("span", { class: "problem", role: "alert" });
      const filter = S.search("Filter", parameters.get("filter") || "", (text) => apply(text), {
        placeholder: "regular expression, such as ess|kl_",
      });
      const share = S.h("input", {
        type: "range",
        min: 0,
        max: 0.98,
        step: 0.02,
        value: choices.smooth,
        oninput: (event) => {
          choices.smooth = Number(event.target.value);
          context.keep({ smooth: choices.smooth });
          charts.draw();
        },
      });
      const log = S.h("input", {
        type: "checkbox",
        checked: choices.log,
        onchange: () => {
          context.keep({ log: log.checked && "1" });
          charts.setLog(log.checked);
        },
      });
      root.append(
        S.h(
          "div",
          { class: "bar" },
          filter,
          problem,
          S.select(
            "Over",
            [
              ["step", "steps"],
              ["time", "time"],
            ],
            choices.x,
            (value) => {
              context.keep({ x: value === "step" ? "" : value });
              charts.setX(value);
            },
          ),
          S.h("label", { class: "field" }, S.h("span", {}, "Smooth"), share),
          S.h("label", { class: "field check" }, log, S.h("span", {}, "log scale")),
          range,
        ),
      );
      const sections = GROUPS.map(([title]) => {
        const own = keys.filter((key) => groupOf(key) === title);
        if (!own.length) return null;
        const grid = S.h(
          "div",
          { class: "charts" },
          own.map((key) => charts.element(key)),
        );
        const count = S.h("span", { class: "muted" });
        const section = S.h(
          "details",
          { class: "group", open: true },
          S.h("summary", {}, S.h("h2", {}, title), count),
          grid,
        );
        return { section, own, count };
      }).filter(Boolean);
      const none = S.empty("No metric matches the filter.");
      const eventCount = S.h("span", { class: "muted" });
      const eventBox = S.h("div", { class: "panel" });
      const eventSection = S.h(
        "details",
        { class: "group", ontoggle: () => showEvents() },
        S.h("summary", {}, S.h("h2", {}, "Events"), eventCount),
        eventBox,
      );
      const showEvents = () => {
        eventCount.textContent = S.number(charts.events.length);
        eventSection.hidden = !charts.events.length;
        if (eventSection.open) eventBox.replaceChildren(S.eventList(charts.events.slice(-MOST_EVENTS)));
      };
      showEvents();
      root.append(eventSection, ...sections.map(({ section }) => section), none);

      const apply = (text) => {
        const expression = expressionOf(text);
        problem.textContent = expression ? "" : "not a regular expression yet";
        if (!expression) return;
        context.keep({ filter: text });
        let shown = 0;
        for (const { section, own, count } of sections) {
          const fits = own.filter(
            (key) => expression.test(key) || expression.test(S.describe(context.catalog, key).meaning),
          );
          own.forEach((key) => (charts.charts.get(key).root.hidden = !fits.includes(key)));
          const isWhole = fits.length === own.length;
          count.textContent = isWhole ? S.number(own.length) : `${S.number(fits.length)} of ${S.number(own.length)}`;
          section.hidden = !fits.length;
          shown += fits.length;
        }
        none.hidden = shown > 0;
      };
      apply(parameters.get("filter") || "");
      charts.onZoom();

      return {
        live(run, batch) {
          if (run === runs[0] && batch.event.length) {
            S.addEvents(charts.events, batch.event);
            showEvents();
          }
          if (batch.step.length + batch.event.length) charts.append(run, batch.step);
        },
        escape: () => charts.zoom(null, null),
        remove: () => charts.remove(),
      };
    },
  });
})();
