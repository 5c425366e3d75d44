"use strict";
// Where the data comes from: the server of `slipstream dashboard`, or this file itself (a report).

(() => {
  const RETRY_MS = 2000;
  const STREAMED = ["step", "eval", "servers", "event", "state"];

  const query = (parameters) =>
    new URLSearchParams(
      Object.entries(parameters || {}).filter(([, value]) => value !== undefined && value !== ""),
    ).toString();

  /** A run's path below /api/. */
  S.path = (run, ...parts) => ["runs", run, ...parts].map(encodeURIComponent).join("/");

  const live = {
    isLive: true,

    /** The server's answer as JSON. Raises: Error with its explanation. */
    async get(path, parameters, signal) {
      const text = query(parameters);
      const reply = await fetch(`api/${path}${text && `?${text}`}`, {
        signal,
        headers: { Accept: "application/json" },
      });
      const body = await reply.json().catch(() => ({ error: `the server answered ${reply.status} without JSON` }));
      if (!reply.ok) throw new Error(body.error || `the server answered ${reply.status}`);
      return body;
    },

    /**
     * Follows a run; returns the function that ends it.
     *
     * `onRecord(kind, data)` gets each record once and in order: the browser itself resumes a broken stream with
     * Last-Event-ID. `onState` gets `live` or `reconnecting`; `onGap` is called when the stream had to be opened anew,
     * without an id: what is shown must be loaded again.
     */
    follow(run, { onRecord, onState, onGap }) {
      let stream = null;
      let timer = 0;
      const open = () => {
        stream = new EventSource(`api/${S.path(run, "stream")}`);
        stream.addEventListener("open", () => onState("live"));
        stream.addEventListener("error", () => {
          onState("reconnecting");
          if (stream.readyState !== EventSource.CLOSED) return;
          timer = setTimeout(() => {
            open();
            stream.addEventListener("open", onGap, { once: true });
          }, RETRY_MS);
        });
        for (const kind of STREAMED)
          stream.addEventListener(kind, (message) => onRecord(kind, JSON.parse(message.data)));
      };
      open();
      return () => {
        clearTimeout(timer);
        stream.close();
      };
    },
  };

  /** A name with `*` for any text, as an expression. */
  S.glob = (pattern) =>
    new RegExp(
      `^${pattern
        .split("*")
        .map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"))
        .join(".*")}$`,
    );

  function selectSeries(whole, { keys = "*", from = -Infinity, to = Infinity }) {
    const patterns = keys.split(",").map(S.glob);
    const rows = whole.step.flatMap((step, row) => (step >= from && step <= to ? [row] : []));
    const pick = (column) => rows.map((row) => column[row]);
    const names = Object.keys(whole.columns).filter((name) => patterns.some((pattern) => pattern.test(name)));
    const columns = Object.fromEntries(names.map((name) => [name, pick(whole.columns[name])]));
    return { step: pick(whole.step), time_s: pick(whole.time_s), columns, total: whole.total };
  }

  const SORT_KEYS = { step: "number", reward: "reward", staleness: "staleness", tokens: "tokens" };

  /** Filters, sorts and pages a list as the server does. */
  function selectRows(whole, name, { query: text = "", sort = "", offset = 0, limit = 50, ...exact }) {
    const wanted = Object.entries(exact).filter(([, value]) => value !== undefined && value !== "");
    const rows = whole[name].filter(
      (row) =>
        JSON.stringify(row).toLowerCase().includes(text.toLowerCase()) &&
        wanted.every(([key, value]) => String(row[key]) === String(value)),
    );
    const key = SORT_KEYS[sort.replace("-", "")] || sort.replace("-", "");
    const sign = sort.startsWith("-") ? -1 : 1;
    if (key) rows.sort((a, b) => sign * ((a[key] ?? -Infinity) - (b[key] ?? -Infinity)) || 0);
    return { total: rows.length, [name]: rows.slice(Number(offset), Number(offset) + Number(limit)) };
  }

  const embedded = (data) => ({
    isLive: false,

    async get(path, parameters = {}) {
      const { kind, history, ...rest } = parameters;
      const variant = kind === "eval" && path.endsWith("/series") ? "?kind=eval" : history ? "?history=1" : "";
      const whole = data[decodeURIComponent(path) + variant];
      if (whole === undefined)
        throw new Error("This report does not contain it; `slipstream dashboard` on the run's folder shows it.");
      if (path.endsWith("/series")) return selectSeries(whole, rest);
      if (path.endsWith("/samples")) return selectRows(whole, "samples", { kind, ...rest });
      if (path.endsWith("/groups") && whole.groups) return selectRows(whole, "groups", rest);
      if (path === "compare") return selectCompared(whole, rest.runs.split(","));
      return whole;
    },

    follow: () => () => {},
  });

  function selectCompared(whole, runs) {
    const differs = ({ values }) => new Set(runs.map((run) => S.json(values[run]))).size > 1;
    return { keys: whole.keys.filter(differs) };
  }

  const element = document.getElementById("data");
  S.source = element ? embedded(JSON.parse(element.textContent)) : live;
})();
