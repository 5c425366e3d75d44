"use strict";
// Runs compared (settings, versions, curves), and one run's configuration, versions, machine and warnings.

(() => {
  const CURVES = [
    { title: "Reward", key: "reward" },
    { title: "Score", key: "score", isEval: true },
    { title: "Entropy", key: "entropy", unit: "nats" },
    { title: "Effective samples", key: "ess" },
    { title: "Staleness", key: "staleness_mean", unit: "versions", floor: 0 },
    { title: "Gradient norm", key: "grad_norm" },
    { title: "Tokens per second", key: "tokens_generated_per_s", floor: 0, format: S.short },
    { title: "Learner idle", key: "learner_idle_fraction", format: S.percent, floor: 0 },
  ];

  /** `{a: {b: 1}}` as `a.b` -> 1; lists stay whole. */
  function flatten(value, prefix = "", found = {}) {
    for (const [key, inner] of Object.entries(value || {})) {
      const name = prefix ? `${prefix}.${key}` : key;
      if (inner && typeof inner === "object" && !Array.isArray(inner) && Object.keys(inner).length)
        flatten(inner, name, found);
      else found[name] = inner;
    }
    return found;
  }

  const starts = (info) => info.run || [];
  const latestStart = (info) => starts(info).at(-1) || {};
  const code = (text) => S.h("code", {}, text);

  /** Keys that differ between any two runs: they say nothing about what the runs do. */
  const OF_EACH_RUN = /^run\.(name|dir|port_base)$|(^|[._])port$|\.(bind|endpoint)$/;

  const differences = (title, keys, runs) =>
    S.table(
      title,
      [{ title: "" }, ...runs.map((run, i) => ({ title: S.h("span", {}, S.swatch(i), " ", run) }))],
      keys.map(({ key, values }) => ({ cells: [code(key), ...runs.map((run) => code(S.json(values[run])))] })),
    );

  function difference(title, keys, runs, what) {
    const telling = keys.filter(({ key }) => !OF_EACH_RUN.test(key));
    const others = keys.filter(({ key }) => OF_EACH_RUN.test(key));
    return S.panel(
      title,
      {},
      telling.length ? differences(title, telling, runs) : S.empty(`No ${what} differs.`),
      others.length > 0 &&
        S.h(
          "details",
          {},
          S.h("summary", { class: "muted" }, `names and ports: ${S.number(others.length)}`),
          differences("Names and ports", others, runs),
        ),
    );
  }

  function versionDifferences(runs, infos) {
    const flat = infos.map((info) => {
      const { python, packages, git, machine } = latestStart(info);
      return flatten({ python, packages, git, machine });
    });
    const keys = [...new Set(flat.flatMap((one) => Object.keys(one)))];
    return keys
      .filter((key) => new Set(flat.map((one) => S.json(one[key]))).size > 1)
      .map((key) => ({ key, values: Object.fromEntries(runs.map((run, i) => [run, flat[i][key]])) }));
  }

  S.views.push({
    name: "compare",
    title: "Compare",

    async show(root, context) {
      const { runs, signal } = context;
      if (runs.length < 2) {
        root.append(
          S.empty(
            context.all.length > 1
              ? "Choose a second run above (r) to see both side by side: what differs in their settings and versions, and their curves."
              : "There is one run only. `slipstream dashboard RUN RUN …` shows several side by side.",
          ),
        );
        return null;
      }
      const charts = CURVES.map((curve) => ({
        ...curve,
        chart: new S.Chart({ height: 170, sync: "compare", ...curve }),
      }));
      const [compared, infos, loaded] = await Promise.all([
        context.get("compare", { runs: runs.join(",") }),
        Promise.all(runs.map((run) => context.get(S.path(run)))),
        Promise.all(
          runs.map(async (run) => ({
            run,
            columns: await S.loadColumns(
              run,
              CURVES.filter(({ isEval }) => !isEval).map(({ key }) => key),
              { points: 1000 },
              signal,
            ),
            evals: await S.loadEvaluations(run, signal),
          })),
        ),
      ]);
      root.append(
        S.h(
          "div",
          { class: "charts small" },
          charts.map(({ chart }) => S.h("section", { class: "panel" }, chart.root)),
        ),
        difference("Settings that differ", compared.keys, runs, "setting"),
        difference("Versions and machines that differ", versionDifferences(runs, infos), runs, "version"),
      );
      const draw = () => {
        for (const { chart, key, isEval } of charts)
          chart.show(
            loaded
              .map(({ run, columns, evals }, index) => {
                const source = isEval ? evals : columns;
                return {
                  label: run,
                  index,
                  x: source.step,
                  y: source.column(key),
                  points: isEval,
                  interval: isEval ? source.column("score_interval") : undefined,
                };
              })
              .filter(({ y }) => y.length),
          );
      };
      draw();
      return {
        async live(run, batch) {
          const target = loaded.find((one) => one.run === run);
          batch.step.forEach((record) => target.columns.append(record));
          if (batch.eval.length) target.evals = await S.loadEvaluations(run, signal).catch(() => target.evals);
          draw();
        },
        remove: () => charts.forEach(({ chart }) => chart.remove()),
      };
    },
  });

  const pairs = (object) =>
    S.h(
      "dl",
      { class: "facts long" },
      Object.entries(flatten(object)).map(([key, value]) =>
        S.h("div", {}, S.h("dt", {}, key), S.h("dd", {}, S.json(value))),
      ),
    );

  function settingsTable(settings, changed, text) {
    const wanted = text.toLowerCase();
    const fits = Object.entries(settings).filter(([key, value]) =>
      `${key} ${S.json(value)}`.toLowerCase().includes(wanted),
    );
    if (!fits.length) return S.empty("No setting matches.");
    return S.table(
      "Settings",
      [{ title: "Key" }, { title: "Value" }],
      fits.map(([key, value]) => ({
        className: key in changed ? "changed" : "",
        cells: [code(key), code(S.json(value))],
      })),
    );
  }

  function startPanel(entry, index, count) {
    const { started_at: began, command, folder, python, packages, git, machine } = entry;
    const commit = git ? `${git.commit}${git.changed ? ", with changes" : ""}` : "–";
    const head = [
      ["command", command],
      ["folder", folder],
      ["started", S.when(began)],
      ["commit", commit],
    ].filter(([, value]) => value && value !== "–");
    return S.h(
      "details",
      { open: index === count - 1 },
      S.h("summary", {}, S.h("h3", {}, count > 1 ? `Start ${index + 1} of ${count}` : "Start")),
      S.facts(head),
      S.h("h4", {}, "Machine"),
      pairs(machine),
      S.h("h4", {}, "Versions"),
      pairs({ python, ...packages }),
    );
  }

  S.views.push({
    name: "run",
    title: "Run",

    async show(root, context) {
      const info = await context.get(S.path(context.run));
      const known = context.all.find(({ id }) => id === context.run);
      const changed = info.changed || {};
      const settings = flatten(info.config);
      const entries = starts(info);
      const warnings = info.warnings || [];
      const whole = S.h("div", {}, settingsTable(settings, changed, ""));
      root.append(
        S.panel(
          info.name,
          {},
          S.facts([
            ["state", known.state],
            ["folder", known.folder],
            ["step", `${S.number(known.step)} of ${S.number(known.steps)}`],
            ["started", S.when(known.started_at)],
            ["last written", S.when(known.updated_at)],
          ]),
        ),
        S.panel(
          "Warnings",
          {},
          warnings.length
            ? S.h(
                "ul",
                { class: "events" },
                warnings.map((warning) =>
                  S.h(
                    "li",
                    {},
                    S.h("span", { class: "when" }, String(warning.time).slice(0, 19).replace("T", " ")),
                    S.h("span", { class: `kind ${warning.level}` }, warning.process),
                    S.h("span", {}, warning.text),
                  ),
                ),
              )
            : S.empty("None."),
        ),
        S.panel(
          "Changed settings",
          {},
          Object.keys(changed).length
            ? settingsTable(flatten(changed), {}, "")
            : S.empty("All settings have their defaults."),
        ),
        S.panel(
          "Starts, versions and machine",
          {},
          entries.length
            ? entries.map((entry, i) => startPanel(entry, i, entries.length))
            : S.empty("`run.json` is not there: the run was started by an older release."),
        ),
        ...(info.summary ? [S.panel("Summary", {}, pairs(info.summary))] : []),
        S.panel(
          null,
          {},
          S.h(
            "details",
            {},
            S.h(
              "summary",
              {},
              S.h("h2", {}, "All settings"),
              S.h("span", { class: "muted" }, S.number(Object.keys(settings).length)),
            ),
            S.h(
              "div",
              { class: "bar" },
              S.search("Find a setting", "", (text) => whole.replaceChildren(settingsTable(settings, changed, text))),
            ),
            whole,
          ),
        ),
      );
      return null;
    },
  });
})();
