"use strict";
// Where the data comes from: the server of `slipstream dashboard`, or this file itself (a report).

(() => {
  const RETRY_MS = 2000;
  const STREAMED = ["step", "eval", "servers", "event", "state", "finish"];

  const query = (parameters) =>
    new URLSearchParams(
      Object.entries(parameters || {}).filter(([, value]) => value !== undefined && value !== ""),
    ).toString();

  /** Data that can't be had; the message says why. */
  class DataError extends Error {}

  /** What is shown in place of data. A fault of the page itself goes to the console too. */
  S.failure = (error) => {
    if (error.name === "AbortError") return S.empty("");
    if (!(error instanceof DataError)) console.error(error);
    return S.empty(error.message);
  };

  /** A run's path below /api/. */
  S.path = (run, ...parts) => ["runs", run, ...parts].map(encodeURIComponent).join("/");

  const live = {
    isLive: true,

    /** The server's answer as JSON. Raises: DataError; AbortError once `signal` is aborted. */
    async get(path, parameters, signal) {
      const text = query(parameters);
      try {
        const reply = await fetch(`api/${path}${text && `?${text}`}`, { signal });
        const body = await reply.json();
        if (reply.ok) return body;
        throw new DataError(body.error);
      } catch (error) {
        if (error instanceof TypeError) throw new DataError("The dashboard's server does not answer.");
        if (error instanceof SyntaxError) throw new DataError("The server's answer is no JSON.");
        throw error;
      }
    },

    /**
     * Follows a run. Returns `{stop, ready}`; `ready` is a promise of the first answer: what is read from then on lacks
     * nothing that the stream does not bring.
     *
     * `onRecord(kind, data)` gets the records in order, `onState` gets `live` or `reconnecting`. A broken stream goes on
     * after its last id. `onGap` is called where that is not possible: everything must be loaded again.
     */
    follow(run, { onRecord, onState, onGap }) {
      let stream = null;
      let timer = 0;
      let lastId = "";
      let wasOpen = false;
      let settle = null;
      const ready = new Promise((resolve) => (settle = resolve));
      const open = () => {
        stream = new EventSource(`api/${S.path(run, "stream")}?${query({ after: lastId })}`);
        stream.addEventListener("open", () => {
          onState("live");
          if (wasOpen && !lastId) onGap();
          wasOpen = true;
          settle();
        });
        stream.addEventListener("error", () => {
          onState("reconnecting");
          settle();
          if (stream.readyState === EventSource.CLOSED) timer = setTimeout(open, RETRY_MS);
        });
        stream.addEventListener("reset", onGap);
        for (const kind of STREAMED) {
          stream.addEventListener(kind, (message) => {
            lastId = message.lastEventId || lastId;
            onRecord(kind, JSON.parse(message.data));
          });
        }
      };
      open();
      const stop = () => {
        clearTimeout(timer);
        stream.close();
      };
      return { stop, ready };
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
    return { ...whole, total: rows.length, [name]: rows.slice(Number(offset), Number(offset) + Number(limit)) };
  }

  const embedded = (data) => ({
    isLive: false,

    async get(path, parameters = {}) {
      const { kind, history, ...rest } = parameters;
      const isKindApart = path.endsWith("/series") || path.includes("/prompts/");
      const variant = kind === "eval" && isKindApart ? "?kind=eval" : history ? "?history=1" : "";
      const whole = data[decodeURIComponent(path) + variant];
      if (whole === undefined)
        throw new DataError("This report does not contain it; `slipstream dashboard` on the run's folder shows it.");
      if (path.endsWith("/series")) return selectSeries(whole, rest);
      if (path.endsWith("/samples")) return selectRows(whole, "samples", { kind: kind || "step", ...rest });
      if (path.endsWith("/groups") && whole.groups) return selectRows(whole, "groups", rest);
      if (path === "compare") return selectCompared(whole, rest.runs.split(","));
      return whole;
    },

    follow: () => ({ stop: () => {}, ready: Promise.resolve() }),
  });

  function selectCompared(whole, runs) {
    const differs = ({ values }) => new Set(runs.map((run) => S.json(values[run]))).size > 1;
    return { keys: whole.keys.filter(differs) };
  }

  const element = document.getElementById("data");
  S.source = element ? embedded(JSON.parse(element.textContent)) : live;
})();
