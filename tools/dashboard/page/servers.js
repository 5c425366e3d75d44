"use strict";
// The rollout servers: a table of any length, sorted, with bars and marked outliers; the fleet over time.

(() => {
  const ROW_PX = 30;
  const FAR = 4; // median absolute deviations from the median
  const LEAST = { lag: 2, kv_cache_use: 0.2, idle_fraction: 0.2 }; // smaller deviations are no outliers

  /** `bad`: the side on which an outlier is marked. */
  const COLUMNS = [
    { key: "server", title: "Server", isText: true },
    { key: "version", title: "Version", format: S.number },
    { key: "lag", title: "Lag", format: S.number, bad: 1, hint: "versions behind the published one" },
    { key: "stall_s", title: "Stall", format: S.duration, bad: 1, hint: "pause of generation in the last update" },
    {
      key: "tokens_per_s",
      title: "Tokens/s",
      format: (value) => S.short(value === null ? null : Math.round(value)),
      bad: -1,
      isBar: true,
    },
    { key: "idle_fraction", title: "Idle", format: S.percent, bad: 1, isBar: true, whole: 1 },
    { key: "kv_cache_use", title: "KV cache", format: S.percent, bad: 1, isBar: true, whole: 1 },
    { key: "prefix_hits", title: "Hits", format: S.percent, hint: "prompt tokens found in the KV cache" },
    { key: "running", title: "Running", format: S.number, isBar: true },
    { key: "waiting", title: "Waiting", format: S.number, bad: 1 },
    { key: "engine_deaths", title: "Restarts", format: S.number, bad: 1, hint: "of the engine, after a crash" },
    { key: "requests_restarted", title: "Lost requests", format: S.number, hint: "begun anew after a crash" },
  ];

  const median = (values) => {
    const sorted = [...values].sort((a, b) => a - b);
    return sorted.length ? sorted[sorted.length >> 1] : 0;
  };

  /** The value beyond which a server's number is an outlier, by column. */
  function limits(servers) {
    const found = {};
    for (const { key, bad } of COLUMNS.filter(({ bad }) => bad)) {
      const values = servers.map((server) => server[key]).filter((value) => typeof value === "number");
      const middle = median(values);
      const spread = Math.max(
        FAR * 1.5 * median(values.map((value) => Math.abs(value - middle))),
        LEAST[key] ?? Math.abs(middle) * 0.5,
      );
      found[key] = (value) => typeof value === "number" && bad * (value - middle) > spread && value !== middle;
    }
    return found;
  }

  class Table {
    constructor(context) {
      this.context = context;
      this.sort = context.parameters.get("sort") || "server";
      this.text = context.parameters.get("filter") || "";
      this.list = new S.List({
        label: "Servers",
        rowHeight: ROW_PX,
        className: "grid servers",
        render: (server) => this.cells(server),
      });
      this.head = S.h(
        "div",
        { class: "grid-head servers" },
        COLUMNS.map((column) => {
          const button = S.h(
            "button",
            { type: "button", title: column.hint, onclick: () => this.sortBy(column.key) },
            column.title,
          );
          return S.h("span", { class: column.isText ? "" : "number", "data-key": column.key }, button);
        }),
      );
      this.root = S.h("div", { class: "scroll" }, S.h("div", { class: "grid-wide" }, this.head, this.list.root));
    }

    sortBy(key) {
      const isText = key === "server";
      this.sort = this.sort === key ? `-${key}` : this.sort === `-${key}` ? key : isText ? key : `-${key}`;
      this.context.keep({ sort: this.sort });
      this.show(this.servers);
    }

    filter(text) {
      this.text = text;
      this.context.keep({ filter: text });
      this.show(this.servers);
    }

    show(servers) {
      this.servers = servers;
      this.isOutlier = limits(servers);
      this.most = Object.fromEntries(
        COLUMNS.filter(({ isBar }) => isBar).map(({ key, whole }) => [
          key,
          whole ?? servers.reduce((most, server) => Math.max(most, server[key] ?? 0), 0),
        ]),
      );
      const key = this.sort.replace(/^-/, "");
      const sign = this.sort.startsWith("-") ? -1 : 1;
      const order =
        key === "server"
          ? (a, b) => sign * String(a.server).localeCompare(String(b.server), "en", { numeric: true })
          : (a, b) => sign * ((a[key] ?? -Infinity) - (b[key] ?? -Infinity));
      const wanted = this.text.toLowerCase();
      this.list.setItems(servers.filter(({ server }) => String(server).toLowerCase().includes(wanted)).sort(order));
      this.list.root.style.height = `${Math.min(this.list.count * ROW_PX + 2, 620)}px`;
      for (const cell of this.head.children) cell.classList.toggle("sorted", cell.dataset.key === key);
      for (const cell of this.head.children)
        cell.dataset.direction = cell.dataset.key === key ? (sign < 0 ? "↓" : "↑") : "";
    }

    cells(server) {
      return COLUMNS.map(({ key, isText, format, isBar, bad }) => {
        if (isText) return S.h("span", { class: "name", title: String(server[key]) }, String(server[key]));
        const value = server[key];
        const isFar = this.isOutlier[key]?.(value);
        const share = isBar && this.most[key] ? (value ?? 0) / this.most[key] : 0;
        return S.h(
          "span",
          { class: `number${isFar ? " outlier" : ""}`, title: isFar && "far from the other servers" },
          isBar && S.h("span", { class: "cell-bar", css: { width: `${Math.round(100 * Math.min(1, share))}%` } }),
          S.h("span", { class: "cell-text" }, isFar && (bad < 0 ? "▼ " : "▲ "), format(value ?? null)),
        );
      });
    }
  }

  const sum = (servers, key) => servers.reduce((total, server) => total + (server[key] ?? 0), 0);

  function fleet({ servers, version }, isOutlier) {
    const fact = (label, value, note) =>
      S.h(
        "div",
        { class: "tile" },
        S.h("div", { class: "tile-label" }, label),
        S.h("div", { class: "tile-value" }, value),
        S.h("div", { class: "tile-note" }, note || " "),
      );
    const behind = servers.filter(({ lag }) => lag > 0).length;
    const far = servers.filter((server) => COLUMNS.some(({ key }) => isOutlier[key]?.(server[key]))).length;
    const middle = (key) => median(servers.map((server) => server[key]).filter((value) => typeof value === "number"));
    const known = (key) => servers.some((server) => typeof server[key] === "number");
    return [
      fact("Servers", S.number(servers.length), far ? `${S.number(far)} far from the others` : "alike"),
      fact("Published version", S.number(version), behind ? `${S.number(behind)} servers behind it` : "on all servers"),
      fact("Tokens per second", known("tokens_per_s") ? S.short(sum(servers, "tokens_per_s")) : "–", "all servers"),
      fact("KV cache", known("kv_cache_use") ? S.percent(middle("kv_cache_use")) : "–", "median"),
      fact("Requests", `${S.short(sum(servers, "running"))}`, `${S.short(sum(servers, "waiting"))} waiting`),
      fact(
        "Engine restarts",
        S.number(sum(servers, "engine_deaths")),
        `${S.number(sum(servers, "requests_restarted"))} requests begun anew`,
      ),
    ];
  }

  const HISTORY = [
    { key: "tokens_per_s", title: "Tokens per second", unit: "all servers", format: S.short },
    { key: "idle_fraction", title: "Idle", unit: "mean", format: S.percent },
    { key: "kv_cache_use", title: "KV cache", unit: "mean", format: S.percent },
    { key: "prefix_hits", title: "Prefix hits", unit: "mean", format: S.percent },
    { key: "lag_max", title: "Lag", unit: "versions, most", format: S.number },
    { key: "stall_s_max", title: "Stall", unit: "most", format: S.duration },
    { key: "running", title: "Running", unit: "requests", format: S.number },
    { key: "waiting", title: "Waiting", unit: "requests", format: S.number },
    { key: "server_count", title: "Servers", format: S.number },
  ];

  S.views.push({
    name: "servers",
    title: "Servers",

    async show(root, context) {
      const [now, past] = await Promise.all([
        context.get(S.path(context.run, "servers")),
        context.get(S.path(context.run, "servers"), { history: 1 }),
      ]);
      if (!now?.servers?.length) {
        root.append(
          S.empty(
            "No rollout server has reported yet. Once a second the learner writes `servers.json`; runs of older releases have none.",
          ),
        );
        return null;
      }
      const table = new Table(context);
      const tiles = S.h("div", { class: "tiles" });
      const show = (state) => {
        table.show(state.servers);
        tiles.replaceChildren(...fleet(state, table.isOutlier));
      };
      const known = HISTORY.filter(({ key }) => past.columns[key]?.some((value) => value !== null));
      const charts = known.map((curve) => ({
        key: curve.key,
        chart: new S.Chart({ sync: "servers", xName: "time", height: 110, floor: 0, ...curve }),
      }));
      root.append(
        tiles,
        S.panel(
          null,
          {},
          S.h(
            "div",
            { class: "bar" },
            S.search("Find a server", table.text, (text) => table.filter(text)),
          ),
          table.root,
        ),
      );
      if (charts.length)
        root.append(
          S.panel(
            "All servers over time",
            {},
            S.h(
              "div",
              { class: "charts small" },
              charts.map(({ chart }) => chart.root),
            ),
          ),
        );
      show(now);
      const since = past.time_s.map((time) => time - past.time_s[0]);
      for (const { chart, key } of charts) chart.show([{ label: key, index: 0, x: since, y: past.columns[key] }]);
      return {
        live(run, batch) {
          if (run === context.run && batch.servers) show(batch.servers);
        },
        remove: () => charts.forEach(({ chart }) => chart.remove()),
      };
    },
  });
})();
