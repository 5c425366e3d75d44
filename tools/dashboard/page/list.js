"use strict";
// A list of any length of which only the visible rows are elements.

(() => {
  const BROWSED_ROW_PX = 54;
  const SPARE = 6; // rows above and below the visible ones

  /**
   * A virtual list with rows of one height, as a listbox: arrows, Page Up/Down, Home and End move, Enter opens.
   *
   * Options: `label`, `rowHeight`, `render(item, index)` -> children of the row, `open(item, index)`, and either
   * `items` by `setItems`, or `load(offset, limit)` -> `{total, items}` with `pageSize`.
   */
  S.List = class {
    constructor(options) {
      this.options = { pageSize: 100, ...options };
      this.items = [];
      this.count = 0;
      this.active = -1;
      this.rows = new Map();
      this.pages = new Map();
      this.space = S.h("div", { class: "list-space", role: "presentation" });
      this.root = S.h(
        "div",
        {
          class: `list ${options.className || ""}`,
          role: "listbox",
          tabindex: "0",
          "aria-label": options.label,
          onscroll: S.perFrame(() => this.draw()),
          onkeydown: (event) => this.key(event),
        },
        this.space,
      );
      this.id = `list-${Math.random().toString(36).slice(2, 8)}`;
      new ResizeObserver(S.perFrame(() => this.draw())).observe(this.root);
    }

    setItems(items) {
      this.items = items;
      this.count = items.length;
      this.active = Math.min(this.active, this.count - 1);
      this.renew();
    }

    /** Loads the first page anew; resolves to the total. */
    async reload() {
      this.pages.clear();
      this.items = [];
      const { total, items } = await this.fetch(0);
      this.count = total;
      this.items = [...items];
      this.root.scrollTop = 0;
      this.active = -1;
      this.renew();
      return total;
    }

    fetch(page) {
      const { load, pageSize } = this.options;
      if (!this.pages.has(page)) this.pages.set(page, load(page * pageSize, pageSize));
      return this.pages.get(page);
    }

    /** Draws all visible rows again. */
    renew() {
      this.space.style.height = `${this.count * this.options.rowHeight}px`;
      this.rows.forEach((row) => row.remove());
      this.rows.clear();
      this.draw();
    }

    draw() {
      const { rowHeight } = this.options;
      const first = Math.max(0, Math.floor(this.root.scrollTop / rowHeight) - SPARE);
      const last = Math.min(this.count, Math.ceil((this.root.scrollTop + this.root.clientHeight) / rowHeight) + SPARE);
      for (const [index, row] of this.rows) {
        if (index >= first && index < last) continue;
        row.remove();
        this.rows.delete(index);
      }
      for (let index = first; index < last; index++) if (!this.rows.has(index)) this.add(index);
      if (this.options.load) this.complete(first, last);
    }

    add(index) {
      const { rowHeight, render, open } = this.options;
      const item = this.items[index];
      const row = S.h(
        "div",
        {
          class: "row",
          role: "option",
          id: `${this.id}-${index}`,
          "aria-selected": String(index === this.active),
          "aria-setsize": this.count,
          "aria-posinset": index + 1,
          onclick: () => {
            this.select(index);
            if (this.items[index]) open?.(this.items[index], index);
          },
        },
        item ? render(item, index) : S.h("span", { class: "muted" }, "…"),
      );
      row.style.transform = `translateY(${index * rowHeight}px)`;
      row.style.height = `${rowHeight}px`;
      this.rows.set(index, row);
      this.space.append(row);
    }

    async complete(first, last) {
      const { pageSize } = this.options;
      for (let page = Math.floor(first / pageSize); page * pageSize < last; page++) {
        if (this.pages.has(page)) continue;
        const pages = this.pages;
        try {
          const { items } = await this.fetch(page);
          items.forEach((item, i) => {
            const index = page * pageSize + i;
            this.items[index] = item;
            this.rows.get(index)?.remove();
            this.rows.delete(index);
          });
          this.draw();
        } catch (error) {
          pages.delete(page);
          if (error.name !== "AbortError") S.announce(error.message);
        }
      }
    }

    select(index) {
      const before = this.rows.get(this.active);
      before?.setAttribute("aria-selected", "false");
      this.active = index;
      this.rows.get(index)?.setAttribute("aria-selected", "true");
      this.root.setAttribute("aria-activedescendant", `${this.id}-${index}`);
    }

    key(event) {
      const { rowHeight, open } = this.options;
      if (event.key === "Enter" && this.items[this.active]) {
        open?.(this.items[this.active], this.active);
        return;
      }
      const page = Math.max(1, Math.floor(this.root.clientHeight / rowHeight) - 1);
      const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
      if (!(event.key in moves) || !this.count) return;
      event.preventDefault();
      this.reveal(Math.max(0, Math.min(this.count - 1, this.active + moves[event.key])));
    }

    /** Scrolls to a row and makes it the active one. */
    reveal(index) {
      const { rowHeight } = this.options;
      const top = index * rowHeight;
      if (top < this.root.scrollTop) this.root.scrollTop = top;
      if (top + rowHeight > this.root.scrollTop + this.root.clientHeight)
        this.root.scrollTop = top + rowHeight - this.root.clientHeight;
      this.draw();
      this.select(index);
    }
  };

  /** A list on the left, what was chosen on the right; on a narrow screen one of both. */
  S.split = (isDetail, list, detail, back) =>
    S.h(
      "div",
      { class: `split${isDetail ? " has-detail" : ""}` },
      S.h("div", { class: "split-list" }, list),
      S.h("div", { class: "split-detail" }, isDetail && S.h("a", { class: "back", href: back }, "← list"), detail),
    );

  /**
   * Fills a view with a list that the server searches, sorts and pages, beside what is chosen in it.
   *
   * Options: `view`, also the name of its path and of the list in the answer; `filters`, parameters of the address that
   * the server gets too; `search`, the label of the field `query`; `controls(value, choose)`, further fields;
   * `render(item)`; `detail()`, a promise of what is shown of the chosen one; `none`, the text where there is nothing;
   * `onPage(answer)`. Returns a function that adds a remark to the number of items.
   */
  S.browse = async (root, context, { view, filters, search, controls, render, detail, none, onPage }) => {
    const { parameters, argument, run } = context;
    const value = (name) => parameters.get(name) || "";
    const chosen = () => Object.fromEntries(filters.filter(value).map((name) => [name, value(name)]));
    const count = S.h("span", { class: "muted count", role: "status" });
    const remark = S.h("div", {});
    const list = new S.List({
      label: view,
      rowHeight: BROWSED_ROW_PX,
      className: "browsed",
      render,
      open: (item) => context.go(view, item.id, chosen()),
      load: async (offset, limit) => {
        const answer = await context.get(S.path(run, view), { ...chosen(), offset, limit });
        onPage?.(answer);
        return { total: answer.total, items: answer[view] };
      },
    });
    const reload = async () => {
      try {
        const total = await list.reload();
        count.textContent = `${S.number(total)} ${view}`;
        const isFiltered = filters.some((name) => name !== "sort" && value(name));
        remark.replaceChildren(...(total ? [] : [S.empty(isFiltered ? "Nothing matches: widen the search." : none)]));
      } catch (error) {
        remark.replaceChildren(S.failure(error));
      }
    };
    const choose = (name) => (text) => {
      context.keep({ [name]: text });
      reload();
    };
    const fields = [S.search(search, value("query"), choose("query")), ...controls(value, choose), count];
    const [shown] = await Promise.all([detail().catch(S.failure), reload()]);
    root.append(
      S.h("div", { class: "bar" }, fields),
      S.split(argument !== null, [remark, list.root], shown, S.link(view, null, chosen())),
    );
    list.renew();
    const index = list.items.findIndex((item) => item?.id === argument);
    if (index >= 0) list.reveal(index);
    return (text) => (count.textContent = `${S.number(list.count)} ${view}${text}`);
  };
})();
