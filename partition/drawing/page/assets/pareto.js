/**
 * Draw the front: for each predicted peak the time of the fastest plan within it, and the plan that the reader picks.
 *
 * Reads `points` (peak_bytes, seconds, saved_bytes, strategy, lines, saved: a table or null; the fastest first),
 * `chosen` (an index into them, or null), `marks` (name, peak_bytes, seconds, lines), `plain` (peak_bytes, seconds, or
 * null), and the meaning of the seconds, `time` ("extra time" where it is missing). Where plain JAX's time of a step is
 * known, each may have its `share` of that. Points and marks are buttons: one tab stop, arrow keys between them, Enter
 * shows the plan. A pointer has the nearest within its reach, so that each can be had where several stand together.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});
  const { d3 } = globalThis.jointcutVendor;

  const FONT = 12;
  const LINE = 16;
  const MARGIN = { top: 30, right: 20, bottom: 46, left: 58 };
  const REACH = 24; // pixels within which a pointer has the nearest item
  const TOLD = 2; // lines of an item that its tooltip says
  const MARKS = [d3.symbolSquare, d3.symbolTriangle, d3.symbolDiamond, d3.symbolWye, d3.symbolTriangle2];

  // -------------------------------------------------------------------------------------------------- the items

  /**
   * The items of the plot, by peak, the smallest first: the kind of each, its shape, and its text.
   *
   * @returns {Array<Object>}
   */
  function itemsOf(section) {
    const time = section.time ?? "extra time";
    const points = section.points.map((point, index) => (index === section.chosen
      ? { ...point, kind: "chosen", name: "the chosen plan", label: "chosen", shape: d3.symbolStar, size: 260 }
      : { ...point, kind: "plan", name: `plan ${index + 1} of ${section.points.length}`, shape: d3.symbolCircle,
        size: 68 }));
    const marks = section.marks.map((mark, index) =>
      ({ ...mark, kind: "mark", label: mark.name, shape: MARKS[index % MARKS.length], size: 90 }));
    const baseline = section.plain?.name ?? "plain JAX";
    const plain = section.plain && { lines: [], ...section.plain, kind: "plain", name: baseline,
      label: baseline, shape: d3.symbolCross, size: 90, turn: "rotate(45)" };
    return [...points, ...marks, ...(plain ? [plain] : [])].map((item) => ({ ...item, time, baseline }))
      .sort((a, b) => a.peak_bytes - b.peak_bytes || b.seconds - a.seconds);
  }

  /** The figures of an item in one line. */
  const facts = (item) => [
    `peak ${J.bytes(item.peak_bytes)}`,
    `${item.time} ${J.seconds(item.seconds)}`,
    typeof item.share === "number" && item.kind !== "plain" && `${item.share.toFixed(2)} of ${item.baseline}`,
    item.saved_bytes !== undefined && `saves ${J.bytes(item.saved_bytes)}`,
  ].filter(Boolean).join(", ");

  /** The corners of the front: from each peak on, the least time of any plan within it. */
  function corners(points, most) {
    const found = [];
    for (const point of [...points].sort((a, b) => a.peak_bytes - b.peak_bytes || a.seconds - b.seconds)) {
      if (found.length > 0 && point.seconds >= found.at(-1).seconds) continue;
      found.push({ bytes: point.peak_bytes, seconds: point.seconds });
    }
    return found.length > 0 ? [...found, { bytes: most, seconds: found.at(-1).seconds }] : [];
  }

  // ------------------------------------------------------------------------------------------------ the picture

  /** Where an axis begins: at zero, or where all its figures are near each other, a little below them. */
  function beginning(least, most) {
    return least > 0.6 * most ? Math.max(0, least - 0.4 * (most - least) - 0.02 * most) : Math.min(0, least);
  }

  /** Scales and sizes of a picture `width` pixels wide. */
  function frameOf(items, width) {
    const height = Math.round(Math.max(280, Math.min(440, 0.62 * width)));
    const plot = { x: MARGIN.left, y: MARGIN.top, width: width - MARGIN.left - MARGIN.right,
      height: height - MARGIN.top - MARGIN.bottom };
    const [least, most] = d3.extent(items, (item) => item.peak_bytes);
    const start = beginning(least, most);
    const end = most + 0.16 * (most - start); // room for a name beside the last
    const slowest = Math.max(1e-6, d3.max(items, (item) => item.seconds));
    const fastest = beginning(d3.min(items, (item) => item.seconds), slowest);
    const roof = slowest + 0.14 * (slowest - fastest);
    const [bytes, seconds] = [J.byteUnit(most), J.secondUnit(slowest)];
    const x = d3.scaleLinear([start / bytes.divisor, end / bytes.divisor],
      [plot.x, plot.x + plot.width]);
    const y = d3.scaleLinear([fastest / seconds.divisor, roof / seconds.divisor],
      [plot.y + plot.height, plot.y]);
    return { width, height, plot, x, y, bytes, seconds, most: end,
      xOf: (item) => x(item / bytes.divisor), yOf: (item) => y(item / seconds.divisor) };
  }

  /** The path of an item's shape around the origin. */
  const shape = (item) =>
    J.svg("path", { class: `point-shape shape-${item.kind}`, d: d3.symbol(item.shape, item.size)(),
      transform: item.turn ?? null });

  /** The rectangles along the front's line, which names had better not lie on. */
  const along = (points, frame) => d3.pairs(corners(points, frame.most)).flatMap(([a, b]) => {
    const [left, right] = [frame.xOf(a.bytes), frame.xOf(b.bytes)];
    const [above, below] = [frame.yOf(a.seconds), frame.yOf(b.seconds)];
    return [{ x: left, y: above - 2, width: right - left, height: 4 },
      { x: right - 2, y: Math.min(above, below), width: 4, height: Math.abs(below - above) }];
  });

  /** The place of an item in the picture. */
  const placeOf = (item, frame) => ({ x: frame.xOf(item.peak_bytes), y: frame.yOf(item.seconds) });

  /** Half the side of the square that holds an item's shape and the ring around it. */
  const half = (item) => (item.kind === "chosen" ? 17 : 12);

  /** Names beside the items that have one, where they touch no item, no other name, and better not the line. */
  function labels(items, frame, line) {
    const taken = items.map((item) => {
      const [{ x, y }, room] = [placeOf(item, frame), half(item)];
      return { x: x - room, y: y - room, width: 2 * room, height: 2 * room };
    });
    const named = items.filter((item) => item.label).sort((a, b) => (b.kind === "chosen") - (a.kind === "chosen"));
    return named.map((item) => {
      const { x, y } = placeOf(item, frame);
      const text = J.fitted(item.label, frame.plot.width - 24, FONT, 650);
      const width = J.width(text, FONT, 650) + 8;
      const room = half(item);
      const [left, right, above, below] = [-width - room, room, -LINE - room, room];
      const wished = [[right, -8], [left, -8], [-width / 2, above], [-width / 2, below], [0, above], [0, below],
        [-width, above], [-width, below], [right, above], [right, below], [left, above], [left, below],
        [-width / 2, above - 10]];
      const place = J.place({ width, height: LINE, at: wished.map(([dx, dy]) => ({ x: x + dx, y: y + dy })) },
        frame.plot, taken, line);
      if (!place?.wished) return null; // farther away it would seem to name something else; the legend has it
      taken.push(place);
      return J.svg("text", { class: "label strong", x: place.x + 4, y: place.y + 12, "aria-hidden": "true" }, text);
    });
  }

  /** The tooltip of an item. */
  const told = (item) => J.tooltip.content(item.name, [item.strategy, facts(item), ...item.lines.slice(0, TOLD)]);

  /** The buttons of the plot: one of them takes the tab key, arrows go on from there. */
  function buttons(items, frame, state, pick) {
    const nodes = items.map((item, index) => {
      const { x, y } = placeOf(item, frame);
      const node = J.svg("g", { class: "point", role: "button", "aria-pressed": String(index === state.picked),
        tabindex: index === state.focus ? "0" : "-1", "aria-label": `${item.name}: ${facts(item)}`,
        "data-kind": item.kind, transform: `translate(${x},${y})` },
        J.svg("circle", { class: "point-reach", r: 12 }), J.svg("circle", { class: "point-ring", r: 10 }), shape(item));
      node.addEventListener("focus", () => node.matches(":focus-visible") && J.tooltip.show(node, told(item)));
      node.addEventListener("blur", () => J.tooltip.hide());
      node.addEventListener("keydown", (event) => steer(event, index));
      return node;
    });
    const enter = (index, options) => {
      nodes[state.focus].setAttribute("tabindex", "-1");
      state.focus = index;
      nodes[index].setAttribute("tabindex", "0");
      nodes[index].focus(options);
    };
    const steer = (event, index) => {
      const leads = { ArrowLeft: index - 1, ArrowDown: index - 1, ArrowRight: index + 1, ArrowUp: index + 1, Home: 0,
        End: items.length - 1 };
      if (event.key === "Enter" || event.key === " ") pick(index);
      else if (event.key in leads) enter(Math.max(0, Math.min(leads[event.key], items.length - 1)));
      else return;
      event.preventDefault();
    };
    return { nodes, enter };
  }

  /** Let a pointer have the nearest item: its tooltip while it moves, its plan by a click. */
  function pointing(svg, items, frame, { nodes, enter }, pick) {
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const apart = ({ x, y }) => Math.hypot(x + box.x - event.clientX, y + box.y - event.clientY);
      const distances = items.map((item) => apart(placeOf(item, frame)));
      const index = d3.minIndex(distances);
      return distances[index] <= REACH ? index : -1;
    };
    const aim = (event) => {
      const index = nearest(event);
      svg.classList.toggle("aiming", index >= 0);
      nodes.forEach((node, place) => node.classList.toggle("aimed", place === index));
      if (index >= 0) J.tooltip.show(nodes[index], told(items[index]), { x: event.clientX, y: event.clientY });
      else J.tooltip.hide();
    };
    const leave = () => {
      for (const node of nodes) node.classList.remove("aimed");
      J.tooltip.hide();
    };
    const click = (event) => {
      const pressed = event.detail === 0; // by a screen reader, which has no pointer
      const index = pressed ? nodes.indexOf(event.target.closest(".point")) : nearest(event);
      if (index < 0) return;
      enter(index, { preventScroll: true });
      pick(index);
      if (!pressed) aim(event);
    };
    const listen = { pointermove: aim, pointerdown: aim, pointerleave: leave, click };
    for (const [name, listener] of Object.entries(listen)) svg.addEventListener(name, listener);
  }

  /** The picture in words. */
  function summary(section, items) {
    const [least, most] = d3.extent(section.points, (point) => point.peak_bytes);
    const chosen = items.find((item) => item.kind === "chosen");
    return [
      `${J.count(section.points.length, "plan")} by predicted peak and ${items[0].time}`,
      section.points.length > 0 && `from ${J.bytes(least)} to ${J.bytes(most)}`,
      chosen && `chosen: ${facts(chosen)}`,
      section.plain && `${items[0].baseline}: ${facts(section.plain)}`,
    ].filter(Boolean).join("; ");
  }

  // ---------------------------------------------------------------------------------------- beside the picture

  /** The meaning of each shape. */
  function legend(items) {
    const first = (kind) => items.find((item) => item.kind === kind);
    const sign = (item) => J.svg("svg", { viewBox: "-10 -10 20 20", "aria-hidden": "true" }, shape(item));
    const entry = (item, name, figure) =>
      J.element("li", {}, J.element("div", { class: "legend-entry" }, J.legendEntry(sign(item), name, figure)));
    const figure = (item) => `${J.bytes(item.peak_bytes)}, ${J.seconds(item.seconds)}`;
    const [plan, chosen, plain] = [first("plan"), first("chosen"), first("plain")];
    return J.element("ul", { class: "legend legend-wrapped" },
      plan && entry(plan, "a plan of the front", ""),
      chosen && entry(chosen, "the chosen plan", figure(chosen)),
      plain && entry(plain, plain.name, figure(plain)),
      items.filter((item) => item.kind === "mark").map((item) => entry(item, item.name, figure(item))));
  }

  /** The texts of the axes, with their units. */
  const titles = (frame, time) => ({ x: `predicted peak of the step${J.per} (${frame.bytes.name})`,
    y: `predicted ${time} (${frame.seconds.name})` });

  /** Write an item's figures and lines into the panel, and its saved values below. */
  function tell(panel, below, item, page) {
    const heading = item.name[0].toUpperCase() + item.name.slice(1);
    panel.replaceChildren(
      J.element("h3", {}, heading),
      J.element("p", { class: "panel-facts" }, [item.strategy, facts(item)].filter(Boolean).join("; ")),
      J.lines(item.lines));
    below.replaceChildren();
    if (!item.saved) return;
    below.append(J.element("h3", {}, `What ${item.name} saves`));
    J.table(below, item.saved, `What ${item.name} saves`, (value) => J.follow(page, value));
  }

  /** The picture `width` pixels wide. */
  function picture(section, items, width, state, pick) {
    const frame = frameOf(items, width);
    const line = d3.line().curve(d3.curveStepAfter).x((corner) => frame.xOf(corner.bytes))
      .y((corner) => frame.yOf(corner.seconds));
    const points = buttons(items, frame, state, pick);
    const svg = J.svg("svg", { width: frame.width, height: frame.height, role: "group",
      viewBox: `0 0 ${frame.width} ${frame.height}`, "aria-label": summary(section, items) },
      J.svg("g", { "aria-hidden": "true" }, J.axes(frame, titles(frame, items[0].time), false)),
      J.svg("path", { class: "front-line", d: line(corners(section.points, frame.most)) }),
      labels(items, frame, along(section.points, frame)), points.nodes);
    pointing(svg, items, frame, points, pick);
    return svg;
  }

  /** Draw the section; the top of this file lists the keys that it reads. */
  J.sections.pareto = (element, section, page) => {
    const items = itemsOf(section);
    if (items.length === 0) {
      element.append(J.element("p", { class: "empty" }, "There are no plans to choose from."));
      return;
    }
    const chosen = items.findIndex((item) => item.kind === "chosen");
    const start = Math.max(0, chosen >= 0 ? chosen : items.findIndex((item) => item.kind === "plan"));
    const state = { picked: start, focus: start };
    const plot = J.element("div", { class: "plot" });
    const panel = J.element("div", { class: "panel", role: "region", "aria-label": "The plan that is shown" });
    const below = J.element("div", { class: "front-table" });
    const pick = (index) => {
      state.picked = index;
      plot.querySelectorAll(".point").forEach((point, place) =>
        point.setAttribute("aria-pressed", String(place === index)));
      tell(panel, below, items[index], page);
      J.announce(`${items[index].name} is shown: ${facts(items[index])}`);
    };
    element.append(J.element("div", { class: "front" }, plot, J.element("div", {}, panel, legend(items)), below));
    tell(panel, below, items[start], page);
    page.on("value", ({ value }) => J.mark(below, value));
    J.fit(plot, (width) => plot.replaceChildren(picture(section, items, width, state, pick)));
  };
})();
