"use strict";
// A trajectory as text: turns that fold, tokens coloured by version, log-prob, ratio, advantage or mask.

(() => {
  const HUES = 6; // backgrounds of versions in style.css
  const TOKENS_AT_ONCE = 4000;
  const OPEN_CHARACTERS = 1500;
  const STRONGEST = 0.5; // share of the colour in the background: text keeps its contrast

  const ROLES = { prompt: "prompt", action: "policy", observation: "environment" };

  /** `value(column)` of a token as -1 … 1 for a diverging scale, 0 … 1 for a sequential one; null: no colour. */
  const MODES = {
    none: { label: "none" },
    version: { label: "version" },
    logprob: {
      label: "log-prob",
      unit: "nats, log μ",
      scale: (value) => -Math.min(1, Math.abs(value) / 5),
      ends: ["0", "≤ −5: improbable"],
    },
    ratio: {
      label: "ratio",
      unit: "new over old probability",
      scale: (value) => Math.max(-1, Math.min(1, Math.log2(Math.max(value, 1e-9)))),
      ends: ["≤ ½", "1", "≥ 2"],
    },
    advantage: {
      label: "advantage",
      unit: "",
      scale: (value, most) => value / (most || 1),
      ends: ["negative", "0", "positive"],
    },
    trained: { label: "mask", unit: "" },
    entropy: { label: "entropy", unit: "nats", scale: (value, most) => value / (most || 1), ends: ["0", "highest"] },
  };

  const present = (tokens, mode) => tokens[mode]?.some((value) => value !== null && value !== undefined);

  /** Where in a trajectory a token's value is, and the values' range over all of it. */
  class Colouring {
    constructor(stretches, mode) {
      this.mode = mode;
      const values = stretches.flatMap(({ tokens }) => tokens?.[mode] || []).filter((v) => typeof v === "number");
      this.most = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
      this.versions = [...new Set(stretches.flatMap(({ tokens }) => tokens?.version || []))]
        .filter((v) => v !== null && v !== undefined && v >= 0)
        .sort((a, b) => a - b);
    }

    apply(element, tokens, row, isAction) {
      const value = tokens[this.mode]?.[row];
      element.className = "token";
      if (value === null || value === undefined || !isAction) return;
      if (this.mode === "version") element.classList.add(`hue-${(this.versions.indexOf(value) % HUES) + 1}`);
      else if (this.mode === "trained") element.classList.add(value ? "kept" : "masked");
      else if (MODES[this.mode].scale) {
        const share = MODES[this.mode].scale(value, this.most);
        element.classList.add(share < 0 ? "negative" : "positive");
        element.style.setProperty("--share", `${Math.round(100 * STRONGEST * Math.abs(share))}%`);
      }
    }

    legend() {
      const entry = (className, text, share) =>
        S.h(
          "span",
          { class: "entry" },
          S.h("span", { class: `token sample ${className}`, css: share && { "--share": share } }, "ab"),
          text,
        );
      if (this.mode === "version")
        return this.versions.map((version, i) => entry(`hue-${(i % HUES) + 1}`, `version ${version}`));
      if (this.mode === "trained") return [entry("kept", "trained on"), entry("masked", "left out by a mask")];
      const { ends, unit, scale } = MODES[this.mode];
      if (!scale) return [];
      const isDiverging = ends.length === 3;
      const strong = `${100 * STRONGEST}%`;
      return [
        entry(
          isDiverging || this.mode === "logprob" ? "negative" : "positive",
          isDiverging ? ends[0] : ends.at(-1),
          strong,
        ),
        entry("", isDiverging ? ends[1] : ends[0]),
        isDiverging && entry("positive", ends[2], strong),
        unit && S.h("span", { class: "muted" }, unit),
      ];
    }
  }

  /** What is known of one token, as a line of text. */
  function describe(tokens, row) {
    const facts = [`“${tokens.text[row]}”`, `id ${tokens.id?.[row] ?? "–"}`];
    for (const mode of Object.keys(MODES)) {
      const value = tokens[mode]?.[row];
      if (value === null || value === undefined) continue;
      facts.push(
        mode === "trained"
          ? value
            ? "trained on"
            : "left out by a mask"
          : `${MODES[mode].label} ${typeof value === "number" && mode !== "version" ? value.toFixed(4) : value}`,
      );
    }
    return facts.join("   ");
  }

  class Transcript {
    constructor(stretches, mode) {
      this.stretches = stretches;
      this.spans = new Map(); // element -> [tokens, row, isAction]
      const modes = Object.keys(MODES).filter(
        (name) => name === "none" || stretches.some(({ tokens }) => tokens && present(tokens, name)),
      );
      this.mode = modes.includes(mode) ? mode : "none";
      this.legend = S.h("div", { class: "token-legend" });
      this.fact = S.h(
        "div",
        { class: "token-fact", role: "status" },
        "Point at a token, or focus a turn and move with the arrows.",
      );
      this.toolbar = S.h(
        "fieldset",
        { class: "segments" },
        S.h("legend", {}, "Colour by"),
        modes.map((name) =>
          S.h(
            "label",
            {},
            S.h("input", {
              type: "radio",
              name: "colour",
              value: name,
              checked: name === this.mode,
              onchange: () => this.recolour(name),
            }),
            S.h("span", {}, MODES[name].label),
          ),
        ),
      );
      const actions = stretches.filter(({ role }) => role === "action").length;
      let turn = 0;
      this.root = S.h(
        "div",
        { class: "transcript" },
        S.h("div", { class: "token-bar" }, this.toolbar, this.legend, this.fact),
        stretches.map((stretch, i) =>
          this.turn(stretch, stretch.role === "action" ? ++turn : turn, actions, i === stretches.length - 1),
        ),
      );
      this.recolour(this.mode);
    }

    turn(stretch, turn, turns, isLast) {
      const { role, text, tokens, versions } = stretch;
      const isAction = role === "action";
      const versionText = versions?.length
        ? `version ${versions[0]}${versions.length > 1 ? `–${versions.at(-1)}` : ""}`
        : "";
      const title = [
        ROLES[role] || role,
        turns > 1 && role !== "prompt" && `turn ${turn}`,
        `${S.number(tokens.text.length)} tokens`,
        isAction && versionText,
      ].filter(Boolean);
      const body = S.h("div", {
        class: "turn-text",
        tabindex: "0",
        role: "group",
        "aria-label": title.join(", "),
        onkeydown: (event) => this.key(event, body),
      });
      const details = S.h(
        "details",
        { class: `turn ${role}` },
        S.h(
          "summary",
          {},
          S.h("strong", {}, title[0]),
          S.h("span", { class: "muted" }, ` · ${title.slice(1).join(" · ")}`),
          S.h("span", { class: "gist" }, text.slice(0, 120)),
        ),
        body,
      );
      const fillOnce = () => {
        if (details.open && !body.hasChildNodes()) this.fill(body, stretch, 0);
      };
      details.addEventListener("toggle", fillOnce);
      details.open = turns <= 1 || (isAction && isLast) || (role === "prompt" && text.length < OPEN_CHARACTERS);
      fillOnce();
      return details;
    }

    fill(body, { tokens, text, role }, from) {
      if (!tokens?.text?.length) {
        body.append(text);
        return;
      }
      const colouring = new Colouring(this.stretches, this.mode);
      const fragment = document.createDocumentFragment();
      const last = Math.min(tokens.text.length, from + TOKENS_AT_ONCE);
      for (let row = from; row < last; row++) {
        const span = S.h("span", { class: "token" }, tokens.text[row]);
        this.spans.set(span, [tokens, row, role === "action"]);
        colouring.apply(span, tokens, row, role === "action");
        fragment.append(span);
      }
      body.append(fragment);
      if (last < tokens.text.length) {
        const more = S.h(
          "button",
          {
            type: "button",
            onclick: () => {
              more.remove();
              this.fill(body, { tokens, text, role }, last);
            },
          },
          `${S.number(tokens.text.length - last)} more tokens`,
        );
        body.append(more);
      }
      body.onpointerover = (event) => this.point(event.target);
    }

    point(span) {
      const known = this.spans.get(span);
      if (!known) return;
      this.pointed?.classList.remove("pointed");
      this.pointed = span;
      span.classList.add("pointed");
      this.fact.textContent = describe(known[0], known[1]);
    }

    key(event, body) {
      const direction = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
      if (!direction) return;
      event.preventDefault();
      const isHere = this.pointed && this.pointed.parentElement === body;
      this.point(isHere ? this.pointed[direction] : body.firstElementChild);
      this.pointed?.scrollIntoView({ block: "nearest" });
    }

    recolour(mode) {
      this.mode = mode;
      S.colourMode = mode;
      const colouring = new Colouring(this.stretches, mode);
      for (const [span, [tokens, row, isAction]] of this.spans) {
        const isPointed = span === this.pointed;
        colouring.apply(span, tokens, row, isAction);
        span.classList.toggle("pointed", isPointed);
      }
      this.legend.replaceChildren(...colouring.legend().filter(Boolean));
    }
  }

  S.colourMode = "version";

  /** The turns of a sample or of a group's answer. */
  S.transcript = (stretches) => new Transcript(stretches, S.colourMode).root;

  /** Facts of a sample as pairs of name and text. */
  S.sampleFacts = (sample) =>
    [
      [sample.kind === "eval" ? "version" : "step", S.number(sample.number)],
      ["chosen as", sample.chosen],
      ["reward", S.number(sample.reward)],
      ...Object.entries(sample.scores || {}).map(([name, score]) => [name, S.number(score)]),
      ["tokens", S.number(sample.tokens)],
      ["staleness", S.number(sample.staleness)],
      ["ended by", sample.finish_reason],
      ["task", sample.task],
      ["env", sample.env],
    ].filter(([, text]) => text !== null && text !== undefined && text !== "–");

  S.facts = (pairs) =>
    S.h(
      "dl",
      { class: "facts" },
      pairs.map(([name, text]) => S.h("div", {}, S.h("dt", {}, name), S.h("dd", {}, text))),
    );
})();
