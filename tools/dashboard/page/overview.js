"use strict";
// Overview: figures with their change since the start, the pipeline, the main curves.

(() => {
  const KEYS = [
    "steps",
    "reward*",
    "score/*",
    "staleness_*",
    "tokens_generated_per_s",
    "learner_idle_fraction",
    "generator_idle_fraction",
    "step_s",
    "entropy",
    "ess",
    "policy_version",
    "weight_sync_s",
    "generation_stall_s",
    "groups_in_flight_limit",
    "buffer/*",
    "mfu",
    "tokens_per_gpu_s",
    "power_w",
    "cost_per_million_tokens",
    "loss",
    "lr",
    "grad_norm",
    "epoch",
    "tokens_trained_per_s",
  ];
  const LATEST_EVENTS = 6;
  const RATE_ROWS = 100; // rows at the end that the remaining time is computed from
  const SPARK = { width: 96, height: 22, points: 60 };

  const change = (now, then, format) => {
    if (now === null || then === null || now === undefined) return "";
    if (format(now) === format(then)) return "as at the start";
    return `${now > then ? "↑" : "↓"} from ${format(then)}`;
  };

  function spark(values) {
    const known = values.filter((value) => typeof value === "number");
    if (known.length < 3) return null;
    const stride = Math.max(1, Math.floor(known.length / SPARK.points));
    const shown = known.filter((_, i) => i % stride === 0 || i === known.length - 1);
    const low = Math.min(...shown);
    const span = Math.max(...shown) - low || 1;
    const points = shown.map(
      (value, i) =>
        `${((i * SPARK.width) / (shown.length - 1)).toFixed(1)},${(1 + (SPARK.height - 2) * (1 - (value - low) / span)).toFixed(1)}`,
    );
    return S.svg(
      "svg",
      {
        class: "spark",
        viewBox: `0 0 ${SPARK.width} ${SPARK.height}`,
        preserveAspectRatio: "none",
        "aria-hidden": "true",
      },
      S.svg("polyline", { points: points.join(" ") }),
    );
  }

  const tile = (label, value, note, values) =>
    S.h(
      "div",
      { class: "tile" },
      S.h("div", { class: "tile-label" }, label),
      S.h("div", { class: "tile-value" }, value),
      S.h("div", { class: "tile-note" }, note || " "),
      values && spark(values),
    );

  /** Seconds until the last step, by the pace of the last rows. */
  function remaining(columns) {
    const elapsed = columns.elapsed();
    const last = columns.length - 1;
    const from = Math.max(0, last - RATE_ROWS);
    const steps = columns.step[last] - columns.step[from];
    const left = columns.last("steps") - columns.step[last];
    return steps > 0 ? (left * (elapsed[last] - elapsed[from])) / steps : null;
  }

  function tiles(columns, evals, isRunning, isRl) {
    const metric = (name, label, format, note) => {
      const now = columns.last(name);
      return now === null
        ? null
        : tile(label, format(now), note ?? change(now, columns.first(name), format), columns.column(name));
    };
    const elapsed = columns.elapsed();
    const done = columns.step.at(-1);
    const steps = columns.last("steps");
    const score = evals.last("score");
    const interval = evals.last("score_interval");
    return [
      tile(
        "Step",
        S.number(done),
        steps ? `of ${S.number(steps)} · ${isRl ? "version" : "epoch"} ${S.number(columns.last(isRl ? "policy_version" : "epoch"))}` : "",
      ),
      isRunning && done < steps
        ? tile("Time left", S.duration(remaining(columns)), `${S.duration(elapsed.at(-1))} so far`)
        : tile("Time", S.duration(elapsed.at(-1)), "wall clock"),
      ...(isRl ? [] : lossTiles(metric, evals)),
      metric("reward", "Reward", S.number),
      !isRl
        ? null
        : score === null
        ? tile("Score", "–", "no evaluation yet: eval.every_steps")
        : tile(
            "Score",
            [S.number(score), interval > 0 && S.h("small", {}, ` ± ${S.number(interval)}`)],
            change(score, evals.first("score"), S.number),
            evals.column("score"),
          ),
      metric("staleness_mean", "Staleness", S.number, `versions, at most ${S.number(columns.last("staleness_max"))}`),
      metric("tokens_generated_per_s", "Tokens per second", S.short),
      metric("learner_idle_fraction", "Learner idle", S.percent),
      metric("generator_idle_fraction", "Servers idle", S.percent),
      metric("ess", "Effective samples", S.number),
      metric("entropy", "Entropy", S.number),
      metric("mfu", "MFU", S.percent),
      metric("tokens_per_gpu_s", "Trained per GPU", (value) => `${S.short(value)}/s`),
      metric("power_w", "Power of a GPU", (value) => `${S.number(Math.round(value))} W`),
      metric("cost_per_million_tokens", "Cost of 1 M tokens", S.number),
    ].filter(Boolean);
  }

  /** Tiles of a training on rows of files. */
  const lossTiles = (metric, evals) => {
    const measured = evals.last("loss");
    return [
      metric("loss", "Loss", S.number),
      measured === null
        ? null
        : tile("Validation loss", S.number(measured), change(measured, evals.first("loss"), S.number), evals.column("loss")),
      metric("lr", "Learning rate", S.number, ""),
      metric("grad_norm", "Norm of the gradient", S.number),
      metric("tokens_trained_per_s", "Tokens per second", S.short),
    ];
  };

  const LOSS_CURVES = [
    { title: "Loss", parts: ["loss"] },
    { title: "Validation loss", isEval: true, parts: ["loss"] },
    { title: "Norm of the gradient", parts: ["grad_norm"], floor: 0 },
    { title: "Trained", unit: "tokens/s", parts: ["tokens_trained_per_s"], floor: 0 },
  ];
  const CURVES = [
    { title: "Reward", parts: ["reward", "score/*"] },
    { title: "Evaluation", isEval: true, parts: ["score"] },
    {
      title: "Staleness",
      unit: "versions",
      parts: ["staleness_in_flight", "staleness_in_queue", "staleness_max"],
      floor: 0,
    },
    {
      title: "Idle",
      unit: "share of time",
      parts: ["learner_idle_fraction", "generator_idle_fraction"],
      format: S.percent,
      floor: 0,
      ceiling: 1,
    },
  ];

  const LABELS = {
    staleness_in_flight: "in flight",
    staleness_in_queue: "in queue",
    staleness_max: "most",
    learner_idle_fraction: "learner",
    generator_idle_fraction: "servers",
  };

  /** Lines of a curve: of one run its parts, of several runs the first part of each. */
  function lines(curve, loaded) {
    const isSingle = loaded.length === 1;
    return loaded.flatMap(({ run, columns, evals }, runIndex) => {
      const source = curve.isEval ? evals : columns;
      const names = Object.keys(source.columns).filter((name) =>
        curve.parts.some((part) => (part.endsWith("*") ? name.startsWith(part.slice(0, -1)) : name === part)),
      );
      names.sort((a, b) => curve.parts.indexOf(a) - curve.parts.indexOf(b));
      const ordered =
        curve.parts[0] && names.includes(curve.parts[0])
          ? [curve.parts[0], ...names.filter((name) => name !== curve.parts[0])]
          : names;
      return (isSingle ? ordered : ordered.slice(0, 1)).map((name, i) => ({
        label: isSingle ? LABELS[name] || name : run,
        index: isSingle ? i : runIndex,
        x: source.step,
        y: source.column(name),
        points: curve.isEval,
        interval: curve.isEval ? evals.column("score_interval") : undefined,
      }));
    });
  }

  async function loadRun(run, signal) {
    const [columns, evals, events] = await Promise.all([
      S.loadColumns(run, KEYS, { points: 1000 }, signal),
      S.loadEvaluations(run, signal),
      S.source.get(S.path(run, "events"), {}, signal),
    ]);
    return { run, columns, evals, events };
  }

  /** Adds events that are not there yet: the stream and the list may bring the same. */
  S.addEvents = (events, added) => {
    const known = new Set(events.map((event) => JSON.stringify(event)));
    events.push(...added.filter((event) => !known.has(JSON.stringify(event))));
  };

  const OF_ALL_EVENTS = ["time_s", "at", "step", "kind", "text"];

  /** What an event says, with its details. */
  const sayingOf = (event) => {
    const details = Object.entries(event).filter(([name, value]) => !OF_ALL_EVENTS.includes(name) && value !== null);
    return [event.text, ...details.map(([name, value]) => `${name} ${S.json(value)}`)].join(" · ");
  };

  /** Events as marks of a chart over the steps. */
  S.marksOf = (events) => events.map((event) => ({ x: event.step, kind: event.kind, text: sayingOf(event) }));

  /** Events as a list, the latest first. */
  S.eventList = (events) =>
    S.h(
      "ul",
      { class: "events" },
      events
        .toReversed()
        .map((event) =>
          S.h(
            "li",
            {},
            S.h("span", { class: "when" }, `step ${S.number(event.step)}`),
            S.h("span", { class: `kind ${event.kind}` }, event.kind.replaceAll("_", " ")),
            S.h("span", {}, sayingOf(event)),
          ),
        ),
    );

  S.views.push({
    name: "overview",
    title: "Overview",

    async show(root, context) {
      const loaded = await Promise.all(context.runs.map((run) => loadRun(run, context.signal)));
      const first = loaded[0];
      const isRl = (context.all.find(({ id }) => id === first.run)?.trainer ?? "rl") === "rl";
      const waiting = S.empty(
        isRl
          ? "No step is trained yet. The first one comes once the servers have loaded the model and answered a batch of groups; see `logs/` of the run's folder until then."
          : "No step is trained yet; see `logs/` of the run's folder until then.",
      );
      const tileRow = S.h("div", { class: "tiles" });
      const pipeline = new S.Pipeline();
      const charts = (isRl ? CURVES : LOSS_CURVES).map((curve) => ({
        curve,
        chart: new S.Chart({ sync: "overview", height: 190, ...curve }),
      }));
      const list = S.h("div", {});
      root.append(
        waiting,
        tileRow,
        isRl ? S.panel(context.runs.length > 1 ? `Pipeline of ${first.run}` : "Pipeline", {}, pipeline.root) : "",
        S.h(
          "div",
          { class: "charts wide" },
          charts.map(({ chart }) => S.h("section", { class: "panel" }, chart.root)),
        ),
        S.panel("Latest events", {}, list),
      );

      const draw = () => {
        waiting.hidden = first.columns.length > 0;
        if (!first.columns.length) return;
        const state = context.all.find(({ id }) => id === first.run)?.state;
        tileRow.replaceChildren(...tiles(first.columns, first.evals, state === "running", isRl));
        const record = Object.fromEntries(
          Object.keys(first.columns.columns).map((name) => [name, first.columns.last(name) ?? undefined]),
        );
        pipeline.show(record);
        for (const { curve, chart } of charts) chart.show(lines(curve, loaded), S.marksOf(first.events));
        list.replaceChildren(
          first.events.length
            ? S.eventList(first.events.slice(-LATEST_EVENTS))
            : S.empty("No event so far: no restart, no warning, no move of the throttle."),
        );
      };

      draw();
      return {
        async live(run, batch) {
          const target = loaded.find((one) => one.run === run);
          if (!target) return;
          batch.step.forEach((record) => target.columns.append(record));
          S.addEvents(target.events, batch.event);
          draw();
          if (!batch.eval.length) return;
          target.evals = await S.loadEvaluations(run, context.signal).catch(() => target.evals);
          draw();
        },
        remove: () => charts.forEach(({ chart }) => chart.remove()),
      };
    },
  });
})();
