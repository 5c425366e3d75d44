"use strict";
// The kept samples: a list with search, filters and sorting beside the chosen one.

(() => {
  const SORTS = [
    ["", "latest first"],
    ["step", "oldest first"],
    ["-reward", "highest reward"],
    ["reward", "lowest reward"],
    ["-staleness", "most stale"],
    ["-tokens", "longest"],
    ["tokens", "shortest"],
  ];
  const KINDS = [
    ["", "training"],
    ["eval", "evaluation"],
  ];
  const CHOSEN = [
    ["", "any"],
    ["best", "best"],
    ["worst", "worst"],
    ["longest", "longest"],
    ["random", "random"],
  ];

  const row = (sample) => [
    S.h(
      "span",
      { class: "row-top" },
      S.h("span", { class: "when" }, `${sample.kind === "eval" ? "version" : "step"} ${S.number(sample.number)}`),
      S.h("span", { class: "kind" }, sample.chosen),
      S.h("span", { class: "spacer" }),
      S.h(
        "span",
        { class: "muted" },
        `${S.number(sample.tokens)} tokens${sample.staleness ? ` · stale ${S.number(sample.staleness)}` : ""}`,
      ),
      S.h("b", { class: "reward" }, S.number(sample.reward)),
    ),
    S.h("span", { class: "excerpt" }, sample.excerpt),
  ];

  async function detail(context) {
    const { argument, run } = context;
    if (!argument)
      return S.empty(
        "Choose a sample: it is shown turn by turn, its tokens coloured by version, log-prob, ratio, advantage or mask.",
      );
    const sample = await context.get(S.path(run, "samples", argument));
    return S.h(
      "article",
      { class: "panel" },
      S.h(
        "h2",
        {},
        `${sample.kind === "eval" ? "Evaluation of version" : "Step"} ${S.number(sample.number)}`,
        sample.chosen && S.h("span", { class: "muted" }, ` · ${sample.chosen}`),
      ),
      S.facts(S.sampleFacts(sample)),
      S.h(
        "p",
        { class: "links" },
        sample.group_id && S.h("a", { href: S.link("groups", sample.group_id) }, `Group ${sample.group_id}`),
        sample.task !== null &&
          sample.task !== undefined &&
          S.h("a", { href: S.link("prompts", String(sample.task), { kind: sample.kind }) }, "This task over the steps"),
      ),
      S.transcript(sample.stretches),
    );
  }

  S.views.push({
    name: "samples",
    title: "Samples",

    async show(root, context) {
      const problem = S.h("p", { class: "problem" });
      root.append(problem);
      const remark = await S.browse(root, context, {
        view: "samples",
        filters: ["kind", "chosen", "query", "sort", "task", "from", "to"],
        search: "Search in prompts and answers",
        controls: (value, choose) => [
          S.select("Sort", SORTS, value("sort"), choose("sort")),
          S.select("Kind", KINDS, value("kind"), choose("kind")),
          S.select("Chosen as", CHOSEN, value("chosen"), choose("chosen")),
        ],
        render: row,
        detail: () => detail(context),
        none: "No sample is kept yet: the learner keeps a few answers of each step and each evaluation.",
        onPage: ({ note }) => (problem.textContent = note ? `Tokens are shown as their ids: ${note}` : ""),
      });
      let steps = 0;
      return {
        live(run, batch) {
          if (run !== context.run || !batch.step.length) return;
          steps += batch.step.length;
          remark(`, ${S.number(steps)} steps since`);
        },
      };
    },
  });
})();
