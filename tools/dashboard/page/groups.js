"use strict";
// Groups of the ledger: a list by state, and one group's life with its answers.

(() => {
  const STATES = ["issued", "ready", "leased", "trained", "durable", "filtered", "expired", "reissued"];
  const SORTS = [
    ["", "latest first"],
    ["id", "oldest first"],
    ["-tokens", "longest"],
    ["tokens", "shortest"],
    ["-version", "newest version"],
  ];

  const row = (group) => [
    S.h(
      "span",
      { class: "row-top" },
      S.h("span", { class: "when" }, group.id),
      S.h("span", { class: `kind state-${group.state}` }, group.state),
      S.h("span", { class: "muted" }, group.detail),
      S.h("span", { class: "spacer" }),
      S.h("b", { class: "reward" }, S.number(group.reward ?? null)),
    ),
    S.h(
      "span",
      { class: "excerpt muted" },
      [
        `server ${group.server || "–"}`,
        `version ${S.number(group.version)}`,
        group.answers > 0 && `${S.number(group.answers)} answers, ${S.number(group.tokens)} tokens`,
        group.steps?.length > 0 && `step ${group.steps.map(S.number).join(", ")}`,
      ]
        .filter(Boolean)
        .join(" · "),
    ),
  ];

  /** The states as a strip to scale, and the same as a table. */
  function life(history) {
    if (!history?.length) return S.empty("The ledger keeps no history of it.");
    const start = history[0].time_s;
    const end = history.at(-1).time_s;
    const whole = end - start || 1;
    const parts = history.slice(0, -1).map((entry, i) => ({ ...entry, for_s: history[i + 1].time_s - entry.time_s }));
    const strip = S.h(
      "div",
      {
        class: "strip",
        role: "img",
        "aria-label": parts.map(({ state, for_s }) => `${state} for ${S.duration(for_s)}`).join(", "),
      },
      parts.map(({ state, for_s }) =>
        S.h(
          "span",
          {
            class: `state-${state}`,
            title: `${state}: ${S.duration(for_s)}`,
            css: { "flex-grow": Math.max(for_s / whole, 0.02) },
          },
          for_s / whole > 0.12 && `${state} ${S.duration(for_s)}`,
        ),
      ),
    );
    return S.h(
      "div",
      {},
      parts.length > 0 && strip,
      S.table(
        "States",
        [{ title: "State" }, { title: "After", number: true }, { title: "At" }, { title: "" }],
        history.map(({ state, time_s, detail }) => ({
          cells: [
            S.h("span", { class: `kind state-${state}` }, state),
            S.duration(time_s - start),
            S.when(time_s),
            detail ?? "",
          ],
        })),
      ),
    );
  }

  const policyText = (stretches) =>
    stretches
      .filter(({ role }) => role === "action")
      .map(({ text }) => text)
      .join(" ");

  function answers({ samples, note }) {
    const list = samples;
    if (!list.length) return S.empty(`Its answers are not shown: ${note || "the ledger has none"}.`);
    const mean = list.reduce((sum, { reward }) => sum + (reward ?? 0), 0) / list.length;
    return list.map((answer) => {
      const body = S.h("div", {});
      const details = S.h(
        "details",
        {
          class: "answer",
          ontoggle: () => {
            if (details.open && !body.hasChildNodes()) body.append(S.transcript(answer.stretches));
          },
        },
        S.h(
          "summary",
          {},
          S.h("span", { class: "when" }, `answer ${answer.answer}`),
          S.h("b", { class: "reward" }, S.number(answer.reward)),
          S.h(
            "span",
            { class: "muted" },
            `${answer.reward > mean ? "above" : answer.reward < mean ? "below" : "at"} the mean · ${S.number(answer.tokens)} tokens · ${answer.finish_reason ?? ""}`,
          ),
          S.h("span", { class: "gist" }, policyText(answer.stretches).slice(0, 160)),
        ),
        body,
      );
      return details;
    });
  }

  async function detail(context) {
    const { argument, run } = context;
    if (argument === null)
      return S.empty("Choose a group: its states with their times, and its answers with their rewards.");
    const group = await context.get(S.path(run, "groups", argument));
    return S.h(
      "div",
      {},
      S.h(
        "section",
        { class: "panel" },
        S.h("h2", {}, `Group ${argument}`, S.h("span", { class: `kind state-${group.state}` }, group.state)),
        S.facts(Object.entries(group.facts)),
        life(group.history),
      ),
      S.h("section", { class: "panel" }, S.h("h2", {}, "Answers"), answers(group)),
    );
  }

  S.views.push({
    name: "groups",
    title: "Groups",

    async show(root, context) {
      let states = null;
      await S.browse(root, context, {
        view: "groups",
        filters: ["state", "query", "sort"],
        search: "Find by id or server",
        controls: (value, choose) => [
          (states = S.select(
            "State",
            [["", "all"], ...STATES.map((name) => [name, name])],
            value("state"),
            choose("state"),
          )),
          S.select("Sort", SORTS, value("sort"), choose("sort")),
        ],
        render: row,
        detail: () => detail(context),
        none: "The ledger holds no group yet.",
        onPage: ({ counts }) => {
          for (const option of states.querySelectorAll("option"))
            if (option.value in counts) option.textContent = `${option.value} (${S.number(counts[option.value])})`;
        },
      });
      return null;
    },
  });
})();
