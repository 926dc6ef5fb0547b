/**
 * Give every visible box of a graph its place; the lines between them are those of routes.js.
 *
 * Each open box is laid out by dagre on its own, its open children as boxes of their size; long rows are wrapped. Then
 * the rows of the two sides are moved apart until what is saved crosses the cut as level as it can: a chain of pairs of
 * rows, the heaviest in saved bytes, is put at equal heights, and so on inside of each open pair. The forward flows
 * down at the left of x = 0, the backward up at the right.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  /** Sizes in pixels at a scale of one. */
  const SIZE = { box: 28, head: 38, pad: 14, row: 20, wrapped: 10, column: 14, title: 190, side: 300 };
  /** Inside of a box: before and after the text, the sign that it opens, and between name and note. */
  Object.assign(SIZE, { edge: 12, sign: 16, word: 10, least: 56 });
  J.graphSize = SIZE;
  /** Half of the room between the sides, and the room that the children of a box have at least. */
  const APART = 130;
  const LEAST = 240;
  /** The room of a side whose both sides and the cut are to be so wide. */
  J.graphRoom = (width) => Math.max(SIZE.side, Math.min(760, width / 2 - APART));
  /** How much taller the sides may become for the sake of level curves. */
  const STRETCH = 1.3;
  /** An edge over more rows than this goes by the lane at the outer side of its frame, if its ends are tied anyway. */
  const NEAR = 3;
  const TITLE = { size: 13, weight: 600 };
  const NOTE = { size: 12, weight: 400 };

  /**
   * @typedef {Object} Placed a box in its place
   * @property {Object} box of the model
   * @property {boolean} open
   * @property {{title: string, note: string, titleWidth: number, sign: number}} label
   * @property {number} x left edge
   * @property {number} y upper edge
   * @property {number} w
   * @property {number} h
   */

  /** The label of a box, and the width that it needs; a root only has room for its heading. */
  function labelOf(box) {
    if (!box.parent) return { width: SIZE.side };
    const weight = box.kind === "op" ? 400 : TITLE.weight;
    const isWide = J.width(box.name, TITLE.size, weight) > SIZE.title;
    const title = J.fitted(isWide ? J.line(box.name) : box.name, SIZE.title, TITLE.size, weight);
    const note = J.graphNote(box);
    const titleWidth = J.width(title, TITLE.size, weight);
    const noteWidth = note ? J.width(note, NOTE.size, NOTE.weight) + SIZE.word : 0;
    const sign = box.children.length > 0 ? SIZE.sign : 0;
    const wide = sign + titleWidth + noteWidth;
    return { title, note, titleWidth, sign, wide, width: Math.ceil(Math.max(SIZE.least, wide + 2 * SIZE.edge)) };
  }

  /** Put boxes of one row where they want to be, as far as they are apart and stay within the room. */
  function spread(row, room) {
    let left = -room / 2;
    for (const kid of row) {
      kid.across = Math.max(kid.across, left + kid.w / 2);
      left = kid.across + kid.w / 2 + SIZE.column;
    }
    let right = room / 2;
    for (const kid of row.toReversed()) {
      kid.across = Math.min(kid.across, right - kid.w / 2);
      right = kid.across - kid.w / 2 - SIZE.column;
    }
  }

  /** Rows of boxes of one rank, wrapped where they are wider than the room; `across` is from the middle of the row. */
  function wrap(kids, wish, room) {
    const width = (row) => row.reduce((sum, kid) => sum + kid.w + SIZE.column, -SIZE.column);
    const sorted = [...kids].sort((a, b) => wish(a) - wish(b));
    if (width(sorted) <= room) {
      for (const kid of sorted) kid.across = wish(kid);
      spread(sorted, room);
      return [{ kids: sorted }];
    }
    const rows = [[]];
    for (const kid of sorted) {
      if (rows.at(-1).length > 0 && width([...rows.at(-1), kid]) > room) rows.push([]);
      rows.at(-1).push(kid);
    }
    return rows.map((row) => {
      let left = -width(row) / 2;
      for (const kid of row) {
        kid.across = left + kid.w / 2;
        left += kid.w + SIZE.column;
      }
      return { kids: row };
    });
  }

  /** The links that dagre need not see: they pass many rows, and other links tie their ends in the same order. */
  function longWays(kids, links) {
    const next = new Map(kids.map(({ box }) => [box, []]));
    for (const { from, to } of links) next.get(from).push(to);
    const inOrder = kids.map(({ box }) => box).sort((a, b) => a.turn - b.turn);
    const row = new Map(inOrder.map((box) => [box, 0]));
    for (const box of inOrder) for (const to of next.get(box)) row.set(to, Math.max(row.get(to), row.get(box) + 1));
    const leads = (from, to, seen) => next.get(from).some((box) => {
      if (box === to) return true;
      if (seen.has(box) || row.get(box) >= row.get(to)) return false;
      seen.add(box);
      return leads(box, to, seen);
    });
    const around = ({ from, to }) => next.get(from).some((box) => box !== to && leads(box, to, new Set([box])));
    return new Set(links.filter((link) => row.get(link.to) - row.get(link.from) > NEAR && around(link)));
  }

  /** Places of the children of an open box as dagre sees them, by id, and the points of the edges between them. */
  function dagreOf(node, links) {
    const { Graph, layout } = globalThis.jointcutVendor.dagre;
    const graph = new Graph();
    const rankdir = node.box.side === "forward" ? "TB" : "BT";
    graph.setGraph({ rankdir, nodesep: SIZE.column, edgesep: 8, ranksep: SIZE.row });
    for (const kid of node.kids) graph.setNode(kid.box.id, { width: kid.w, height: SIZE.box });
    const aside = longWays(node.kids, links);
    for (const link of links) if (!aside.has(link)) graph.setEdge(link.from.id, link.to.id, {});
    layout(graph);
    const places = new Map(node.kids.map((kid) => [kid.box.id, graph.node(kid.box.id)]));
    const points = links.map((link) =>
      (aside.has(link) ? null : graph.edge(link.from.id, link.to.id).points.slice(1, -1)));
    return { places, points };
  }

  /** Where the edges between children bend: beside the ranks they pass, and half way between two; null for the lane. */
  function bends(links, points, ranks, across) {
    const found = new Map();
    links.forEach(({ from, to }, index) => {
      const route = points[index]?.map(({ x, y }) => {
        const beside = ranks.find((rank) => Math.abs(rank.level - y) < 1);
        return { x: across(x), beside, above: ranks.findLast((rank) => rank.level < y) };
      }) ?? null;
      found.set(`${from.id} ${to.id}`, route);
    });
    return found;
  }

  /** Arrange the children of an open box in rows of its room; widths are final after this, heights are not. */
  function arrange(node, model, cache, room) {
    const links = [...(model.siblings.get(node.box)?.values() ?? [])];
    const key = node.kids.map((kid) => `${kid.box.id}:${kid.w}`).join(" ");
    const known = cache.get(node.box.id);
    const { places: byId, points } = known?.key === key ? known : { ...dagreOf(node, links), key };
    cache.set(node.box.id, { key, places: byId, points });
    const places = new Map(node.kids.map((kid) => [kid, byId.get(kid.box.id)]));
    const levels = [...new Set([...places.values()].map(({ y }) => Math.round(y)))].sort((a, b) => a - b);
    const xs = node.kids.map((kid) => places.get(kid).x);
    const middle = xs.reduce((sum, x) => sum + x, 0) / Math.max(1, xs.length);
    const widest = 2 * Math.max(1, ...node.kids.map((kid) => Math.abs(places.get(kid).x - middle) + kid.w / 2));
    const squeezed = (x) => (x - middle) * Math.min(1, room / widest);
    const ranks = levels.map((level) => {
      const kids = node.kids.filter((kid) => Math.round(places.get(kid).y) === level);
      return { level, rows: wrap(kids, (kid) => squeezed(places.get(kid).x), room) };
    });
    const left = Math.min(0, ...node.kids.map((kid) => kid.across - kid.w / 2));
    const right = Math.max(0, ...node.kids.map((kid) => kid.across + kid.w / 2));
    const width = Math.max(node.label.width, right - left + 2 * SIZE.pad);
    const shift = width / 2 - (left + right) / 2;
    for (const kid of node.kids) kid.across += shift;
    Object.assign(node, { ranks, rows: ranks.flatMap((rank) => rank.rows), w: width });
    node.routes = bends(links, points, ranks, (x) => squeezed(x) + shift);
    ranks.forEach((rank) => rank.rows.forEach((row, index) => (row.gap = index ? SIZE.wrapped : SIZE.row)));
  }

  /** A box with its size, and with its children arranged where it is open, as far as it can in the room for them. */
  function grow(box, model, cache, room) {
    const open = model.isOpen(box);
    const label = labelOf(box);
    const node = { box, open, label, w: label.width, h: SIZE.box, kids: [] };
    if (!open) return node;
    const inner = Math.max(LEAST, room - 2 * SIZE.pad);
    node.kids = box.children.map((child) => grow(child, model, cache, inner));
    arrange(node, model, cache, inner);
    stack([node], []);
    return node;
  }

  /**
   * Put the rows of one or two open boxes below one another, the rows of each pair at equal heights; without any pair
   * both stand about one middle.
   *
   * @param {Array<Object>} nodes one, or a forward and a backward one, which come out equally tall
   * @param {Array<Array<number>>} pairs of indices of rows, increasing
   * @returns {number} their height
   */
  function stack(nodes, pairs) {
    const heads = nodes.map((node) => (node.box.parent ? SIZE.head : 0));
    const ends = heads.slice();
    const placed = nodes.map(() => 0);
    const put = (side, row, middle) => {
      row.middle = middle;
      row.tall = Math.max(...row.kids.map((kid) => kid.h));
      ends[side] = middle + row.tall / 2;
    };
    const next = (side, row) => {
      const tall = Math.max(...row.kids.map((kid) => kid.h));
      return ends[side] + (placed[side] === 0 ? 0 : row.gap) + tall / 2;
    };
    for (const stop of [...pairs, nodes.map((node) => node.rows.length)]) {
      nodes.forEach((node, side) => {
        for (; placed[side] < stop[side]; placed[side] += 1) {
          const row = node.rows[placed[side]];
          put(side, row, next(side, row));
        }
      });
      const rows = nodes.map((node, side) => node.rows[stop[side]]);
      if (rows.some((row) => row === undefined)) continue;
      const middle = Math.max(...rows.map((row, side) => next(side, row)));
      rows.forEach((row, side) => put(side, row, middle));
      placed.forEach((_, side) => (placed[side] += 1));
    }
    const tallest = Math.max(...ends);
    nodes.forEach((node, side) => {
      if (pairs.length === 0) for (const row of node.rows) row.middle += (tallest - ends[side]) / 2;
      node.h = tallest + (node.box.parent ? SIZE.pad : 0);
    });
    return nodes[0].h;
  }

  /** How much two rows want to be level, by their indices: saved bytes between them, and halves of one scope. */
  function ties(forward, backward, model) {
    const rowOf = (node) => new Map(node.rows.flatMap((row, index) => row.kids.map((kid) => [kid.box, index])));
    const [left, right] = [rowOf(forward), rowOf(backward)];
    const weights = forward.rows.map(() => backward.rows.map(() => 0));
    for (const { value, from, to } of model.crossings) {
      const a = left.get(J.graphUnder(from, forward.box));
      const b = right.get(to.length > 0 ? J.graphUnder(to[0], backward.box) : null);
      if (a !== undefined && b !== undefined) weights[a][b] += Math.log2(2 + model.section.values.bytes[value]);
    }
    const keys = new Map([...right].map(([box, index]) => [box.key, index]));
    for (const [box, index] of left) if (keys.has(box.key)) weights[index][keys.get(box.key)] += 200;
    const last = backward.rows.length - 1;
    if (!forward.box.parent && weights.length > 0 && last >= 0) weights.at(-1)[last] += 1;
    return weights;
  }

  /** The heaviest chain of pairs whose indices both increase. */
  function chain(weights) {
    const [tall, wide] = [weights.length, weights[0]?.length ?? 0];
    const best = Array.from({ length: tall + 1 }, () => new Array(wide + 1).fill(0));
    for (let i = 1; i <= tall; i += 1) {
      for (let j = 1; j <= wide; j += 1) {
        best[i][j] = Math.max(best[i - 1][j], best[i][j - 1], best[i - 1][j - 1] + weights[i - 1][j - 1]);
      }
    }
    const pairs = [];
    for (let [i, j] = [tall, wide]; i > 0 && j > 0;) {
      if (best[i][j] === best[i - 1][j]) i -= 1;
      else if (best[i][j] === best[i][j - 1]) j -= 1;
      else pairs.unshift([(i -= 1), (j -= 1)]);
    }
    return pairs;
  }

  /** Level the two halves of an open scope, inside first; the weakest ties give way where all would cost much room. */
  function level(forward, backward, model) {
    const halves = new Map(backward.kids.filter((kid) => kid.open).map((kid) => [kid.box.key, kid]));
    for (const kid of forward.kids) if (kid.open && halves.has(kid.box.key)) level(kid, halves.get(kid.box.key), model);
    const weights = ties(forward, backward, model);
    const pairs = chain(weights);
    const natural = stack([forward, backward], []);
    while (pairs.length > 0 && stack([forward, backward], pairs) > STRETCH * natural) {
      const weakest = Math.min(...pairs.map(([i, j]) => weights[i][j]));
      pairs.splice(pairs.findIndex(([i, j]) => weights[i][j] === weakest), 1);
    }
    if (pairs.length === 0) stack([forward, backward], []);
  }

  /** Fix the corners of a box and of all in it. */
  function fix(node, x, y, found) {
    Object.assign(node, { x, y });
    if (node.box.parent) found.set(node.box, node);
    for (const row of node.rows ?? []) {
      for (const kid of row.kids) fix(kid, x + kid.across - kid.w / 2, y + row.middle - kid.h / 2, found);
    }
  }

  /**
   * Lay out the visible boxes of a model.
   *
   * @param {Object} model made by `J.graphModel`
   * @param {Map} cache of dagre's answers, kept between calls
   * @param {number} room that each side should not exceed, in pixels at a scale of one
   * @returns {{boxes: Map<Object, Placed>, edges: Array<Object>, handles: Array<Object>, sides: Object}} `sides` are
   *   the rectangles of forward and backward; edges and handles have a `path`, handles a height `y` at x = 0 too
   */
  J.graphLayout = (model, cache, room) => {
    const [forward, backward] = ["forward", "backward"].map((side) => grow(model.roots[side], model, cache, room));
    const roots = { forward, backward };
    level(forward, backward, model);
    const boxes = new Map();
    fix(forward, -APART - forward.w, 0, boxes);
    fix(backward, APART, 0, boxes);
    const edges = model.edges().map((edge) => ({ ...edge, path: J.graphRoute(edge, boxes, roots) }));
    return { boxes, edges, handles: J.graphCurves(model.handles(), boxes), sides: roots };
  };

  /**
   * The item to go to from another in a direction: the nearest ahead; items to the side count as further.
   *
   * @param {string} id of the item to start from
   * @param {Array<number>} direction one of the four unit vectors
   * @param {Map<string, {rect: {x: number, y: number, w: number, h: number}}>} items
   * @returns {string|undefined}
   */
  J.graphNeighbour = (id, [dx, dy], items) => {
    const middle = ({ x, y, w, h }) => ({ x: x + w / 2, y: y + h / 2 });
    const start = middle(items.get(id).rect);
    let best;
    let least = Infinity;
    for (const [other, { rect }] of items) {
      const { x, y } = middle(rect);
      const ahead = (x - start.x) * dx + (y - start.y) * dy;
      const aside = Math.abs((x - start.x) * dy) + Math.abs((y - start.y) * dx);
      const cost = ahead + 2 * aside + (aside > 2 * ahead ? 1e5 : 0);
      if (other !== id && ahead > 0.5 && cost < least) [best, least] = [other, cost];
    }
    return best;
  };
})();
