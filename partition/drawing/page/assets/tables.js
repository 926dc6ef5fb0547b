/**
 * Draw tables: rows that can be sorted, shown in part and followed to a value; and two plans side by side.
 *
 * A table reads `columns` (name, align, sort), `rows` (texts), `keys` (what to sort by, or null), `values` (for each
 * row the indices of the values that it is about, or null) and `shown` (rows at first, where there are many more). A
 * diff reads `before` and `after` (title, lines), `columns`, and `rows` (sign, cells).
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  const SHORT = 26; // letters that a cell may have without being broken into lines
  const SPARE = 2; // rows beyond those at first that are shown with them: a button would take as much room

  /** The class of each column's cells: figures at the right, short texts on one line, long ones broken. */
  const looks = (columns, rows) => columns.map((column, index) => {
    if (column.align === "right") return "right";
    return rows.every((cells) => cells[index].length <= SHORT) ? "short" : "long";
  });

  /** A text that may be broken after the slashes of its paths. */
  const breakable = (text) => text.split(/(?<=[/\\])/).flatMap((part) => [part, J.element("wbr")]).slice(0, -1);

  /** Compare two keys: numbers by size, texts as people order them, and nothing last. */
  function compare(a, b) {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }

  /** The order of rows by one column; equal keys stay in the order given. */
  function ordered(keys, column, direction) {
    const signed = (a, b) => (a === null || b === null ? compare(a, b) : direction * compare(a, b));
    return keys.map((_, row) => row).sort((a, b) => signed(keys[a][column], keys[b][column]) || a - b);
  }

  /** A header cell; `sort(column)` is called where its button is pressed. */
  function headCell(column, index, look, sort) {
    const sign = J.element("span", { class: "sort-sign", "aria-hidden": "true" });
    const own = J.per && column.name.endsWith(J.per) ? column.name.slice(0, -J.per.length) : column.name;
    const whose = own !== column.name && J.element("span", { class: "whose" }, J.per); // a line of its own: tables are wide
    const content = column.sort && sort
      ? J.element("button", { type: "button", class: "sort", onclick: () => sort(index) },
        look === "right" ? [sign, own, whose] : [own, sign, whose])
      : [own, whose];
    return J.element("th", { scope: "col", class: look }, content);
  }

  /** Say in the header which column orders the rows, and which way. */
  function tellOrder(heads, column, direction) {
    heads.forEach((head, index) => {
      const sign = head.querySelector(".sort-sign");
      if (!sign) return;
      if (index === column) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
      sign.textContent = index === column ? (direction > 0 ? "▲" : "▼") : "";
    });
  }

  /** A row of cells; one about values can be followed to the first, by its first cell's button or a click anywhere. */
  function bodyRow(cells, look, values, follow) {
    const row = J.element("tr", { "data-values": values?.join(" ") ?? null });
    const link = values === null ? null
      : J.element("button", { type: "button", class: "reach", onclick: (event) => {
        event.stopPropagation();
        follow(values[0]);
      } }, cells[0]);
    row.append(...cells.map((cell, index) => J.element("td", { class: look[index] },
      index === 0 && link ? link : breakable(cell))));
    if (link) {
      row.classList.add("reachable");
      row.addEventListener("click", () => getSelection().isCollapsed && follow(values[0]));
    }
    return row;
  }

  /** Lines of text, one below the other. */
  J.lines = (lines) => J.element("ul", { class: "lines" }, lines.map((line) => J.element("li", {}, line)));

  /** A table within a box that scrolls sideways where it must, and can then be reached by the keyboard. */
  function scrolled(table, label) {
    const box = J.element("div", { class: "scroll", role: "group", "aria-label": label, tabindex: "0" }, table);
    new ResizeObserver(() => {
      if (box.scrollWidth > box.clientWidth + 1) box.setAttribute("tabindex", "0");
      else box.removeAttribute("tabindex");
    }).observe(box);
    return box;
  }

  /** The button that shows all rows, and again only the first. */
  function moreButton(count, shown, showAll) {
    const button = J.element("button", { type: "button", class: "more", "aria-expanded": "false" });
    const set = (all) => {
      button.setAttribute("aria-expanded", String(all));
      button.textContent = all ? `Show the first ${J.number(shown)}` : `Show all ${J.count(count, "row")}`;
      showAll(all);
    };
    button.addEventListener("click", () => set(button.getAttribute("aria-expanded") === "false"));
    set(false);
    return { button, set };
  }

  /**
   * Mark the rows of an element's tables that are about a value, and unmark the others.
   *
   * @param {Element} element
   * @param {number} value
   * @returns {HTMLElement|undefined} the first row that is marked
   */
  J.mark = (element, value) => {
    let first;
    for (const row of element.querySelectorAll("tbody tr")) {
      const marked = row.dataset.values?.split(" ").includes(String(value)) ?? false;
      if (marked) first ??= row;
      row.classList.toggle("marked", marked);
      if (marked) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
    return first;
  };

  /**
   * Draw a table into an element.
   *
   * @param {Element} element
   * @param {Object} payload as the top of this file says
   * @param {string} label what a screen reader calls it
   * @param {(value: number) => void} [follow] called where the reader follows a row to its value
   * @returns {{showAll: () => void}}
   */
  J.table = (element, payload, label, follow) => {
    const { columns, keys, shown, values } = payload;
    const look = looks(columns, payload.rows);
    const rows = payload.rows.map((cells, index) => bodyRow(cells, look, values?.[index] ?? null, follow));
    if (rows.length === 0) {
      element.append(J.element("p", { class: "empty" }, "Nothing stands here."));
      return { showAll() {} };
    }
    const body = J.element("tbody");
    const state = { order: rows.map((_, row) => row), column: null, direction: 1, all: rows.length <= shown + SPARE };
    const lay = () => {
      body.append(...state.order.map((row) => rows[row]));
      state.order.forEach((row, place) => (rows[row].hidden = !state.all && place >= shown));
    };
    const sort = (column) => {
      const first = columns[column].align === "right" ? -1 : 1;
      const direction = state.column === column ? -state.direction : first;
      Object.assign(state, { column, direction, order: ordered(keys ?? payload.rows, column, direction) });
      tellOrder(heads, column, direction);
      lay();
    };
    const heads = columns.map((column, index) => headCell(column, index, look[index], sort));
    element.append(scrolled(J.element("table", { class: "rows" },
      J.element("thead", {}, J.element("tr", {}, heads)), body), label));
    lay();
    if (state.all) return { showAll() {} };
    const more = moreButton(rows.length, shown, (all) => {
      state.all = all;
      lay();
    });
    element.append(more.button);
    return { showAll: () => more.set(true) };
  };

  /** Tell all views that the reader follows a value; where there is a graph, go there, as it shows what makes it. */
  J.follow = (page, value, from) => {
    page.emit("value", { value, from });
    const graph = page.data.sections.find((section) => section.kind === "graph");
    if (graph) document.getElementById(graph.id).scrollIntoView({ behavior: J.still() ? "auto" : "smooth" });
  };

  /**
   * Draw a section of kind `table`. It marks the row of a value that any view selects, and scrolls to it where a `row`
   * is asked for, or where there is no graph to go to.
   */
  J.sections.table = (element, section, page) => {
    const graph = page.data.sections.some(({ kind }) => kind === "graph");
    const table = J.table(element, section, section.title, (value) => J.follow(page, value, section.id));
    const mark = (value, goes) => {
      const row = J.mark(element, value);
      if (row?.hidden) table.showAll();
      if (row && goes) row.scrollIntoView({ block: "center", behavior: J.still() ? "auto" : "smooth" });
      return row;
    };
    page.on("value", ({ value, from }) => mark(value, !graph && from !== section.id));
    page.on("row", ({ value }) => mark(value, true)?.querySelector("button")?.focus({ preventScroll: true }));
  };

  /** One side of a diff. */
  const plan = ({ title, lines }) => J.element("div", { class: "side" }, J.element("h3", {}, title), J.lines(lines));

  /** One row of a diff: its sign is written, coloured, and said. */
  function signed({ sign, cells }, look) {
    const added = sign === "+";
    return J.element("tr", { class: added ? "row-added" : "row-removed" },
      J.element("td", { class: "sign" },
        J.element("span", { "aria-hidden": "true" }, added ? "+" : "−"),
        J.element("span", { class: "unseen" }, added ? "added" : "removed")),
      cells.map((cell, index) => J.element("td", { class: look[index] }, breakable(cell))));
  }

  /** Draw a section of kind `diff`. */
  J.sections.diff = (element, section) => {
    const { before, after, columns, rows } = section;
    element.append(J.element("div", { class: "sides" }, plan(before), plan(after)));
    if (rows.length === 0) {
      element.append(J.element("p", { class: "empty" }, "The two save and recompute the same."));
      return;
    }
    const sign = J.element("th", { scope: "col", class: "sign" }, J.element("span", { class: "unseen" }, "change"));
    const look = looks(columns, rows.map((row) => row.cells));
    const heads = columns.map((column, index) => headCell(column, index, look[index], null));
    element.append(scrolled(J.element("table", { class: "rows" },
      J.element("thead", {}, J.element("tr", {}, sign, heads)),
      J.element("tbody", {}, rows.map((row) => signed(row, look)))), section.title));
  };
})();
