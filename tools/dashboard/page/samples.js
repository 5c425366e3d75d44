"use strict";
// The kept samples: a list with search, filters and sorting beside the chosen one.

(() => {
  const ROW_PX = 54;

  const SORTS = [
    ["-step", "latest first"],
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

  /** A list on the left, what was chosen on the right; on a narrow screen one of both. */
  S.split = (isDetail, list, detail, back) =>
    S.h(
      "div",
      { class: `split${isDetail ? " has-detail" : ""}` },
      S.h("div", { class: "split-list" }, list),
      S.h("div", { class: "split-detail" }, isDetail && S.h("a", { class: "back", href: back }, "← list"), detail),
    );

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
      const { parameters, run } = context;
      const choice = (name, fallback = "") => parameters.get(name) || fallback;
      const count = S.h("span", { class: "muted count", role: "status" });
      const nothing = S.empty("");
      const problem = S.h("p", { class: "problem" });
      const list = new S.List({
        label: "Samples",
        rowHeight: ROW_PX,
        className: "samples",
        render: row,
        open: (sample) => context.go("samples", sample.id, filters()),
        load: async (offset, limit) => {
          const { total, samples, note } = await context.get(S.path(run, "samples"), {
            ...filters(),
            sort: choice("sort", "-step"),
            offset,
            limit,
          });
          problem.textContent = note ? `Tokens are shown as their ids: ${note}` : "";
          return { total, items: samples };
        },
      });
      const filters = () =>
        Object.fromEntries(
          ["kind", "chosen", "query", "sort", "task", "from", "to"]
            .filter((name) => parameters.get(name))
            .map((name) => [name, parameters.get(name)]),
        );
      const reload = async () => {
        try {
          const total = await list.reload();
          count.textContent = `${S.number(total)} samples`;
          nothing.hidden = total > 0;
          const text = Object.keys(filters()).length
            ? "No sample matches: widen the search or the filters."
            : "No samples are kept yet: the learner keeps a few of each step and evaluation, unless `learner.samples` is off.";
          nothing.replaceChildren(...S.prose(text));
        } catch (error) {
          if (error.name === "AbortError") return;
          nothing.hidden = false;
          nothing.textContent = error.message;
        }
      };
      const choose = (name) => (value) => {
        context.keep({ [name]: value });
        reload();
      };
      const bar = S.h(
        "div",
        { class: "bar" },
        S.search("Search in prompts and answers", choice("query"), choose("query")),
        S.select("Sort", SORTS, choice("sort", "-step"), choose("sort")),
        S.select("Kind", KINDS, choice("kind"), choose("kind")),
        S.select("Chosen as", CHOSEN, choice("chosen"), choose("chosen")),
        count,
      );
      const [shown] = await Promise.all([detail(context).catch((error) => S.empty(error.message)), reload()]);
      root.append(
        bar,
        S.split(Boolean(context.argument), [problem, nothing, list.root], shown, S.link("samples", null, filters())),
      );
      list.renew();
      const index = list.items.findIndex((sample) => sample?.id === context.argument);
      if (index >= 0) list.reveal(index);
      let fresh = 0;
      return {
        live(from, batch) {
          if (from !== run || !(batch.step.length + batch.eval.length)) return;
          fresh += batch.step.length;
          count.textContent = `${S.number(list.count)} samples, ${S.number(fresh)} steps since`;
        },
      };
    },
  });
})();
