"use strict";
// Elements and numbers as text. Texts of runs reach the page only as text nodes and attributes, never as markup.

const S = { views: [] };

(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "css") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  /** An HTML element. `attributes`: `onEVENT` listeners, `css` properties, else attributes; null and false: left out. */
  S.h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  S.svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  /** Text whose parts in backquotes are code. */
  S.prose = (text) => text.split("`").map((part, i) => (i % 2 ? S.h("code", {}, part) : part));

  /** A sentence in place of a view's content: what is missing, and what to set. */
  S.empty = (text) => S.h("p", { class: "empty" }, S.prose(text));

  S.panel = (title, attributes, ...children) =>
    S.h("section", { class: "panel", ...attributes }, title && S.h("h2", {}, title), ...children);

  /** A labelled <select>; `options`: pairs of value and text. */
  S.select = (label, options, value, onchange) => {
    const select = S.h(
      "select",
      { onchange: () => onchange(select.value) },
      options.map(([key, text]) => S.h("option", { value: key, selected: key === value }, text)),
    );
    return S.h("label", { class: "field" }, S.h("span", {}, label), select);
  };

  /** A labelled text field; `oninput` gets its text once typing has paused. */
  S.search = (label, value, oninput, attributes) => {
    let timer = 0;
    const input = S.h("input", {
      type: "search",
      value,
      spellcheck: "false",
      autocomplete: "off",
      "data-search": true,
      ...attributes,
      oninput: () => {
        clearTimeout(timer);
        timer = setTimeout(() => oninput(input.value, input), 150);
      },
    });
    return S.h("label", { class: "field grow" }, S.h("span", {}, label), input);
  };

  /** A table of texts and nodes; `columns`: `{title, number}`. */
  S.table = (caption, columns, rows) =>
    S.h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      S.h(
        "table",
        {},
        S.h("caption", { class: "visually-hidden" }, caption),
        S.h(
          "thead",
          {},
          S.h(
            "tr",
            {},
            columns.map((c) => S.h("th", { scope: "col", class: c.number && "number" }, c.title)),
          ),
        ),
        S.h(
          "tbody",
          {},
          rows.map((row) =>
            S.h(
              "tr",
              { class: row.className },
              row.cells.map((cell, i) => S.h("td", { class: columns[i].number && "number" }, cell)),
            ),
          ),
        ),
      ),
    );

  const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  /** A number to 3 or 4 digits; `–` for an absent one. */
  S.number = (value) => {
    if (typeof value === "string") return value; // "NaN" and "Infinity" of JSON that has no other form for them
    if (!isNumber(value)) return "–";
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (Number.isInteger(value) || size >= 1000) return grouped.format(value).replace("-", "−");
    if (size < 0.001) return value.toExponential(1).replace("e-", "e−").replace("-", "−");
    return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3).replace("-", "−");
  };

  S.percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %` : "–");

  /** Large numbers with k, M, G. */
  S.short = (value) => {
    if (!isNumber(value)) return "–";
    for (const [size, letter] of [
      [1e12, "T"],
      [1e9, "G"],
      [1e6, "M"],
      [1e4, "k"],
    ])
      if (Math.abs(value) >= size) return `${(value / (letter === "k" ? 1e3 : size)).toFixed(1)} ${letter}`;
    return S.number(value);
  };

  S.duration = (seconds) => {
    if (!isNumber(seconds)) return "–";
    if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60) return `${minutes}m ${String(Math.floor(seconds % 60)).padStart(2, "0")}s`;
    if (minutes < 2880) return `${Math.floor(minutes / 60)}h ${String(minutes % 60).padStart(2, "0")}m`;
    return `${(minutes / 1440).toFixed(1)} days`;
  };

  const SHARES = /fraction|^ended\/|^masked\/|cut_off|without_spread|coverage|kv_cache|share|mfu/;

  /** A metric's value in its unit. */
  S.value = (name, unit, value) => {
    if (!isNumber(value)) return S.number(value);
    if (SHARES.test(name)) return S.percent(value);
    if (unit === "s" && name !== "time_s") return S.duration(value);
    return S.number(value);
  };

  S.when = (unixSeconds) =>
    isNumber(unixSeconds) ? new Date(unixSeconds * 1000).toLocaleString("sv-SE", { timeZoneName: "short" }) : "–";

  /** A value of a configuration as text. */
  S.json = (value) => (typeof value === "string" ? value : value === undefined ? "–" : JSON.stringify(value));

  S.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /** Calls `work` once per frame, however often it is asked. */
  S.perFrame = (work) => {
    let pending = 0;
    return () => {
      pending ||= requestAnimationFrame(() => {
        pending = 0;
        work();
      });
    };
  };

  S.announce = (text) => {
    document.getElementById("announce").textContent = text;
  };
})();
