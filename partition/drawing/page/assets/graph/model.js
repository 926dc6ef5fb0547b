/**
 * Hold a graph as two trees of boxes, and say which of them are visible. Nothing here touches the document.
 *
 * Each side, forward and backward, is a tree: scopes hold scopes and ops, and where a scope holds many, neighbours of
 * one source line stand in a run, and runs of those in longer runs. A box is opened by its key, which the two halves of
 * a scope share, so that both open together. Edges are lifted to the boxes that can be seen, and merged.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  /** More children than this, and consecutive ops of one source line stand in one box. */
  const MANY = 24;
  /** The most boxes that a box shows when it opens, and a side before anything does; longer rows are cut into runs. */
  const MOST = 48;
  /** How many boxes are shown at first: up to the most where they make many of the saved values, or are very few. */
  const AT_FIRST = 60;
  const AT_MOST = 120;
  const FEW = 12;
  /** Families of fewer ops than this stay closed at first: to open them would tell nothing. */
  const SMALL = 4;

  /**
   * @typedef {Object} Box
   * @property {string} key the key that opens it: shared by the two halves of a scope
   * @property {string} id of its own
   * @property {"scope"|"run"|"op"|"arguments"} kind
   * @property {"forward"|"backward"} side
   * @property {string} name
   * @property {string} detail of a loop: its steps
   * @property {boolean} loop
   * @property {number} node index of an op, else -1
   * @property {Box|null} parent
   * @property {Array<Box>} children
   * @property {number} depth below its root
   * @property {number} ops how many it holds
   * @property {number} again how many of them are recomputed
   * @property {number} seconds predicted for the ops with a price: of the forward, or recomputed
   * @property {number} saved bytes of the values that its ops make and the backward keeps
   * @property {number} first index of its first op
   * @property {number} turn when it runs: the mean index of its ops, without those recomputed where it has others
   */

  /** A box of a kind, without children. */
  function makeBox(kind, side, key, name, parent, more) {
    const counts = { ops: 0, again: 0, seconds: 0, saved: 0, first: Infinity, turn: -1 };
    const rest = { depth: 0, node: -1, detail: "", loop: false };
    const box = { kind, side, key, id: `${side}-${key}`, name, parent, children: [], ...counts, ...rest, ...more };
    if (parent) parent.children.push(box);
    return box;
  }

  /** The side of a role. */
  const sideOf = (role) => (role === "forward" ? "forward" : "backward");

  /**
   * The scope that stands for each scope: a scope that holds only a single scope is shown as that scope.
   *
   * @returns {Array<{scope: number, parent: number, name: string}>} by the index of a scope
   */
  function scopeChains({ scopes, nodes }) {
    const ops = new Array(scopes.length).fill(0);
    for (const scope of nodes.scope) ops[scope] += 1;
    const inside = ops.slice();
    for (let scope = scopes.length - 1; scope > 0; scope -= 1) inside[scopes[scope].parent] += inside[scope];
    const children = scopes.map(() => 0);
    scopes.forEach(({ parent }, scope) => parent !== null && inside[scope] > 0 && (children[parent] += 1));
    const skipped = (scope) => scope > 0 && ops[scope] === 0 && children[scope] === 1 && scopes[scope].kind !== "loop";
    return scopes.map(({ name }, scope) => {
      let { parent } = scopes[scope];
      while (parent !== null && skipped(parent)) {
        name = `${scopes[parent].name}/${name}`;
        parent = scopes[parent].parent;
      }
      return { scope, parent, name };
    });
  }

  /** Put the ops of both sides into their scopes: the roots, and the box of each op. */
  function plant(section) {
    const { scopes, nodes, values } = section;
    const chains = scopeChains(section);
    const made = new Map();
    const scopeBox = (scope, side) => {
      const id = `${side}-s${scope}`;
      if (!made.has(id)) {
        const { parent, name } = chains[scope];
        const above = scope === 0 ? null : scopeBox(parent, side);
        const loop = scopes[scope].kind === "loop";
        made.set(id, makeBox("scope", side, `s${scope}`, name, above, { loop, detail: scopes[scope].detail }));
      }
      return made.get(id);
    };
    const roots = { forward: scopeBox(0, "forward"), backward: scopeBox(0, "backward") };
    const known = values.saved.some((saved, value) => saved && values.node[value] < 0);
    const entry = known && makeBox("arguments", "forward", "arguments", "arguments", roots.forward, { first: -1 });
    const kept = nodes.name.map(() => 0);
    values.node.forEach((node, value) => values.saved[value] && node >= 0 && (kept[node] += values.bytes[value]));
    const leaves = nodes.name.map((name, node) => {
      const side = sideOf(nodes.role[node]);
      const again = nodes.role[node] === "recomputed" ? 1 : 0;
      const [ops, saved, seconds] = [1, kept[node], nodes.role[node] === "backward" ? 0 : nodes.seconds[node] ?? 0];
      const more = { node, first: node, turn: node, ops, again, saved, seconds };
      return makeBox("op", side, `n${node}`, name, scopeBox(nodes.scope[node], side), more);
    });
    return { roots, leaves, entry };
  }

  /** Add the counts of children to those of a box. */
  function total(box, children) {
    let [weight, turns] = [0, 0];
    const own = children.some((child) => child.ops > child.again);
    for (const child of children) {
      for (const name of ["ops", "again", "seconds", "saved"]) box[name] += child[name];
      box.first = Math.min(box.first, child.first);
      const counted = own ? child.ops - child.again : child.ops;
      weight += counted;
      turns += counted * child.turn;
    }
    box.turn = turns / Math.max(1, weight);
  }

  /** Add up the contents of each box, and order its children as they run. */
  function sum(box) {
    box.children.forEach(sum);
    if (box.children.length > 0) total(box, box.children);
    box.children.sort((a, b) => a.first - b.first);
  }

  /** Stand consecutive children of a box in one box of their own. */
  function enclose(box, children, name, serial) {
    const run = makeBox("run", box.side, `${box.key}-${box.side}-${serial}`, name, null, { parent: box, children });
    for (const child of children) child.parent = run;
    total(run, children);
    return run;
  }

  /** Children with each row of consecutive ops of one source line in a run. */
  function byLine(box, section) {
    const rows = [];
    for (const child of box.children) {
      const source = child.kind === "op" ? section.nodes.source[child.node] : null;
      const last = rows.at(-1);
      if (last && source !== null && last.source === source) last.children.push(child);
      else rows.push({ source, children: [child] });
    }
    const name = (source) => section.sources[source].split("/").at(-1) || "ops"; // without its folder
    return rows.map(({ source, children }, serial) =>
      (children.length === 1 ? children[0] : enclose(box, children, name(source), `l${serial}`)));
  }

  /** Children in runs, about as many as each then holds; a run is named by its ends. */
  function byNumber(box, children, level) {
    const length = Math.ceil(Math.sqrt(children.length));
    const runs = [];
    let before = 0;
    for (let start = 0; start < children.length; start += length) {
      const part = children.slice(start, start + length);
      const ops = part.reduce((total, child) => total + child.ops, 0);
      const scoped = part.some((child) => child.kind === "scope");
      const name = scoped ? `${part[0].name} … ${part.at(-1).name}` : `ops ${before + 1}–${before + ops}`;
      runs.push(part.length === 1 ? part[0] : enclose(box, part, name, `r${level}.${start}`));
      before += ops;
    }
    return runs;
  }

  /** Fold the children of each box where they are many; then say how deep each box lies. */
  function fold(box, section) {
    for (const child of box.children) fold(child, section);
    if (box.children.length > MANY) box.children = byLine(box, section);
    const most = box.parent ? MOST : MANY;
    for (let level = 0; box.children.length > most; level += 1) box.children = byNumber(box, box.children, level);
  }

  /** Say how deep each box lies below its root, and note it by its id. */
  function sink(box, depth, byId) {
    box.depth = depth;
    byId.set(box.id, box);
    for (const child of box.children) sink(child, depth + 1, byId);
  }

  /** The child of `above` that holds a box, or null where the box does not lie below it. */
  function under(box, above) {
    while (box && box.depth > above.depth + 1) box = box.parent;
    return box && box.parent === above ? box : null;
  }

  /** The deepest box that holds both. */
  function common(a, b) {
    while (a.depth > b.depth) a = a.parent;
    while (b.depth > a.depth) b = b.parent;
    while (a !== b) [a, b] = [a.parent, b.parent];
    return a;
  }

  /** For each box, the edges between its children that go with the run: they order the children on the page. */
  function siblingEdges(edges, leaves) {
    const within = new Map();
    edges.from.forEach((from, index) => {
      const [a, b] = [leaves[from], leaves[edges.to[index]]];
      if (!a || a.side !== b.side || a === b) return;
      const above = common(a, b);
      const [start, end] = [under(a, above), under(b, above)];
      if (start.turn >= end.turn) return;
      if (!within.has(above)) within.set(above, new Map());
      within.get(above).set(`${start.id} ${end.id}`, { from: start, to: end });
    });
    return within;
  }

  /**
   * The values that go from the forward to the backward: each once, with the ops that read it, in running order.
   *
   * @returns {Array<{value: number, saved: boolean, from: Box, to: Array<Box>}>}
   */
  function crossings({ values, edges, nodes, arguments: given }, leaves, entry) {
    const readers = new Map();
    const add = (value, node) => readers.set(value, (readers.get(value) ?? new Set()).add(node));
    edges.value.forEach((value, index) => {
      const [from, to] = [edges.from[index], edges.to[index]];
      const start = from < 0 ? "forward" : sideOf(nodes.role[from]);
      if (start === "forward" && sideOf(nodes.role[to]) === "backward") add(value, to);
    });
    const byLabel = new Map();
    values.label.forEach((label, value) => label && values.saved[value] && byLabel.set(label, value));
    for (const [node, labels] of Object.entries(given ?? {})) {
      if (nodes.role[node] === "forward") continue;
      for (const label of labels) if (byLabel.has(label)) add(byLabel.get(label), Number(node));
    }
    values.saved.forEach((saved, value) => saved && !readers.has(value) && readers.set(value, new Set()));
    return [...readers]
      .map(([value, to]) => ({
        value,
        saved: values.saved[value],
        from: leaves[values.node[value]] ?? (entry || null),
        to: [...to].sort((a, b) => a - b).map((node) => leaves[node]),
      }))
      .filter(({ from }) => from !== null && from.side === "forward");
  }

  /** The key of boxes that open together at first: parent, kind and name. */
  const family = (box) => `${box.parent.key} ${box.kind} ${box.name.replace(/\d+/g, "#")}`;

  /** Boxes with children among those given, by family; families that make most of the saved values come first. */
  function families(boxes) {
    const found = new Map();
    for (const box of boxes) {
      if (box.children.length > 0) found.set(family(box), [...(found.get(family(box)) ?? []), box]);
    }
    const sum = (members, name) => members.reduce((total, box) => total + box[name], 0);
    return [...found.values()]
      .map((boxes) => ({ boxes, ops: sum(boxes, "ops"), saved: sum(boxes, "saved"),
        largest: Math.max(...boxes.map((box) => box.saved)), more: boxes.flatMap((box) => box.children).length }))
      .filter(({ ops }) => ops >= SMALL)
      .sort((a, b) => b.saved - a.saved || b.ops - a.ops);
  }

  class GraphModel {
    /** @param {Object} section of kind `graph` */
    constructor(section) {
      const { roots, leaves, entry } = plant(section);
      Object.assign(this, { section, roots, leaves, entry, byId: new Map(), open: new Set() });
      for (const root of Object.values(roots)) {
        sum(root);
        fold(root, section);
        sink(root, 0, this.byId);
      }
      this.siblings = siblingEdges(section.edges, leaves);
      this.crossings = crossings(section, leaves, entry);
      this.openAtFirst();
    }

    /** Whether a box shows its children. */
    isOpen(box) {
      return box.parent === null || (box.children.length > 0 && this.open.has(box.key));
    }

    /** Open a box that is closed, close one that is open; the other half of a scope goes with it. */
    toggle(box) {
      if (this.open.has(box.key)) this.open.delete(box.key);
      else this.open.add(box.key);
    }

    /** Close every box. */
    collapse = () => this.open.clear();

    /** Open all that holds a box, so that it can be seen. */
    reveal(box) {
      for (let above = box.parent; above && above.parent; above = above.parent) this.open.add(above.key);
    }

    /** The saved values that take the most bytes, largest first, each with the box of the op that makes it. */
    largest(count) {
      const { bytes } = this.section.values;
      return this.crossings.filter((one) => one.saved).sort((a, b) => bytes[b.value] - bytes[a.value]).slice(0, count);
    }

    /** Open families of boxes while there is room: more room for a box that makes a good part of the saved values. */
    openAtFirst() {
      const part = Math.max(1, this.roots.forward.saved / 3);
      for (;;) {
        const visible = this.visible();
        const most = ({ largest }) => (visible.length < FEW || largest >= part ? AT_MOST : AT_FIRST);
        const closed = visible.filter((box) => !this.isOpen(box));
        const next = families(closed).find((family) => visible.length + family.more <= most(family));
        if (!next) return;
        for (const box of next.boxes) this.open.add(box.key);
      }
    }

    /** All boxes that can be seen, open ones too, each side in the order it runs. */
    visible() {
      const found = [];
      const walk = (box) => {
        if (box.parent) found.push(box);
        if (this.isOpen(box)) box.children.forEach(walk);
      };
      Object.values(this.roots).forEach(walk);
      return found;
    }

    /** The box that stands for another now: itself, or the outermost closed one around it. */
    standing(box) {
      let shown = box;
      for (let above = box; above.parent; above = above.parent) if (!this.isOpen(above)) shown = above;
      return shown;
    }

    /**
     * The edges within the sides, lifted to the visible boxes and merged.
     *
     * @returns {Array<{from: Box, to: Box, count: number}>}
     */
    edges() {
      const shown = this.leaves.map((leaf) => this.standing(leaf));
      const merged = new Map();
      this.section.edges.from.forEach((start, index) => {
        const [from, to] = [shown[start], shown[this.section.edges.to[index]]];
        if (!from || from === to || from.side !== to.side) return;
        const key = `${from.id} ${to.id}`;
        const edge = merged.get(key) ?? { from, to, count: 0 };
        edge.count += 1;
        merged.set(key, edge);
      });
      return [...merged.values()];
    }

    /**
     * The curves through the cut: one for each two boxes that a kept value joins first. Every saved value is in one of
     * them, at its first reader; boxes that read it later are its `others`.
     *
     * @returns {Array<{key: string, from: Box, to: Box|null, others: Array<Box>, values: Array<number>, bytes: number,
     *   saved: boolean}>}
     */
    handles() {
      const merged = new Map();
      for (const { value, saved, from, to } of this.crossings) {
        const start = this.standing(from);
        const [first, ...rest] = [...new Set(to.map((leaf) => this.standing(leaf)))];
        const key = `${saved ? "h" : "p"}-${start.id}-${first?.id ?? "none"}`;
        const fresh = { key, from: start, to: first ?? null, saved, others: new Set(), values: [] };
        const handle = merged.get(key) ?? fresh;
        merged.set(key, handle);
        handle.values.push(value);
        for (const other of rest) handle.others.add(other);
      }
      const { bytes } = this.section.values;
      return [...merged.values()].map((handle) => ({
        ...handle,
        values: handle.values.sort((a, b) => bytes[b] - bytes[a]),
        others: [...handle.others],
        bytes: handle.values.reduce((total, value) => total + bytes[value], 0),
      }));
    }

    /** The names of the boxes around a box, outermost first. */
    path(box) {
      const names = [];
      for (let above = box.parent; above && above.parent; above = above.parent) names.unshift(above.name);
      return names;
    }

    /** Boxes whose name or source holds a text: scopes first, then ops, each in the order they run. */
    search(text) {
      const wanted = text.trim().toLowerCase();
      if (!wanted) return [];
      const { nodes, sources } = this.section;
      const holds = (box) => box.name.toLowerCase().includes(wanted)
        || (box.node >= 0 && sources[nodes.source[box.node]].toLowerCase().includes(wanted));
      const hits = [...this.byId.values()].filter((box) => box.parent && box.kind !== "run" && holds(box));
      return [...hits.filter((box) => box.node < 0), ...hits.filter((box) => box.node >= 0)];
    }
  }

  /** Read a section of kind `graph` into its model. */
  J.graphModel = (section) => new GraphModel(section);
  Object.assign(J, { graphUnder: under, graphCommon: common });
})();
