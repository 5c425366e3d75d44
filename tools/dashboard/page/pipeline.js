"use strict";
// The path of the groups: tickets → in flight → ready → leased → trained, and what leaves it.

(() => {
  const WIDE_PX = 600;
  const MOST = 9; // width in pixels of the strongest flow

  const held = (record, name) => record[`buffer/${name}`] ?? null;

  /** A plain sentence on who waits, and the remedy. `kind`: fine, warn. */
  S.whoWaits = (record) => {
    const learner = record.learner_idle_fraction ?? null;
    const servers = record.generator_idle_fraction ?? null;
    if (learner === null && servers === null) return { kind: "fine", text: "No share of idle time is known yet." };
    const shares = `learner ${S.percent(learner)} idle, servers ${S.percent(servers)} idle`;
    if ((servers ?? 0) >= 0.25 && (servers ?? 0) >= (learner ?? 0))
      return {
        kind: "warn",
        text: `Servers are held back by the staleness limit: ${shares}. The learner is the slower side.`,
      };
    if ((learner ?? 0) >= 0.5)
      return {
        kind: "warn",
        text: `The learner waits for groups: ${shares}. More rollout servers, or shorter answers, would use it better.`,
      };
    if ((learner ?? 0) >= 0.25) return { kind: "fine", text: `The learner sometimes waits for groups: ${shares}.` };
    return { kind: "fine", text: `Nobody waits long: ${shares}.` };
  };

  function stages(record) {
    const limit = record.groups_in_flight_limit;
    return [
      { name: "issued", title: "Tickets", count: held(record, "issued"), note: "so far" },
      {
        name: "in_flight",
        title: "In flight",
        count: held(record, "in_flight"),
        note: limit ? `of ${S.number(limit)} allowed` : "on the servers",
        fill: limit && held(record, "in_flight") / limit,
      },
      { name: "ready", title: "Ready", count: held(record, "ready"), note: "in the queue" },
      { name: "leased", title: "Leased", count: held(record, "leased"), note: "in a step" },
      { name: "trained", title: "Trained", count: held(record, "trained"), note: "durable included" },
    ];
  }

  const exits = (record) => [
    { after: 1, title: "issued again", count: held(record, "reissued") },
    { after: 2, title: "filtered", count: held(record, "filtered") },
    { after: 2, title: "expired", count: held(record, "expired") },
  ];

  /** Answers that were never trained on, by reason. */
  function dropped(record) {
    const prefix = "buffer/answers_dropped/";
    const reasons = Object.entries(record).filter(([name, count]) => name.startsWith(prefix) && count > 0);
    reasons.sort(([, a], [, b]) => b - a);
    if (!reasons.length) return "No answer was dropped.";
    return `Answers dropped so far: ${reasons.map(([name, count]) => `${name.slice(prefix.length)} ${S.short(count)}`).join(", ")}.`;
  }

  /** Width of a flow in pixels: by its share of the tickets, never invisible. */
  const width = (count, issued) => (count ? Math.max(1.5, (MOST * count) / Math.max(1, issued)) : 1);

  const text = (x, y, className, content, anchor = "middle") =>
    S.svg("text", { x, y, class: className, "text-anchor": anchor }, content);

  function box(x, y, w, h, stage) {
    return S.svg(
      "g",
      {},
      S.svg("rect", { x, y, width: w, height: h, rx: 6, class: "stage" }),
      stage.fill
        ? S.svg("rect", { x, y: y + h - 4, width: w * Math.min(1, stage.fill), height: 4, rx: 2, class: "stage-fill" })
        : null,
      text(x + w / 2, y + 18, "stage-title", stage.title),
      text(x + w / 2, y + 42, "stage-count", S.short(stage.count)),
      text(x + w / 2, y + 58, "stage-note", stage.note),
    );
  }

  function arrow(points, count, issued, className = "flow") {
    return S.svg("path", {
      d: points,
      class: `${className}${count === 0 ? " none" : ""}`,
      "stroke-width": width(count, issued),
      "marker-end": `url(#tip-${className})`,
    });
  }

  const tips = () =>
    S.svg(
      "defs",
      {},
      ["flow", "loss", "weights"].map((kind) =>
        S.svg(
          "marker",
          {
            id: `tip-${kind}`,
            viewBox: "0 0 8 8",
            refX: kind === "flow" ? 5 : 7,
            refY: 4,
            markerWidth: kind === "flow" ? 15 : 9,
            markerHeight: kind === "flow" ? 15 : 9,
            markerUnits: "userSpaceOnUse",
            orient: "auto",
          },
          S.svg("path", { d: "M0 0 8 4 0 8z", class: `tip-${kind}` }),
        ),
      ),
    );

  /** Count that flowed through the gap after a stage: what is beyond it, so far. */
  const passed = (record, gap) => {
    const beyond = ["ready", "leased", "trained", "filtered", "expired"];
    const names = gap === 0 ? ["issued"] : gap === 1 ? beyond : gap === 2 ? ["leased", "trained"] : ["trained"];
    return names.reduce((sum, name) => sum + (held(record, name) || 0), 0);
  };

  const weightsText = (record) =>
    `weights: version ${S.number(record.policy_version)}${record.weight_sync_s === undefined ? "" : `, sync ${S.duration(record.weight_sync_s)}, stall ${S.duration(record.generation_stall_s)}`}`;

  function wide(record, list, out, issued) {
    const [w, h, gap, top] = [118, 68, 44, 46];
    const x = (i) => 4 + i * (w + gap);
    const total = x(list.length - 1) + w + 4;
    const middle = top + h / 2;
    const parts = list.map((stage, i) => box(x(i), top, w, h, stage));
    for (let i = 0; i < list.length - 1; i++)
      parts.push(arrow(`M${x(i) + w} ${middle}H${x(i + 1) - 7}`, passed(record, i), issued));
    const shifts = [0, -26, 26];
    out.forEach((exit, i) => {
      const at = x(exit.after) + w / 2 + (exit.after === 2 ? shifts[i] : 0);
      parts.push(arrow(`M${at} ${top + h}V${top + h + 26}`, exit.count, issued, "loss"));
      parts.push(
        text(
          at + (i === 1 ? 6 : i === 2 ? -6 : 0),
          top + h + 42,
          "exit",
          `${exit.title} ${S.short(exit.count)}`,
          i === 1 ? "end" : i === 2 ? "start" : "middle",
        ),
      );
    });
    const from = x(4) + w / 2;
    const to = x(1) + w / 2;
    parts.push(
      S.svg("path", { d: `M${from} ${top}V22H${to}V${top - 1}`, class: "weights", "marker-end": "url(#tip-weights)" }),
    );
    parts.push(text((from + to) / 2, 15, "exit", weightsText(record)));
    return [total, top + h + 50, parts];
  }

  function tall(record, list, out, issued) {
    const [w, h, gap, left] = [150, 66, 30, 34];
    const y = (i) => 6 + i * (h + gap);
    const parts = list.map((stage, i) => box(left, y(i), w, h, stage));
    for (let i = 0; i < list.length - 1; i++)
      parts.push(arrow(`M${left + w / 2} ${y(i) + h}V${y(i + 1) - 7}`, passed(record, i), issued));
    out.forEach((exit, i) => {
      const at = y(exit.after) + (exit.after === 1 ? 33 : i === 1 ? 16 : 48);
      parts.push(arrow(`M${left + w} ${at}h18`, exit.count, issued, "loss"));
      parts.push(text(left + w + 24, at + 4, "exit", `${exit.title} ${S.short(exit.count)}`, "start"));
    });
    parts.push(
      S.svg("path", {
        d: `M${left} ${y(4) + h / 2}H12V${y(1) + h / 2}H${left - 1}`,
        class: "weights",
        "marker-end": "url(#tip-weights)",
      }),
    );
    const bottom = y(list.length - 1) + h;
    parts.push(text(6, bottom + 20, "exit", weightsText(record), "start"));
    return [350, bottom + 28, parts];
  }

  /**
   * The pipeline of one run as an element with `show(record)` for the latest value of each metric.
   */
  S.Pipeline = class {
    constructor() {
      this.sentence = S.h("p", { class: "sentence" });
      this.picture = S.h("div", { class: "pipeline" });
      this.losses = S.h("p", { class: "muted" });
      this.root = S.h("div", {}, this.sentence, this.picture, this.losses);
      new ResizeObserver(() => {
        if (this.shown && this.isWide() !== this.wasWide) this.show(this.shown);
      }).observe(this.picture);
    }

    isWide() {
      return this.picture.clientWidth >= WIDE_PX;
    }

    show(record) {
      this.shown = record;
      this.wasWide = this.isWide();
      const list = stages(record);
      const issued = list[0].count || 1;
      const [w, h, parts] = (this.wasWide ? wide : tall)(record, list, exits(record), issued);
      const label = list.map(({ title, count }) => `${title} ${S.number(count)}`).join(", ");
      const style = this.wasWide ? { "max-width": `${Math.round(w * 1.25)}px` } : { "max-width": "350px" };
      this.picture.replaceChildren(
        S.svg(
          "svg",
          { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": `Groups: ${label}`, css: style },
          tips(),
          parts,
        ),
      );
      const { kind, text: said } = S.whoWaits(record);
      this.sentence.textContent = said;
      this.sentence.className = `sentence ${kind}`;
      this.losses.textContent = dropped(record);
    }
  };
})();
