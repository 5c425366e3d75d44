"use strict";
// One task's answers side by side over the steps.

(() => {
  const EXCERPT = 240; // characters that the list of a task's samples has of each

  const SHORT = 60; // characters of answers that stand in narrow columns

  const nameOf = ({ kind, number }) => `${kind === "eval" ? "version" : "step"} ${S.number(number)}`;

  /** An answer; where only its beginning is known, a button loads the rest. */
  function card(sample, context) {
    const text = S.h("p", { class: "card-text" }, sample.excerpt);
    const more = S.h(
      "button",
      {
        type: "button",
        class: "quiet",
        onclick: async () => {
          try {
            const { stretches } = await context.get(S.path(context.run, "samples", sample.id));
            text.textContent = stretches
              .slice(1)
              .map((stretch) => stretch.text)
              .join("");
            more.remove();
          } catch (error) {
            more.textContent = error.message;
          }
        },
      },
      "whole answer",
    );
    const stale = sample.staleness ? ` · stale ${S.number(sample.staleness)}` : "";
    return S.h(
      "article",
      { class: "card", "aria-label": nameOf(sample) },
      S.h(
        "header",
        {},
        S.h("span", { class: "when" }, nameOf(sample)),
        S.h("span", { class: "spacer" }),
        S.h("b", { class: "reward" }, S.number(sample.reward)),
      ),
      text,
      sample.excerpt.length >= EXCERPT && more,
      S.h(
        "footer",
        {},
        S.h("span", { class: "muted" }, `${S.number(sample.tokens)} tokens${stale}`),
        S.h("a", { href: S.link("samples", sample.id, { kind: sample.kind === "eval" ? "eval" : "" }) }, "tokens"),
      ),
    );
  }

  const row = (task) => [
    S.h(
      "span",
      { class: "row-top" },
      S.h("span", { class: "when" }, `task ${task.task}`),
      S.h("span", { class: "kind" }, task.kind === "eval" ? "evaluation" : "training"),
      S.h("span", { class: "muted" }, task.env),
      S.h("span", { class: "spacer" }),
      S.h("span", { class: "muted" }, `${S.number(task.samples)} answers`),
    ),
    S.h("span", { class: "excerpt" }, task.excerpt),
  ];

  const curve = (samples) => ({
    label: "reward",
    index: 0,
    points: "loose",
    x: samples.map(({ number }) => number),
    y: samples.map(({ reward }) => reward),
  });

  S.views.push({
    name: "prompts",
    title: "Prompts",

    async show(root, context) {
      const { argument, run, parameters } = context;
      const kind = parameters.get("kind") || "step";
      const [tasks, chosen] = await Promise.all([
        context.get(S.path(run, "prompts"), { limit: 500 }),
        argument === null
          ? null
          : context.get(S.path(run, "prompts", argument), { kind }).catch((error) => ({ failure: S.failure(error) })),
      ]);
      if (!tasks.length && !chosen?.total) {
        root.append(
          S.empty(
            "No task was sampled at several steps yet, or the samples are of an older release, which kept no task. Evaluations ask the same tasks again and again: `eval.every_steps` sets how often.",
          ),
        );
        return null;
      }
      const list = new S.List({
        label: "Tasks",
        rowHeight: 54,
        className: "browsed",
        render: row,
        open: (task) => context.go("prompts", String(task.task), { kind: task.kind }),
      });
      const fits = (task, text) =>
        `${task.task} ${task.env} ${task.excerpt}`.toLowerCase().includes(text.toLowerCase());
      const fill = (text) => list.setItems(tasks.filter((task) => fits(task, text)));
      const chart = new S.Chart({
        title: "Reward of the kept answers",
        unit: kind === "eval" ? "over versions" : "over steps",
        height: 120,
      });
      let detail = S.empty("Choose a task: its answers stand side by side, from the first step to the last.");
      let samples = [];
      if (chosen?.failure) detail = chosen.failure;
      else if (chosen) {
        samples = [...chosen.samples].sort((a, b) => a.number - b.number);
        const isShort = samples.every(({ excerpt }) => excerpt.length <= SHORT);
        const prompt = tasks.find((task) => task.kind === kind && String(task.task) === argument)?.excerpt;
        detail = S.h(
          "div",
          {},
          S.h(
            "section",
            { class: "panel" },
            S.h("h2", {}, `Task ${argument}`, S.h("span", { class: "muted" }, ` · ${samples[0]?.env ?? ""}`)),
            prompt && S.h("p", { class: "prompt-text" }, prompt),
            chart.root,
          ),
          S.h(
            "div",
            {
              class: `cards${isShort ? " short" : ""}`,
              tabindex: "0",
              role: "region",
              "aria-label": "Answers over the steps",
            },
            samples.map((sample) => card(sample, context)),
          ),
        );
      }
      root.append(
        S.h("div", { class: "bar" }, S.search("Find a task", "", fill)),
        S.split(argument !== null, list.root, detail, S.link("prompts")),
      );
      fill("");
      const index = tasks.findIndex((task) => task.kind === kind && String(task.task) === argument);
      if (index >= 0) list.reveal(index);
      if (samples.length) chart.show([curve(samples)]);
      return { remove: () => chart.remove() };
    },
  });
})();
