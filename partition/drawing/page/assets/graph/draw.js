/**
 * Make the elements of a graph's picture out of its layout: the sides, edges, curves, boxes and handles.
 *
 * Every box and every handle is a group with a role, a label and a place in `data-id`; what one can see of it are
 * shapes whose colours stand in graph.css.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  /** Widths of curves in pixels: the widest, and those of a thousandth of its bytes or less. */
  const THICK = 9;
  const THIN = 1.25;

  /** The pattern of what runs twice, and the tip of an edge. */
  J.graphDefinitions = (id) => J.svg("defs", {},
    J.svg("pattern", { id: `${id}-hatch`, width: 6, height: 6, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" }, J.svg("rect", { class: "hatch", width: 2, height: 6 })),
    J.svg("marker", { id: `${id}-tip`, viewBox: "0 0 6 6", refX: 5, refY: 3, markerWidth: 7, markerHeight: 7,
      orient: "auto", markerUnits: "userSpaceOnUse" }, J.svg("path", { class: "edge-tip", d: "M0 .5L5.5 3L0 5.5Z" })));

  /** The key to the picture, in the order in which one reads it. */
  J.graphKey = (id, cut) => {
    const shape = (name, ...children) =>
      J.svg("svg", { class: name, width: 24, height: 16, "aria-hidden": "true" }, children);
    const place = { x: 1, y: 1, width: 22, height: 14, rx: 4 };
    const box = () => J.svg("rect", { class: "box-shape", ...place });
    const hatch = () => J.svg("rect", { fill: `url(#${id}-hatch)`, ...place });
    const entry = (picture, name, text) => J.element("li", {}, picture, J.element("strong", {}, name), text);
    return J.element("ul", { class: "graph-key" },
      entry(shape("forward", box()), "forward", "runs first, downward"),
      cut && entry(shape("saved", J.svg("path", { class: "curve", d: "M0 8H24", "stroke-width": 3 }),
        J.svg("path", { class: "handle-shape", d: "M12 2L18 8L12 14L6 8Z" })), "saved", "kept for the backward"),
      entry(shape("backward", box()), "backward", "runs next, upward"),
      cut && entry(shape("backward again", box(), hatch()), "recomputed", "runs a second time"));
  };

  /** A text in the picture. */
  const words = (name, x, y, text, more) => J.svg("text", { class: name, x, y, ...more }, text);

  /** The panel of one side, with its heading. */
  function side(node, name, lines) {
    const middle = node.x + node.w / 2;
    return J.svg("g", { class: `side-panel ${name}`, "aria-hidden": "true" },
      J.svg("rect", { x: node.x, y: -14, width: node.w, height: node.h + 28, rx: 16 }),
      words("side-name", middle, -44, lines[0]),
      words("side-note", middle, -25, lines[1]));
  }

  /**
   * The panels of the sides, the cut between them, and the way from the end of the one to the beginning of the other.
   *
   * @param {Object} layout
   * @param {Object} model
   * @param {Object} summary as J.graphSummary gives it
   * @param {string} id of the view, for its markers
   */
  J.graphGround = (layout, model, summary, id) => {
    const { forward, backward } = layout.sides;
    const { ops, again } = model.roots.backward;
    const bottom = forward.h + 14;
    const [from, to] = [forward.x + forward.w / 2, backward.x + backward.w / 2];
    const round = `V${bottom + 22}a12 12 0 0 0 12 12H${to - 12}a12 12 0 0 0 12 -12V${bottom + 6}`;
    const turn = ops > 0 && [J.svg("path", { class: "turn", d: `M${from} ${bottom + 4}${round}`,
      "marker-end": `url(#${id}-tip)` }), words("turn-word", 0, bottom + 38, "then backward, from the bottom up")];
    return J.svg("g", { class: "ground", "aria-hidden": "true" },
      side(forward, "forward", ["forward ↓", `${J.count(model.roots.forward.ops, "op")}, from the top down`]),
      side(backward, "backward", ["↑ backward",
        J.count(ops, "op") + (again > 0 ? `, ${J.number(again)} of them recomputed` : "")]),
      J.svg("line", { class: "cut-line", x1: 0, x2: 0, y1: -14, y2: bottom + 18 }),
      words("cut-name", 0, -44, summary.cut ? "the cut" : "not yet cut"),
      words("cut-note", 0, -25, summary.note),
      turn);
  };

  /** An edge within a side; `from` and `to` are kept beside the element. */
  J.graphEdge = ({ from, to, path }, id) => ({ from, to,
    element: J.svg("path", { class: `edge ${from.side}`, d: path, "marker-end": `url(#${id}-tip)` }) });

  /** The width of a curve by its bytes: it grows with their logarithm. */
  J.graphWidths = (handles) => {
    const most = Math.max(1, ...handles.map(({ bytes }) => bytes));
    return (bytes) => THIN + (THICK - THIN) * Math.max(0, 1 + Math.log10(Math.max(1, bytes) / most) / 3);
  };

  /** A curve through the cut with its branches. */
  J.graphCurve = (handle, width) =>
    J.svg("g", { class: handle.saved ? "crossing" : "crossing passed", "aria-hidden": "true" },
      J.svg("path", { class: "curve", d: handle.path, "stroke-width": handle.saved ? width(handle.bytes) : 1 }),
      handle.branches.map((branch) => J.svg("path", { class: "curve branch", d: branch })));

  /** The handle of a curve, where it meets the cut. */
  J.graphHandle = ({ key, y, bytes, values }, label) => {
    const text = J.size(bytes) + (values.length > 1 ? `, ${values.length} values` : "");
    return J.svg("g", { class: "handle", role: "button", tabindex: "-1", "aria-label": label, "data-id": key,
      "data-bytes": bytes, "data-count": values.length, transform: `translate(0 ${y})` },
      J.svg("rect", { class: "plate", x: -11, y: -9, width: J.width(text, 12) + 28, height: 18, rx: 9 }),
      J.svg("path", { class: "handle-shape", d: "M0 -5.5L5.5 0L0 5.5L-5.5 0Z" }),
      words("handle-label", 10, 4, text, { "aria-hidden": "true" }));
  };

  /** The texts of a box: whether it opens, its name, and what it says beside it. */
  function inscription({ box, open, label, x, y, w }) {
    const left = open ? x + 12 : x + (w - label.wide) / 2;
    const shares = box.again > 0 && box.kind !== "op";
    const base = y + (open ? 21 : shares ? 17.5 : 18.5);
    const sign = open ? `M${left} ${base - 7}h9l-4.5 6z` : `M${left + 1} ${base - 9}v9l6 -4.5z`;
    const start = left + label.sign;
    return [
      box.children.length > 0 && J.svg("path", { class: "sign", d: sign }),
      words(box.kind === "op" ? "box-name" : "box-name strong", start, base, label.title),
      label.note && words("box-note", start + label.titleWidth + 10, base, label.note),
    ];
  }

  /** The hatch over what a box holds that is recomputed: all of an op, the share of a scope along its lower edge. */
  function hatched({ box, open, x, y, w, h }, id) {
    if (box.again === 0 || open) return null;
    const fill = `url(#${id}-hatch)`;
    if (box.kind === "op") return J.svg("rect", { class: "hatching", x, y, width: w, height: h, rx: 7, fill });
    const wide = Math.max(4, (w - 16) * (box.again / box.ops));
    return [J.svg("rect", { class: "share-base", x: x + 8, y: y + h - 5, width: w - 16, height: 3, rx: 1.5 }),
      J.svg("rect", { class: "share", x: x + 8, y: y + h - 5, width: wide, height: 3, rx: 1.5 })];
  }

  /** What lies behind the edges of an open box: its ground, and for a loop another sheet. */
  J.graphSheet = ({ box, x, y, w, h }) => J.svg("g", { class: `sheet ${box.side}`, "aria-hidden": "true" },
    box.loop && J.svg("rect", { class: "behind", x: x + 4, y: y + 4, width: w, height: h, rx: 12 }),
    J.svg("rect", { class: "ground-shape", x, y, width: w, height: h, rx: 12 }));

  /** A box: closed ones and ops whole, open ones as an outline whose head closes it. */
  J.graphBox = (placed, label, id) => {
    const { box, open, x, y, w, h } = placed;
    const opens = box.children.length > 0;
    const kinds = ["box", box.side, box.kind, open && "open", opens && "opens", box.loop && "loop",
      box.kind === "op" && box.again > 0 && "again"].filter(Boolean).join(" ");
    const rect = (name, more) => J.svg("rect", { class: name, x, y, width: w, height: h, rx: open ? 12 : 7, ...more });
    return J.svg("g", { class: kinds, role: opens ? "button" : "img", tabindex: "-1", "aria-label": label,
      "aria-expanded": opens ? String(open) : null, "data-id": box.id, "data-kind": box.kind },
      box.loop && !open && rect("behind", { x: x + 4, y: y + 4 }),
      rect("box-shape"),
      hatched(placed, id),
      open && rect("box-head", { height: 34 }),
      inscription(placed));
  };
})();
