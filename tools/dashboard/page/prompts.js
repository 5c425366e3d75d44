"use strict";
// One task's answers side by side over the steps.

(() => {
  const card = (sample) =>
    S.h(
      "article",
      { class: "card", tabindex: "0", "aria-label": `${sample.kind === "eval" ? "version" : "step"} ${sample.number}` },
      S.h(
        "header",
        {},
        S.h("span", { class: "when" }, `${sample.kind === "eval" ? "version" : "step"} ${S.number(sample.number)}`),
        S.h("span", { class: "spacer" }),
        S.h("b", { class: "reward" }, S.number(sample.reward)),
      ),
      S.h("p", { class: "card-text" }, sample.text ?? sample.excerpt),
      S.h(
        "footer",
        {},
        S.h(
          "span",
          { class: "muted" },
          `${S.number(sample.tokens)} tokens${sample.staleness ? ` · stale ${S.number(sample.staleness)}` : ""}`,
        ),
        S.h("a", { href: S.link("samples", sample.id) }, "tokens"),
      ),
    );

  const row = (task) => [
    S.h(
      "span",
      { class: "row-top" },
      S.h("span", { class: "when" }, `task ${task.task}`),
      S.h("span", { class: "muted" }, task.env),
      S.h("span", { class: "spacer" }),
      S.h("span", { class: "muted" }, `${S.number(task.samples)} answers`),
    ),
    S.h("span", { class: "excerpt" }, task.prompt ?? ""),
  ];

  function rewards(samples) {
    const chart = new S.Chart({ title: "Reward of the kept answers", height: 120 });
    const trained = samples.filter(({ kind }) => kind !== "eval");
    const shown = trained.length ? trained : samples;
    return {
      chart,
      draw: () =>
        chart.show([
          {
            label: "reward",
            index: 0,
            points: "loose",
            x: shown.map(({ number }) => number),
            y: shown.map(({ reward }) => reward),
          },
        ]),
    };
  }

  S.views.push({
    name: "prompts",
    title: "Prompts",

    async show(root, context) {
      const { argument, run } = context;
      const [found, chosen] = await Promise.all([
        context.get(S.path(run, "prompts"), { limit: 2000 }),
        argument === null
          ? null
          : context.get(S.path(run, "prompts", argument)).catch((error) => ({ problem: error.message })),
      ]);
      const tasks = Array.isArray(found) ? found : found.prompts;
      if (!tasks.length) {
        root.append(
          S.empty(
            "No task was sampled at several steps yet. Evaluations ask the same tasks again and again: `eval.every_steps` sets how often.",
          ),
        );
        return null;
      }
      const list = new S.List({
        label: "Tasks",
        rowHeight: 54,
        className: "samples",
        render: row,
        open: (task) => context.go("prompts", String(task.task)),
      });
      const fill = (text) =>
        list.setItems(
          tasks.filter((task) =>
            `${task.task} ${task.env} ${task.prompt ?? ""}`.toLowerCase().includes(text.toLowerCase()),
          ),
        );
      let detail = S.empty("Choose a task: its answers stand side by side, from the first step to the last.");
      let curve = null;
      if (chosen?.problem) detail = S.empty(chosen.problem);
      else if (chosen) {
        const samples = [...chosen.samples].sort((a, b) => a.number - b.number);
        curve = rewards(samples);
        detail = S.h(
          "div",
          {},
          S.h(
            "section",
            { class: "panel" },
            S.h("h2", {}, `Task ${argument}`, S.h("span", { class: "muted" }, ` · ${chosen.env ?? ""}`)),
            chosen.prompt && S.h("p", { class: "prompt-text" }, chosen.prompt),
            curve.chart.root,
          ),
          S.h(
            "div",
            { class: "cards", tabindex: "0", role: "region", "aria-label": "Answers over the steps" },
            samples.map(card),
          ),
        );
      }
      root.append(
        S.h("div", { class: "bar" }, S.search("Find a task", "", fill)),
        S.split(argument !== null, list.root, detail, S.link("prompts")),
      );
      fill("");
      const index = tasks.findIndex(({ task }) => String(task) === argument);
      if (index >= 0) list.reveal(index);
      curve?.draw();
      return { remove: () => curve?.chart.remove() };
    },
  });
})();
