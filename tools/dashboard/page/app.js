"use strict";
// The frame around the views: routes, chosen runs, their streams, theme, keys.

(() => {
  const FLUSH_MS = 250;
  const LOOK_AGAIN_MS = 5000;
  const QUIET_S = 15; // after that, the age of the last step is shown
  const MOST_STREAMS = 4; // a browser has six connections to one host
  const THEMES = ["system", "light", "dark"];
  const ENDED = ["finished", "stopped", "failed"];

  const header = document.getElementById("header");
  const nav = document.getElementById("nav");
  const main = document.getElementById("main");

  const app = {
    runs: [],
    catalog: [],
    chosen: [],
    stream: new Map(),
    follows: new Map(),
    view: null,
    handle: null,
    abort: null,
    batch: new Map(),
    timer: 0,
  };

  // --- routes: #/VIEW/ARGUMENT?runs=A,B&…

  function route() {
    const [path, text = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const [name, ...rest] = path.split("/").map(decodeURIComponent);
    const view = S.views.find((known) => known.name === name) || S.views[0];
    return { view, argument: rest.join("/") || null, parameters: new URLSearchParams(text) };
  }

  const address = (name, argument, parameters) => {
    const text = new URLSearchParams(
      Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== ""),
    ).toString();
    return `#/${name}${argument ? `/${encodeURIComponent(argument)}` : ""}${text && `?${text}`}`;
  };

  const runsParameter = () => app.chosen.join(",");

  /** A link's address to a view of the chosen runs. */
  S.link = (name, argument, parameters = {}) => address(name, argument, { runs: runsParameter(), ...parameters });

  // --- what the views get

  function context({ view, argument, parameters }, signal) {
    return {
      runs: app.chosen,
      run: app.chosen[0],
      all: app.runs,
      catalog: app.catalog,
      argument,
      parameters,
      signal,
      /** Keeps a view's choices in the address, without drawing it again. */
      keep: (changes) =>
        history.replaceState(
          null,
          "",
          S.link(view.name, argument, {
            ...Object.fromEntries(parameters),
            runs: runsParameter(),
            ...remember(parameters, changes),
          }),
        ),
      go: (name, to, more) => (location.hash = S.link(name, to, more)),
      get: (path, query) => S.source.get(path, query, signal),
    };
  }

  function remember(parameters, changes) {
    for (const [key, value] of Object.entries(changes)) value ? parameters.set(key, value) : parameters.delete(key);
    return changes;
  }

  async function open() {
    const to = route();
    const wanted = (to.parameters.get("runs") || "").split(",").filter((id) => app.runs.some((run) => run.id === id));
    app.chosen = wanted.length ? wanted : app.chosen.length ? app.chosen : app.runs.slice(0, 1).map((run) => run.id);
    app.abort?.abort();
    app.handle?.remove?.();
    app.batch.clear();
    app.abort = new AbortController();
    app.view = to.view;
    app.handle = null;
    const { signal } = app.abort;
    document.title = `${to.view.title} · ${app.chosen.join(", ") || "slipstream"}`;
    showNav();
    showHeader();
    const root = S.h(
      "div",
      { class: `view view-${to.view.name}` },
      S.h("h1", { class: "visually-hidden" }, to.view.title),
    );
    main.replaceChildren(root);
    if (!app.chosen.length) {
      root.append(S.empty("There is no run yet. `slipstream up configs/demo.yaml` starts one; this page finds it."));
      setTimeout(load, LOOK_AGAIN_MS);
      return;
    }
    try {
      await followChosen();
      if (signal.aborted) return;
      const handle = (await to.view.show(root, context(to, signal))) || {};
      if (signal.aborted) handle.remove?.();
      else app.handle = handle;
    } catch (error) {
      root.append(S.failure(error));
    }
  }

  // --- streams of the chosen runs

  /** Opens and closes streams; resolves once each new one is open, or has failed for the first time. */
  function followChosen() {
    const wanted = S.source.isLive && !document.hidden ? app.chosen.slice(0, MOST_STREAMS) : [];
    for (const [run, { stop }] of app.follows) {
      if (wanted.includes(run)) continue;
      stop();
      app.follows.delete(run);
      app.stream.delete(run);
    }
    for (const run of wanted) {
      if (app.follows.has(run)) continue;
      app.follows.set(
        run,
        S.source.follow(run, {
          onRecord: (kind, data) => receive(run, kind, data),
          onState: (state) => {
            app.stream.set(run, state);
            showState();
          },
          onGap: open,
        }),
      );
    }
    return Promise.all([...app.follows.values()].map(({ ready }) => ready));
  }

  function receive(run, kind, data) {
    const known = app.runs.find(({ id }) => id === run);
    if (!known) return; // its folder was removed
    if (kind === "state") known.state = data.state;
    if (kind === "step") Object.assign(known, { step: data.step, steps: data.steps, updated_at: Date.now() / 1000 });
    if (!app.batch.has(run)) app.batch.set(run, { step: [], eval: [], event: [], servers: null });
    const batch = app.batch.get(run);
    if (Array.isArray(batch[kind])) batch[kind].push(data);
    else batch[kind] = data;
    app.timer ||= setTimeout(flush, FLUSH_MS);
  }

  /** Hands what came to the view; while that is loading, it is kept. */
  function flush() {
    app.timer = 0;
    showState();
    if (!app.handle) {
      app.timer = setTimeout(flush, FLUSH_MS);
      return;
    }
    const batches = [...app.batch];
    app.batch.clear();
    for (const [run, batch] of batches) app.handle.live?.(run, batch);
  }

  // --- header and navigation

  const parts = {
    picker: S.h("details", { class: "picker" }),
    chips: S.h("div", { class: "chips" }),
    state: S.h("span", { class: "state", role: "status" }),
    progress: S.h("span", { class: "progress muted" }),
    theme: S.h("button", { type: "button", class: "quiet", onclick: () => nextTheme() }),
    help: S.h(
      "button",
      { type: "button", class: "quiet", "aria-label": "Keys", title: "Keys (?)", onclick: () => showHelp() },
      "?",
    ),
  };
  header.append(
    S.h("span", { class: "brand" }, "slipstream"),
    parts.picker,
    parts.chips,
    S.h("span", { class: "spacer" }),
    parts.progress,
    parts.state,
    parts.theme,
    parts.help,
  );

  function showHeader() {
    const toggle = (id, isOn) => {
      const chosen = isOn ? [...app.chosen, id] : app.chosen.filter((run) => run !== id);
      if (!chosen.length) return;
      const { view, argument, parameters } = route();
      const wasOpen = parts.picker.open;
      location.hash = address(view.name, isOn || app.chosen[0] !== id ? argument : null, {
        ...Object.fromEntries(parameters),
        runs: chosen.join(","),
      });
      parts.picker.open = wasOpen;
    };
    const focused = document.activeElement?.dataset?.run;
    parts.picker.replaceChildren(
      S.h(
        "summary",
        { title: "Choose runs (r)" },
        app.runs.length > 1 ? `Runs · ${app.chosen.length} of ${app.runs.length}` : "Run",
      ),
      S.h(
        "div",
        { class: "menu" },
        app.runs.map((run) =>
          S.h(
            "label",
            {},
            S.h("input", {
              type: "checkbox",
              "data-run": run.id,
              checked: app.chosen.includes(run.id),
              onchange: (event) => toggle(run.id, event.target.checked),
            }),
            S.h("span", { class: "menu-name" }, run.id, S.h("span", { class: "muted" }, ` ${run.folder}`)),
            S.h("span", { class: "muted" }, `${run.state} · step ${S.number(run.step)}`),
          ),
        ),
      ),
    );
    if (focused) parts.picker.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
    parts.chips.replaceChildren(
      ...app.chosen.map((id, index) => S.h("span", { class: "chip" }, app.chosen.length > 1 && S.swatch(index), id)),
    );
    showState();
  }

  /** `live`, `reconnecting`, or how the run ended. */
  function stateOf(run) {
    if (!S.source.isLive) return "report";
    const stream = app.stream.get(run.id);
    if (stream === "reconnecting") return "reconnecting";
    if (ENDED.includes(run.state)) return run.state;
    return stream === "live" ? "live" : "connecting";
  }

  function showState() {
    const run = app.runs.find(({ id }) => id === app.chosen[0]);
    if (!run) return;
    const state = stateOf(run);
    if (parts.state.textContent !== state) parts.state.textContent = state;
    parts.state.className = `state ${state}`;
    const age = Date.now() / 1000 - run.updated_at;
    const since = state === "live" && age > QUIET_S ? ` · ${S.duration(age)} ago` : "";
    parts.progress.textContent = run.steps ? `step ${S.number(run.step)} of ${S.number(run.steps)}${since}` : "";
  }

  function showNav() {
    nav.replaceChildren(
      ...S.views.map((view, i) =>
        S.h(
          "a",
          { href: S.link(view.name), "aria-current": view === app.view && "page", "aria-keyshortcuts": String(i + 1) },
          S.h("kbd", { "aria-hidden": "true" }, String(i + 1)),
          view.title,
        ),
      ),
    );
    nav.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  // --- theme

  function storedTheme() {
    try {
      return localStorage.getItem("slipstream.theme") || "system";
    } catch {
      return "system"; // a report opened from a file may have no storage
    }
  }

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    parts.theme.textContent = { system: "◐", light: "☀", dark: "☾" }[theme];
    parts.theme.title = `Colours: ${theme} (t)`;
    parts.theme.setAttribute("aria-label", `Colours: ${theme}`);
    S.redrawCharts();
  }

  function nextTheme() {
    const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    try {
      localStorage.setItem("slipstream.theme", theme);
    } catch {
      S.announce("The choice of colours is not kept: this page has no storage.");
    }
    setTheme(theme);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", S.redrawCharts);

  // --- keys

  const KEYS = [
    [`1 – ${S.views.length}`, "views"],
    ["/", "search"],
    ["r", "choose runs"],
    ["↑ ↓ Page Home End", "in a list, Enter opens"],
    ["← →", "in a chart or a turn: cursor; with Shift in a chart: further"],
    ["drag", "in a chart: zoom, Esc or a double click goes back"],
    ["t", "colours: system, light, dark"],
    ["Esc", "close, leave a field"],
    ["?", "this list"],
  ];
  const help = S.h(
    "dialog",
    { "aria-label": "Keys" },
    S.h("h2", {}, "Keys"),
    S.facts(KEYS),
    S.h("form", { method: "dialog" }, S.h("button", {}, "Close")),
  );
  document.body.append(help);
  const showHelp = () => help.showModal();

  const isTyping = (element) =>
    element.matches("input:not([type=checkbox], [type=radio], [type=range]), select, textarea");

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.key === "Escape") {
      parts.picker.open = false;
      if (isTyping(event.target)) event.target.blur();
      else app.handle?.escape?.();
      return;
    }
    if (isTyping(event.target)) return;
    const view = S.views[Number(event.key) - 1];
    if (view) location.hash = S.link(view.name);
    else if (event.key === "/") main.querySelector("[data-search]")?.focus();
    else if (event.key === "r") {
      parts.picker.open = !parts.picker.open;
      parts.picker.querySelector(parts.picker.open ? "input" : "summary").focus();
    } else if (event.key === "t") nextTheme();
    else if (event.key === "?") showHelp();
    else return;
    event.preventDefault();
  });

  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address is the route
    main.focus();
  });

  document.addEventListener("click", (event) => {
    if (!parts.picker.contains(event.target)) parts.picker.open = false;
  });

  // A hidden page needs no stream; once it is shown again, what may have changed is loaded anew.
  document.addEventListener("visibilitychange", () => {
    const isRunning = app.runs.some(({ id, state }) => app.chosen.includes(id) && state === "running");
    if (document.hidden || !isRunning) followChosen();
    else load();
  });

  parts.picker.addEventListener("toggle", async () => {
    if (!parts.picker.open) return;
    app.runs = await S.source.get("runs").catch(() => app.runs);
    showHeader();
  });

  async function load() {
    try {
      [app.runs, app.catalog] = await Promise.all([
        S.source.get("runs"),
        app.catalog.length ? app.catalog : S.source.get("metrics"),
      ]);
      await open();
    } catch (error) {
      main.replaceChildren(S.failure(error), S.h("button", { type: "button", onclick: load }, "Try again"));
    }
  }

  setInterval(showState, LOOK_AGAIN_MS);
  setTheme(storedTheme());
  addEventListener("hashchange", open);
  load();
})();
