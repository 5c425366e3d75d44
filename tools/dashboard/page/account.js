"use strict";
// The ledger's account: generated = trained + each reason of loss, in tokens and groups, and the length bias.

(() => {
  const KINDS = ["trained", "ready", "leased", "in_flight", "evaluation"];
  const NAMES = {
    trained: "trained",
    ready: "ready",
    leased: "leased",
    in_flight: "in flight",
    evaluation: "evaluation",
  };

  const amount = (row, kind) => (KINDS.includes(kind) ? row[kind] : row.lost?.[kind]) ?? 0;

  /** All kinds that tokens went to, the reasons of loss by size. */
  function kindsOf(rows) {
    const lost = {};
    for (const row of rows)
      for (const [reason, tokens] of Object.entries(row.lost || {})) lost[reason] = (lost[reason] || 0) + tokens;
    const reasons = Object.keys(lost).sort((a, b) => lost[b] - lost[a]);
    return [...KINDS.filter((kind) => rows.some((row) => row[kind])), ...reasons];
  }

  const classOf = (kind, kinds) =>
    KINDS.includes(kind)
      ? `part-${kind}`
      : `part-lost-${(kinds.filter((k) => !KINDS.includes(k)).indexOf(kind) % 5) + 1}`;

  function bar(row, kinds, scale) {
    const whole = Math.max(row.generated || 0, 1);
    const text = kinds.map((kind) => `${NAMES[kind] || kind} ${S.percent(amount(row, kind) / whole)}`).join(", ");
    return S.h(
      "div",
      { class: "stack", role: "img", "aria-label": text, title: text, css: { width: `${Math.max(2, 100 * scale)}%` } },
      kinds.map(
        (kind) =>
          amount(row, kind) > 0 &&
          S.h("span", { class: classOf(kind, kinds), css: { "flex-grow": amount(row, kind) } }),
      ),
    );
  }

  const closing = (row) =>
    row.closes
      ? S.h("span", { class: "good" }, "closes")
      : S.h("span", { class: "bad" }, `differs by ${S.number(row.difference)} tokens`);

  function names(row) {
    const list = row.groups || [];
    if (!list.length) return null;
    return S.h(
      "details",
      { class: "culprits" },
      S.h("summary", {}, `${S.number(list.length)} groups`),
      S.h(
        "p",
        {},
        list.map((id) => [S.h("a", { href: S.link("groups", id) }, id), " "]),
      ),
    );
  }

  function sumBy(rows, key) {
    const sums = new Map();
    for (const row of rows) {
      const sum = sums.get(row[key]) || {
        name: row[key],
        generated: 0,
        lost: {},
        closes: true,
        difference: 0,
        groups: [],
      };
      for (const name of ["generated", ...KINDS]) sum[name] = (sum[name] || 0) + (row[name] || 0);
      for (const [reason, tokens] of Object.entries(row.lost || {}))
        sum.lost[reason] = (sum.lost[reason] || 0) + tokens;
      sum.closes &&= row.closes;
      sum.difference += row.difference || 0;
      sum.groups.push(...(row.groups || []));
      sums.set(row[key], sum);
    }
    return [...sums.values()];
  }

  function table(title, rows, kinds) {
    const most = Math.max(1, ...rows.map(({ generated }) => generated || 0));
    const columns = [
      { title: "" },
      { title: "Where the tokens went" },
      { title: "Generated", number: true },
      ...kinds.map((kind) => ({ title: NAMES[kind] || kind, number: true })),
      { title: "Sum" },
    ];
    return S.table(
      title,
      columns,
      rows.map((row) => ({
        className: row.closes ? "" : "broken",
        cells: [
          row.name,
          S.h("div", { class: "stack-cell" }, bar(row, kinds, (row.generated || 0) / most)),
          S.number(row.generated),
          ...kinds.map((kind) => S.number(amount(row, kind))),
          S.h("span", {}, closing(row), names(row)),
        ],
      })),
    );
  }

  function equation(total, kinds) {
    const lost = kinds.filter((kind) => !KINDS.includes(kind));
    const terms = [...KINDS.filter((kind) => kinds.includes(kind)), ...lost]
      .map((kind) => [
        S.h(
          "span",
          { class: "term" },
          S.h("span", { class: `key ${classOf(kind, kinds)}` }),
          S.h("b", {}, S.number(amount(total, kind))),
          ` ${NAMES[kind] || kind}`,
        ),
        " + ",
      ])
      .flat()
      .slice(0, -1);
    return S.h(
      "p",
      { class: "equation" },
      S.h("span", { class: "term" }, S.h("b", {}, S.number(total.generated)), " tokens generated"),
      " = ",
      terms,
      " ",
      closing(total),
    );
  }

  const STATES = ["in_flight", "ready", "leased", "trained", "filtered", "expired", "reissued"];

  /** The number of issued groups as a sum over their states, by the latest record. */
  function groupsLine(columns) {
    const count = (state) => columns.last(`buffer/${state}`);
    if (count("issued") === null) return S.empty("No step is trained yet.");
    const term = (state) =>
      S.h("span", { class: "term" }, S.h("b", {}, S.number(count(state))), ` ${state.replaceAll("_", " ")}`);
    return S.h(
      "p",
      { class: "equation" },
      term("issued"),
      STATES.flatMap((state, i) => [i ? " + " : " = ", term(state)]),
    );
  }

  /** Distances of the lengths of trained and dropped answers from all delivered ones. */
  function bias(columns) {
    const prefix = "buffer/length_bias/";
    const rows = Object.keys(columns.columns)
      .filter((name) => name.startsWith(prefix))
      .map((name) => [name.slice(prefix.length), columns.last(name)])
      .filter(([, value]) => value !== null);
    if (!rows.length) return S.empty("No answer was dropped, or lengths are not known yet: there is no length bias.");
    return S.h(
      "div",
      {},
      S.h(
        "p",
        { class: "muted" },
        "Distance of the lengths of these answers from those of all delivered ones (Kolmogorov–Smirnov). 0: alike, 1: no overlap. What is far from 0 changes what is learned.",
      ),
      S.table(
        "Length bias",
        [{ title: "Answers" }, { title: "" }, { title: "Distance", number: true }],
        rows.map(([reason, value]) => ({
          cells: [
            reason,
            S.h(
              "div",
              { class: "stack-cell" },
              S.h(
                "div",
                { class: "stack plain", css: { width: `${Math.max(1, 100 * value)}%` } },
                S.h("span", { class: "part-ready", css: { "flex-grow": 1 } }),
              ),
            ),
            S.number(value),
          ],
        })),
      ),
    );
  }

  function tokenPanels({ rows, total }) {
    const kinds = kindsOf([...rows, total]);
    const broken = rows.filter(({ closes, groups }) => !closes || groups.length > 0).length;
    const again = (total.uses || 0) - (total.trained || 0);
    return [
      S.panel(
        "Tokens",
        {},
        equation(total, kinds),
        bar(total, kinds, 1),
        again > 0 && S.h("p", { class: "muted" }, `${S.number(again)} of the trained tokens were used once more.`),
        broken > 0 &&
          S.h(
            "p",
            { class: "bad", role: "alert" },
            S.prose(
              `${S.number(broken)} of ${S.number(rows.length)} rows do not close: their groups are named below; \`slipstream ledger account\` explains them.`,
            ),
          ),
      ),
      S.panel("By env", {}, table("Tokens by env", sumBy(rows, "env"), kinds)),
      S.panel("By server", {}, table("Tokens by server", sumBy(rows, "server"), kinds)),
    ];
  }

  S.views.push({
    name: "account",
    title: "Account",

    async show(root, context) {
      const tokens = S.h("div", { class: "view" }, S.panel("Tokens", {}, S.empty("Reading the ledger …")));
      root.append(tokens);
      const reading = context
        .get(S.path(context.run, "account"))
        .then(tokenPanels, (error) => [S.panel("Tokens", {}, S.failure(error))]);
      const columns = await S.loadColumns(context.run, ["buffer/*"], { points: 10 }, context.signal);
      root.append(
        S.panel("Groups, at the latest step", {}, groupsLine(columns)),
        S.panel("Length bias", {}, bias(columns)),
      );
      tokens.replaceChildren(...(await reading));
      return null;
    },
  });
})();
