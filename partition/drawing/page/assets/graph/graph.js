/**
 * Draw the graph with the cut through it, and let it be opened, searched, zoomed and walked by keyboard.
 *
 * Reads a section of kind `graph`: `scopes`, `nodes`, `values`, `edges`, `arguments`, `sources`, `texts`, and as `cut`
 * whether a plan is drawn. Listens for `value`, whose maker it opens and shows; a handle on the cut tells `value` of
 * the largest that it stands for. Why that is saved is said below the picture, and `row` leads to the tables.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  /** Room around the picture, and above it for the headings. */
  const MARGIN = { side: 18, top: 74, bottom: 64 };
  /** The scales that zooming may reach; those of the first view at least and at most, and at least on narrow screens. */
  const SCALE = { least: 0.05, most: 3, legible: 0.92, large: 1.2, glance: 0.36 };
  /** The height of the frame, and the width from which on it has room for a legible picture. */
  const TALL = { least: 300, most: 1200 };
  const WIDE = 1100;
  const LARGEST = 10;
  const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

  class GraphView {
    constructor(element, section, page) {
      Object.assign(this, { section, page, model: J.graphModel(section), cache: new Map(), id: J.id("graph") });
      Object.assign(this, { current: null, chosen: new Set(), hit: -1, hits: [], touched: false });
      this.d3 = globalThis.jointcutVendor.d3;
      this.summary = J.graphSummary(this.model);
      this.indexValues();
      this.world = J.svg("g", { class: "graph-world" });
      this.svg = J.svg("svg", { class: "graph", role: "group", "aria-label": this.summary.text },
        J.graphDefinitions(this.id), this.world);
      element.classList.add("graph-view");
      this.picked = J.element("p", { class: "graph-picked", hidden: true });
      element.append(this.controls(), J.graphKey(this.id, this.summary.cut), J.element("div", { class: "graph-frame" }, this.svg),
        this.picked);
      this.bindZoom();
      this.svg.addEventListener("keydown", (event) => this.press(event));
      page.on("value", ({ value, from }) => from !== section.id && this.showValue(value));
      this.draw();
      J.fit(this.svg, (width) => this.resize(width));
    }

    /** Know which values each op makes. */
    indexValues() {
      const made = new Map();
      const add = (node, value) => node >= 0 && made.set(node, (made.get(node) ?? new Set()).add(value));
      this.section.values.node.forEach((node, value) => add(node, value));
      this.section.edges.from.forEach((node, edge) => add(node, this.section.edges.value[edge]));
      this.valuesOf = (node) => [...(made.get(node) ?? [])];
    }

    // ------------------------------------------------------------------------------------------- the controls

    /** The search field and the buttons. */
    controls() {
      const button = (text, call, label) =>
        J.element("button", { type: "button", "aria-label": label, onclick: call }, text);
      this.field = J.element("input", { type: "search", id: `${this.id}-search`, oninput: () => this.look(),
        placeholder: "op, scope or source line" });
      this.found = J.element("output", { class: "graph-found", for: `${this.id}-search` });
      const find = (event) => (event.preventDefault(), this.walk());
      return J.element("div", { class: "controls graph-controls" },
        J.element("form", { role: "search", onsubmit: find },
          J.element("label", { for: `${this.id}-search` }, "Find"), this.field, this.found),
        J.element("div", { class: "graph-buttons" },
          this.summary.cut && button("Open saved", () => this.openSaved()),
          button("Collapse all", () => this.collapse()),
          button("Reset", () => this.reset()),
          J.element("span", { class: "graph-zoom", role: "group", "aria-label": "Zoom" },
            button("−", () => this.scale(1 / 1.4), "Zoom out"),
            button("+", () => this.scale(1.4), "Zoom in"),
            button("Fit", () => this.fit(), "Fit the picture into its frame"))));
    }

    /** Take up a new text to search for. */
    look() {
      this.hits = this.model.search(this.field.value);
      this.hit = -1;
      this.found.textContent = this.field.value.trim() ? J.count(this.hits.length, "hit") : "";
    }

    /** Go to the next hit, and open what hides it. */
    walk() {
      if (this.hits.length === 0) return;
      this.hit = (this.hit + 1) % this.hits.length;
      this.found.textContent = `${this.hit + 1} of ${this.hits.length}`;
      this.show(this.hits[this.hit]);
    }

    /** Open and mark what makes the largest saved values, and show the largest. */
    openSaved() {
      const largest = this.model.largest(LARGEST);
      for (const { from } of largest) this.model.reveal(from);
      if (largest.length > 0) this.show(largest[0].from, largest);
      J.announce(`Opened and marked: what makes the ${J.count(largest.length, "largest saved value")}.`);
    }

    /** Close every box. */
    collapse() {
      this.model.collapse();
      this.draw();
      this.fit();
      J.announce("All boxes are closed.");
    }

    /** Go back to the first view. */
    reset() {
      this.model.collapse();
      this.model.openAtFirst();
      this.chosen.clear();
      this.draw();
      this.first();
    }

    // --------------------------------------------------------------------------------------------- the view

    /** Zoom by pinch or wheel with ctrl, pan by dragging; the wheel and a finger alone scroll the page. */
    bindZoom() {
      const mine = (event) => {
        if (event.type === "wheel") return event.ctrlKey || event.metaKey;
        return event.touches ? event.touches.length > 1 : event.button === 0 && !event.ctrlKey;
      };
      this.zoom = this.d3.zoom().scaleExtent([SCALE.least, SCALE.most]).filter(mine).on("zoom", (event) => {
        this.world.setAttribute("transform", event.transform);
        if (event.sourceEvent) this.touched = true;
        if (event.sourceEvent) J.tooltip.hide();
      });
      this.selection = this.d3.select(this.svg).call(this.zoom).on("dblclick.zoom", null);
    }

    /** The rectangle that holds the whole picture. */
    bounds() {
      const { forward, backward } = this.layout.sides;
      const [left, right] = [forward.x - MARGIN.side, backward.x + backward.w + MARGIN.side];
      return { x: left, y: -MARGIN.top, width: right - left, height: forward.h + MARGIN.top + MARGIN.bottom };
    }

    /** The scale of the first view: it fills the frame from side to side, and is legible where there is room for that. */
    filling() {
      const least = Math.max(SCALE.glance, SCALE.legible * Math.min(1, this.width / WIDE));
      return Math.max(least, Math.min(SCALE.large, this.width / this.bounds().width));
    }

    /** The room for a side, so that both are legible beside each other. */
    room() {
      return J.graphRoom(Math.max(this.width ?? 0, WIDE) / SCALE.legible - 2 * MARGIN.side);
    }

    /** Give the frame the height that the picture needs, within bounds, and show it as at first. */
    resize(width) {
      this.width = width;
      if (this.touched) return;
      if (this.room() !== this.drawn) this.draw();
      const wanted = this.bounds().height * this.filling();
      this.height = Math.round(Math.max(TALL.least, Math.min(TALL.most, wanted)));
      this.svg.style.height = `${this.height}px`;
      this.first();
    }

    /** Show the picture from side to side, its beginning where it is too tall, and around the cut where too wide. */
    first() {
      const [bounds, scale] = [this.bounds(), this.filling()];
      const wide = scale * bounds.width <= this.width + 1;
      const x = this.width / 2 - scale * (wide ? bounds.x + bounds.width / 2 : 0);
      const free = Math.max(0, this.height - scale * bounds.height) / 2;
      this.aim({ k: scale, x, y: free - scale * bounds.y }, true);
    }

    /** Show the whole, however small. */
    fit() {
      const bounds = this.bounds();
      const scale = Math.min(1.2, this.width / bounds.width, this.height / bounds.height);
      const x = this.width / 2 - scale * (bounds.x + bounds.width / 2);
      this.aim({ k: scale, x, y: this.height / 2 - scale * (bounds.y + bounds.height / 2) });
    }

    /** Move the view, smoothly where the reader likes it; a picture without a width has none. */
    aim({ k, x, y }, atOnce) {
      if (this.width === undefined) return;
      const target = this.d3.zoomIdentity.translate(x, y).scale(k);
      const how = atOnce || J.still() ? this.selection.interrupt() : this.selection.transition().duration(260);
      how.call(this.zoom.transform, target);
    }

    // ------------------------------------------------------------------------------------------ the drawing

    /** Draw what is visible now; the box that had the focus keeps it, if it is still there. */
    draw() {
      const focused = this.svg.contains(document.activeElement) ? document.activeElement.dataset.id : null;
      J.tooltip.hide();
      this.drawn = this.room();
      this.layout = J.graphLayout(this.model, this.cache, this.drawn);
      this.items = new Map();
      this.lines = this.layout.edges.map((edge) => J.graphEdge(edge, this.id));
      const boxes = [...this.layout.boxes.values()];
      const frames = boxes.filter(({ open }) => open).sort((a, b) => a.box.depth - b.box.depth);
      const layers = {
        sheets: frames.map(J.graphSheet),
        edges: this.lines.map(({ element }) => element),
        curves: this.drawCurves(),
        frames: frames.map((placed) => this.drawBox(placed)),
        boxes: boxes.filter(({ open }) => !open).map((placed) => this.drawBox(placed)),
        handles: this.layout.handles.filter(({ saved }) => saved).map((handle) => this.drawHandle(handle)),
      };
      this.world.replaceChildren(J.graphGround(this.layout, this.model, this.summary, this.id),
        ...Object.entries(layers).map(([name, elements]) => J.svg("g", { class: `layer-${name}` }, elements)));
      this.order = this.ordered();
      this.enter(this.items.has(this.current) ? this.current : this.order[0]);
      if (focused !== null) this.items.get(this.current)?.element.focus({ preventScroll: true });
      this.mark();
    }

    /** The curves through the cut, each remembered with its ends. */
    drawCurves() {
      const width = J.graphWidths(this.layout.handles);
      return this.layout.handles.map((handle) => {
        const element = J.graphCurve(handle, width);
        this.lines.push({ from: handle.from, to: handle.to, others: handle.others, key: handle.key, element });
        return element;
      });
    }

    /** One box, which shows its tooltip and opens. */
    drawBox(placed) {
      const { box, open, x, y, w, h } = placed;
      const element = J.graphBox(placed, J.graphBoxLabel(this.model, box), this.id);
      const tip = () => J.graphBoxTip(this.model, box, this.valuesOf);
      const touches = ({ from, to, others = [] }) => [from, to, ...others].some((end) => this.holds(box, end));
      this.bind(element, { id: box.id, box, rect: { x, y, w, h: open ? 34 : h } }, tip, touches);
      return element;
    }

    /** One handle, which shows its tooltip and tells its value. */
    drawHandle(handle) {
      const element = J.graphHandle(handle, J.graphHandleLabel(this.section, handle));
      this.bind(element, { id: handle.key, handle, rect: { x: -8, y: handle.y - 8, w: 16, h: 16 } },
        () => J.graphHandleTip(this.model, handle), ({ key }) => key === handle.key);
      return element;
    }

    /** Whether a box is another or holds it. */
    holds(box, inner) {
      for (let above = inner; above; above = above.parent) if (above === box) return true;
      return false;
    }

    /** Remember an element, and let pointer and focus light the lines that touch it. */
    bind(element, item, tip, touches) {
      this.items.set(item.id, { ...item, element });
      J.tooltip.attach(element, tip);
      const light = () => {
        this.svg.classList.add("lighting");
        for (const line of this.lines) line.element.classList.toggle("lit", touches(line));
      };
      for (const name of ["pointerenter", "focus"]) element.addEventListener(name, light);
      for (const name of ["pointerleave", "blur"]) {
        element.addEventListener(name, () => this.svg.classList.remove("lighting"));
      }
      element.addEventListener("focus", () => this.enter(item.id));
      element.addEventListener("click", () => this.act(item.id));
    }

    /** All that can be reached, as it runs: the forward, the handles, the backward. */
    ordered() {
      const ids = (side) => this.model.visible().filter((box) => box.side === side).map((box) => box.id);
      const handles = this.layout.handles.filter(({ saved }) => saved).sort((a, b) => a.y - b.y);
      return [...ids("forward"), ...handles.map(({ key }) => key), ...ids("backward")];
    }

    /** Mark what was chosen: the op that makes a value, and the handle that carries it. */
    mark() {
      for (const { box, handle, element } of this.items.values()) {
        const chosen = box ? this.chosen.has(box) : handle.values.some((value) => this.chosen.has(value));
        element.classList.toggle("chosen", chosen);
      }
    }

    // ------------------------------------------------------------------------------------------- being used

    /** Make an item the one that Tab leads to. */
    enter(id) {
      this.items.get(this.current)?.element.setAttribute("tabindex", "-1");
      this.current = id ?? null;
      this.items.get(this.current)?.element.setAttribute("tabindex", "0");
    }

    /** Do what a click does: open or close a box, tell a handle's value. */
    act(id) {
      const { box, handle, element } = this.items.get(id);
      if (handle) this.pick(handle.values);
      if (!box || box.children.length === 0) return;
      const seen = this.items.get(id).rect;
      const { k, x, y } = this.d3.zoomTransform(this.svg);
      const focused = document.activeElement === element;
      this.model.toggle(box);
      this.current = id;
      this.draw();
      const { rect } = this.items.get(id);
      this.aim({ k, x: x + k * (seen.x - rect.x), y: y + k * (seen.y - rect.y) }, true);
      this.touched = true;
      if (focused) this.items.get(id).element.focus({ preventScroll: true });
      J.announce(`${box.name} ${this.model.isOpen(box) ? `opened, ${J.count(box.children.length, "box")}` : "closed"}`);
    }

    /** Tell all views the largest of some values, mark it here, and say below the picture why it is saved. */
    pick(values) {
      const [value] = values;
      this.chosen = new Set([value, this.model.leaves[this.section.values.node[value]] ?? this.model.entry]);
      this.mark();
      this.tell(values);
      this.page.emit("value", { value, from: this.section.id });
    }

    /** Say below the picture what a value is and why it is saved, with a way to its row where there is a table. */
    tell(values) {
      const said = J.graphPicked(this.section, values);
      const holds = ({ kind, values: rows }) => kind === "table" && rows?.some((row) => row?.includes(values[0]));
      const listed = this.page.data.sections.some(holds);
      this.picked.replaceChildren(said, ...(listed ? [" ", J.element("button", { type: "button",
        onclick: () => this.page.emit("row", { value: values[0] }) }, "Its row in the table")] : []));
      this.picked.hidden = false;
      J.announce(said);
    }

    /** Move among what is visible, open and close, zoom: by keys. */
    press(event) {
      const id = event.target.closest?.("[data-id]")?.dataset.id;
      if (id === undefined || event.altKey || event.metaKey || event.ctrlKey) return;
      const [at, last] = [this.order.indexOf(id), this.order.length - 1];
      const goals = { Home: 0, End: last, PageUp: Math.max(0, at - 1), PageDown: Math.min(last, at + 1) };
      if (event.key === "Enter" || event.key === " ") this.act(id);
      else if (event.key in ARROWS) this.go(J.graphNeighbour(id, ARROWS[event.key], this.items));
      else if (event.key in goals) this.go(this.order[goals[event.key]]);
      else if (event.key === "+" || event.key === "-") this.scale(event.key === "+" ? 1.4 : 1 / 1.4);
      else return;
      event.preventDefault();
    }

    /** Give an item the focus, and bring it into view. */
    go(id) {
      const item = this.items.get(id);
      if (!item) return;
      this.bring(item.rect);
      item.element.focus({ preventScroll: true });
      item.element.scrollIntoView({ block: "nearest", behavior: "auto" });
    }

    /** Move the picture as little as need be to have a rectangle in the frame. */
    bring(rect) {
      const { k, x, y } = this.d3.zoomTransform(this.svg);
      const shift = (start, length, room) => {
        const margin = Math.min(40, room / 4);
        if (start < margin) return margin - start;
        return Math.min(0, Math.max(margin - start, room - margin - start - length));
      };
      const dx = shift(x + k * rect.x, k * rect.w, this.width);
      const dy = shift(y + k * rect.y, k * rect.h, this.height);
      if (dx !== 0 || dy !== 0) this.aim({ k, x: x + dx, y: y + dy }, true);
    }

    /** Zoom about the middle of the frame. */
    scale(factor) {
      this.touched = true;
      (J.still() ? this.selection : this.selection.transition().duration(200)).call(this.zoom.scaleBy, factor);
    }

    /**
     * Open what hides a box, and put it into the middle of the frame.
     *
     * @param {Object} box
     * @param {Array<{from: Object, value: number}>} marked values and their makers to mark; else the box alone
     */
    show(box, marked = [{ from: box }]) {
      this.chosen = new Set(marked.flatMap(({ from, value }) => [from, value]));
      this.model.reveal(box);
      this.touched = true;
      this.draw();
      this.enter(box.id);
      const { x, y, w, h } = this.items.get(box.id).rect;
      const k = Math.max(0.8, this.d3.zoomTransform(this.svg).k);
      this.aim({ k, x: this.width / 2 - k * (x + w / 2), y: this.height / 2 - k * (y + h / 2) });
      J.announce(`Shown in the graph: ${J.graphBoxLabel(this.model, box)}`);
    }

    /** Show the op that makes a value, if it is in the graph. */
    showValue(value) {
      const node = this.section.values.node[value];
      const box = node >= 0 ? this.model.leaves[node] : this.model.entry;
      if (!box) return;
      this.show(box, [{ from: box, value }]);
      this.tell([value]);
    }
  }

  J.sections ??= {};

  /** Draw a section of kind `graph`. */
  J.sections.graph = (element, section, page) => void new GraphView(element, section, page);
})();
