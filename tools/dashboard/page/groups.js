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
      const { parameters, run, argument } = context;
      const filters = () =>
        Object.fromEntries(
          ["state", "query", "sort"].filter((name) => parameters.get(name)).map((name) => [name, parameters.get(name)]),
        );
      const count = S.h("span", { class: "muted count", role: "status" });
      const nothing = S.empty("");
      const list = new S.List({
        label: "Groups",
        rowHeight: 54,
        className: "samples",
        render: row,
        open: (group) => context.go("groups", group.id, filters()),
        load: async (offset, limit) => {
          const { total, counts, groups } = await context.get(S.path(run, "groups"), { ...filters(), offset, limit });
          for (const option of states.querySelectorAll("option[value]:not([value=''])"))
            option.textContent = `${option.value} (${S.number(counts[option.value] ?? 0)})`;
          return { total, items: groups };
        },
      });
      const reload = async () => {
        try {
          const total = await list.reload();
          count.textContent = `${S.number(total)} groups`;
          nothing.hidden = total > 0;
          nothing.textContent = Object.keys(filters()).length
            ? "No group matches: widen the search or the state."
            : "The ledger holds no group yet.";
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
      const states = S.select(
        "State",
        [["", "all"], ...STATES.map((state) => [state, state])],
        parameters.get("state") || "",
        choose("state"),
      );
      const bar = S.h(
        "div",
        { class: "bar" },
        S.search("Find by id or server", parameters.get("query") || "", choose("query")),
        states,
        S.select("Sort", SORTS, parameters.get("sort") || "", choose("sort")),
        count,
      );
      const [shown] = await Promise.all([detail(context).catch((error) => S.empty(error.message)), reload()]);
      root.append(bar, S.split(argument !== null, [nothing, list.root], shown, S.link("groups", null, filters())));
      list.renew();
      const index = list.items.findIndex((group) => group?.id === argument);
      if (index >= 0) list.reveal(index);
      return null;
    },
  });
})();
